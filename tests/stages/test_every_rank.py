"""What one rank refuses, all ranks refuse, before anything changes; and what all ranks do alike is right on each.

The situations come from programs that hung, or went on with two trainings mixed.
"""

import copy

import pytest
import torch
import torch.distributed as dist

from guard.chained import Chained
from harness import STAGE_4, STAGES
from tests.common import Net, error_of, on_ranks, optimizer_of, trainable
from tests.pairs import ADAMW, Pair, backward, parameter_of, sgd_of, train


class Oversized(ValueError):
    """An exception that is not made from a text alone."""

    def __init__(self, numel, limit):
        super().__init__(f"{numel} of {limit}")


def hook_that_raises(_, state_dict):
    raise Oversized(9, 3)


BAD_STATES = {
    "None": lambda state: None,
    "without groups": lambda state: {"state": state["state"]},
    "a group without parameters": lambda state: {**state, "param_groups": [{**state["param_groups"][0], "params": []}]},
    "a group that is none": lambda state: {**state, "param_groups": [7]},
    "a plain optimizer's": lambda state: torch.optim.SGD([torch.ones(3)], lr=0.1).state_dict(),
    "a hook raises": lambda state: state,
}


@pytest.mark.shared_guard
@on_ranks(2, bad=BAD_STATES)
def test_a_state_dict_that_one_rank_refuses_changes_nothing_on_any(rank, stage, bad):
    """In 16 bits, where main parameters are loaded too."""
    model = Net(seed=0).to(rank.device, torch.bfloat16)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)

    def go(step):
        model(torch.full((4, 7), 0.1 * step, device=rank.device, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    go(0)
    saved = copy.deepcopy(optimizer.state_dict())
    go(1)
    before = copy.deepcopy(optimizer.state_dict())
    if rank.number == 1:
        saved = BAD_STATES[bad](saved)
        if bad == "a hook raises":
            optimizer.register_load_state_dict_pre_hook(hook_that_raises)
    error = error_of(lambda: optimizer.load_state_dict(saved), ValueError, TypeError)
    assert error.startswith("rank 1: ") == (rank.number == 0)
    assert str(optimizer.state_dict()) == str(before)


@on_ranks(2, gamma=[0.5, 1.0])
def test_state_dicts_of_different_steps_are_refused_on_every_rank(rank, stage, gamma):
    """With a schedule by the lr; else by the number of steps, of which each state_dict has a count."""
    model, states = Net(seed=0).to(rank.device), []
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma)
    for step in range(2):
        train(model, optimizer, rank, 2 * step, 2 * step + 1)
        scheduler.step()
        states.append(copy.deepcopy(optimizer.state_dict()))
    what = "n_steps is 2.0 on rank 0 and 4.0 on rank 1" if gamma == 1 else "lr of group 0 is 0.005 on rank 0 and 0.0025"
    assert what in error_of(lambda: optimizer.load_state_dict(states[rank.number]), ValueError)
    optimizer.load_state_dict(states[0])
    assert optimizer.state_dict()["n_steps"] == 2


@pytest.mark.parametrize("stage", [STAGE_4])
@on_ranks(2, name=["max_norm", "norm_type", "factor"])
def test_arguments_that_differ_are_refused_on_every_rank(rank, stage, name):
    """In the message that stage 4 has anyway. The gradients are dropped, and the next step is as without that."""
    pair = Pair(rank, stage)
    backward(pair.model, rank, 7)
    calls = {"factor": lambda: pair.optimizer.scale_grads_(1.0 + rank.number),
             "max_norm": lambda: pair.optimizer.clip_grad_norm_(1.0 + rank.number),
             "norm_type": lambda: pair.optimizer.clip_grad_norm_(1.0, 1.0 + rank.number)}
    assert f"{name} is 1.0 on rank 0 and 2.0 on rank 1: set the same" in error_of(calls[name])
    pair.backward(0)
    pair.clip(0.05)
    pair.step()
    pair.assert_same(is_exact=False)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_a_rank_of_a_chain_may_lack_an_optimizer(rank, stage):
    """Clip with experts on ranks 0 and 1: the norm is that of gradients of 3 and 4 on all ranks."""
    group = dist.new_group([0, 1])
    shared, expert = parameter_of(0, rank, n=4), parameter_of(0, rank, n=9)
    optimizers = [sgd_of(stage, [shared])]
    if rank.number < 2:
        optimizers.append(sgd_of(stage, [expert], process_group=group))
    chain = Chained(*optimizers)
    (3 * shared.sum() + 4 * expert.sum()).backward()
    norm = (4 * 3**2 + 9 * 4**2) ** 0.5
    assert chain.clip_grad_norm_(1e-3).item() == pytest.approx(norm, rel=1e-6)
    chain.step()
    torch.testing.assert_close(shared.detach(), torch.full_like(shared, -1e-3 * 3 / norm), rtol=1e-3, atol=0)
