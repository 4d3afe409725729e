"""Hands on lr alone: a scheduler that writes betas is not heard."""

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    def step_own(self):
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            own["lr"] = group["lr"]
        self.optimizer.step()
