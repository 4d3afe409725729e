"""Brings the parameters to all ranks as a sum with zeros: right, and twice the bytes of a broadcast."""

import torch.distributed as dist

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def send(self, param, owner):
        if self.rank != owner:
            param.zero_()
        dist.all_reduce(param, group=self.group)
