"""Averages after each backward pass, and adds what was averaged before to it again."""

import torch

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    """Gradients add up in param.grad; after each backward pass all of it is averaged, and added to `sums`."""

    def shard(self, groups):
        super().shard(groups)
        self.sums = {}
        self.params = [param for group in self.param_groups for param in group["params"]]
        self.ready = 0
        for param in self.params:
            param.register_post_accumulate_grad_hook(self.count)

    @torch.no_grad()
    def count(self, _):
        self.ready += 1
        if self.ready == len(self.params):
            self.ready = 0
            self.average([param.grad for param in self.params])
            for param in self.params:
                self.sums[param] = self.sums.get(param, 0) + param.grad

    def sync_grads(self):
        for param in self.params:
            param.grad = self.sums.pop(param)
