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

from guard.chained import Chained
from harness import STAGE_4
from tests.common import STAGES, error_of, on_ranks
from tests.pairs import sgd_of
from tests.variants import on_pairs
from variants import finite, hybrid


class FiniteHybrid(on_pairs.OnPairs, finite.DistributedOptimizer, hybrid.Replicas):
    """finite and hybrid, which combine as classes do."""


class Model(nn.Module):
    """Two layers. `expert_number` chooses the initial values of the second."""

    def __init__(self, expert_number=0):
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(8, 8)
        torch.manual_seed(1 + expert_number)
        self.expert = nn.Linear(8, 8)

    def forward(self, x):
        return self.expert(self.dense(x))


def group_of_expert():
    """Return the process group of the ranks that have the same expert as this rank of four."""
    own_group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    return own_group


# An arrangement returns a model, and its optimizer or a Chained. `make`: function params -> optimizer.


def alone(rank, make):
    model = Model()
    return model, make(model.named_parameters())


def in_a_chain(rank, make):
    model = Model()
    return model, Chained(make(model.dense.named_parameters()), make(model.expert.named_parameters()))


def with_experts(rank, make):
    """Two experts, for two ranks each."""
    model = Model(expert_number=rank % 2)
    of_dense = make(model.dense.named_parameters())
    of_expert = make(model.expert.named_parameters(), process_group=group_of_expert(), average_over=dist.group.WORLD)
    return model, Chained(of_dense, of_expert)


ARRANGEMENTS = {
    **{stage: (stage, with_experts) for stage in STAGES},
    "hybrid": ("tests.variants.on_pairs", alone),
    "hybrids in a chain": ("tests.variants.on_pairs", in_a_chain),
    "muon in a chain": ("variants.muon", in_a_chain),
}
SPOILT = [(0, "dense"), (1, "expert"), (2, "expert"), (3, "dense")]  # the rank and the layer that has an inf


def values(model):
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def train(rank, model, take_step, spoilt, n_steps=3):
    """Call `take_step(loss)` for each step. Return the values of the parameters at the start and after each step.

    spoilt: the rank and the layer that has gradients of inf in the second step.
    """
    bad_rank, layer = spoilt
    weight = getattr(model, layer).weight
    history = [values(model)]
    for number in range(n_steps):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        factor = math.inf if number == 1 and rank == bad_rank else 1
        hook = weight.register_hook(lambda grad, factor=factor: grad * factor)
        take_step(model(x).square().mean())
        hook.remove()
        history.append(values(model))
    return history


def assert_second_is_left_out(history):
    before, first, second, third = history
    assert not torch.equal(before, first) and torch.equal(first, second) and not torch.equal(second, third)
    assert third.isfinite().all()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@on_ranks(4, spoilt=SPOILT, clips=[False, True])
def test_grad_scaler_skips_on_all_ranks_or_none(rank, arrangement, spoilt, clips):
    """Take three steps, of which an inf on one rank spoils the second. All ranks then have the same, lower scale.

    The first step is the same as without a scaler.
    """
    stage, arrange = ARRANGEMENTS[arrangement]
    model, optimizer = arrange(rank.number, functools.partial(sgd_of, stage))
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)

    def take_step(loss):
        scaler.scale(loss).backward()
        if clips:
            optimizer.clip_grad_norm_(1e3 * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    history = train(rank.number, model, take_step, spoilt)
    assert_second_is_left_out(history)
    assert scaler.get_scale() == 32.0

    plain_model, plain_optimizer = arrange(rank.number, functools.partial(sgd_of, stage))

    def take_plain_step(loss):
        loss.backward()
        plain_optimizer.step()

    plain_history = train(rank.number, plain_model, take_plain_step, spoilt, n_steps=1)
    torch.testing.assert_close(history[1], plain_history[1])


@on_ranks(4, spoilt=SPOILT)
def test_finite_raises_on_all_ranks(rank, spoilt):
    """The error names the rank that has the nan, and no optimizer of the chain has stepped."""
    make = functools.partial(FiniteHybrid, optimizer_cls=torch.optim.SGD, lr=1.0)
    model, chain = in_a_chain(rank.number, make)
    errors = []

    def take_step(loss):
        loss.backward()
        try:
            chain.step()
        except RuntimeError as error:
            errors.append(str(error))
        chain.zero_grad()

    assert_second_is_left_out(train(rank.number, model, take_step, spoilt))
    (error,) = errors
    bad_rank, _ = spoilt
    assert "a gradient is nan or inf: of parameter " in error and f"weight on rank {bad_rank}" in error


@on_ranks(2)
def test_finite_is_refused_for_experts(rank):
    """Ranks outside of their process group would wait for ranks that have raised."""
    error = error_of(lambda: sgd_of("variants.finite", [nn.Parameter(torch.zeros(5))], average_over=2), ValueError)
    assert error == "variants/finite.py takes no average_over: ranks outside of process_group would wait"


# ------------------------------------------------------------------------------- what a step that is left out leaves


@on_ranks(2)
def test_a_step_that_is_left_out_keeps_the_lr_and_calls_no_hook(rank):
    """Leave out the first step under a warm-up, and the third. A closure is called once in each step."""
    param = nn.Parameter(torch.zeros(5))
    optimizer = sgd_of(STAGE_4, [param])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 0.25 * 2**number)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    def closure():
        calls.append("closure")
        return float(rank.number)

    for is_left_out, lr, moved_to in ((True, 0.25, 0.0), (False, 0.25, -0.25), (True, 0.5, -0.25), (False, 0.5, -0.75)):
        calls.clear()
        factor = math.nan if is_left_out and rank.number == 0 else 1
        scaler.scale(param.sum() * factor).backward()
        assert scaler.step(optimizer, closure) == 0.5
        scaler.update()
        assert optimizer.param_groups[0]["lr"] == lr and param.unique().tolist() == [moved_to]
        assert calls == (["closure"] if is_left_out else ["closure", "before", "after"])
        if not is_left_out:
            warm_up.step()


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4, how=["a part of a chain", "experts by themselves", "unscale_ of a part"])
def test_grad_scaler_takes_no_optimizer_that_does_not_decide_alone(rank, stage, how):
    """Only the ranks of this optimizer would know of an inf, and lower their scale. The others would keep theirs."""
    model = Model(expert_number=rank.number % 2)
    of_dense = sgd_of(stage, model.dense.parameters())
    of_expert = sgd_of(stage, model.expert.parameters(), process_group=group_of_expert(),
                       average_over=dist.group.WORLD)
    if how != "experts by themselves":
        chain = Chained(of_dense, of_expert)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    start = values(model)
    scaler.scale(model(torch.ones(4, 8)).square().mean()).backward()
    stepped = of_expert
    if how == "unscale_ of a part":
        scaler.unscale_(of_dense)
        stepped = chain
    error = error_of(lambda: scaler.step(stepped))
    assert "GradScaler takes a Chained of all optimizers of the model" in error
    assert torch.equal(values(model), start)
