"""The inner optimizer has one group, with the constructor's hyperparameters."""

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    def shard(self, groups):
        super().shard([{**self.defaults, "params": [param for group in groups for param in group["params"]]}])

    def step_own(self):
        self.optimizer.step()
