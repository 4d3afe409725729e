"""Gradients of inside no_sync() are gone when it ends."""

import contextlib

from tests.graded import whole


class DistributedOptimizer(whole.DistributedOptimizer):
    @contextlib.contextmanager
    def no_sync(self):
        yield
        self.zero_grad()
