"""What has happened since the last step, and when a backward pass ends. Shown by tests/stages/test_rounds.py."""

import weakref

import torch


class Rounds:
    """Since the last step. One object, for whoever wraps the optimizer sees it, too.

    Attributes:
        n, is_open: how many rounds have ended, and whether a backward pass has begun one that hasn't.
        went_backward: whether a pass has begun a round; once agreed: on any rank.
        used: ids of the parameters whose gradient, of this rank, has left. A tensor's own hash is slow.
        waiting: of those whose gradient came outside of a round, and is in param.grad. In a round they are in
            `Bucket.ready`.
        unused: those that received a gradient on no rank: they are not stepped.
        settings_differ: whether the ranks have other values in their parameter groups, or only other roundings.
        is_synced: whether the ranks have agreed on these, and everything has left.
        backward_pass: function () -> the one that is under way, if it is; a weak reference.
        is_accumulating: inside no_sync.
    """

    def __init__(self):
        self.is_accumulating, self.unused = False, set()
        self.start()

    def start(self):
        """Count anew, after a step."""
        self.n, self.is_open, self.went_backward = 0, False, False
        self.used, self.waiting = set(), set()
        self.settings_differ = self.is_synced = False
        self.backward_pass = lambda: None

    def has_grads(self):
        return bool(self.waiting or self.n or self.is_open)

    def begin(self, backward_pass):
        self.backward_pass = weakref.ref(backward_pass)
        self.is_open = self.went_backward = True

    def has_left(self, used, is_last):
        """A bucket has; `used`: ids of those of its parameters that had a gradient."""
        self.used.update(used)
        self.waiting.difference_update(used)
        if is_last:
            self.is_open = False
            self.n += 1


class BackwardPass:
    """Calls `at_end` when the backward pass that is under way ends: the outer one, if a checkpoint is re-entrant.

    torch holds it until then, and drops it without a call when the pass fails: who holds it weakly sees that.
    """

    def __init__(self, at_end):
        self.at_end, self.handle = at_end, None
        self._queue()

    def _queue(self, *_):
        if self.handle is not None:
            self.handle.remove()  # or the graph, which the user may keep, would hold this after a failure
        torch.autograd.Variable._execution_engine.queue_callback(self)

    @torch.compiler.disable  # where a compiled function calls backward()
    def __call__(self):
        node = torch._C._current_autograd_node()  # inside which this pass was
        if node is None:
            self.at_end()
        else:
            self.handle = node.register_hook(self._queue)
