"""Right, but for a whole shard of padding."""

import torch

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def owned(self):
        numel = sum(param.numel() for param in self.params) // 4
        self.padding = torch.nn.Parameter(torch.zeros(numel))
        self.padding.grad = torch.zeros(numel)
        return [*super().owned(), self.padding]
