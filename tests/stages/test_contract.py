"""The contract: what every stage must do, on several ranks. The reference is one process with the data of all ranks.

The body of a test runs on every rank; an assertion that fails there is reported here. Run it on a package of your own
with `pytest --stage my_package`.
"""

import contextlib
import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import lr_scheduler as schedulers

from harness import STAGE_4
from tests.common import OPTIMIZERS, STAGES, Net, batch, loss_of, on_ranks, optimizer_of, trainable
from tests.pairs import ADAMW, SGD, UNFUSED, Pair, assert_same, backward, parameter_of, sgd_of, sums_commute, train

# ------------------------------------------------------------------------------------------------------------ equality


@pytest.mark.any_size
@on_ranks(how=[{"fused": True}, UNFUSED], name=OPTIMIZERS)
def test_equals_replicated_training(rank, stage, how, name):
    optimizer_cls, kwargs = OPTIMIZERS[name]
    has_kernel = name != "Adagrad" or rank.device.type == "cpu"  # torch has no such one for CUDA
    pair = Pair(rank, stage, optimizer_cls, **kwargs, **how if has_kernel else {})
    assert isinstance(pair.optimizer, torch.optim.Optimizer)
    assert_same(*pair.models, exact=True)
    before = copy.deepcopy(trainable(pair.model))
    for step in range(3):
        pair.train(step)
        pair.assert_same(how == UNFUSED)
    assert not any(map(torch.equal, trainable(pair.model), before))


GRAPHS = [*((stage, {}) for stage in STAGES), (STAGE_4, {"prefetch": True}),
          (STAGE_4, {"prefetch": True, "own": {"find_unused_parameters": True, "bucket_cap_mb": 1e-6}})]


@pytest.mark.parametrize("stage, how", GRAPHS)
@on_ranks(2)
def test_a_graph_that_has_read_older_parameters_is_refused(rank, stage, how):
    """Raise torch's own error for each parameter, on each rank: else gradients would be those of values never seen.

    The graph is from before the constructor, which broadcasts, or from before a step.
    """
    weight = parameter_of(rank.number, rank)
    of_constructor = (weight**2).sum()
    optimizer_of(stage)([weight], lr=0.1)
    pair = Pair(rank, stage, torch.optim.SGD, **how, **SGD)
    if "own" in how:  # what is not used is not stepped: autograd must be told when it is, again
        (pair.model.scale * pair.model.up.bias.sum()).backward()
        pair.optimizer.step()
        pair.optimizer.zero_grad()
    of_step = [(param**2).sum() for param in trainable(pair.model)]
    train(pair.model, pair.optimizer, rank, 0)
    for graph in (of_constructor, *of_step):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


@on_ranks
def test_frozen_parameters_are_broadcast_and_can_be_unfrozen_later(rank, stage):
    """Train while one layer is frozen, and then while another one is."""
    pair = Pair(rank, stage, groups=nn.Module.parameters, seeds=(rank.number, rank.number))  # a generator
    assert not any(param.requires_grad for param in pair.model.frozen.parameters())
    pair.train(0, 1)
    pair.assert_same()
    for model in pair.models:
        model.frozen.requires_grad_(True)
        model.up.requires_grad_(False)
    pair.train(2, 3)
    pair.assert_same()


def steps_by_hand(rank, make, shapes):
    """All 0 at first, gradient r + 1 on rank r, lr 0.1: the mean gradient of d ranks is (d + 1) / 2."""
    weights = [nn.Parameter(torch.full(shape, float(rank.number), device=rank.device)) for shape in shapes]
    optimizer = make(weights, torch.optim.SGD, lr=0.1)
    for step in (1, 2):
        (sum(weight.sum() for weight in weights) * (rank.number + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        for weight in weights:
            torch.testing.assert_close(weight, torch.full_like(weight, -0.1 * step * (rank.world_size + 1) / 2))


@on_ranks(shapes=[[(16,)], [()], [(1,)], [(3,), (2, 1)], [(0,), (7,)]])
def test_sixteen_elements_or_fewer_than_there_are_ranks_by_hand(rank, stage, shapes):
    steps_by_hand(rank, optimizer_of(stage), shapes)


@on_ranks(3)
def test_process_group_of_some_ranks(rank, stage):
    """Ranks 1 and 2 train in a process group of their own; rank 0 takes no part."""
    group = dist.new_group([1, 2])
    if rank.number:
        weight = nn.Parameter(torch.full((5,), float(rank.number), device=rank.device))
        optimizer = optimizer_of(stage)([weight], torch.optim.SGD, process_group=group, lr=1.0)
        (weight.sum() * rank.number).backward()
        optimizer.step()
        assert weight.tolist() == [1 - 1.5] * 5


# --------------------------------------------------------------------------------------------- groups and schedulers


def two_groups(model):
    """Matrices in one group; vectors and the scalar in another, without weight decay."""
    matrices = [param for param in trainable(model) if param.dim() > 1]
    vectors = [param for param in trainable(model) if param.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "lr": 0.003, "weight_decay": 0.0}]


@on_ranks
def test_add_param_group_later(rank, stage):
    """Take a step with one group of named parameters, add a group, and take two more. Seed 0: ranks begin alike."""
    def first(model):
        return model.up.named_parameters()

    def second(model):
        params = [*model.down.parameters(), model.scale, model.head.weight, *model.embed.parameters()]
        return list(zip("abcde", params))

    pair = Pair(rank, stage, groups=first, seeds=[0])
    late = [param for model in pair.models for _, param in second(model)]
    for param in late:
        param.requires_grad_(False)
    pair.train(0)
    for param in late:
        param.requires_grad_(True)
    with torch.no_grad():
        pair.model.scale += rank.number  # add_param_group broadcasts, as the constructor does
    for optimizer, model in zip(pair.optimizers, pair.models):
        optimizer.add_param_group({"params": second(model), "lr": 0.02})
    assert [group["param_names"] for group in pair.optimizer.param_groups] == [["weight", "bias"], [*"abcde"]]
    pair.train(1, 2)
    pair.assert_same()


SCHEDULERS = {  # each writes into the groups in a way of its own: the lr, betas too, or what it needs itself
    "from 0": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: step / 4),
    "LinearLR": lambda optimizer: schedulers.LinearLR(optimizer, 1 / 3, 1.0, 3),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.02, 6),
    "SWALR": lambda optimizer: torch.optim.swa_utils.SWALR(optimizer, 0.001, anneal_epochs=2),
}


@on_ranks(2, name=SCHEDULERS)
def test_schedulers_of_torch(rank, stage, name):
    """Train two groups under a scheduler: rates and parameters are those of replicated training after each step."""
    pair = Pair(rank, stage, groups=two_groups)
    assert [len(group["params"]) for group in pair.optimizer.param_groups] == [4, 4]
    schedules = [SCHEDULERS[name](optimizer) for optimizer in pair.optimizers]
    rates = set()
    for step in range(4):
        pair.train(step)
        for schedule in schedules:
            schedule.step()
        for ours, theirs in zip(*(optimizer.param_groups for optimizer in pair.optimizers)):
            assert ours["lr"] == theirs["lr"] and ours["betas"] == theirs["betas"]
            rates.add(ours["lr"])
    assert len(rates) > 2  # the scheduler does something
    saved, expected = (optimizer.state_dict()["param_groups"] for optimizer in pair.optimizers)
    assert [group["lr"] for group in saved] == [group["lr"] for group in expected]  # of the next step
    pair.assert_same()


# --------------------------------------------------------------------------------- closure, accumulation, clipping


@on_ranks
def test_closure_and_its_loss(rank, stage):
    """Step with a closure: the loss is the mean over the ranks, and parameters are those of replicated training."""
    pair = Pair(rank, stage)
    for step in range(2):

        def closure(step=step):
            pair.optimizer.zero_grad()
            return backward(pair.model, rank, step)

        loss = pair.optimizer.step(closure)
        assert torch.allclose(loss, pair.replicated.step(step), rtol=1e-5)
        assert not loss.requires_grad
    pair.assert_same()
    assert pair.optimizer.step(lambda: backward(pair.model, rank, 2) and 2.0) == 2.0  # a float is a loss too


@on_ranks(with_no_sync=[True, False])
def test_three_micro_batches_add_up_as_in_one_process(rank, stage, with_no_sync):
    pair = Pair(rank, stage)
    for first in (0, 3):  # two accumulations: nothing of the first is left in the second
        with pair.optimizer.no_sync() if with_no_sync else contextlib.nullcontext():
            pair.backward(first, first + 1)
        pair.train(first + 2)
    if with_no_sync:
        with pair.optimizer.no_sync():
            pair.train(6)  # and no backward pass outside: nothing is lost
    pair.assert_same(is_exact=False)


accumulate = test_three_micro_batches_add_up_as_in_one_process.__wrapped__


@on_ranks
def test_which_ranks_have_a_gradient_may_change_in_every_step(rank, stage):
    """A rank without a gradient adds zero to the average, and no gradient that it had in an earlier step."""
    takes_unused = "find_unused_parameters" in inspect.signature(optimizer_of(stage)).parameters
    first, second = (parameter_of(0.0, rank) for _ in range(2))
    last = rank.world_size - 1
    optimizer = sgd_of(stage, [first, second], **{"find_unused_parameters": True} if takes_unused else {})
    due = 0.0
    for step, users in enumerate([{0}, {last}, set(), {0, last}]):  # of the first parameter; all use the second one
        loss = second.sum()
        if rank.number in users:
            loss = loss + first.sum() * (rank.number + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        due -= sum(user + 1 for user in users) / rank.world_size
        assert torch.allclose(first, torch.full_like(first, due)), f"step {step}: {first[0]:g} instead of {due:g}"


@on_ranks(2)
def test_zero_grad_forgets_gradients_reduced_or_not(rank, stage):
    pair = Pair(rank, stage)
    backward(pair.model, rank, 7)
    pair.optimizer.zero_grad()
    backward(pair.model, rank, 8)
    pair.optimizer.clip_grad_norm_(1.0)
    pair.optimizer.zero_grad()  # a step that is skipped after clipping
    pair.train(0)
    pair.assert_same()


@on_ranks(norm_type=[1.0, 2.0, torch.inf], max_norm=[0.05, 1e6])
def test_clipping_equals_torch_on_the_whole_model(rank, stage, norm_type, max_norm):
    pair = Pair(rank, stage)
    for step in range(3):
        pair.backward(step)
        norm = pair.clip(max_norm, norm_type)
        assert max_norm > 1 or norm > max_norm  # 0.05 clips
        pair.step()
    pair.assert_same(is_exact=False)


clip = test_clipping_equals_torch_on_the_whole_model.__wrapped__


@on_ranks
def test_a_norm_that_is_not_finite_is_an_error_where_that_is_asked(rank, stage):
    """Spoil the last rank's gradient: every rank has the error. The next step is as without it."""
    pair = Pair(rank, stage)
    for value in (torch.nan, torch.inf):
        factor = value if rank.number == rank.world_size - 1 else 1.0
        (loss_of(pair.model, *batch(0, rank.number, device=rank.device)) * factor).backward()
        with pytest.raises(RuntimeError, match="the norm of all gradients is (nan|inf): zero_grad"):
            pair.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        pair.optimizer.zero_grad()
    pair.backward(1)
    assert pair.optimizer.clip_grad_norm_(1e6, error_if_nonfinite=True).isfinite()
    pair.step()
    pair.assert_same()


# ------------------------------------------------------------------------------------------------------------- state


def moments_are_sharded(rank, make, state_of):
    """AdamW's two moments of every element once; scalars, the step counts, are not sharded and not counted."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))).to(rank.device)
    optimizer = make(model.parameters(), **ADAMW)
    model(torch.ones(2, 16, device=rank.device)).sum().backward()
    optimizer.step()
    tensors = [t for state in state_of(optimizer).values() for t in state.values() if torch.is_tensor(t)]
    counts, numel = [None] * rank.world_size, 12 * (16 * 16 + 16)
    dist.all_gather_object(counts, sum(t.numel() for t in tensors if t.dim()))
    assert sum(counts) == 2 * numel, f"{counts} elements of moments, and {numel} of parameters"
    assert max(counts) <= 2 * (numel / rank.world_size + 16 * 16)  # 1/d, up to one matrix


@on_ranks
def test_state_is_sharded(rank, stage):
    moments_are_sharded(rank, optimizer_of(stage), lambda optimizer: optimizer.state)


@on_ranks
def test_resumes_from_its_state_dict(rank, stage):
    """Load the model and the optimizer into new ones after three steps: the fourth is the same, its rate too."""
    pair = Pair(rank, stage)
    schedules = [SCHEDULERS["SWALR"](optimizer) for optimizer in pair.optimizers]
    for step in range(3):
        pair.train(step)
        for schedule in schedules:
            schedule.step()
    saved = copy.deepcopy((pair.model.state_dict(), pair.optimizer.state_dict()))
    train(pair.model, pair.optimizer, rank, 9)  # after the checkpoint: must leave no trace

    pair.model = Net(seed=5).to(rank.device)
    pair.optimizer = optimizer_of(stage)(trainable(pair.model), **ADAMW)
    pair.model.load_state_dict(saved[0])
    pair.optimizer.load_state_dict(saved[1])
    assert pair.optimizer.param_groups[0]["lr"] == pair.replicated.optimizer.param_groups[0]["lr"] < 0.01
    train(pair.model, pair.optimizer, rank, 3)
    pair.replicated.step(3)
    assert_same(pair.model, pair.replicated.model, sums_commute(rank))


@on_ranks(2)
def test_state_may_be_looked_at_and_is_refused_of_another_rank(rank, stage):
    """Ask for the state of a parameter that another rank steps: that does no harm. Load another rank's: an error."""
    model = Net(seed=0).to(rank.device)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    train(model, optimizer, rank, 0)
    before = optimizer.state_dict()
    for param in trainable(model):
        optimizer.state[param].get("exp_avg")  # torch's state is a defaultdict: this puts {} into it
    assert optimizer.state_dict()["state"].keys() == before["state"].keys()
    optimizer.state["of all"]["n"] = 3  # torch saves it
    assert optimizer.state_dict()["state"]["of all"] == {"n": 3}
    everyone = [None] * rank.world_size
    dist.all_gather_object(everyone, before)
    with pytest.raises(ValueError, match="save with torch.distributed.checkpoint, which cuts states for other ranks"):
        optimizer.load_state_dict(everyone[1 - rank.number])


def delete(optimizer, param):
    if param in optimizer.state:
        del optimizer.state[param]


def zero_all(optimizer, param):
    for param, state in optimizer.state.items():
        state["exp_avg"].zero_()
        optimizer.state[param] = dict(state)


def assign_all(optimizer, param):
    optimizer.state = {key: {} if key is param else value for key, value in optimizer.state.items()}


@on_ranks
def test_the_state_of_a_parameter_can_be_reset(rank, stage):
    """As people reset dead neurons: each rank what it steps of them."""
    pair = Pair(rank, stage)
    for step, reset in enumerate([delete, zero_all, assign_all]):
        pair.train(step)
        for optimizer, model in zip(pair.optimizers, pair.models):
            reset(optimizer, model.up.weight)
    pair.train(3)
    pair.assert_same()
    known = {id(param) for param in trainable(pair.model)}
    assert {id(param) for param in pair.optimizer.state} <= known and len(pair.optimizer.state) <= len(known)


# ------------------------------------------------------------------------------------------------------------ errors


def parameter(rank, *shape, **kwargs):
    """Another value on each rank, so that a broadcast before the error would be seen."""
    return nn.Parameter(torch.full(shape, rank.number + 1.0, device=rank.device, **kwargs))


def shared_twice(rank):
    return [parameter(rank, 2)] + [parameter(rank, 3)] * 2


class Lamb(torch.optim.Optimizer):
    """The step of each tensor is scaled by a ratio of norms: not element-wise."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param -= self.param_groups[0]["lr"] * param.norm() / param.grad.norm() * param.grad


class Noted(torch.optim.AdamW):
    """Takes what no two ranks print alike."""

    def __init__(self, params, notes, **kwargs):
        super().__init__(params, **kwargs)


def behind_one(make):
    """-> function of a rank -> what `make` makes of it, as parameter 1."""
    return lambda rank: [parameter(rank, 3), make(rank)]


def one_parameter(rank):
    return [parameter(rank, 3)]


TYPE_ERRORS = {  # what is refused: (the parameters on a rank, words of the error, other arguments)
    "a tensor": (lambda r: parameter(r, 3), "iterable"),
    "not iterable": (lambda r: 7, "iterable"),
    "not tensors": (behind_one(lambda r: "weight"), "only optimize Tensors, but one of the params is str"),
    "a set": (lambda r: {parameter(r, 3), parameter(r, 3)}, "a set has no order"),
    "no class": (one_parameter, "optimizer_cls must be a class, such as torch.optim.AdamW, not an object of class str",
                 lambda r: {"optimizer_cls": "adamw"}),
    "a mesh": (one_parameter, r'process_group must be a ProcessGroup, such as mesh\["dp"\].get_group\(\), not a Mesh',
               lambda r: {"process_group": type("Mesh", (), {})()}),
}
VALUE_ERRORS = {
    "empty": (lambda r: [], "empty"),
    "empty groups": (lambda r: [{"params": []}, {"params": []}], "empty"),
    "duplicate": (shared_twice, "parameters 1 of group 0 and 2 of group 0 share memory: pass each one once"),
    "sparse": (behind_one(lambda r: torch.ones(3, 3, device=r.device).to_sparse().requires_grad_()),
               "parameter 1 .*sparse"),
    "overlapping memory": (lambda r: [parameter(r, 3), *map(nn.Parameter, parameter(r, 9).data.unfold(0, 5, 4))],
                           "parameters 1 of group 0 and 2 of group 0 share memory"),
    "integers": (behind_one(lambda r: torch.ones(3, dtype=torch.int64, device=r.device)), "parameter 1 .*int64"),
    "8 bits": (behind_one(lambda r: parameter(r, 3, dtype=torch.float8_e4m3fn)), "parameter 1 .*float8_e4m3fn"),
    "several devices": (behind_one(lambda r: nn.Parameter(torch.ones(3, device="meta"))), "parameter 1 .*meta"),
    "without memory": (lambda r: [nn.Parameter(torch.ones(3, device="meta"))], "on the meta device, without memory"),
    "infinite lr": (one_parameter, "lr is inf: it must be a finite number", lambda r: {"lr": float("inf")}),
    # Those on which rank 1 disagrees
    "another shape": (lambda r: [parameter(r, 4), parameter(r, 3 + (r.number == 1))], "parameter"),
    "another dtype": (lambda r: [parameter(r, 3, dtype=torch.float64 if r.number == 1 else torch.float32)], "float64"),
    "another name": (lambda r: [("ab"[r.number == 1], parameter(r, 3))], "is a .* on rank 0 and b .* on rank 1"),
    "frozen elsewhere": (lambda r: [parameter(r, 3).requires_grad_(r.number != 1)],
                         "is .* torch.float32 on rank 0 and .* torch.float32 frozen on rank 1"),
    "another number": (lambda r: [parameter(r, 3) for _ in range(2 + (r.number == 1))], "rank 1"),
    "another lr of a group": (lambda r: [{"params": one_parameter(r), "lr": 0.5 + (r.number == 1)}],
                              "lr of group 0 is 0.5 on rank 0 and 1.5 on rank 1"),
    "another optimizer": (one_parameter, "optimizer_cls is Lamb on rank 0 and AdamW on rank 1",
                          lambda r: {"optimizer_cls": torch.optim.AdamW if r.number == 1 else Lamb}),
    "bad on one rank": (lambda r: shared_twice(r) if r.number == 1 else one_parameter(r), "share memory"),
}


@on_ranks(3, of={**TYPE_ERRORS, **VALUE_ERRORS})
def test_refuses_before_anything_changes(rank, stage, of):
    """Build an optimizer of what is wrong, on each rank or on one of them: every rank has the error.

    The other arguments of two ranks may print otherwise: that is no error.
    """
    make, message, *make_arguments = TYPE_ERRORS.get(of) or VALUE_ERRORS[of]
    params = make(rank)
    tensors = [p for p in params if torch.is_tensor(p) and not p.is_meta] if isinstance(params, list) else []
    before = [t.detach().clone() for t in tensors]
    with pytest.raises(TypeError if of in TYPE_ERRORS else ValueError, match=message):
        optimizer_of(stage)(params, **(make_arguments[0](rank) if make_arguments else {}))
    assert all(torch.equal(t.detach().to_dense(), b.to_dense()) for t, b in zip(tensors, before))
    optimizer_of(stage)(one_parameter(rank), Noted, lr=0.1, notes=({"rank": rank.number},))


@on_ranks(2)
def test_sparse_gradients_are_refused_or_right(rank, stage):
    """Refuse by name, or step: a gradient that is lost is neither."""
    embedding = nn.Embedding(6, 3, sparse=True).to(rank.device)
    nn.init.ones_(embedding.weight)
    optimizer = optimizer_of(stage)(embedding.named_parameters(), torch.optim.SGD, lr=1.0)
    try:
        embedding(torch.tensor([2], device=rank.device)).sum().backward()
        optimizer.step()
    except ValueError as error:
        assert "weight" in str(error) and "sparse" in str(error)
    else:
        assert embedding.weight[2].eq(0).all() and embedding.weight.sum() == 15


@on_ranks(2)
def test_mixed_dtypes_are_refused_or_right(rank, stage):
    """Stages 1 and 2 put all gradients into one tensor."""
    params = [parameter(rank, 3), parameter(rank, 3, dtype=torch.float64)]
    refuses = pytest.raises(ValueError, match="parameter 1 of group 0 is torch.float64, 0 of group 0 is torch.float32")
    may_refuse = contextlib.nullcontext() if stage in STAGES else contextlib.suppress(ValueError)
    with refuses if stage in STAGES[:2] else may_refuse:
        optimizer = optimizer_of(stage)(params, torch.optim.SGD, lr=0.5)
        sum(param.sum() for param in params).backward()
        optimizer.step()
        assert all(param.eq(0.5).all() for param in params)


def test_no_process_group(stage):
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        optimizer_of(stage)([nn.Parameter(torch.ones(3))])
