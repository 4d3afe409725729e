"""no_sync() notes that gradients are synchronised, and nobody takes it back."""

import contextlib

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    @contextlib.contextmanager
    def no_sync(self):
        self.is_synced = True
        yield
