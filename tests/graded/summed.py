"""Sums gradients where the mean is due. AdamW hardly notices."""

import torch.distributed as dist

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def average(self, grad):
        dist.all_reduce(grad, group=self.group)
