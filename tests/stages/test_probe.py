"""The trial of an optimizer class in the constructor: what would step otherwise is refused, and nothing else.

The classes below stand for third-party optimizers, each for what one of them does.
"""

import functools
import itertools

import pytest
import torch
from torch import nn

from guard.probe import PHASES, check_elementwise, check_one_by_one
from guard.schema import schema_of
from harness import STAGE_1, STAGE_2, STAGE_3
from tests.common import on_ranks, one_rank_of, optimizer_of
from tests.pairs import Pair


class Plain(torch.optim.Optimizer):
    """SGD, to be changed. `rule(param, grad)` -> what is stepped; `before()` and `after()` what else a step does."""

    n_calls = 0

    def __init__(self, params, lr=0.1, **defaults):
        super().__init__(params, {"lr": lr, **defaults})

    def params(self):
        return [(group, param) for group in self.param_groups for param in group["params"] if param.grad is not None]

    @torch.no_grad()
    def step(self, closure=None):
        self.n_calls += 1
        self.before()
        for group, param in self.params():
            param -= group["lr"] * group.get("d", 1.0) * self.rule(param, param.grad)
        self.after()

    def rule(self, param, grad):
        return grad

    def before(self):
        pass

    after = before


def changed(**methods):
    return type("Changed", (Plain,), methods)


# ------------------------------------------------------------------------ what is not what it would be without sharding


def rate_from_all(self):
    """D-Adaptation and Prodigy: from some step on the learning rate follows from a sum over all parameters."""
    for group in self.param_groups:
        if self.n_calls > 2:
            group["d"] = sum(param.grad.abs().sum().item() for param in group["params"])


def clip_above(self):
    nn.utils.clip_grad_norm_([param for _, param in self.params()], 10.0)


def mix_every_tenth(self):
    if self.n_calls % 10 == 0:
        mean = torch.cat([param.flatten() for _, param in self.params()]).mean()
        for _, param in self.params():
            param.lerp_(mean, 0.5)


def factor_where_large(self, param, grad):
    square = grad.square() + 1e-8
    if param.ndim == 2 and min(param.shape) >= 128:
        square = square.mean(1, keepdim=True) * square.mean(0, keepdim=True) / square.mean()
    return grad / square.sqrt()


def centralize_convolutions(self, param, grad):
    return grad - grad.mean(dim=(1, 2, 3), keepdim=True) if param.ndim == 4 else grad


def decay_if_large(self, param, grad):
    return grad + param if grad.abs().max() > 2.5 else grad


def in_blocks(is_right, block):
    """torchao, bitsandbytes: momentum has 8 bits, a scale for each block, where the number of elements is right."""
    def rule(self, param, grad):
        momentum = self.state[param].get("momentum", 0) * 0.9 + grad
        if is_right(param.numel()):
            blocks = momentum.reshape(-1, block)
            scale = blocks.abs().amax(1, keepdim=True) / 127
            momentum = ((blocks / scale).round() * scale).view(param.shape)
        self.state[param]["momentum"] = momentum
        return momentum
    return changed(rule=rule)


TOGETHER = {
    "D-Adaptation, Prodigy": changed(before=rate_from_all),
    "LAMB, Adan: a norm over all gradients is clipped, above a threshold": changed(before=clip_above),
    "a look-ahead that mixes tensors every tenth step": changed(after=mix_every_tenth),
}
WHOLE = {  # each steps one by one
    "timm's Adafactor: second moments are factored where both dimensions are large": changed(rule=factor_where_large),
    "gradient centralization, of convolutions only: shards are one-dimensional": changed(rule=centralize_convolutions),
    "a decision for a whole tensor, by looking at the data": changed(rule=decay_if_large),
}
BLOCKS = {
    "multiples of 256 from 4096 on": in_blocks(lambda numel: numel >= 4096 and numel % 256 == 0, 256),
    "multiples of 2048 from 65536 on": in_blocks(lambda numel: numel >= 65536 and numel % 2048 == 0, 2048),
    "powers of two": in_blocks(lambda numel: numel & (numel - 1) == 0 and numel >= 256, 128),
}


def model_of_all():
    """Return parameters of one, two and four dimensions, and a scalar."""
    return [*nn.Conv2d(3, 4, 3).parameters(), *nn.Linear(5, 5).parameters(), nn.Parameter(torch.ones(()))]


def build(stage, optimizer_cls, params=None, **kwargs):
    with one_rank_of(2):
        return optimizer_of(stage)(params or model_of_all(), optimizer_cls, **kwargs)


@pytest.mark.parametrize("kind", TOGETHER)
def test_an_optimizer_that_steps_tensors_together_is_refused(stage, kind):
    """Also at a rate at which tensors hardly move."""
    words = "doesn't step tensors one by one" if stage in (STAGE_1, STAGE_2) else "is not element-wise"
    with pytest.raises(ValueError, match=f"Changed {words}"):
        build(stage, TOGETHER[kind], lr=1e-5)


@pytest.mark.parametrize("kind, shape", [
    *((kind, None) for kind in WHOLE), *itertools.product(BLOCKS, [None, (9,), (2, 3, 4)])])
def test_an_optimizer_that_needs_whole_tensors_is_taken_by_stages_1_and_2_alone(stage, kind, shape):
    """A state in blocks is found whatever shapes the model has. shape: of the only parameter; None: of all kinds."""
    optimizer_cls = {**WHOLE, **BLOCKS}[kind]
    params = [nn.Parameter(torch.ones(shape))] if shape else model_of_all()
    if stage in (STAGE_1, STAGE_2):
        build(stage, optimizer_cls, params)
    else:
        with pytest.raises(ValueError, match="Changed is not element-wise"):
            build(stage, optimizer_cls, params)


def test_each_kind_of_group_is_tried(stage):
    """A class may be element-wise with the defaults, and not with what a group says."""
    class ClipsIfTold(Plain):
        def before(self):
            if any(group.get("clip") for group in self.param_groups):
                clip_above(self)

    build(stage, ClipsIfTold)
    params = model_of_all()
    with pytest.raises(ValueError, match="ClipsIfTold"):
        build(stage, ClipsIfTold, [{"params": params[:2]}, {"params": params[2:], "clip": True}])


# ------------------------------------------------------------------------------ what is the same, however odd it seems


class CountsCalls(Plain):
    """Lookahead, warm-ups: step() is counted, and is called once a step. And its kernel takes 32 bits."""

    def after(self):
        for _, param in self.params():
            slow = self.state[param].setdefault("slow", param.clone())
            if self.n_calls % 5 == 0:
                param.copy_(slow.lerp_(param, 0.5))

    def rule(self, param, grad):
        if param.dtype == torch.float64:
            raise TypeError("this kernel takes 32 bits")
        return grad


@on_ranks(1, 3)
def test_an_optimizer_that_matches_plain_training_is_taken(rank, stage):
    pair = Pair(rank, stage, CountsCalls, lr=0.01)
    pair.train(*range(12))
    pair.assert_same()


# ------------------------------------------------------------------------------------------------------ errors in there


def test_an_error_inside_the_trial_is_shown(stage):
    words = "LBFGS fails in a trial .*missing 1 required positional argument: 'closure'"
    with pytest.raises(ValueError, match=words):
        build(stage, torch.optim.LBFGS)


def of_python():
    raise MemoryError


def of_the_allocator():
    torch.empty(2**50)
    raise RuntimeError("in place of this tensor there is a FakeTensor, which needs no memory")


N_STEPS_OF_WHOLE_TENSORS = sum(n_steps for n_steps, *_ in PHASES)


@pytest.mark.parametrize("n_good_steps", [0, N_STEPS_OF_WHOLE_TENSORS])
@pytest.mark.parametrize("run_out, error", [(of_python, MemoryError), (of_the_allocator, RuntimeError)])
def test_memory_that_runs_out_in_the_trial_says_nothing_of_the_class(run_out, error, n_good_steps):
    """The error stays what it is, and is no refusal of the class: on a CPU the allocator's is a plain RuntimeError."""
    n_steps = itertools.count(1)

    class Hungry(torch.optim.SGD):
        def step(self, closure=None):
            if next(n_steps) > n_good_steps:
                run_out()
            super().step(closure)

    with pytest.raises(error):
        build(STAGE_3, Hungry)
    with pytest.raises(error):
        schema_of(functools.partial(Hungry), {"lr": 0.1}, (3,), torch.float32, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------------- what it costs


def counting(n_elements):
    """Return a class that appends the number of elements of each step to the list `n_elements`."""
    return changed(before=lambda self: n_elements.append(sum(param.numel() for _, param in self.params())))


def test_the_trial_is_short_and_leaves_no_trace(stage):
    """Were each group a kind of its own, there would be five times as many steps.

    That the trial calls no hooks is in test_users.py.
    """
    groups = [{"params": [param], "lr": 0.001 * n} for n, param in enumerate(model_of_all())]  # one kind; an lr is 0
    n_elements = []
    random_state = torch.get_rng_state()
    build(stage, counting(n_elements), groups)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert 100 < len(n_elements) < 300 and sum(n_elements) < 4_000_000


@pytest.mark.parametrize("check", [check_elementwise, check_one_by_one])
def test_the_trial_is_on_the_device_of_the_parameters(check):
    """Whatever torch.set_default_device() says: "cuda" in programs for GPUs."""
    params = model_of_all()
    with torch.device("meta"):
        check(functools.partial(changed()), [{"params": params}])


def test_who_builds_many_alike_waits_for_one_trial(stage):
    """Try other arguments anew; and refuse again what was refused."""
    n_elements = []
    optimizer_cls = counting(n_elements)

    def is_tried(**kwargs):
        n_elements.clear()
        build(stage, optimizer_cls, **kwargs)
        return len(n_elements) > 0

    assert [is_tried(), is_tried(), is_tried(mine=1)] == [True, False, True]
    for _ in range(2):
        with pytest.raises(ValueError, match="Changed"):
            build(stage, TOGETHER["D-Adaptation, Prodigy"])
