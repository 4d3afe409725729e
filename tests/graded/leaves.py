"""Rank 1 ends in the middle of a step, as if all were well."""

import os

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def average(self, grad):
        if self.rank == 1:
            os._exit(0)
        super().average(grad)
