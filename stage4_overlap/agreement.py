"""Parameters that a batch doesn't use (experts, heads, skipped layers), or gradients of the user's own.

Before a step the ranks agree, in one all-reduce, on which parameters were used and on how many rounds there are, and
on whether something is wrong with a gradient. Shown by tests/stages/test_rounds.py, and
tests/stages/test_overlap.py, `test_unused_parameters_like_ddp`.
"""

import torch
import torch.distributed as dist

from guard.groups import named_params
from guard.refuse import data_replaced
from guard.settings import checksum_of

# What can be wrong with a gradient; 0: nothing. The ranks agree on the largest.
MISSING = 1
LATE = 2  # it was assigned when that of the backward pass had left
MOVED = 3  # its parameter has other memory than this optimizer steps


def what_is_wrong(now, params, buckets):
    """-> for each of `params`: LATE, MOVED or 0, on this rank; once the ranks have agreed: MISSING too, on any."""
    by_autograd = now.waiting.union(*[map(id, bucket.ready) for bucket in buckets])
    assigned = {id(param) for param in params if param.grad is not None} - by_autograd  # by a user
    late = assigned if now.is_synced else assigned & now.used
    moved = {id(param) for bucket in buckets for param in bucket.moved_params()}
    if not late and not moved:
        return [0] * len(params)
    return [MOVED if id(param) in moved else LATE if id(param) in late else 0 for param in params]


def agree(now, params, wrong, groups, process_group):
    """Collective. -> for each of `params` whether any rank has used it, and what is wrong; and the number of rounds.

    A gradient that is kept, by no_sync() say, leaves in a round of its own.
    """
    kept = [param.grad is not None for param in params]
    used = [id(param) in now.used or is_kept for param, is_kept in zip(params, kept)]
    wrong = [what or (MISSING if not is_used and param.requires_grad else 0)
             for param, is_used, what in zip(params, used, wrong)]
    checksum = checksum_of(groups)  # they agree if the largest is the smallest
    report = [*used, *wrong, now.went_backward, now.n + any(kept), checksum, -checksum]
    report = torch.tensor(report, dtype=torch.int32).to(params[0].device)
    dist.all_reduce(report, dist.ReduceOp.MAX, group=process_group)
    *of_params, now.went_backward, n_rounds, largest, minus_smallest = report.tolist()
    now.settings_differ = largest != -minus_smallest
    return of_params[: len(params)], of_params[len(params) :], n_rounds


def error_of(worst, wrong, groups):
    names = [name for (name, _), what in zip(named_params(groups), wrong) if what == worst]
    if worst == MOVED:
        return data_replaced(names[0])
    if worst == LATE:
        return RuntimeError(f"the gradient of parameter {names[0]} was assigned after that of backward() had left: too "
                            "late, go backward in no_sync(), and take DDP off the model")
    return RuntimeError(f"no gradient on some rank for parameter {', '.join(names[:9])}"
                        f"{' and others' * (len(names) > 9)}: call backward() before step(), use it in the loss, "
                        "freeze it with requires_grad_(False), or pass find_unused_parameters=True")
