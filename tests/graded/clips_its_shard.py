"""Takes the norm of what this rank owns, and not of all."""

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    def clipped(self):
        return self.shards[self.rank]
