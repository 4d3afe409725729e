"""Doesn't think of a rank that owns nothing."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def __init__(self, params, optimizer_cls, *, process_group=None, **kwargs):
        super().__init__(params, optimizer_cls, process_group=process_group, **kwargs)
        self.optimizer = optimizer_cls(self.owned(), **kwargs)
