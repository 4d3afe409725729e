"""Each rank waits for what others own, and nobody sends its own: the ranks broadcast from different roots."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def send(self, param, owner):
        if owner != self.rank:
            super().send(param, owner)
