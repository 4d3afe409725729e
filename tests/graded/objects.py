"""Trains right, and sends pickled objects: every rank gives all it has to all."""

import torch
import torch.distributed as dist

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def gathered(self, tensors):
        """-> [rank][tensor]."""
        of_ranks = [None] * self.d
        dist.all_gather_object(of_ranks, tensors, group=self.group)
        return of_ranks

    @torch.no_grad()
    def step(self):
        for param, *grads in zip(self.params, *self.gathered([param.grad for param in self.params])):
            param.grad = torch.stack(grads).mean(0)
        self.optimizer.step()
        for param, *values in zip(self.params, *self.gathered([param.data for param in self.params])):
            param.copy_(values[self.owner[param]])
