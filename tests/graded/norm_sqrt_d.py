"""Adds the squares of all gradients over the ranks, which have the same: the norm is sqrt(d) times too large."""

import torch
import torch.distributed as dist

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    def clip_grad_norm_(self, max_norm):
        self.sync_grads()
        squares = sum((param.grad**2).sum() for param in self.clipped())
        dist.all_reduce(squares)
        norm = squares.sqrt()
        for param in self.clipped():
            param.grad *= torch.clamp(max_norm / norm, max=1)
        return norm
