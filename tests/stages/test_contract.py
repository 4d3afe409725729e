"""The contract: what every stage must do, on several ranks. The reference is one process with the data of all ranks.

The body of a test runs on every rank; an assertion that fails there is reported here. Run it on a package of your own
with `pytest --stage my_package`.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from tests.common import OPTIMIZERS, Net, batch, loss_of, on_ranks, optimizer_of, trainable
from tests.pairs import ADAMW, PREFETCH, SGD, UNFUSED, Pair, assert_same, backward, parameter_of, sums_commute, train

# ------------------------------------------------------------------------------------------------------------ equality


@pytest.mark.any_size
@on_ranks(how=[{"fused": True}, UNFUSED], name=OPTIMIZERS)
def test_equals_replicated_training(rank, stage, how, name):
    """Train three steps: after each the parameters are those of one process, to the bit with unfused kernels."""
    optimizer_cls, kwargs = OPTIMIZERS[name]
    if name == "Adagrad" and rank.device.type == "cuda":
        how = UNFUSED  # torch has no fused Adagrad for CUDA
    pair = Pair(rank, stage, optimizer_cls, **kwargs, **how)
    assert isinstance(pair.optimizer, torch.optim.Optimizer)
    assert_same(*pair.models, exact=True)
    before = copy.deepcopy(trainable(pair.model))
    for step in range(3):
        pair.train(step)
        pair.assert_same(how == UNFUSED)
    assert not any(map(torch.equal, trainable(pair.model), before))


@pytest.mark.parametrize("stage, prefetch", PREFETCH)
@on_ranks(2)
def test_a_graph_that_has_read_older_parameters_is_refused(rank, stage, prefetch):
    """Raise torch's own error for each parameter on each rank: its gradient would be that of values never seen.

    One graph is from before the constructor, which broadcasts. The others are from before a step.
    """
    weight = parameter_of(rank.number, rank)
    before_constructor = (weight**2).sum()
    optimizer_of(stage)([weight], lr=0.1)
    pair = Pair(rank, stage, torch.optim.SGD, prefetch=prefetch, **SGD)
    before_step = [(param**2).sum() for param in trainable(pair.model)]
    train(pair.model, pair.optimizer, rank, 0)
    for graph in [before_constructor, *before_step]:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()


@on_ranks
def test_frozen_parameters_are_broadcast_and_can_be_unfrozen_later(rank, stage):
    """Train while one layer is frozen, and then while another one is."""
    pair = Pair(rank, stage, groups=nn.Module.parameters, seeds=(rank.number, rank.number))
    assert not any(param.requires_grad for param in pair.model.frozen.parameters())
    pair.train(0, 1)
    pair.assert_same()
    for model in pair.models:
        model.frozen.requires_grad_(True)
        model.up.requires_grad_(False)
    pair.train(2, 3)
    pair.assert_same()


@on_ranks(shapes=[[(16,)], [()], [(1,)], [(3,), (2, 1)], [(0,), (7,)]])
def test_sixteen_elements_or_fewer_than_there_are_ranks_by_hand(rank, stage, shapes):
    """Rank r begins with parameters r, and has gradients r + 1: of d ranks the mean gradient is (d + 1) / 2."""
    weights = [nn.Parameter(torch.full(shape, float(rank.number), device=rank.device)) for shape in shapes]
    optimizer = optimizer_of(stage)(weights, torch.optim.SGD, lr=0.1)
    mean_grad = (rank.world_size + 1) / 2
    for n_steps in (1, 2):
        loss = sum(weight.sum() for weight in weights) * (rank.number + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for weight in weights:
            torch.testing.assert_close(weight.detach(), torch.full_like(weight, -0.1 * n_steps * mean_grad))


# ------------------------------------------------------------------------------------- groups, schedules, and the state


def two_groups(model):
    """Return matrices in one group; vectors and the scalar in another, without weight decay."""
    matrices = [param for param in trainable(model) if param.dim() > 1]
    vectors = [param for param in trainable(model) if param.dim() < 2]
    return [{"params": matrices}, {"params": vectors, "lr": 0.003, "weight_decay": 0.0}]


def net_with_one_layer_to_train(seed):
    model = Net(seed).requires_grad_(False)
    model.up.requires_grad_(True)
    return model


def names_in(optimizer):
    return [group["param_names"] for group in optimizer.param_groups]


@on_ranks
def test_add_param_group_later(rank, stage):
    """Take a step with a group of one layer, unfreeze all others, add them as a group, and take two more steps."""
    pair = Pair(rank, stage, groups=lambda model: model.up.named_parameters(), seeds=[0],
                net=net_with_one_layer_to_train)
    pair.train(0)
    with torch.no_grad():
        pair.model.scale += rank.number  # add_param_group broadcasts rank 0's value
    for optimizer, model in zip(pair.optimizers, pair.models):
        others = [(name, param) for name, param in model.named_parameters() if not param.requires_grad]
        model.requires_grad_(True)
        optimizer.add_param_group({"params": others, "lr": 0.02})
    assert names_in(pair.optimizer) == names_in(pair.replicated.optimizer)
    pair.train(1, 2)
    pair.assert_same()


def rates_and_betas(optimizer):
    return [(group["lr"], group["betas"]) for group in optimizer.param_groups]


@on_ranks
def test_resumes_from_its_state_dict(rank, stage):
    """Train two groups under a schedule of lr and betas. Load model and optimizer into new ones after three steps.

    The fourth step is the same, with the scheduled lr and betas.
    """
    pair = Pair(rank, stage, groups=two_groups)
    schedules = [OneCycleLR(optimizer, max_lr=0.02, total_steps=6) for optimizer in pair.optimizers]
    for step in range(3):
        pair.train(step)
        for schedule in schedules:
            schedule.step()
        assert rates_and_betas(pair.optimizer) == rates_and_betas(pair.replicated.optimizer)
    pair.assert_same()
    of_model, of_optimizer = copy.deepcopy((pair.model.state_dict(), pair.optimizer.state_dict()))
    train(pair.model, pair.optimizer, rank, 9)  # after the checkpoint: must leave no trace

    pair.model = Net(seed=5).to(rank.device)
    pair.build(two_groups(pair.model))
    pair.model.load_state_dict(of_model)
    pair.optimizer.load_state_dict(of_optimizer)
    assert rates_and_betas(pair.optimizer) == rates_and_betas(pair.replicated.optimizer)
    train(pair.model, pair.optimizer, rank, 3)
    pair.replicated.step(3)
    assert_same(pair.model, pair.replicated.model, sums_commute(rank))


@on_ranks
def test_state_is_sharded(rank, stage):
    """Each element has AdamW's two moments on one rank, and ranks have about as many. Step counts are scalars."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12))).to(rank.device)
    optimizer = optimizer_of(stage)(model.parameters(), **ADAMW)
    model(torch.ones(2, 16, device=rank.device)).sum().backward()
    optimizer.step()
    n_own = 0
    for state in optimizer.state.values():
        n_own += sum(value.numel() for value in state.values() if torch.is_tensor(value) and value.dim())
    n_of_ranks = [None] * rank.world_size
    dist.all_gather_object(n_of_ranks, n_own)
    n_params = 12 * (16 * 16 + 16)
    assert sum(n_of_ranks) == 2 * n_params, f"{n_of_ranks} elements of moments, and {n_params} of parameters"
    assert max(n_of_ranks) <= 2 * (n_params / rank.world_size + 16 * 16)  # 1/d, up to one matrix


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
    of_ranks = [None] * rank.world_size
    dist.all_gather_object(of_ranks, before)
    with pytest.raises(ValueError, match="save with torch.distributed.checkpoint, which cuts states for other ranks"):
        optimizer.load_state_dict(of_ranks[1 - rank.number])


def delete(optimizer, param):
    if param in optimizer.state:
        del optimizer.state[param]


def zero_all(optimizer, _):
    for param, state in optimizer.state.items():
        state["exp_avg"].zero_()
        optimizer.state[param] = dict(state)


def assign_all(optimizer, param):
    state = dict(optimizer.state.items())
    if param in state:
        state[param] = {}
    optimizer.state = state


@on_ranks
def test_the_state_of_a_parameter_can_be_reset(rank, stage):
    """Reset it as people reset dead neurons: each rank resets what it steps of the parameter."""
    pair = Pair(rank, stage)
    for step, reset in enumerate([delete, zero_all, assign_all]):
        pair.train(step)
        for optimizer, model in zip(pair.optimizers, pair.models):
            reset(optimizer, model.up.weight)
    pair.train(3)
    pair.assert_same()
    assert set(pair.optimizer.state) <= set(trainable(pair.model))


# ------------------------------------------------------------------------------------------------- closure and clipping


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


@on_ranks(2)
def test_zero_grad_forgets_gradients_reduced_or_not(rank, stage):
    """Drop the gradients of one pass as they are, and those of another after clipping. Then take a step."""
    pair = Pair(rank, stage)
    backward(pair.model, rank, 7)
    pair.optimizer.zero_grad()
    backward(pair.model, rank, 8)
    pair.optimizer.clip_grad_norm_(1.0)
    pair.optimizer.zero_grad()
    pair.train(0)
    pair.assert_same()


@on_ranks(norm_type=[1.0, 2.0, torch.inf], max_norm=[0.05, 1e6])
def test_clipping_equals_torch_on_the_whole_model(rank, stage, norm_type, max_norm):
    """Clip in three steps, to a norm that is smaller than that of the gradients, or larger."""
    pair = Pair(rank, stage)
    for step in range(3):
        pair.backward(step)
        norm = pair.clip(max_norm, norm_type)
        assert 0.05 < norm < 1e6
        pair.step()
    pair.assert_same(is_exact=False)


@on_ranks
def test_a_norm_that_is_not_finite_is_an_error_where_that_is_asked(rank, stage):
    """Spoil the last rank's gradient: every rank has the error. The next step is as without it."""
    pair = Pair(rank, stage)
    is_last = rank.number == rank.world_size - 1
    loss = loss_of(pair.model, *batch(0, rank.number, device=rank.device))
    (loss * (torch.nan if is_last else 1.0)).backward()
    with pytest.raises(RuntimeError, match="the norm of all gradients is nan: zero_grad"):
        pair.optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    pair.optimizer.zero_grad()
    pair.backward(1)
    assert pair.optimizer.clip_grad_norm_(1e6, error_if_nonfinite=True).isfinite()
    pair.step()
    pair.assert_same()


# ------------------------------------------------------------------------------------------------------------ errors


def parameter(rank, *shape, **kwargs):
    """Return a parameter of another value on each rank, so that a broadcast before the error would be seen."""
    return nn.Parameter(torch.full(shape, rank.number + 1.0, device=rank.device, **kwargs))


def one_parameter(rank):
    return [parameter(rank, 3)]


def behind_one(make):
    """Return a function of a rank that returns a usual parameter and what `make(rank)` returns."""
    return lambda rank: [parameter(rank, 3), make(rank)]


def shared_twice(rank):
    return [parameter(rank, 2)] + [parameter(rank, 3)] * 2


def overlapping(rank):
    return list(map(nn.Parameter, parameter(rank, 9).data.unfold(0, 5, 4)))


class Lamb(torch.optim.Optimizer):
    """The step of each tensor is scaled by a ratio of norms: not element-wise."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param -= self.param_groups[0]["lr"] * param.norm() / param.grad.norm() * param.grad


class Mesh:
    """Stands for an argument of the wrong class."""


class Refused(NamedTuple):
    """What a constructor refuses: `params`, or other arguments. Both are functions of a rank."""

    params: Callable
    words: str  # of the error
    arguments: Callable = lambda rank: {}
    error: type = ValueError


REFUSED = {
    "a set": Refused(lambda rank: set(one_parameter(rank)), "a set has no order", error=TypeError),
    "no class": Refused(
        one_parameter, "optimizer_cls must be a class, such as torch.optim.AdamW, not an object of class str",
        lambda rank: {"optimizer_cls": "adamw"}, TypeError),
    "a mesh": Refused(
        one_parameter, r'process_group must be a ProcessGroup, such as mesh\["dp"\].get_group\(\), not a Mesh',
        lambda rank: {"process_group": Mesh()}, TypeError),
    "empty": Refused(lambda rank: [{"params": []}], "empty"),
    "overlapping memory": Refused(overlapping, "parameters 0 of group 0 and 1 of group 0 share memory: pass each one"),
    "sparse": Refused(behind_one(lambda rank: torch.ones(3, 3, device=rank.device).to_sparse().requires_grad_()),
                      "parameter 1 .*sparse"),
    "integers": Refused(behind_one(lambda rank: torch.ones(3, dtype=torch.int64, device=rank.device)),
                        "parameter 1 .*int64"),
    "8 bits": Refused(behind_one(lambda rank: parameter(rank, 3, dtype=torch.float8_e4m3fn)),
                      "parameter 1 .*float8_e4m3fn"),
    "without memory": Refused(behind_one(lambda rank: nn.Parameter(torch.ones(3, device="meta"))),
                              "parameter 1 .* on the meta device, without memory"),
    "infinite lr": Refused(one_parameter, "lr is inf: it must be a finite number", lambda rank: {"lr": float("inf")}),
    # In these cases rank 1 differs from the others.
    "bad on one rank": Refused(lambda rank: shared_twice(rank) if rank.number == 1 else one_parameter(rank),
                               "share memory"),
    "frozen elsewhere": Refused(
        lambda rank: [parameter(rank, 3).requires_grad_(rank.number != 1)],
        r"is 0 of group 0 \(3,\) torch.float32 on rank 0 and 0 of group 0 \(3,\) torch.float32 frozen on rank 1"),
    "another number": Refused(lambda rank: [parameter(rank, 3) for _ in range(3 if rank.number == 1 else 2)], "rank 1"),
    "another lr of a group": Refused(
        lambda rank: [{"params": one_parameter(rank), "lr": 1.5 if rank.number == 1 else 0.5}],
        "lr of group 0 is 0.5 on rank 0 and 1.5 on rank 1"),
    "another optimizer": Refused(
        one_parameter, "optimizer_cls is Lamb on rank 0 and AdamW on rank 1",
        lambda rank: {"optimizer_cls": torch.optim.AdamW if rank.number == 1 else Lamb}),
}


@on_ranks(3, name=REFUSED)
def test_refuses_before_anything_changes(rank, stage, name):
    """Build an optimizer of what is wrong, on each rank or on one of them. Every rank has the error, and can go on."""
    case = REFUSED[name]
    params = case.params(rank)

    def values():
        tensors = [param for param in params if torch.is_tensor(param) and not param.is_meta]
        return [tensor.detach().to_dense().clone() for tensor in tensors]

    before = values()
    with pytest.raises(case.error, match=case.words):
        optimizer_of(stage)(params, **case.arguments(rank))
    assert all(map(torch.equal, values(), before))
    optimizer_of(stage)(one_parameter(rank), lr=0.1)
