"""All replicas agree, because nothing ever moves."""

import torch

from stage1_naive_broadcast import DistributedOptimizer as Stage1


class DistributedOptimizer(Stage1):
    @torch.no_grad()
    def step(self, closure=None):
        return self._closure_loss(closure)
