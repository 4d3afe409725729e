"""For whoever has parameters that a batch doesn't use (experts, heads, skipped layers), or gradients of their own.

Before a step the ranks agree, in one all-reduce, on which parameters were used and on how many rounds there are, and
on whether something is wrong with a gradient. Shown by tests/stages/test_rounds.py, and
tests/stages/test_overlap.py, `test_unused_parameters_like_ddp`.
"""

import torch
import torch.distributed as dist

from guard.groups import all_params, named_params
from guard.refuse import data_replaced
from guard.settings import checksum_of, difference_between_ranks

# What can be wrong with a gradient, for `_agree`; 0: nothing. The ranks agree on the largest.
MISSING = 1
LATE = 2  # it was assigned when that of the backward pass had left
MOVED = 3  # its parameter has other memory than this optimizer steps


class Agreement:
    @torch.no_grad()
    def finish_grad_sync(self) -> None:
        """Average the gradients: each rank receives its shards. Idempotent; `step` calls it too. Collective.

        Raises:
            RuntimeError: a parameter received no gradient, or one was assigned when that of the backward pass had left,
                or its `data` was replaced; on every rank, except after `clip_grad_norm_`, when the ranks have agreed
                already: then on the rank where that is so. Or the parameter groups of the ranks differ, in lr say.
        """
        wrong = self._agree()
        difference = self._round.settings_differ and difference_between_ranks(self.param_groups, self.process_group)
        if difference:
            self.zero_grad()
            raise RuntimeError(difference)
        worst = max(wrong)
        if worst and not (worst == MISSING and self.find_unused_parameters):
            self.zero_grad()
            names = [name for (name, _), what in zip(named_params(self.param_groups), wrong) if what == worst]
            raise error_of(worst, names)
        self.sync_grads()

    @property
    def _grads_elsewhere(self):
        return self._round.went_backward

    def step_own(self):
        super().step_own()
        unused = self._round.unused
        if unused:
            for bucket in self.buckets:
                bucket.stepped = [param for param in bucket.params if param not in unused]

    def sync_params(self):
        self._start_accumulation()
        super().sync_params()

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        """Forget the gradients, those that have left too, of which `model.zero_grad()` doesn't know.

        They become None, whatever `set_to_none` says: a bucket takes them out as it leaves. Collective after a backward
        pass, which every rank must have had then: what has begun must end, on all of them. A pass that failed before
        its first gradient is none: where that happens on some ranks only, the others wait for them.
        """
        if self._round.waiting or self._round.went_backward:
            self._agree()
        self._start_accumulation()
        super().zero_grad()

    def _start_accumulation(self):
        """Begin anew with all that is counted between two steps."""
        self._leave_out(set())
        self._round.__init__()

    def _agree(self):
        """Let every gradient leave, and finish as many rounds on each rank.

        -> for each parameter: 0, or MISSING on a rank that asks for a gradient, or LATE, or MOVED.
        """
        now, params = self._round, all_params(self)
        ids = list(map(id, params))
        by_autograd = now.waiting.union(*[map(id, bucket.ready) for bucket in self.buckets])
        assigned = {id(param) for param in params if param.grad is not None} - by_autograd  # by a user
        wrong = dict.fromkeys(assigned if now.is_synced else assigned & now.used, LATE)
        wrong |= {id(param): MOVED for bucket in self.buckets for param in bucket.moved_params()}
        if now.is_synced:  # the other ranks have gone on: there is nobody to agree with
            return [wrong.get(one, 0) for one in ids]
        if self.rank < 0:
            raise RuntimeError("this rank is in no process group since reshard(): it has nothing to step")
        if now.is_open or not now.n:
            self._finish_round()
        kept = [param.grad is not None for param in params]  # by no_sync, say: they leave in a round of their own
        used = [one in now.used or is_kept for one, is_kept in zip(ids, kept)]
        wrong = [wrong.get(one) or (MISSING if not is_used and param.requires_grad else 0)
                 for one, param, is_used in zip(ids, params, used)]
        checksum = checksum_of(self.param_groups)  # they agree if the largest is the smallest
        report = [*used, *wrong, now.went_backward, now.n + any(kept), checksum, -checksum]
        report = torch.tensor(report, dtype=torch.int32).to(params[0].device)
        dist.all_reduce(report, dist.ReduceOp.MAX, group=self.process_group)
        *report, now.went_backward, n_rounds, largest, minus_smallest = report.tolist()
        now.settings_differ = largest != -minus_smallest
        while now.n < n_rounds:
            self._finish_round()
        self._leave_out({param for param, use in zip(params, report) if not use})
        now.is_synced = True
        return report[len(params) :]

    def _leave_out(self, unused):
        """Those that no rank has used are not stepped: their main parameters have no gradient."""
        for param in self._round.unused | unused:
            if param in self._main_param:
                self._main_param[param].grad = None if param in unused else self.bucket_of[param].main_grads[param]
        self._round.unused = unused


def error_of(worst, names):
    if worst == MOVED:
        return data_replaced(names[0])
    if worst == LATE:
        return RuntimeError(f"the gradient of parameter {names[0]} was assigned after that of backward() had left: too "
                            "late, go backward in no_sync(), and take DDP off the model")
    return RuntimeError(f"no gradient on some rank for parameter {', '.join(names[:9])}"
                        f"{' and others' * (len(names) > 9)}: call backward() before step(), use it in the loss, "
                        "freeze it with requires_grad_(False), or pass find_unused_parameters=True")
