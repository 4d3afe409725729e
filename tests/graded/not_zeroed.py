"""step() leaves parameters in the buffer, and trusts the loop to call zero_grad()."""

import torch

from stage3_gradbuffer.optimizer import ShardedOptimizer as Stage3


class ShardedOptimizer(Stage3):
    @torch.no_grad()
    def step(self):
        self.sync_grads()
        self.step_own()
        self.sync_params()
