"""Stage 1's core, and what level 2 asks for besides."""

import contextlib

import torch

from stage1_naive_broadcast.optimizer import ShardedOptimizer


class DistributedOptimizer(ShardedOptimizer):
    is_synced = False

    def sync_grads(self):
        if not self.is_synced:
            super().sync_grads()
        self.is_synced = True

    @torch.no_grad()
    def step(self):
        super().step()
        self.is_synced = False

    def no_sync(self):
        return contextlib.nullcontext()  # gradients travel in step(), and nowhere else

    def clip_grad_norm_(self, max_norm):
        self.sync_grads()
        return torch.nn.utils.clip_grad_norm_(self.clipped(), max_norm)

    def clipped(self):
        return [param for group in self.param_groups for param in group["params"]]

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict):
        self.optimizer.load_state_dict(state_dict)
