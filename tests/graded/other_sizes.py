"""Ranks send tensors of other sizes in the same collective."""

import torch.distributed as dist

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def send(self, param, owner):
        dist.all_reduce(param.view(-1)[self.rank :], group=self.group)
