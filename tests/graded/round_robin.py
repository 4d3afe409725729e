"""Sharded, but unevenly: of layers with a weight and a bias, rank 0 of 2 gets all the weights."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def owned(self):
        self.owner = {param: index % self.d for index, param in enumerate(self.params)}
        return super().owned()
