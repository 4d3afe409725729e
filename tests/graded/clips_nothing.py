"""Returns the norm, and scales nothing."""

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    def clip_grad_norm_(self, max_norm):
        return super().clip_grad_norm_(float("inf"))
