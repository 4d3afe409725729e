"""Hands on no hyperparameters."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def __init__(self, params, optimizer_cls, *, process_group=None, lr, **kwargs):
        super().__init__(params, optimizer_cls, process_group=process_group)
