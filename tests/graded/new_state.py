"""Makes the inner optimizer anew in each step, and with it the state."""

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def __init__(self, params, optimizer_cls, *, process_group=None, **kwargs):
        self.make = lambda: optimizer_cls([{"params": self.owned()}], **kwargs)
        super().__init__(params, optimizer_cls, process_group=process_group, **kwargs)

    def step(self):
        self.optimizer = self.make()
        super().step()
