"""The last parameter has no owner."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def owned(self):
        return [param for param in super().owned() if param is not self.params[-1]]
