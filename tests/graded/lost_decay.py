"""Every group has its own lr, and the constructor's weight decay."""

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    def step_own(self):
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            own.update(lr=group["lr"], weight_decay=self.defaults["weight_decay"])
        self.optimizer.step()
