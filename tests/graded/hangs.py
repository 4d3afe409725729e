"""Rank 0 alone waits for all, before it writes a log, say."""

import torch.distributed as dist

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def send(self, param, owner):
        if self.rank == 0:
            dist.barrier(group=self.group)
        super().send(param, owner)
