"""Averages the gradients at the end of no_sync(), which is right, and no saving."""

import contextlib

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    @contextlib.contextmanager
    def no_sync(self):
        yield
        whole.ShardedOptimizer.sync_grads(self)
