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
from tests.pairs import ADAMW, parameter_of, sgd_of, train


class Oversized(ValueError):
    """An exception that is not made from a text alone."""

    def __init__(self, numel, limit):
        super().__init__(f"{numel} of {limit}")


def hook_that_raises(_, state_dict):
    raise Oversized(9, 3)


@pytest.mark.shared_guard
@on_ranks(2)
def test_a_state_dict_that_one_rank_refuses_changes_nothing_on_any(rank, stage):
    """A hook of the user's raises on rank 1: rank 0 has an error too, and both keep the newer state.

    tests/checkpoint/test_schema.py has the state_dicts that are refused.
    """
    weight = torch.nn.Parameter(torch.ones(5, device=rank.device, dtype=torch.bfloat16))  # has a main parameter
    optimizer = optimizer_of(stage)([weight], **ADAMW)
    states = []
    for _ in range(2):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(copy.deepcopy(optimizer.state_dict()))
    old, new = states
    if rank.number == 1:
        optimizer.register_load_state_dict_pre_hook(hook_that_raises)
    error = error_of(lambda: optimizer.load_state_dict(old), ValueError)
    assert error == ("9 of 3" if rank.number == 1 else "rank 1: 9 of 3")
    assert str(optimizer.state_dict()) == str(new)


@on_ranks(2)
def test_state_dicts_of_different_steps_are_refused_on_every_rank(rank, stage):
    """Each state_dict has a count of the steps."""
    model = Net(seed=0).to(rank.device)
    optimizer = optimizer_of(stage)(trainable(model), **ADAMW)
    states = []
    for step in range(2):
        train(model, optimizer, rank, step)
        states.append(copy.deepcopy(optimizer.state_dict()))
    error = error_of(lambda: optimizer.load_state_dict(states[rank.number]), ValueError)
    assert "n_steps is 1.0 on rank 0 and 2.0 on rank 1" in error
    optimizer.load_state_dict(states[0])
    assert optimizer.state_dict()["n_steps"] == 1


ARGUMENTS = {  # name -> call of a method of stage 4 in which this argument is `value`
    "max_norm": lambda optimizer, value: optimizer.clip_grad_norm_(value),
    "norm_type": lambda optimizer, value: optimizer.clip_grad_norm_(1.0, value),
    "factor": lambda optimizer, value: optimizer.scale_grads_(value),
}


@on_ranks(2, name=ARGUMENTS)
def test_arguments_that_differ_are_refused_on_every_rank(rank, name):
    """Stage 4 compares them in the message that it has anyway, and drops the gradients. The next step is right."""
    weight = parameter_of(0, rank)
    optimizer = sgd_of(STAGE_4, [weight])
    weight.sum().backward()
    error = error_of(lambda: ARGUMENTS[name](optimizer, 1.0 + rank.number))
    assert f"{name} is 1.0 on rank 0 and 2.0 on rank 1: set the same" in error
    weight.sum().backward()
    optimizer.step()
    assert weight.eq(-1).all()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(3)
def test_a_rank_of_a_chain_may_lack_an_optimizer(rank, stage):
    """Clip with an expert on ranks 0 and 1: on all ranks the norm is that of gradients of 3 and 4."""
    group = dist.new_group([0, 1])
    shared = parameter_of(0, rank, n=4)
    expert = parameter_of(0, rank, n=9)
    optimizers = [sgd_of(stage, [shared])]
    if rank.number < 2:
        optimizers.append(sgd_of(stage, [expert], process_group=group))
    (3 * shared.sum() + 4 * expert.sum()).backward()
    norm = Chained(*optimizers).clip_grad_norm_(1e-3).item()
    assert norm == pytest.approx((4 * 3**2 + 9 * 4**2) ** 0.5, rel=1e-6)
