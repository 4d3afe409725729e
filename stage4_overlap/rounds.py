"""Tracks which gradients were sent in which backward pass, and lets the ranks agree on that with one all-reduce a step.

The ranks agree on which parameters were used (experts, heads and skipped layers may not be), on the number of rounds,
and on whether something is wrong with a gradient. The host knows all this, and sends it over a group of the hosts: no
host waits for its GPU. Shown by tests/stages/test_rounds.py, `test_no_step_waits_for_the_device`, and
tests/stages/test_drawn.py.
"""

import collections
import weakref

import torch
import torch.distributed as dist

from guard.dropping import lost
from guard.groups import checksum_of, named_params
from guard.refuse import backends_of, data_replaced

# What can be wrong with a gradient; 0 is nothing. The ranks agree on the largest number.
MISSING = 1
LATE = 2  # it was assigned after the gradient of the backward pass had been sent
LOST = 3  # model.zero_grad() should have dropped it, with others that were sent and stay
MOVED = 4  # its parameter no longer has the memory that this optimizer updates
MOST_NAMES = 9  # of parameters in an error

HOST_GROUPS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # process group -> its gloo group; None: itself
N_MADE: collections.Counter = collections.Counter()  # name of a group -> how many gloo groups were made for it


class Rounds:
    """Counts the rounds since the last step. It is one object, so that a wrapper that copies attributes shares it.

    Attributes:
        n: number of rounds that have ended.
        n_dropped: number of those whose gradients `model.zero_grad()` has dropped.
        is_open: whether a backward pass has begun a round that hasn't ended.
        went_backward: whether a pass has begun a round, on this rank; after the ranks have agreed, on any rank.
        used: ids of the parameters whose gradient this rank has sent. Ids, because a tensor's own hash is slow.
        lost: ids of those of them whose gradient `model.zero_grad()` should have dropped.
        waiting: ids of the parameters whose gradient came outside of a round, and is still in `param.grad`. Inside a
            round, `Bucket.ready` has the parameters.
        unused: parameters that had no gradient on any rank when the ranks agreed last: they are not updated, and their
            main parameters have no gradient until the ranks agree again.
        with_grad: ids of the parameters that any rank has used since `zero_grad(set_to_none=True)`.
        with_zeros: ids of those of them that `zero_grad(set_to_none=False)` has left with zeros. Where no rank uses
            them, they are updated nevertheless, as in torch.
        settings: name -> value, of the parameter groups, and arguments of `clip_grad_norm_` or `scale_grads_`.
        settings_differ: whether the ranks have different settings, if only by rounding.
        is_synced: whether the ranks have agreed on all this, and every gradient was sent.
        backward_pass: function () -> the current BackwardPass or None; a weak reference.
        is_accumulating: whether we are inside no_sync.
    """

    def __init__(self):
        self.is_accumulating, self.unused = False, set()
        self.with_grad, self.with_zeros = set(), set()
        self.start()

    def start(self):
        """Count anew, after a step."""
        self.n, self.is_open, self.went_backward = 0, False, False
        self.settings, self.settings_differ = {}, False
        self.backward_pass = lambda: None
        self.drop()

    def zero(self, ids, set_to_none):
        """Note which parameters torch's zero_grad() leaves with zeros."""
        if set_to_none:
            self.with_zeros -= ids
            self.with_grad -= ids
        else:
            self.with_zeros |= self.with_grad & ids

    def drop(self):
        """Forget all gradients. The rounds that have sent them still count, and the ranks compare their number."""
        self.n_dropped, self.is_synced = self.n, False
        self.used, self.waiting, self.lost = set(), set(), set()


class BackwardPass:
    """Calls `at_end` when the current backward pass ends; inside a re-entrant checkpoint, when the outer pass ends.

    torch keeps this object until then. If the pass fails, torch drops it without a call, and weak references to it die.
    """

    def __init__(self, at_end):
        self.at_end, self.handle = at_end, None
        self._queue()

    def _queue(self, *_):
        if self.handle is not None:
            self.handle.remove()  # or the graph, which the user may keep, would keep this object after a failure
        torch.autograd.Variable._execution_engine.queue_callback(self)

    @torch.compiler.disable  # where a compiled function calls backward()
    def __call__(self):
        node = torch._C._current_autograd_node()  # the node of an outer pass that ran this pass
        if node is None:
            self.at_end()
        else:
            self.handle = node.register_hook(self._queue)


def what_is_wrong(rounds, params, buckets):
    """Return {id of a parameter: LATE, LOST or MOVED}, as this rank sees it; `agree_on_rounds` adds MISSING."""
    moved = []
    assigned = {id(param) for param in params if param.grad is not None} - rounds.waiting
    for bucket in buckets:
        assigned.difference_update(map(id, bucket.ready))  # autograd has made these: a user has assigned the others
        moved += bucket.moved_params()
    late = assigned if rounds.is_synced else assigned & rounds.used
    return dict.fromkeys(late, LATE) | dict.fromkeys(rounds.lost, LOST) | dict.fromkeys(map(id, moved), MOVED)


def host_group(process_group, device):
    """Return gloo between the ranks of `process_group`, made once; None if that serves CPU tensors. Collective.

    It isn't made by `new_group`, which names a group after the number of groups that this rank is in: ranks in
    different numbers of groups would wait for each other under different names, for ever.
    """
    group = process_group or dist.group.WORLD
    if group not in HOST_GROUPS:
        N_MADE[group.group_name] += 1  # under the same name, the store would still have entries of an earlier group
        name = f"{group.group_name} on the host, {N_MADE[group.group_name]}"
        store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
        HOST_GROUPS[group] = None if "cpu" in backends_of(group) else dist.ProcessGroupGloo(
            store, dist.get_rank(group), group.size(), group._get_backend(device).options._timeout)
    return HOST_GROUPS[group]


def agree_on_rounds(rounds, params, faults, process_group):
    """Return whether any rank has used each of `params`, what is wrong with each, and the number of rounds. Collective.

    It runs in the step, and not when a backward pass ends, because until the step another pass may follow, gradients
    may be assigned, and a scheduler may set the lr.

    faults: what this rank's `what_is_wrong` returns.
    """
    n_rounds = rounds.n
    used = []
    wrong = []
    for param in params:
        has_grad = param.grad is not None
        if has_grad:
            n_rounds = rounds.n + 1  # no_sync() has kept it: it needs one more round
        is_used = has_grad or id(param) in rounds.used
        used.append(is_used)
        wrong.append(faults.get(id(param)) or (MISSING if param.requires_grad and not is_used else 0))
    checksum = checksum_of(rounds.settings)  # the ranks have the same if the largest equals the smallest
    report = [*used, *wrong, rounds.went_backward, n_rounds, checksum, -checksum]
    report = torch.tensor(report, dtype=torch.int32, device="cpu")
    hosts = host_group(process_group, params[0].device)
    if hosts is None:
        dist.all_reduce(report, dist.ReduceOp.MAX, group=process_group)
    else:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        hosts.allreduce([report], options).wait()
    *of_params, rounds.went_backward, n_rounds, largest, minus_smallest = report.tolist()
    rounds.settings_differ = largest != -minus_smallest
    return of_params[: len(params)], of_params[len(params) :], n_rounds


def error_of(wrong, groups, find_unused_parameters):
    """Return an exception for the worst fault in `wrong`, or None."""
    worst = max(wrong)
    if worst == 0 or worst == MISSING and find_unused_parameters:
        return None
    names = [name for (name, _), fault in zip(named_params(groups), wrong) if fault == worst]
    if worst == MOVED:
        return data_replaced(names[0])
    if worst == LOST:
        return lost(names[0])
    if worst == LATE:
        return RuntimeError(f"the gradient of parameter {names[0]} was assigned after that of backward() had left: too "
                            "late, go backward in no_sync(), and take DDP off the model")
    and_others = " and others" if len(names) > MOST_NAMES else ""
    return RuntimeError(f"no gradient on some rank for parameter {', '.join(names[:MOST_NAMES])}{and_others}: call "
                        "backward() before step(), use it in the loss, freeze it with requires_grad_(False), or pass "
                        "find_unused_parameters=True")
