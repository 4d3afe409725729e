"""The trial of an optimizer class in the constructor: what would step otherwise is refused, and nothing else.

The classes below stand for third-party optimizers, each for what one of them does.
"""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from guard.probe import PASSED, PHASES, check_elementwise, check_one_by_one
from guard.schema import schema_of
from tests.common import STAGES, on_ranks, one_rank_of, optimizer_of
from tests.pairs import Pair

ONE, TWO, THREE, FOUR = STAGES


class Plain(torch.optim.Optimizer):
    """SGD, to be changed. `rule(param, grad)` -> what is stepped."""

    def __init__(self, params, lr=0.1, **defaults):
        super().__init__(params, {"lr": lr, **defaults})

    def params(self):
        return [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]

    @torch.no_grad()
    def step(self, closure=None):
        for group, param in self.params():
            param -= group["lr"] * self.rule(param, param.grad)

    def rule(self, param, grad):
        return grad


# ------------------------------------------------------------------------ what is not what it would be without sharding


class SumsUp(Plain):
    """D-Adaptation and Prodigy: the learning rate follows from a sum over all parameters, from some step on."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, lr, d=1e-6, numerator=0.0)

    @torch.no_grad()
    def step(self, closure=None):
        for group, param in self.params():
            state = self.state[param]
            if not state:
                state["start"], state["sum"] = param.clone(), torch.zeros_like(param)
            group["numerator"] += group["d"] * (param.grad * (state["start"] - param)).sum().item()
            state["sum"].add_(param.grad, alpha=group["d"] ** 2)
        for group in self.param_groups:
            total = sum(self.state[param]["sum"].abs().sum().item() for param in group["params"])
            group["d"] = max(group["d"], min(group["numerator"] / total, group["d"] * 10)) if total else group["d"]
        for group, param in self.params():
            param -= group["lr"] * group["d"] * param.grad


class SumsUpUnseen(SumsUp):
    """It keeps the sums where nobody sees them."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group.update(self.__dict__.setdefault("_unseen", {}).get(id(group), {}))
        super().step()
        for group in self.param_groups:
            self._unseen[id(group)] = {key: group.pop(key) for key in ("d", "numerator")}


class ClipsAbove(Plain):
    """LAMB, Adan: a norm over all gradients is clipped inside step(), above a threshold."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([param for _, param in self.params()], 10.0)
        super().step()


class CountsTensors(Plain):
    """It counts in step(), but once a tensor."""

    n_steps = 0

    def rule(self, param, grad):
        self.n_steps += 1
        return grad / self.n_steps


class DoesNothingAtFirst(Plain):
    """A look-ahead that mixes tensors every tenth step."""

    n_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.n_steps += 1
        if self.n_steps % 10 == 0:
            mean = torch.cat([param.flatten() for _, param in self.params()]).mean()
            for _, param in self.params():
                param.lerp_(mean, 0.5)


def factored_where_large(param, grad):
    square = grad.square() + 1e-8
    if param.ndim == 2 and min(param.shape) >= 128:
        square = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
    return grad / square.sqrt()


TOGETHER = [SumsUp, SumsUpUnseen, ClipsAbove, CountsTensors, DoesNothingAtFirst]
WHOLE = {  # rules that need whole tensors, each stepped one by one
    "Adafactor: clipped by the root of the mean square": lambda param, grad: (
        grad / grad.pow(2).mean().sqrt().clamp(min=1.0)),
    "timm's Adafactor: second moments are factored where both dimensions are large": factored_where_large,
    "what is one-dimensional isn't decayed: so are shards": lambda param, grad: (
        grad + 0.1 * param if param.ndim > 1 else grad),
    "gradient centralization, of convolutions only": lambda param, grad: (
        grad - grad.mean(dim=(1, 2, 3), keepdim=True) if param.ndim == 4 else grad),
    "a decision for a whole tensor, by looking at the data": lambda param, grad: (
        grad + param if grad.abs().max() > 2.5 else grad),
}


class InBlocks(Plain):
    """torchao, bitsandbytes: momentum has 8 bits, with a scale for each block, where the numel is right."""

    is_right, block = staticmethod(lambda numel: numel >= 4096 and numel % 256 == 0), 256

    def rule(self, param, grad):
        momentum = self.state[param].get("momentum", 0) * 0.9 + grad
        if self.is_right(param.numel()):
            blocks = momentum.reshape(-1, self.block)
            scale = blocks.abs().amax(1, keepdim=True) / 127
            momentum = ((blocks / scale).round() * scale).view(param.shape)
        self.state[param]["momentum"] = momentum
        return momentum


BLOCKS = {
    "multiples of 64": (lambda numel: numel % 64 == 0, 64),
    "multiples of 256 from 4096 on": (lambda numel: numel >= 4096 and numel % 256 == 0, 256),
    "multiples of 2048 from 65536 on": (lambda numel: numel >= 65536 and numel % 2048 == 0, 2048),
    "more than 65536": (lambda numel: numel > 65536 and numel % 256 == 0, 256),
    "powers of two": (lambda numel: numel & (numel - 1) == 0 and numel >= 256, 128),
}


def model_of_all():
    """Parameters of one, two and four dimensions, and a scalar."""
    return [*nn.Conv2d(3, 4, 3).parameters(), *nn.Linear(5, 5).parameters(), nn.Parameter(torch.ones(()))]


def build(stage, optimizer_cls, params=None, **kwargs):
    with one_rank_of(2):
        return optimizer_of(stage)(params or model_of_all(), optimizer_cls, **kwargs)


@pytest.mark.parametrize("lr", [1e-5, 0.1])
@pytest.mark.parametrize("optimizer_cls", TOGETHER)
def test_an_optimizer_that_steps_tensors_together_is_refused(stage, optimizer_cls, lr):
    words = "doesn't step tensors one by one" if stage in (ONE, TWO) else "is not element-wise"
    with pytest.raises(ValueError, match=f"{optimizer_cls.__name__} {words}"):
        build(stage, optimizer_cls, lr=lr)


@pytest.mark.parametrize("lr", [1e-5, 0.1])
@pytest.mark.parametrize("rule", WHOLE)
def test_an_optimizer_that_needs_whole_tensors_is_taken_in_stages_1_and_2_alone(stage, rule, lr):
    optimizer_cls = type("Whole", (Plain,), {"rule": lambda self, param, grad: WHOLE[rule](param, grad)})
    is_refused = pytest.raises(ValueError, match="Whole is not element-wise")
    with contextlib.nullcontext() if stage in (ONE, TWO) else is_refused:
        build(stage, optimizer_cls, lr=lr)


@pytest.mark.parametrize("of", ["a vector", "a matrix", "a stack", "all"])
@pytest.mark.parametrize("rule", BLOCKS)
@pytest.mark.parametrize("stage", [THREE, FOUR])
def test_a_state_in_blocks_of_8_bits_is_refused_in_stages_3_and_4(stage, rule, of):
    shape = {"a vector": (9,), "a matrix": (5, 5), "a stack": (2, 3, 4)}.get(of)
    is_right, block = BLOCKS[rule]
    optimizer_cls = type("InBlocks", (InBlocks,), {"is_right": staticmethod(is_right), "block": block})
    with pytest.raises(ValueError, match="InBlocks is not element-wise"):
        build(stage, optimizer_cls, [nn.Parameter(torch.ones(shape))] if shape else None)
    with one_rank_of(2):
        optimizer_of(TWO)(model_of_all(), optimizer_cls)




# ------------------------------------------------------------------------------ what is the same, however odd it seems


class Only32Bits(Plain):
    def rule(self, param, grad):
        if param.dtype == torch.float64:
            raise TypeError("this kernel takes 32 bits")
        return grad.sign()


class WantsAllGradients(Plain):
    def params(self):
        return [(group, param) for group in self.param_groups for param in group["params"]]


class CountsCalls(Plain):
    """Lookahead, warm-ups: step() is counted, and is called once a step."""

    n_calls = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.n_calls += 1
        for _, param in self.params():
            slow = self.state[param].setdefault("slow", param.clone())
            if self.n_calls % 5 == 0:
                param.copy_(slow.lerp_(param, 0.5))


class SeenAnything(Plain):
    """torch's fused SGD: an attribute says whether it has stepped yet. A rank may own nothing."""

    seen, n_steps = False, 0

    def step(self, closure=None):
        super().step()
        self.seen = self.seen or bool(self.params())
        self.n_steps += bool(self.params())


@on_ranks(1, 3, optimizer_cls=[SeenAnything, Only32Bits, WantsAllGradients, CountsCalls])
def test_an_optimizer_that_matches_plain_training_is_taken(rank, stage, optimizer_cls):
    pair = Pair(rank, stage, optimizer_cls, lr=0.01)
    pair.train(*range(12))
    pair.assert_same()


# ------------------------------------------------------------------------------------------------------ errors in there


class WantsTrainMode(Plain):
    """schedulefree: step() wants train() before."""

    training = False

    def train(self):
        self.training = True

    def step(self, closure=None):
        if not self.training:
            raise Exception("Optimizer was not in train mode when step is called")
        super().step()


class Fails(Plain):
    def rule(self, param, grad):
        raise KeyError("momentum_buffer")


@pytest.mark.parametrize("optimizer_cls, error", [
    (Fails, r"Fails fails in a trial on tensors of .*: KeyError: 'momentum_buffer'"),
    (torch.optim.LBFGS, "LBFGS fails in a trial .*missing 1 required positional argument: 'closure'"),
    (WantsTrainMode, "WantsTrainMode fails in a trial .*: Exception: Optimizer was not in train mode"),
    (torch.optim.SparseAdam, "SparseAdam fails in a trial .*SparseAdam does not support dense gradients"),
])
def test_an_error_inside_the_trial_is_shown(stage, optimizer_cls, error):
    with pytest.raises(ValueError, match=error):
        build(stage, optimizer_cls)


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("n_good_steps", [0, sum(n for n, _, _ in PHASES)])  # as many as of whole tensors
def test_memory_that_runs_out_in_the_trial_says_nothing_of_the_class(kind, n_good_steps):
    """Nor of a state, which would not be checked then. A CPU's allocator raises a plain RuntimeError."""
    class Hungry(torch.optim.SGD):
        def step(self, closure=None):
            steps.append(self)
            if len(steps) > n_good_steps:
                if kind is RuntimeError:
                    torch.empty(2**50)
                raise kind("out of memory")
            super().step(closure)

    steps, words = [], "DefaultCPUAllocator" if kind is RuntimeError else "out of memory"
    with pytest.raises(kind, match=words):
        build(STAGES[2], Hungry)
    with pytest.raises(kind, match=words):
        schema_of(Hungry, {"lr": 0.1}, {}, (3,), torch.float32, torch.device("cpu"))


def test_arguments_that_are_wrong_are_torchs_own_error(stage):
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentun'"):
        build(stage, torch.optim.SGD, momentun=0.9)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        build(stage, torch.optim.SGD, lr=-1)


# ------------------------------------------------------------------------------------------------------- what it costs


class Work(TorchDispatchMode):
    """Counts what torch does while it is entered: operators, and elements of what they return."""

    def __init__(self):
        super().__init__()
        self.operators = self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operators += 1
        self.elements += result.numel() if isinstance(result, torch.Tensor) else 0
        return result


def test_the_trial_is_short_and_leaves_no_trace(stage):
    """Here 5,400 to 6,700 operators, 0.1 seconds; were each group a kind of its own, 21,000 and more."""
    calls, state = [], torch.get_rng_state()
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    params = model_of_all()
    groups = [{"params": [param], "lr": 0.001 * n} for n, param in enumerate(params)]  # one kind, and an lr of 0
    build(stage, torch.optim.AdamW, params)
    try:
        torch.set_rng_state(state)
        PASSED.clear()
        with Work() as work:
            build(stage, torch.optim.AdamW, groups)
    finally:
        hook.remove()
    assert not calls and torch.equal(torch.get_rng_state(), state)
    assert 1_000 < work.operators < 10_000 and work.elements < 40_000_000


@pytest.mark.parametrize("check", [check_elementwise, check_one_by_one])
def test_the_trial_is_on_the_device_of_the_parameters(check):
    """Whatever torch.set_default_device() says: "cuda" in programs for GPUs."""
    class OfThisTest(Plain):
        pass

    params = model_of_all()
    with torch.device("meta"):
        check(functools.partial(OfThisTest), [{"params": params}])


def test_each_kind_of_group_is_tried(stage):
    """One that isn't divisible with what its group says, but is with the defaults."""
    class ClipsIfTold(ClipsAbove):
        def step(self, closure=None):
            clips = any(group.get("clip") for group in self.param_groups)
            super().step() if clips else Plain.step(self)

    build(stage, ClipsIfTold)
    params = model_of_all()
    with pytest.raises(ValueError, match="ClipsIfTold"):
        build(stage, ClipsIfTold, [{"params": params[:2]}, {"params": params[2:], "clip": True}])


def test_who_builds_many_alike_waits_for_one_trial(stage):
    """Other arguments, other groups and another device are tried anew; and what was refused is refused again."""
    class Counting(Plain):
        n_steps = 0

        def step(self, closure=None):
            Counting.n_steps += 1
            super().step()

    def steps_of(params=None, **kwargs):
        before = Counting.n_steps
        build(stage, Counting, params, **kwargs)
        return Counting.n_steps - before

    first, again, other_argument = steps_of(), steps_of(), steps_of(mine=1)
    assert first > 0 and again == 0 and other_argument > 0
    assert steps_of([{"params": [nn.Parameter(torch.ones(2, 2))], "mine": 2}], mine=1) > 0
    for _ in range(2):
        with pytest.raises(ValueError, match="SumsUp"):
            build(stage, SumsUp)


def test_muon_is_tried_on_what_it_is_for():
    """On matrices only, since this model has nothing else."""
    matrices = [nn.Parameter(torch.ones(6, 4)) for _ in range(2)]
    build(TWO, torch.optim.Muon, matrices)
    with pytest.raises(ValueError, match=r"Muon is not element-wise.*\(ValueError: Muon only supports 2D parameters"):
        build(FOUR, torch.optim.Muon, matrices)
