"""Broadcasts each parameter from a rank that has not stepped it."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def send(self, param, owner):
        super().send(param, (owner + 1) % self.d)
