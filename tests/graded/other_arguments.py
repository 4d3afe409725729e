"""Takes an optimizer, and not a class and its arguments."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups[0]["params"], type(optimizer), **optimizer.defaults)
