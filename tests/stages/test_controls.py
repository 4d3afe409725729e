"""Negative controls: the contract, run on optimizers that are wrong, must fail, and in the test that is about it."""

import contextlib
from unittest import mock

import pytest
import torch

import stage1_naive_broadcast
import stage2_allgather
from guard.guarded import mean_loss
from tests.common import on_ranks
from tests.stages import test_contract, test_drawn


class Noop(stage1_naive_broadcast.DistributedOptimizer):
    """All replicas agree, because nothing ever moves."""

    @torch.no_grad()
    def step(self, closure=None):
        return mean_loss(self, closure, self.process_group) if closure else None


class Unsharded(stage1_naive_broadcast.DistributedOptimizer):
    """Trains like the reference, and is sharded in name only: every rank holds the whole state."""

    @torch.no_grad()
    def shard(self, groups):
        own_groups = super().shard(groups)
        for group, own in zip(groups, own_groups):
            own["params"] = list(group["params"])
        return own_groups

    def _owned_ranges(self):
        return [(param, 0, param.numel(), param) for group in self.param_groups for param in group["params"]]


TESTS = {  # what it says where it fails -> the test
    "differs by": (test_contract.test_equals_replicated_training.__wrapped__, test_contract.UNFUSED, "AdamW"),
    "moments": (test_contract.test_state_is_sharded.__wrapped__,),
    "seed": (test_drawn.drawn, range(4)),
}
CONTROLS = {  # a class -> which of them fail
    stage2_allgather.DistributedOptimizer: [],  # a right one
    Noop: ["differs by", "moments", "seed"],
    Unsharded: ["moments"],
}


@on_ranks(2, control=CONTROLS, said=TESTS)
def test_the_contract_tells_right_from_wrong(rank, control, said):
    test, *arguments = TESTS[said]
    fails = pytest.raises(AssertionError, match=said) if said in CONTROLS[control] else contextlib.nullcontext()
    with mock.patch.object(stage2_allgather, "DistributedOptimizer", control), fails:
        test(rank, "stage2_allgather", *arguments)
