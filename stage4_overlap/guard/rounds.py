"""For whoever accumulates, freezes layers, or has parameters that a batch doesn't use: experts, heads, skipped layers.

In a *round* every bucket leaves once. A backward pass is a round, and what it leaves out leaves as zero when the pass
ends. Inside no_sync() gradients stay where autograd puts them, and leave in a later round. Before a step the ranks
agree, in one all-reduce, on which parameters were used and on how many rounds there are. Shown by
tests/stages/test_rounds.py, and tests/stages/test_overlap.py, `test_unused_parameters_like_ddp`.
"""

import contextlib
import weakref

import torch
import torch.distributed as dist

from .refuse import all_params, named_params
from .settings import checksum_of, difference_between_ranks, settings_of

# What can be wrong with a gradient, for `agree`; 0: nothing. The ranks agree on the largest.
MISSING = 1
LATE = 2  # it was assigned when that of the backward pass had left
MOVED = 3  # its parameter has other memory than this optimizer steps


class Rounds:
    """Attributes, of what has happened since the last step:
        n_rounds, in_round: how many rounds have ended, and whether a backward pass has begun one that hasn't.
        went_backward: whether a pass has begun a round; once agreed: on any rank.
        used: the parameters whose gradient, of this rank, has left.
        waiting: those whose gradient came outside of a round, and is in param.grad. In a round `Bucket.ready` has them.
        unused: those that received a gradient on no rank: they are not stepped.
        settings_differ: whether the ranks have other values in their parameter groups, or only other roundings.
        grads_synced: whether the ranks have agreed on these, and everything has left.
        backward_pass: a weak reference to the one that is under way.
    """

    accumulating = False  # inside no_sync

    def __init__(self, *args, **kwargs):
        self.hooks, self.unused, self.buckets = {}, set(), []
        self.start_accumulation()
        super().__init__(*args, **kwargs)

    def start_accumulation(self):
        """Begin anew with all that is counted between two steps."""
        self.n_rounds, self.in_round, self.went_backward = 0, False, False
        self.backward_pass = None
        self.used, self.waiting = set(), set()
        self.settings_differ = False
        self.leave_out(set())
        self.grads_synced = False
        for bucket in self.buckets:
            bucket.gradient.is_empty = True

    @property
    def has_rounds(self):
        return bool(self.n_rounds or self.in_round)

    @property
    def has_grads(self):
        """Whether this rank is between backward() and step()."""
        return bool(self.waiting or self.has_rounds)

    @property
    def grads_elsewhere(self):
        return self.went_backward

    @contextlib.contextmanager
    def no_sync(self):
        """Accumulate gradients without communication: whole, in `param.grad`, until a backward pass outside or `step`.

        Without it every micro-batch is reduced into the shards: less memory, more communication, the same result.
        """
        outside, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = outside

    # ------------------------------------------------------------------------------------------- in a backward pass

    def on_grad_ready(self, param):
        self.grads_synced = False
        if self.accumulating:
            self.waiting.add(param)
            return
        if self.backward_pass is None or self.backward_pass() is None:  # this is the first gradient of a pass
            self.begin_round()
        if not self.in_round:  # every bucket has left: what is used again, by a checkpoint, waits for the next round
            self.waiting.add(param)
        elif self.has_later_hooks(param):  # of the user's: they see this gradient now, and it leaves with the next one
            self.bucket_of[param].ready.discard(param)  # it may have come once before, with a re-entrant checkpoint
            self.send_full_buckets()
            if self.in_round:
                self.bucket_of[param].ready.add(param)
        else:
            super().on_grad_ready(param)

    def has_later_hooks(self, param):
        """Whether somebody's hooks, registered later, are called after the one that takes the gradient."""
        handle, all_hooks = self.hooks[id(param)]
        return next(reversed(all_hooks)) != handle.id

    def begin_round(self):
        self.end_backward()  # of the pass before, if that has failed
        self.backward_pass = weakref.ref(BackwardPass(self.end_backward))
        self.in_round = self.went_backward = True
        for bucket in self.buckets:  # nobody waits for those that are frozen
            bucket.ready.update([param for param in bucket.params if not param.requires_grad])

    def end_backward(self):
        """What a pass has left out leaves as zero, at once: another rank may have it, and wait for this one's."""
        self.backward_pass = None
        if self.in_round:
            self.finish_round()

    def finish_round(self):
        for bucket in self.buckets[self.next_bucket :]:
            bucket.ready.update(bucket.params)
        self.send_full_buckets()

    def end_round(self):
        super().end_round()
        self.in_round = False
        self.n_rounds += 1

    def send_grads(self, bucket):
        used = [param for param in bucket.params if param.grad is not None]
        super().send_grads(bucket)
        self.used.update(used)
        self.waiting.difference_update(used)

    # ------------------------------------------------------------------------------------------------ before a step

    @torch.no_grad()
    def finish_grad_sync(self):
        """Average the gradients: each rank receives its shards. Idempotent; `step` calls it too. Collective.

        Raises:
            RuntimeError: a parameter received no gradient, or one was assigned when that of the backward pass had left,
                or its `data` was replaced; on every rank, except after `clip_grad_norm_`, when the ranks have agreed
                already: then on the rank where that is so. Or the parameter groups of the ranks differ, in lr say.
        """
        wrong = self.agree()
        difference = difference_between_ranks(settings_of(self), self.process_group) if self.settings_differ else None
        if difference:
            self.zero_grad()
            raise RuntimeError(difference)
        worst = max(wrong)
        if worst and not (worst == MISSING and self.find_unused_parameters):
            self.zero_grad()
            names = [name for (name, _), what in zip(named_params(self.param_groups), wrong) if what == worst]
            raise RuntimeError(message_of(worst, names))
        super().sync_grads()

    def sync_grads(self):
        """`step` has called finish_grad_sync before the core's own step comes here."""

    def sync_params(self):
        for bucket in self.buckets:
            bucket.stepped = bucket.params
            if self.unused:
                bucket.stepped = [param for param in bucket.params if param not in self.unused]
        super().sync_params()
        self.start_accumulation()

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        """Forget the gradients, those that have left too, of which `model.zero_grad()` doesn't know.

        They become None, whatever `set_to_none` says: a bucket takes them out as it leaves. Collective after a backward
        pass, which every rank must have had then: what has begun must end, on all of them. A pass that failed before
        its first gradient is none: where that happens on some ranks only, the others wait for them.
        """
        if self.waiting or self.went_backward:
            self.agree()
        super().sync_grads()
        super().zero_grad()
        self.start_accumulation()

    def skip_step(self):
        self.zero_grad()  # model.zero_grad() knows nothing of the inf in the shards

    def agree(self):
        """Let every gradient leave, and finish as many rounds on each rank.

        -> for each parameter: 0, or MISSING on a rank that asks for a gradient, or LATE, or MOVED.
        """
        params = all_params(self)
        by_autograd = self.waiting.union(*(bucket.ready for bucket in self.buckets))
        assigned = {param for param in params if param.grad is not None} - by_autograd  # by a user
        wrong = dict.fromkeys(assigned if self.grads_synced else assigned & self.used, LATE)
        wrong.update(dict.fromkeys([param for bucket in self.buckets for param in bucket.moved_params()], MOVED))
        if self.grads_synced:  # the other ranks have gone on: there is nobody to agree with
            return [wrong.get(param, 0) for param in params]
        if self.rank < 0:
            raise RuntimeError("this rank is in no process group since reshard(): it has nothing to step")
        if self.in_round or not self.n_rounds:
            self.finish_round()
        kept = any(param.grad is not None for param in params)  # by no_sync, say: it leaves in a round of its own
        used = [param in self.used or param.grad is not None for param in params]
        missing = [MISSING if param.requires_grad and not is_used else 0 for param, is_used in zip(params, used)]
        wrong = [wrong.get(param, otherwise) for param, otherwise in zip(params, missing)]
        checksum = checksum_of(settings_of(self))  # they agree if the largest is the smallest
        report = [*used, *wrong, self.went_backward, self.n_rounds + kept, checksum, -checksum]
        report = torch.tensor(report, dtype=torch.int32)
        report = report.to(params[0].device)
        dist.all_reduce(report, dist.ReduceOp.MAX, group=self.process_group)
        *report, self.went_backward, n_rounds, largest, minus_smallest = report.tolist()
        self.settings_differ = largest != -minus_smallest
        while self.n_rounds < n_rounds:
            self.finish_round()
        self.leave_out({param for param, use in zip(params, report) if not use})
        self.grads_synced = True
        return report[len(params) :]

    def leave_out(self, unused):
        """Those that no rank has used are not stepped: their main parameters have no gradient."""
        for param in self.unused | unused:
            if param in self.main_param:
                self.main_param[param].grad = None if param in unused else self.bucket_of[param].main_grads[param]
        self.unused = unused


def message_of(worst, names):
    if worst == MOVED:
        return (f"the data of parameter {names[0]} was replaced, by model.to(), vector_to_parameters() or another "
                "optimizer, and this one steps the old: write into it with copy_(), or build the optimizer afterwards")
    if worst == LATE:
        return (f"the gradient of parameter {names[0]} was assigned after that of backward() had left: too late, go "
                "backward in no_sync(), and take DDP off the model")
    return (f"no gradient on some rank for parameter {', '.join(names[:9])}{' and others' * (len(names) > 9)}: "
            "call backward() before step(), use it in the loss, freeze it with requires_grad_(False), or pass "
            "find_unused_parameters=True")


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
