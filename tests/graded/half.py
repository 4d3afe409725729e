"""Divides the sum by 2, whatever the number of ranks."""

import torch.distributed as dist

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def average(self, grad):
        dist.all_reduce(grad, group=self.group)
        grad /= 2
