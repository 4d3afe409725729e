"""zero_grad() forgets nothing."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def zero_grad(self):
        pass
