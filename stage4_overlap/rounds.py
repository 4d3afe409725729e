"""For whoever accumulates, freezes layers, or goes backward in parts: in a backward pass.

In a *round* every bucket leaves once. A backward pass is a round, and what it leaves out leaves as zero when the pass
ends. Inside no_sync() gradients stay where autograd puts them, and leave in a later round. Shown by
tests/stages/test_rounds.py.
"""

import contextlib
import weakref
from collections.abc import Iterator

import torch

from guard.groups import name_of

from .awaited import Awaited


class Round:
    """What has happened since the last step. One object, for whoever wraps the optimizer sees it, too.

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

    is_accumulating = False

    def __init__(self):
        self.n, self.is_open, self.went_backward = 0, False, False
        self.used, self.waiting, self.unused = set(), set(), set()
        self.settings_differ = self.is_synced = False
        self.backward_pass = lambda: None


class Rounds:
    _param_grad_holds = "nothing"  # or what waits for its round

    def _prepare(self, *args, **kwargs):
        self._round = Round()
        return super()._prepare(*args, **kwargs)

    @property
    def has_grads(self):
        """Whether this rank is between backward() and step()."""
        return bool(self._round.waiting or self._round.n or self._round.is_open)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication: whole, in `param.grad`, until a backward pass outside or `step`.

        Without it every micro-batch is reduced into the shards: less memory, more communication, the same result.
        """
        outside, self._round.is_accumulating = self._round.is_accumulating, True
        try:
            yield
        finally:
            self._round.is_accumulating = outside

    def on_grad_ready(self, param):
        now = self._round
        now.is_synced = False
        if isinstance(param, Awaited):
            raise RuntimeError(f"a gradient has come for parameter {name_of(param, self.param_groups)}, which is still "
                               "under way: it was read before the last step, or past torch's functions, by a "
                               "TorchScript model say: call optimizer.finish_param_sync() after step()")
        if now.is_accumulating:
            now.waiting.add(id(param))
            return
        if now.backward_pass() is None:  # this is the first gradient of a pass
            self._begin_round()
        if not now.is_open:  # every bucket has left: what is used again, by a checkpoint, waits for the next round
            now.waiting.add(id(param))
            return
        handle, all_hooks = self._hooks[id(param)]
        if len(all_hooks) == 1 or next(reversed(all_hooks)) == handle.id:
            super().on_grad_ready(param)
        else:  # hooks of the user's come later: they see this gradient now, and it leaves with the next one
            self.bucket_of[param].ready.discard(param)  # it may have come once before, with a re-entrant checkpoint
            self.send_full_buckets()
            if now.is_open:
                self.bucket_of[param].ready.add(param)

    def _begin_round(self):
        self._end_backward()  # of the pass before, if that has failed
        self._round.backward_pass = weakref.ref(BackwardPass(self._end_backward))
        self._round.is_open = self._round.went_backward = True
        for bucket in self.buckets:  # nobody waits for those that are frozen
            bucket.ready.update([param for param in bucket.params if not param.requires_grad])

    def _end_backward(self):
        """What a pass has left out leaves as zero, at once: another rank may have it, and wait for this one's."""
        self._round.backward_pass = lambda: None
        if self._round.is_open:
            self._finish_round()

    def _finish_round(self):
        for bucket in self.queue:
            bucket.ready.update(bucket.params)
        self.send_full_buckets()

    def send_grads(self, bucket):
        used = [id(param) for param in bucket.params if param.grad is not None]
        super().send_grads(bucket)
        self._round.used.update(used)
        self._round.waiting.difference_update(used)
        if not self.queue:  # that was the last one
            self._round.is_open = False
            self._round.n += 1


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
