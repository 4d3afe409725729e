"""Divides before the sum, and after it."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def average(self, grad):
        grad /= self.d
        super().average(grad)
