"""Whether a step happens is decided over all ranks and optimizers of a model: GradScaler, and variants/finite.py.

Each of four ranks in turn has what is not finite. In the arrangements it reaches one group of ranks alone, or one
optimizer of several.
"""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from guard.chained import Chained
from harness import STAGE_4
from tests.common import STAGES, error_of, on_ranks, optimizer_of
from tests.pairs import sgd_of
from tests.variants import on_pairs
from variants import finite, hybrid

FINITE = "variants.finite"


class FiniteHybrid(on_pairs.OnPairs, finite.DistributedOptimizer, hybrid.Replicas):
    """Two variants that combine."""


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group), None


def pairs():
    return [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]


class Model(nn.Module):
    """Two layers; with `ep`, the second is an expert, which has tokens of both ranks of that group."""

    def __init__(self, rank, ep=None):
        super().__init__()
        torch.manual_seed(0)
        self.dense, *experts = (nn.Linear(8, 8) for _ in range(3))
        self.expert, self.ep = experts[rank % 2 if ep else 0], ep

    def forward(self, x):
        if self.ep is None:
            return self.expert(self.dense(x))
        return AllToAll.apply(self.expert(AllToAll.apply(self.dense(x), self.ep)), self.ep)


def alone(rank, make):
    model = Model(rank)
    return model, make(model.named_parameters())


def in_a_chain(rank, make):
    model = Model(rank)
    return model, Chained(make(model.dense.named_parameters()), make(model.expert.named_parameters()))


def with_experts(rank, make):
    model = Model(rank, ep=pairs()[rank // 2])
    of_expert = make(model.expert.named_parameters(), process_group=pairs()[2 + rank % 2],
                     average_over=dist.group.WORLD)
    return model, Chained(make(model.dense.named_parameters()), of_expert)


def spoil(module, factor):
    """Multiply the gradient of the module's weight, once; with 1 nothing changes."""
    return module.weight.register_hook(lambda grad: grad * factor)


def values(model):
    return torch.cat([param.detach().view(-1) for param in model.parameters()])


def train(rank, model, optimizer, backward, step, spoilt, n_steps=3):
    """Take steps, the second spoilt by `spoilt`, a layer on this rank. Return parameters before and after each."""
    history = [values(model)]
    for number in range(n_steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank), device="cpu")
        hook = spoil(spoilt, math.inf) if number == 1 and spoilt is not None else None
        backward(model(x).square().mean())
        step()
        if hook:
            hook.remove()
        optimizer.zero_grad()
        history.append(values(model))
    return history


def assert_second_is_left_out(history):
    before, first, second, third = history
    assert not torch.equal(before, first) and torch.equal(first, second) and not torch.equal(second, third)
    assert third.isfinite().all()


ARRANGEMENTS = {
    **{f"{stage}, {arrange.__name__}": (stage, arrange) for stage in STAGES for arrange in (alone, with_experts)},
    "hybrid": ("tests.variants.on_pairs", alone),
    "hybrids in a chain": ("tests.variants.on_pairs", in_a_chain),
    "muon in a chain": ("variants.muon", in_a_chain),
}
SPOILT = [(0, "dense"), (1, "expert"), (2, "expert"), (3, "dense")]  # the rank and the layer


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@on_ranks(4, spoilt=SPOILT, clips=[False, True])
def test_grad_scaler_skips_on_all_ranks_or_none(rank, arrangement, spoilt, clips):
    """Take three steps, of which an inf on one rank spoils the second. All ranks then have the same, lower scale.

    The first step is the same as without a scaler.
    """
    stage, arrange = ARRANGEMENTS[arrangement]
    bad_rank, layer = spoilt
    model, optimizer = arrange(rank.number, functools.partial(sgd_of, stage))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)

    def step():
        if clips:
            optimizer.clip_grad_norm_(1e3 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()

    history = train(rank.number, model, optimizer, lambda loss: scaler.scale(loss).backward(), step,
                    getattr(model, layer) if rank.number == bad_rank else None)
    assert_second_is_left_out(history)
    assert scaler.get_scale() == 32.0
    plain, unscaled = arrange(rank.number, functools.partial(sgd_of, stage))
    first = train(rank.number, plain, unscaled, torch.Tensor.backward, unscaled.step, None, n_steps=1)[1]
    torch.testing.assert_close(history[1], first)


OF_FINITE = {"alone": (FINITE, alone), "chain": (FINITE, in_a_chain),
             "hybrid": (FiniteHybrid, alone), "hybrids in a chain": (FiniteHybrid, in_a_chain)}


def finite_of(kind, params, **kwargs):
    make = kind if isinstance(kind, type) else optimizer_of(kind)
    return make(params, torch.optim.SGD, lr=1.0, **kwargs)


@pytest.mark.parametrize("arrangement", OF_FINITE)
@on_ranks(4, spoilt=SPOILT, clips=[False, True])
def test_finite_raises_on_all_ranks(rank, arrangement, spoilt, clips):
    """The error names the rank that has the nan, and no optimizer has stepped."""
    kind, arrange = OF_FINITE[arrangement]
    bad_rank, layer = spoilt
    model, optimizer = arrange(rank.number, functools.partial(finite_of, kind))
    errors = []

    def step():
        try:
            if clips:
                optimizer.clip_grad_norm_(1e3)
            optimizer.step()
        except RuntimeError as error:
            errors.append(str(error))

    history = train(rank.number, model, optimizer, torch.Tensor.backward, step,
                    getattr(model, layer) if rank.number == bad_rank else None)
    assert_second_is_left_out(history)
    (error,) = errors
    assert "a gradient is nan or inf: of parameter " in error and f"weight on rank {bad_rank}" in error


@on_ranks(2)
def test_finite_is_refused_for_experts(rank):
    """Ranks outside of their process group would wait for ranks that have raised."""
    error = error_of(lambda: sgd_of(FINITE, [nn.Parameter(torch.zeros(5))], average_over=2), ValueError)
    assert error == "variants/finite.py takes no average_over: ranks outside of process_group would wait"


# ------------------------------------------------------------------------------- what a step that is left out leaves


@on_ranks(2)
def test_a_step_that_is_left_out_keeps_the_lr_and_calls_no_hook(rank):
    """Leave out the first step under a warm-up, and the third. A closure is called once in each step."""
    param = nn.Parameter(torch.zeros(5))
    optimizer = sgd_of(STAGE_4, [param])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    calls = []
    hooks = [register_optimizer_step_pre_hook(lambda *_: calls.append("any before")),
             register_optimizer_step_post_hook(lambda *_: calls.append("any after")),
             optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
             optimizer.register_step_post_hook(lambda *_: calls.append("after"))]
    closure_calls = []
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: [0.25, 0.5, 1.0, 1.0][number])
    for is_bad, lr, moved_to in ((True, 0.25, 0.0), (False, 0.25, -0.25), (True, 0.5, -0.25), (False, 0.5, -0.75)):
        loss = param.sum() * (math.nan if is_bad and rank.number == 0 else 1)
        scaler.scale(loss).backward()
        mean_loss = scaler.step(optimizer, lambda: closure_calls.append(0) or float(rank.number))
        scaler.update()
        assert mean_loss == 0.5
        assert optimizer.param_groups[0]["lr"] == lr and param.unique().tolist() == [moved_to]
        assert calls == ([] if is_bad else ["any before", "before", "after", "any after"])
        calls.clear()
        if not is_bad:
            schedule.step()
    for hook in hooks:
        hook.remove()
    assert len(closure_calls) == 4


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4, how=["a part of a chain", "experts by themselves", "unscale_ of a part"])
def test_grad_scaler_takes_no_optimizer_that_does_not_decide_alone(rank, stage, how):
    """An inf in it would be known to its own ranks alone, and their scale would part from that of the others."""
    model = Model(rank.number, ep=pairs()[rank.number // 2])
    dense = sgd_of(stage, model.dense.parameters())
    expert = sgd_of(stage, model.expert.parameters(), process_group=pairs()[2 + rank.number % 2],
                    average_over=dist.group.WORLD)
    chain = None if how == "experts by themselves" else Chained(dense, expert)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    start = values(model)
    scaler.scale(model(torch.ones(4, 8)).square().mean()).backward()
    if how == "unscale_ of a part":
        scaler.unscale_(dense)
    error = error_of(lambda: scaler.step(chain if how == "unscale_ of a part" else expert))
    assert "GradScaler takes a Chained of all optimizers of the model" in error
    assert torch.equal(values(model), start)
