"""Whether gradients have left, in which backward pass, and what the ranks agree on before a step, in one all-reduce.

Which parameters were used, where a batch doesn't use all of them (experts, heads, skipped layers), on how many rounds
there are, and on whether something is wrong with a gradient. All that is known to the host, and travels between hosts:
none waits for its GPU. Shown by tests/stages/test_rounds.py, `test_no_step_waits_for_the_device`, and
tests/stages/test_overlap.py, `test_unused_parameters_like_ddp`.
"""

import collections
import weakref

import torch
import torch.distributed as dist

from guard.groups import checksum_of, named_params
from guard.refuse import backends_of, data_replaced

# What can be wrong with a gradient; 0: nothing. The ranks agree on the largest.
MISSING = 1
LATE = 2  # it was assigned when that of the backward pass had left
MOVED = 3  # its parameter has other memory than this optimizer steps

HOST_GROUPS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # process group -> the one of gloo, or None
MADE: collections.Counter = collections.Counter()  # of groups beside one of that name


class Rounds:
    """Since the last step. One object, which a wrapper that copies attributes has too.

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


def what_is_wrong(now, params, buckets):
    """-> for each of `params`: LATE, MOVED or 0, on this rank; once the ranks have agreed: MISSING too, on any."""
    by_autograd = now.waiting.union(*[map(id, bucket.ready) for bucket in buckets])
    assigned = {id(param) for param in params if param.grad is not None} - by_autograd  # by a user
    late = assigned if now.is_synced else assigned & now.used
    moved = {id(param) for bucket in buckets for param in bucket.moved_params()}
    if not late and not moved:
        return [0] * len(params)
    return [MOVED if id(param) in moved else LATE if id(param) in late else 0 for param in params]


def host_group(process_group, device):
    """-> a group of the same ranks for tensors of the host: itself, or one of gloo beside it, made once. Collective."""
    group = process_group or dist.group.WORLD
    if group not in HOST_GROUPS:
        HOST_GROUPS[group] = None if "cpu" in backends_of(group) else gloo_beside(
            group, group._get_backend(device).options._timeout)
    return HOST_GROUPS[group] or process_group


def gloo_beside(group, timeout):
    """Made as `new_group` makes one, which names it after the number of groups that this rank is in: others may be in
    more, wait for another name, and never meet. Here the name is that of `group`, and how many it has had."""
    MADE[group.group_name] += 1  # the same name again meets what is left in the store of the group before
    name = f"{group.group_name} on the host, {MADE[group.group_name]}"
    rank, gloo = dist.get_rank(group), dist.ProcessGroup.BackendType.GLOO
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    beside = dist.ProcessGroup(store, rank, group.size())
    beside._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, rank, group.size(), timeout))
    beside._set_default_backend(gloo)
    beside._set_group_name(name)
    dist.distributed_c10d._world.pg_map[beside] = ("gloo", store)  # dist.all_reduce and dist.get_backend look there
    torch._C._distributed_c10d._register_process_group(name, beside)  # and compiled code here
    return beside


def agree(now, params, wrong, groups, process_group):
    """-> for each of `params` whether any rank has used it, and what is wrong; and the number of rounds.

    Collective. It starts in the step, not as a backward pass ends: until then another may follow, gradients may be
    assigned, and a scheduler may set the lr. A gradient that is kept, by no_sync() say, leaves in a round of its own.
    """
    kept = [param.grad is not None for param in params]
    used = [id(param) in now.used or is_kept for param, is_kept in zip(params, kept)]
    wrong = [what or (MISSING if not is_used and param.requires_grad else 0)
             for param, is_used, what in zip(params, used, wrong)]
    checksum = checksum_of(groups)  # they agree if the largest is the smallest
    report = [*used, *wrong, now.went_backward, now.n + any(kept), checksum, -checksum]
    report = torch.tensor(report, dtype=torch.int32, device="cpu")
    of_hosts = host_group(process_group, params[0].device)
    dist.all_reduce(report, dist.ReduceOp.MAX, group=of_hosts)
    *of_params, now.went_backward, n_rounds, largest, minus_smallest = report.tolist()
    now.settings_differ = largest != -minus_smallest
    return of_params[: len(params)], of_params[len(params) :], n_rounds


def error_of(wrong, groups, find_unused_parameters):
    """-> the worst of what is wrong, or None."""
    worst = max(wrong)
    if worst == 0 or worst == MISSING and find_unused_parameters:
        return None
    names = [name for (name, _), what in zip(named_params(groups), wrong) if what == worst]
    if worst == MOVED:
        return data_replaced(names[0])
    if worst == LATE:
        return RuntimeError(f"the gradient of parameter {names[0]} was assigned after that of backward() had left: too "
                            "late, go backward in no_sync(), and take DDP off the model")
    return RuntimeError(f"no gradient on some rank for parameter {', '.join(names[:9])}"
                        f"{' and others' * (len(names) > 9)}: call backward() before step(), use it in the loss, "
                        "freeze it with requires_grad_(False), or pass find_unused_parameters=True")
