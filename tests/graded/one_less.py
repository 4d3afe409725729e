"""Rank 1 broadcasts one parameter less than the others."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def send(self, param, owner):
        if self.rank != 1 or param is not self.params[0]:
            super().send(param, owner)
