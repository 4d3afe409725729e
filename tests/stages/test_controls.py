"""Negative controls: the contract, run on optimizers that are wrong, must fail, and in the test that is about it."""

import contextlib

import pytest
import torch

import stage1_naive_broadcast
import stage2_allgather
from guard.guarded import mean_loss
from tests.stages import test_contract, test_drawn


class Noop(stage1_naive_broadcast.DistributedOptimizer):
    """All replicas agree, because nothing ever moves."""

    @torch.no_grad()
    def step(self, closure=None):
        return mean_loss(self, closure) if closure else None


class Unsharded(stage1_naive_broadcast.DistributedOptimizer):
    """Trains like the reference, and is sharded in name only: every rank holds the whole state."""

    @torch.no_grad()
    def shard(self, groups):
        super().shard(groups)
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            own["params"] = list(group["params"])
        self.state.elsewhere = frozenset()  # or the guard would show nothing of them


class SkipsOne(stage2_allgather.DistributedOptimizer):
    """Forgets to gather the last parameter of a shard: it stays as it was wherever it is not owned."""

    def sync_params(self):
        stale = [(shard[-1], shard[-1].clone()) for r, shard in enumerate(self.shards) if r != self.rank and shard]
        super().sync_params()
        for param, before in stale:
            param.copy_(before)


TESTS = {  # what it says where it fails -> the test
    "differs by": lambda *where: (
        test_contract.test_equals_replicated_training.__wrapped__(*where, test_contract.UNFUSED)),
    "moments": lambda *where: test_contract.test_state_is_sharded.__wrapped__(*where),
    "seed": lambda *where: test_drawn.drawn(*where, range(4)),
}
CONTROLS = {  # a class -> which of them fail
    stage2_allgather.DistributedOptimizer: [],  # a right one
    Noop: ["differs by", "moments", "seed"],
    Unsharded: ["moments"],
    SkipsOne: ["differs by", "seed"],
}


def with_another_class(rank, control, test):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage2_allgather, "DistributedOptimizer", control)
        TESTS[test](rank, "stage2_allgather")


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("control", CONTROLS)
def test_the_contract_tells_right_from_wrong(run, control):
    for test in TESTS:
        fails = test in CONTROLS[control]
        with pytest.raises(pytest.fail.Exception, match=test) if fails else contextlib.nullcontext():
            run(with_another_class, control, test)
