"""The contract: what every stage must do, on 1 to 4 ranks. The reference is one process with the data of all ranks.

Each test sends one function to the ranks; an assertion that fails there is reported here. Run it on a package of your
own with `pytest --stage my_package`.
"""

import copy
import re

import pytest
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler as schedulers

from tests.common import OPTIMIZERS, Net, Replicated, assert_same, batch, loss_of, optimizer_of, trainable

# torch's fused kernels on CPU round a tensor's last elements, those that fill no vector, differently: a parameter cut
# elsewhere than at a multiple of 64 bytes is then not what the whole one would be. Unfused, all are rounded alike.
UNFUSED = {"foreach": False}
FUSED = {"fused": True}
ADAMW = {"lr": 0.01, "weight_decay": 0.1, **UNFUSED}


def backward(model, rank, *steps):
    for step in steps:
        loss = loss_of(model, *batch(step, rank.rank, device=rank.device))
        loss.backward()
    return loss


def train(model, optimizer, rank, *steps):
    for step in steps:
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def exact(rank):
    """Sums over two ranks commute. Over three or more their order depends on the layout: equal up to rounding."""
    return rank.world_size <= 2


# ------------------------------------------------------------------------------------------------------------ equality


def equals_replicated(rank, stage, name, how):
    optimizer_cls, kwargs = OPTIMIZERS[name]
    if name != "Adagrad" or rank.device.type == "cpu":  # torch has no such kernel for CUDA
        kwargs = {**kwargs, **how}
    model = Net(seed=rank.rank).to(rank.device)  # other weights on every rank: the constructor broadcasts
    reference = Replicated(rank, optimizer_cls, **kwargs)
    optimizer = optimizer_of(stage)(trainable(model), optimizer_cls, **kwargs)
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert_same(model, reference.model, exact=True)
    before = copy.deepcopy(reference.model)
    for step in range(5):
        train(model, optimizer, rank, step)
        reference.step(step)
        assert_same(model, reference.model, exact(rank) and how == UNFUSED)
    moved = [not torch.equal(a, b) for a, b in zip(trainable(reference.model), trainable(before))]
    assert all(moved)


@pytest.mark.parametrize("how", [FUSED, UNFUSED], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_replicated_training(run, stage, name, how):
    run(equals_replicated, stage, name, how)


def built_after_the_forward_pass(rank, stage):
    """The broadcast has replaced what the graph has read: torch's error on every rank, no gradient of old weights."""
    weight = torch.nn.Parameter(torch.full((4,), 1.0 + rank.rank, device=rank.device))
    loss = (weight**2).sum()
    optimizer_of(stage)([weight], lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_graph_from_before_the_constructor_is_refused(run, stage):
    run(built_after_the_forward_pass, stage)


def frozen_parameters_stay(rank, stage):
    model = Net(seed=rank.rank, frozen_seed=rank.rank).to(rank.device)
    reference = Replicated(rank, groups=lambda model: model.parameters(), **ADAMW)
    optimizer = optimizer_of(stage)(model.parameters(), **ADAMW)  # a generator, with frozen parameters in it
    for step in range(3):
        train(model, optimizer, rank, step)
        reference.step(step)
    assert_same(model, reference.model, exact(rank))


def test_frozen_parameters_are_broadcast_and_stay_as_they_are(run, stage):
    run(frozen_parameters_stay, stage)


def unfrozen_later(rank, stage):
    model = Net(seed=0).to(rank.device)
    reference = Replicated(rank, groups=lambda model: model.parameters(), **ADAMW)
    optimizer = optimizer_of(stage)(model.parameters(), **ADAMW)
    train(model, optimizer, rank, 0)
    reference.step(0)
    for net in (model, reference.model):
        net.frozen.requires_grad_(True)
        net.up.requires_grad_(False)
    for step in (1, 2):
        train(model, optimizer, rank, step)
        reference.step(step)
    assert_same(model, reference.model, exact(rank))


def test_parameters_can_be_frozen_and_unfrozen_later(run, stage):
    run(unfrozen_later, stage)


def fewer_parameters_than_ranks(rank, stage, shapes):
    weights = [torch.nn.Parameter(torch.full(shape, float(rank.rank), device=rank.device)) for shape in shapes]
    plain = [torch.nn.Parameter(torch.zeros(shape, device=rank.device)) for shape in shapes]
    optimizer = optimizer_of(stage)(weights, **ADAMW)
    reference = torch.optim.AdamW(plain, **ADAMW)
    for step in range(3):
        sum((w.sum() * (rank.rank + step + 1)) for w in weights).backward()
        optimizer.step()
        optimizer.zero_grad()
        for p in plain:
            p.grad = torch.full_like(p, step + 1 + (rank.world_size - 1) / 2)
        reference.step()
    for w, p in zip(weights, plain):
        assert torch.allclose(w, p, rtol=1e-6), (w, p)


@pytest.mark.parametrize("shapes", [[()], [(1,)], [(3,), (2, 1)], [(0,), (7,)]], ids=str)
def test_fewer_parameters_or_elements_than_ranks(run, stage, shapes):
    run(fewer_parameters_than_ranks, stage, shapes)


def by_hand(rank, stage):
    """16 elements 0 … 15, gradient r + 1 on rank r, lr 0.1: the mean gradient of d ranks is (d + 1) / 2."""
    weight = torch.nn.Parameter(torch.arange(16.0, device=rank.device))
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, lr=0.1)
    (weight.sum() * (rank.rank + 1)).backward()
    optimizer.step()
    return weight.tolist()


def test_sixteen_elements_by_hand(run, stage, world_size):
    expected = [i - 0.1 * (world_size + 1) / 2 for i in range(16)]
    for weights in run(by_hand, stage):
        assert weights == pytest.approx(expected, rel=1e-6)


def inner_group(rank, stage):
    """Ranks 1, 2, … train in a process group of their own; rank 0 takes no part."""
    group = dist.new_group(list(range(1, rank.world_size)))
    if rank.rank == 0:
        return None
    weight = torch.nn.Parameter(torch.full((5,), float(rank.rank), device=rank.device))
    optimizer = optimizer_of(stage)([weight], torch.optim.SGD, process_group=group, lr=1.0)
    (weight.sum() * rank.rank).backward()
    optimizer.step()
    return weight.tolist()


@pytest.mark.parametrize("world_size", [3])
def test_process_group_of_some_ranks(run, stage, world_size):
    assert run(inner_group, stage)[1:] == [[1 - 1.5] * 5, [1 - 1.5] * 5]


# --------------------------------------------------------------------------------------------- groups and schedulers


def two_groups(model):
    matrices = [param for param in trainable(model) if param.dim() > 1]
    vectors = [param for param in trainable(model) if param.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "lr": 0.003, "weight_decay": 0.0}]


def parameter_groups(rank, stage):
    model, reference = Net(seed=rank.rank).to(rank.device), Replicated(rank, groups=two_groups, **ADAMW)
    optimizer = optimizer_of(stage)(two_groups(model), **ADAMW)
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 4]
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.003]
    for step in range(3):
        train(model, optimizer, rank, step)
        reference.step(step)
    assert_same(model, reference.model, exact(rank))


def test_groups_with_their_own_lr_and_weight_decay(run, stage):
    run(parameter_groups, stage)


def named_parameters(rank, stage):
    model, reference = Net(seed=rank.rank).to(rank.device), Replicated(rank, **ADAMW)
    optimizer = optimizer_of(stage)([(n, p) for n, p in model.named_parameters() if p.requires_grad], **ADAMW)
    assert "up.weight" in optimizer.param_groups[0]["param_names"]
    train(model, optimizer, rank, 0)
    reference.step(0)
    assert_same(model, reference.model, exact(rank))


def test_named_parameters(run, stage):
    run(named_parameters, stage)


def lr_of_zero(rank, stage):
    model, reference = Net(seed=rank.rank).to(rank.device), Replicated(rank, **{**ADAMW, "lr": 0.0})
    optimizer = optimizer_of(stage)(trainable(model), **{**ADAMW, "lr": 0.0})
    for step in range(3):
        for one in (optimizer, reference.optimizer):
            one.param_groups[0]["lr"] = 0.01 * step
        train(model, optimizer, rank, step)
        reference.step(step)
    assert_same(model, reference.model, exact(rank))


def test_the_learning_rate_may_begin_at_zero(run, stage):
    run(lr_of_zero, stage)


def group_added_later(rank, stage, name):
    optimizer_cls, kwargs = OPTIMIZERS[name][0], {**OPTIMIZERS[name][1], **UNFUSED}

    def first(model):
        return list(model.up.parameters())

    def second(model):
        return [*model.down.parameters(), model.scale, model.head.weight, *model.embed.parameters()]

    model, reference = Net(seed=0).to(rank.device), Replicated(rank, optimizer_cls, groups=first, **kwargs)
    optimizer = optimizer_of(stage)(first(model), optimizer_cls, **kwargs)
    for param in [*second(model), *second(reference.model)]:
        param.requires_grad_(False)
    train(model, optimizer, rank, 0)
    reference.step(0)
    for param in [*second(model), *second(reference.model)]:
        param.requires_grad_(True)
    with torch.no_grad():
        model.scale += rank.rank  # add_param_group broadcasts, as the constructor does
    optimizer.add_param_group({"params": second(model), "lr": 0.02})
    reference.optimizer = regrouped(reference, first, second, optimizer_cls, kwargs)
    for step in (1, 2):
        train(model, optimizer, rank, step)
        reference.step(step)
    assert_same(model, reference.model, exact(rank))


def regrouped(reference, first, second, optimizer_cls, kwargs):
    """torch's Adagrad makes its state in the constructor only, so build one with both groups and keep the old state."""
    groups = [{"params": first(reference.model)}, {"params": second(reference.model), "lr": 0.02}]
    optimizer = optimizer_cls(groups, **kwargs)
    optimizer.state.update(reference.optimizer.state)
    return optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_add_param_group_later(run, stage, name):
    run(group_added_later, stage, name)


SCHEDULERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=3),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=4),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.001, 0.02, step_size_up=2),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.02, total_steps=6),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.001, anneal_epochs=2),
}


def scheduled(rank, stage, name):
    model, reference = Net(seed=rank.rank).to(rank.device), Replicated(rank, groups=two_groups, **ADAMW)
    optimizer = optimizer_of(stage)(two_groups(model), **ADAMW)
    ours, theirs = SCHEDULERS[name](optimizer), SCHEDULERS[name](reference.optimizer)
    plateau = [1.0] if name == "ReduceLROnPlateau" else []  # its step wants a metric
    rates = set()
    for step in range(4):
        train(model, optimizer, rank, step)
        reference.step(step)
        ours.step(*plateau)
        theirs.step(*plateau)
        for group, expected in zip(optimizer.param_groups, reference.optimizer.param_groups):
            assert group["lr"] == expected["lr"] and group["betas"] == expected["betas"]
            rates.add(group["lr"])
    assert len(rates) > 2  # the scheduler does something
    saved = optimizer.state_dict()["param_groups"]  # with the rate of the next step
    assert [group["lr"] for group in saved] == [group["lr"] for group in reference.optimizer.param_groups]
    assert_same(model, reference.model, exact(rank))


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch(run, stage, name):
    run(scheduled, stage, name)


# --------------------------------------------------------------------------------- closure, accumulation, clipping


def closure_and_its_loss(rank, stage):
    model, reference = Net(seed=0).to(rank.device), Replicated(rank, **ADAMW)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    for step in range(3):

        def closure(step=step):
            optimizer.zero_grad()
            return backward(model, rank, step)

        loss, expected = optimizer.step(closure), reference.step(step)
        assert torch.allclose(loss, expected, rtol=1e-5), (loss, expected)
        assert not loss.requires_grad
    assert_same(model, reference.model, exact(rank))
    optimizer.zero_grad()
    assert optimizer.step(lambda: backward(model, rank, 3).item()) is not None  # a float is a loss too


def test_closure_and_its_loss(run, stage):
    run(closure_and_its_loss, stage)


def accumulate(rank, stage, with_no_sync):
    model, reference = Net(seed=0).to(rank.device), Replicated(rank, **ADAMW)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    for first in (0, 3):  # two accumulations: nothing of the first is left in the second
        if with_no_sync:
            with optimizer.no_sync():
                backward(model, rank, first, first + 1)
        else:
            backward(model, rank, first, first + 1)
        backward(model, rank, first + 2)
        optimizer.step()
        optimizer.zero_grad()
        reference.step(first, first + 1, first + 2)
    assert_same(model, reference.model, exact=False)


@pytest.mark.parametrize("with_no_sync", [True, False], ids=["no_sync", "every backward"])
def test_three_micro_batches_equal_one_large_batch(run, stage, with_no_sync):
    run(accumulate, stage, with_no_sync)


def all_inside_no_sync(rank, stage):
    model, reference = Net(seed=0).to(rank.device), Replicated(rank, **ADAMW)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    with optimizer.no_sync():
        backward(model, rank, 0, 1)
    optimizer.step()
    reference.step(0, 1)
    assert_same(model, reference.model, exact=False)


def test_step_after_no_sync_alone_loses_nothing(run, stage):
    run(all_inside_no_sync, stage)


def forgets(rank, stage):
    model, reference = Net(seed=0).to(rank.device), Replicated(rank, **ADAMW)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    backward(model, rank, 7)
    optimizer.zero_grad()
    backward(model, rank, 8)
    optimizer.clip_grad_norm_(1.0)
    optimizer.zero_grad()  # a step that is skipped after clipping
    train(model, optimizer, rank, 0)
    reference.step(0)
    assert_same(model, reference.model, exact(rank))


def test_zero_grad_forgets_gradients_reduced_or_not(run, stage):
    run(forgets, stage)


def clip(rank, stage, norm_type, max_norm):
    model, reference = Net(seed=0).to(rank.device), Replicated(rank, **ADAMW)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    for step in range(3):
        backward(model, rank, step)
        reference.backward(step)
        norm = optimizer.clip_grad_norm_(max_norm, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(trainable(reference.model), max_norm, norm_type)
        assert torch.allclose(norm, expected, rtol=1e-5), (norm, expected)
        assert max_norm > 1 or norm > max_norm  # 0.05 clips
        optimizer.step()
        optimizer.zero_grad()
        reference.optimizer.step()
        reference.optimizer.zero_grad()
    assert_same(model, reference.model, exact=False)


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
def test_clipping_equals_torch_on_the_whole_model(run, stage, norm_type, max_norm):
    run(clip, stage, norm_type, max_norm)


# ------------------------------------------------------------------------------------------------------------- state


def state_elements(rank, stage):
    """Elements of AdamW's two moments on this rank; scalars (the step counts) are not sharded and not counted."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(12))).to(rank.device)
    optimizer = optimizer_of(stage)(model.parameters(), **ADAMW)
    model(torch.ones(2, 16, device=rank.device)).sum().backward()
    optimizer.step()
    tensors = [t for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return sum(t.numel() for t in tensors if t.dim())


def test_state_is_sharded(run, stage, world_size):
    numel = 12 * (16 * 16 + 16)
    counts = run(state_elements, stage)
    assert sum(counts) == 2 * numel  # every element has its two moments once
    assert max(counts) <= 2 * (numel / world_size + 16 * 16)  # 1/d, up to one matrix


def resumed(rank, stage):
    model, reference = Net(seed=0).to(rank.device), Replicated(rank, **ADAMW)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    scheduler = SCHEDULERS["StepLR"](optimizer)
    theirs = SCHEDULERS["StepLR"](reference.optimizer)
    for step in range(3):
        train(model, optimizer, rank, step)
        reference.step(step)
        scheduler.step()
        theirs.step()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, rank, 9)  # after the checkpoint: must leave no trace

    fresh = Net(seed=5).to(rank.device)
    fresh.load_state_dict(saved[0])
    optimizer = optimizer_of(stage)(trainable(fresh), **ADAMW)
    optimizer.load_state_dict(saved[1])
    assert optimizer.param_groups[0]["lr"] == reference.optimizer.param_groups[0]["lr"] < 0.01
    train(fresh, optimizer, rank, 3)
    reference.step(3)
    assert_same(fresh, reference.model, exact(rank))


def test_resumes_from_its_state_dict(run, stage):
    run(resumed, stage)


def state_that_was_looked_at(rank, stage):
    model = Net(seed=0).to(rank.device)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    train(model, optimizer, rank, 0)
    before = optimizer.state_dict()
    for param in trainable(model):
        optimizer.state[param].get("exp_avg")  # torch's state is a defaultdict: this puts {} into it
    assert optimizer.state_dict()["state"].keys() == before["state"].keys()
    train(model, optimizer, rank, 1)
    optimizer.state["of all"]["n"] = 3  # torch saves it
    assert optimizer.state_dict()["state"]["of all"] == {"n": 3}
    optimizer.state[torch.zeros(2, 3)]["slow"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"state has a tensor of shape \(2, 3\), which isn't stepped here"):
        optimizer.state_dict()


def test_state_may_be_looked_at(run, stage):
    """The state of a parameter that another rank steps is not here; to ask for it does no harm, to make one does."""
    run(state_that_was_looked_at, stage)


def del_state(optimizer, param):
    if param in optimizer.state:
        del optimizer.state[param]


def assign_state(optimizer, param):
    optimizer.state[param] = {}


def zero_state(optimizer, param):
    state = optimizer.state.get(param)
    if state is not None:
        state["exp_avg"].zero_()


def zero_all_states(optimizer, param):
    for param, state in optimizer.state.items():
        state["exp_avg"].zero_()
        optimizer.state[param] = dict(state)


def assign_all_states(optimizer, param):
    optimizer.state = {key: {} if key is param else value for key, value in optimizer.state.items()}


def pop_state(optimizer, param):
    if (state := optimizer.state.pop(param, None)) is not None:
        assert "exp_avg" in optimizer.state.setdefault(param, state)
        optimizer.state.pop(param)
    with pytest.raises(KeyError):
        optimizer.state.pop(param)


RESETS = [del_state, assign_state, pop_state, zero_state, zero_all_states, assign_all_states]


def reset(rank, stage, reset_state):
    model = Net(seed=0).to(rank.device)
    optimizer, reference = optimizer_of(stage)(trainable(model), **ADAMW), Replicated(rank, **ADAMW)
    for step in range(4):
        train(model, optimizer, rank, step)
        reference.step(step)
        for ours, param in ((optimizer, model.up.weight), (reference.optimizer, reference.model.up.weight)):
            reset_state(ours, param)
    assert_same(model, reference.model, exact(rank))
    known = {id(param) for param in trainable(model)}
    assert {id(param) for param in optimizer.state} <= known and len(optimizer.state) <= len(known)


@pytest.mark.parametrize("reset_state", RESETS, ids=lambda function: function.__name__)
def test_the_state_of_a_parameter_can_be_reset(run, stage, reset_state):
    """As people reset dead neurons: each rank what it steps of them."""
    run(reset, stage, reset_state)


def wrong_state_dict(rank, stage):
    weights = [torch.nn.Parameter(torch.ones(8, device=rank.device)) for _ in range(4)]
    optimizer = optimizer_of(stage)(weights, **ADAMW)
    theirs = [None] * rank.world_size
    dist.all_gather_object(theirs, optimizer.state_dict())
    try:
        optimizer.load_state_dict(theirs[(rank.rank + 1) % rank.world_size])
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("world_size", [2])
def test_state_dict_of_another_rank_is_refused(run, stage, world_size):
    assert all("rank" in message for message in run(wrong_state_dict, stage))


# ------------------------------------------------------------------------------------------------------------ errors


def refused(rank, stage, make, exception):
    """-> the message of the error; the parameters must be untouched."""
    params, kwargs = BAD[make](rank)
    tensors = [p for p in params if torch.is_tensor(p) and not p.is_meta] if isinstance(params, list) else []
    before = [t.detach().clone() for t in tensors]
    try:
        optimizer_of(stage)(params, **kwargs)
    except exception as error:
        assert all(torch.equal(t.detach().to_dense(), b.to_dense()) for t, b in zip(tensors, before))
        return str(error)
    raise AssertionError("no error")


def parameter(rank, *shape, **kwargs):
    """Another value on each rank, so that a broadcast before the error would be seen."""
    return torch.nn.Parameter(torch.full(shape, rank.rank + 1.0, device=rank.device, **kwargs))


def shared_twice(rank):
    weight = parameter(rank, 3)
    return [parameter(rank, 2), weight, weight]


def retained(rank):
    result = parameter(rank, 3) * 2
    result.retain_grad()  # torch's own optimizers step that
    return result


def in_the_same_memory(rank):
    param = parameter(rank, 3)
    return [param, torch.nn.Parameter(param.data)]


def overlapping(rank):
    flat = torch.ones(9, device=rank.device)
    return [torch.nn.Parameter(flat[:5]), torch.nn.Parameter(flat[4:])]


class Lamb(torch.optim.Optimizer):
    """The step of each tensor is scaled by a ratio of norms: not element-wise."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param -= self.param_groups[0]["lr"] * param.norm() / param.grad.norm() * param.grad


def inference_parameter(rank):
    with torch.inference_mode():
        return torch.nn.Parameter(torch.ones(3, device=rank.device))


BAD = {
    "empty": lambda r: ([], {}),
    "empty group": lambda r: ([{"params": []}], {}),
    "a tensor": lambda r: (parameter(r, 3), {}),
    "not iterable": lambda r: (7, {}),
    "not tensors": lambda r: ([parameter(r, 3), "weight"], {}),
    "duplicate": lambda r: (shared_twice(r), {}),
    "duplicate across groups": lambda r: ([{"params": [p]} for p in shared_twice(r)], {}),
    "sparse": lambda r: ([parameter(r, 3), torch.ones(3, 3, device=r.device).to_sparse().requires_grad_()], {}),
    "not a leaf": lambda r: ([parameter(r, 3), parameter(r, 3) * 2], {}),
    "a result that keeps its gradient": lambda r: ([parameter(r, 3), retained(r)], {}),
    "the same memory": lambda r: (in_the_same_memory(r), {}),
    "overlapping memory": lambda r: ([parameter(r, 3), *overlapping(r)], {}),
    "a set": lambda r: ({parameter(r, 3), parameter(r, 3)}, {}),
    "a set in a group": lambda r: ([{"params": {parameter(r, 3), parameter(r, 3)}}], {}),
    "integers": lambda r: ([parameter(r, 3), torch.ones(3, dtype=torch.int64, device=r.device)], {}),
    "8 bits": lambda r: ([parameter(r, 3), parameter(r, 3, dtype=torch.float8_e4m3fn)], {}),
    "of inference_mode": lambda r: ([parameter(r, 3), inference_parameter(r)], {}),
    "no group": lambda r: ([parameter(r, 3)], {"process_group": [0]}),
    "several devices": lambda r: ([parameter(r, 3), torch.nn.Parameter(torch.ones(3, device="meta"))], {}),
    "no backend": lambda r: ([torch.nn.Parameter(torch.ones(3, device="meta"))], {}),
    "another shape": lambda r: ([parameter(r, 4), parameter(r, 3 + (r.rank == 1))], {}),
    "another order": lambda r: ([parameter(r, 2), parameter(r, 3)][:: 1 - 2 * (r.rank == 1)], {}),
    "another dtype": lambda r: ([parameter(r, 3, dtype=torch.float64 if r.rank == 1 else torch.float32)], {}),
    "another name": lambda r: ([("ab"[r.rank == 1], parameter(r, 3))], {}),
    "another lr": lambda r: ([parameter(r, 3)], {"lr": 0.1 * (1 + (r.rank == 1))}),
    "another optimizer": lambda r: (
        [parameter(r, 3)], {"optimizer_cls": torch.optim.AdamW if r.rank == 1 else torch.optim.Adam}),
    "frozen elsewhere": lambda r: ([parameter(r, 3).requires_grad_(r.rank != 1)], {}),
    "another number": lambda r: ([parameter(r, 3) for _ in range(2 + (r.rank == 1))], {}),
    "bad on one rank": lambda r: (shared_twice(r) if r.rank == 1 else [parameter(r, 3)], {}),
    "negative lr": lambda r: ([parameter(r, 3)], {"lr": -1.0}),
}
REFUSALS = [
    ("empty", ValueError, "empty"),
    ("empty group", ValueError, "empty"),
    ("a tensor", TypeError, "iterable"),
    ("not iterable", TypeError, "iterable"),
    ("not tensors", TypeError, "parameter 1 .*str"),
    ("duplicate", ValueError, "parameter 2 .*duplicate of parameter 1"),
    ("duplicate across groups", ValueError, "parameter 0 of group 2.*duplicate"),
    ("sparse", ValueError, "parameter 1 .*sparse"),
    ("not a leaf", ValueError, "parameter 1 .*leaf"),
    ("a result that keeps its gradient", ValueError, "parameter 1 .*leaf"),
    ("the same memory", ValueError, "parameters 0 of group 0 and 1 of group 0 share memory"),
    ("overlapping memory", ValueError, "parameters 1 of group 0 and 2 of group 0 share memory"),
    ("a set", TypeError, "a set has no order"),
    ("a set in a group", TypeError, "a set has no order"),
    ("integers", ValueError, "parameter 1 .*int64"),
    ("8 bits", ValueError, "parameter 1 .*float8_e4m3fn"),
    ("of inference_mode", ValueError, "parameter 1 .*inference_mode"),
    ("no group", TypeError, "process_group must be a ProcessGroup, .* not a list"),
    ("several devices", ValueError, "parameter 1 .*meta"),
    ("no backend", ValueError, "parameter 0 .* is on meta, process_group has .* for (cpu|cuda).*: move the model"),
    ("negative lr", ValueError, "learning rate"),
]


class Noted(torch.optim.AdamW):
    """Takes what no two ranks print alike."""

    def __init__(self, params, notes, **kwargs):
        super().__init__(params, **kwargs)


def with_an_argument_of_its_own(rank, stage):
    optimizer_of(stage)([parameter(rank, 3)], Noted, lr=0.1, notes=({"rank": rank.rank},))


@pytest.mark.parametrize("world_size", [2])
def test_only_plain_arguments_are_compared(run, stage, world_size):
    run(with_an_argument_of_its_own, stage)


DISAGREEMENTS = [
    ("another shape", "parameter"),
    ("another order", "parameter"),
    ("another dtype", "float64"),
    ("another name", "rank 0 has a .*rank 1 b "),
    ("frozen elsewhere", "rank 0 has .* torch.float32, rank 1 .* torch.float32 frozen"),
    ("another number", "rank 1"),
    ("another lr", r"rank 0 has lr=0.1, rank 1 lr=0.2"),
    ("another optimizer", r"rank 0 has optimizer_cls=<class '.*\.Adam'>, rank 1 optimizer_cls=<class '.*\.AdamW'>"),
    ("bad on one rank", "duplicate"),
]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("make, exception, message", REFUSALS, ids=[case[0] for case in REFUSALS])
def test_refuses_before_anything_changes(run, stage, world_size, make, exception, message):
    for text in run(refused, stage, make, exception):
        assert re.search(message, text), text


@pytest.mark.parametrize("world_size", [3])
@pytest.mark.parametrize("make, message", DISAGREEMENTS, ids=[case[0] for case in DISAGREEMENTS])
def test_ranks_that_disagree_are_refused_on_every_rank(run, stage, world_size, make, message):
    for text in run(refused, stage, make, ValueError):
        assert re.search(message, text), text


def sparse_gradient(rank, stage):
    """Refused by name, or right: a gradient that is lost is neither."""
    embedding = torch.nn.Embedding(6, 3, sparse=True).to(rank.device)
    torch.nn.init.ones_(embedding.weight)
    optimizer = optimizer_of(stage)(embedding.named_parameters(), torch.optim.SGD, lr=1.0)
    try:
        embedding(torch.tensor([2], device=rank.device)).sum().backward()
        optimizer.step()
    except ValueError as error:
        return "weight" in str(error) and "sparse" in str(error)
    return embedding.weight[2].eq(0).all().item() and embedding.weight.sum().item() == 15


@pytest.mark.parametrize("world_size", [2])
def test_sparse_gradients_are_refused_or_right(run, stage, world_size):
    assert run(sparse_gradient, stage) == [True, True]


def test_no_process_group(stage):
    with pytest.raises(RuntimeError, match="process group"):
        optimizer_of(stage)([torch.nn.Parameter(torch.ones(3))])
