"""Steps with five times the gradient: nothing tells why."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def average(self, grad):
        super().average(grad)
        grad *= 5
