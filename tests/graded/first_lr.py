"""Hands on the first group's lr to all groups."""

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    def step_own(self):
        for own in self.optimizer.param_groups:
            own["lr"] = self.param_groups[0]["lr"]
        self.optimizer.step()
