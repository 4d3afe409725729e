"""A negative control: the contract and the drawn calls must fail on an optimizer that is wrong."""

from unittest import mock

import pytest
import torch

import stage1_naive_broadcast
from harness import STAGE_1
from tests.common import on_ranks
from tests.pairs import UNFUSED
from tests.stages import test_contract, test_drawn


class Noop(stage1_naive_broadcast.DistributedOptimizer):
    """All replicas agree, because nothing ever moves."""

    @torch.no_grad()
    def step(self, closure=None):
        return None


@on_ranks(2)
def test_an_optimizer_that_never_steps_is_seen(rank):
    with mock.patch.object(stage1_naive_broadcast, "DistributedOptimizer", Noop):
        with pytest.raises(AssertionError, match="differs by .* from replicated training"):
            test_contract.test_equals_replicated_training.__wrapped__(rank, STAGE_1, UNFUSED, "AdamW")
        with pytest.raises(AssertionError, match="seed 0, "):
            test_drawn.drawn(rank, STAGE_1, range(4))
