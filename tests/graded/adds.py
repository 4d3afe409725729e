"""Steps along the gradient, and not against it."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def average(self, grad):
        super().average(grad)
        grad.neg_()
