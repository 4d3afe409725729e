"""What gradients are divided by: tokens that differ by rank and micro-batch, and experts on a part of the ranks.

A mixture of experts beside one process is in tests/pages/test_experts.py.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from harness import STAGE_1, STAGE_3, STAGES
from tests.common import error_of, on_ranks
from tests.pairs import parameter_of, sgd_of


@on_ranks(factor_type=[None, float, torch.tensor])
def test_micro_batches_of_unequal_lengths_are_those_of_one_process(rank, stage, factor_type):
    """Rank r has a micro-batch of r + 1 tokens, and one of 5. The gradient of a token is 1, and so is the mean of all.

    The number of all tokens is known before the backward pass, or after it: then gradients are scaled by a factor. The
    mean has a norm of 8, and is clipped to the half.
    """
    weight = parameter_of(0, rank, n=64)
    optimizer = sgd_of(stage, [weight])
    d = rank.world_size
    factor = d / (5 * d + sum(range(1, d + 1)))
    factor_of_losses = 1 if factor_type else factor
    for step in (1, 2):
        with optimizer.no_sync():
            ((rank.number + 1) * weight.sum() * factor_of_losses).backward()
        (5 * weight.sum() * factor_of_losses).backward()
        if factor_type:
            optimizer.scale_grads_(factor_type(factor))
        assert optimizer.clip_grad_norm_(4.0).item() == pytest.approx(8)
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(weight.detach(), torch.full_like(weight, -step / 2))


@on_ranks(4, is_number=[False, True])
def test_experts_are_divided_by_all_ranks_whose_tokens_they_have_seen(rank, stage, is_number):
    """Ranks 0 and 2 have one expert, ranks 1 and 3 another one, which begin as rank 0 and rank 1 have them.

    The two gradients of an expert are 1 and 2. They are of the tokens of four ranks, so a step subtracts 3 / 4.
    """
    edp = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank.number % 2]
    weight = parameter_of(rank.number, rank, n=64)
    optimizer = sgd_of(stage, [weight], process_group=edp, average_over=4 if is_number else dist.group.WORLD)
    ((1 + dist.get_rank(edp)) * weight.sum()).backward()
    assert optimizer.clip_grad_norm_(1e6).item() == pytest.approx(8 * 3 / 4)
    optimizer.step()
    assert weight.unique().tolist() == [rank.number % 2 - 3 / 4]


@on_ranks(2, bad=["text", True, 0, math.nan, math.inf])
def test_average_over_is_a_group_or_a_number(rank, stage, bad):
    weight = parameter_of(1 + rank.number, rank)
    assert f"average_over is {bad}: it" in error_of(lambda: sgd_of(stage, [weight], average_over=bad), ValueError)
    assert weight.eq(1 + rank.number).all()


@on_ranks(2)
def test_average_over_is_the_same_everywhere(rank, stage):
    error = error_of(lambda: sgd_of(stage, [parameter_of(1, rank)], average_over=1 + rank.number), ValueError)
    assert "average_over is 1 on rank 0 and 2 on rank 1" in error


@on_ranks(2)
def test_average_over_is_refused_beneath_ddp(rank):
    error = error_of(lambda: sgd_of(STAGE_1, [parameter_of(1, rank)], average_over=2, average_gradients=False),
                     ValueError)
    assert "DDP has divided" in error


@on_ranks(2, dropped_by=["optimizer", "module"])
def test_gradients_that_come_after_a_scaled_average_are_refused(rank, stage, dropped_by):
    """Run a backward pass after clipping: its gradients would be added to gradients that were divided already.

    Drop the gradients, by the optimizer's zero_grad() or a module's, and train on.
    """
    weight = parameter_of(0, rank, n=64)
    optimizer = sgd_of(stage, [weight], average_over=1)  # a sum
    weight.sum().backward()
    for _ in range(2):  # the second call finds a norm that is not twice as large
        assert optimizer.clip_grad_norm_(1e6).item() == pytest.approx(2 * 8)
    words = "the buffer holds" if stage == STAGE_3 else "divided by average_over already"
    assert words in error_of(weight.sum().backward)
    if stage in STAGES[:2]:  # after adding a group all gradients would be averaged again
        group = {"params": [parameter_of(0, rank)]}
        assert "divided by average_over already" in error_of(lambda: optimizer.add_param_group(group))
    if dropped_by == "optimizer":
        optimizer.zero_grad()
    else:
        nn.ParameterList([weight]).zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert weight.unique().tolist() == [-2]
