"""What one rank refuses, all ranks refuse, before anything changes; and what all ranks do alike is right on each.

The situations come from programs that hung, or went on with two trainings mixed.
"""

import copy

import pytest
import torch

from guard.groups import checksum_of
from harness import STAGE_4
from tests.common import error_of, on_ranks, optimizer_of
from tests.pairs import ADAMW, parameter_of, sgd_of


class Oversized(ValueError):
    """An exception that is not made from a text alone."""

    def __init__(self, numel, limit):
        super().__init__(f"{numel} of {limit}")


def hook_that_raises(_, state_dict):
    raise Oversized(9, 3)


@pytest.mark.shared_guard
@on_ranks(2)
def test_a_state_dict_that_one_rank_refuses_changes_nothing_on_any(rank, stage):
    """Load state_dicts of different steps. Then let a hook of the user's raise on rank 1: rank 0 has an error, too.

    tests/checkpoint/test_schema.py has other state_dicts that are refused.
    """
    weight = torch.nn.Parameter(torch.ones(5, device=rank.device, dtype=torch.bfloat16))  # has a main parameter
    optimizer = optimizer_of(stage)([weight], **ADAMW)
    states = []
    for _ in range(2):
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(copy.deepcopy(optimizer.state_dict()))
    error = error_of(lambda: optimizer.load_state_dict(states[rank.number]), ValueError)
    assert "n_steps is 1.0 on rank 0 and 2.0 on rank 1" in error
    if rank.number == 1:
        optimizer.register_load_state_dict_pre_hook(hook_that_raises)
    error = error_of(lambda: optimizer.load_state_dict(states[0]), ValueError)
    assert error == ("9 of 3" if rank.number == 1 else "rank 1: 9 of 3")
    assert str(optimizer.state_dict()) == str(states[1])


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


def test_settings_in_another_order_have_the_same_checksum():
    settings = {"lr of group 0": 0.1, "momentum of group 0": 0.9}
    assert checksum_of(settings) == checksum_of(dict(reversed(settings.items())))
    assert checksum_of(settings) != checksum_of({**settings, "lr of group 0": 0.2})
