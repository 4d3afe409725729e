"""Tracks which gradients each backward pass has sent, and lets the ranks agree on that with one all-reduce per step.

A round is a backward pass that sends gradients: of each bucket, a list of parameters, all together. A rank may send the
gradients of several rounds before a step.
The ranks agree on which parameters were used (experts, heads and skipped layers may not be), on the number of rounds,
and on whether something is wrong with a gradient. The host knows all this without its GPU, and sends it in a process
group of the hosts. So no host waits for its GPU. Shown by tests/stages/test_rounds.py,
`test_no_step_waits_for_the_device`, and tests/stages/test_drawn.py.
"""

import collections
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from guard.dropping import gradient_lost
from guard.groups import checksum_of, named_params
from guard.refuse import backends_of, data_replaced

# Faults of a gradient; 0 is none. A larger number is worse: the ranks agree on the worst fault of each gradient.
MISSING = 1
LATE = 2  # a program has assigned it after the gradient of the backward pass had been sent
LOST = 3  # model.zero_grad() of a part of the model was to drop it, but its bucket had been sent with other gradients
MOVED = 4  # its parameter no longer has the memory that this optimizer updates
MOST_NAMES = 9  # the most names of parameters in an error

HOST_GROUPS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # process group -> what host_group() returns
N_MADE: collections.Counter = collections.Counter()  # name of a group -> how many gloo groups were made for it


class Rounds:
    """Counts the rounds since the last step. An optimizer and a wrapper that copies its attributes share this object.

    Sets have ids of parameters, because a tensor's own hash is slow.

    Attributes:
        n_ended: number of rounds that have ended.
        n_dropped: number of ended rounds whose gradients `model.zero_grad()` has dropped.
        is_open: whether a backward pass has begun a round that hasn't ended.
        went_backward: whether a pass has begun a round on this rank, or, after the ranks have agreed, on any rank.
        used: ids of the parameters whose gradient this rank has sent.
        lost: ids in `used` whose gradient `model.zero_grad()` should have dropped.
        waiting: ids of the parameters whose gradient came outside of a round, and is still in `param.grad`. Inside a
            round, `Bucket.ready` has the parameters.
        unused: the parameters (no ids) that had no gradient on any rank when the ranks agreed last. They are not
            updated, because their main parameters, which the inner optimizer steps, then have no gradient.
        with_grad: ids of the parameters that any rank has used since `zero_grad(set_to_none=True)`.
        with_zeros: ids in `with_grad` of the parameters that `zero_grad(set_to_none=False)` has left with zeros. They
            are updated even if no rank uses them, as in torch.
        settings: name -> value, of the parameter groups, and arguments of `clip_grad_norm_` or `scale_grads_`.
        settings_differ: whether the settings differ between ranks, however little.
        is_synced: whether the ranks have agreed, and every gradient was sent.
        backward_pass: function () -> the current BackwardPass or None; a weak reference.
        is_accumulating: whether we are inside no_sync.
    """

    def __init__(self):
        self.is_accumulating = False
        self.unused = set()
        self.with_grad = set()
        self.with_zeros = set()
        self.start()

    def start(self):
        """Count anew, after a step. Only `is_accumulating`, `unused`, `with_grad` and `with_zeros` stay."""
        self.n_ended = 0
        self.is_open = False
        self.went_backward = False
        self.settings = {}
        self.settings_differ = False
        self.backward_pass = lambda: None
        self.drop()

    def zero(self, ids, set_to_none):
        """Note that zero_grad(set_to_none) was called for the parameters with these ids."""
        if set_to_none:
            self.with_zeros -= ids
            self.with_grad -= ids
        else:
            self.with_zeros |= self.with_grad & ids

    def drop(self):
        """Forget all gradients. The rounds that have sent them still count, and the ranks compare their number."""
        self.n_dropped = self.n_ended
        self.is_synced = False
        self.used = set()
        self.waiting = set()
        self.lost = set()


class BackwardPass:
    """Calls `at_end` when the current backward pass ends; inside a re-entrant checkpoint, when the outer pass ends.

    torch keeps this object until then. If the pass fails, torch drops the object without a call, and weak references to
    the object die.
    """

    def __init__(self, at_end):
        self.at_end = at_end
        self.handle = None  # of the hook on a node of the outer pass
        self._queue()

    def _queue(self, *_):
        if self.handle is not None:
            self.handle.remove()  # else the graph, which the user may keep, would keep this object after a failure
        torch.autograd.Variable._execution_engine.queue_callback(self)

    @torch.compiler.disable  # because a compiled function may call backward()
    def __call__(self):
        node = torch._C._current_autograd_node()  # of an outer pass: it has run the pass that ends now
        if node is None:
            self.at_end()
        else:  # queue this object again when the node has run, for the end of the outer pass
            self.handle = node.register_hook(self._queue)


def what_is_wrong(rounds, params, buckets):
    """Return {id of a parameter: LATE, LOST or MOVED}, as far as this rank knows; `agree_on_rounds` adds MISSING."""
    moved = []
    # What is in `param.grad` has waited since no_sync(), or is ready to be sent, or a program has assigned it.
    assigned = {id(param) for param in params if param.grad is not None} - rounds.waiting
    for bucket in buckets:
        assigned.difference_update(map(id, bucket.ready))
        moved += bucket.moved_params()
    late = assigned if rounds.is_synced else assigned & rounds.used  # the gradients of these had been sent
    # Of several faults of a parameter the worst counts, because the last dict wins.
    return dict.fromkeys(late, LATE) | dict.fromkeys(rounds.lost, LOST) | dict.fromkeys(map(id, moved), MOVED)


def host_group(process_group, device):
    """Return a gloo group of the ranks of `process_group`, or None if `process_group` serves CPU tensors. Collective.

    Each process group gets one gloo group. `new_group` doesn't make it, because `new_group` names a group after the
    number of groups that this rank is in: ranks in different numbers of groups would wait for each other under
    different names, for ever.
    """
    group = process_group or dist.group.WORLD
    if group not in HOST_GROUPS:
        HOST_GROUPS[group] = None
        if "cpu" not in backends_of(group):
            N_MADE[group.group_name] += 1  # an earlier gloo group may have left entries under its name in the store
            name = f"{group.group_name} on the host, {N_MADE[group.group_name]}"
            store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
            timeout = group._get_backend(device).options._timeout
            HOST_GROUPS[group] = dist.ProcessGroupGloo(store, dist.get_rank(group), group.size(), timeout)
    return HOST_GROUPS[group]


class Agreement(NamedTuple):
    """What all ranks know after they have agreed. Lists are in the order of the parameters."""
    are_used: list  # 1 if any rank has used the parameter, else 0
    worst_faults: list  # the worst fault of the parameter's gradient on any rank, or 0
    n_rounds: int  # the largest number of rounds on any rank


def agree_on_rounds(rounds, params, faults, process_group):
    """Return the Agreement of all ranks, and note in `rounds` what else they agree on. Collective.

    The step calls this function, not the end of a backward pass: until the step another pass may follow, a program may
    assign gradients, and a scheduler may set the lr.

    faults: the dict that this rank's `what_is_wrong` has returned.
    """
    n_rounds = rounds.n_ended
    are_used = []
    worst_faults = []
    for param in params:
        has_grad = param.grad is not None
        if has_grad:
            n_rounds = rounds.n_ended + 1  # no_sync() has kept this gradient: one more round will send it
        is_used = has_grad or id(param) in rounds.used
        is_missing = param.requires_grad and not is_used
        are_used.append(is_used)
        worst_faults.append(faults.get(id(param), MISSING if is_missing else 0))
    checksum = checksum_of(rounds.settings)
    # Of each number the ranks get the largest. The smallest checksum is the negative of the largest -checksum.
    facts = [*are_used, *worst_faults, rounds.went_backward, n_rounds, checksum, -checksum]
    report = torch.tensor(facts, dtype=torch.int32, device="cpu")
    hosts = host_group(process_group, params[0].device)
    if hosts is None:
        dist.all_reduce(report, dist.ReduceOp.MAX, group=process_group)
    else:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        hosts.allreduce([report], options).wait()
    *of_params, rounds.went_backward, n_rounds, largest, minus_smallest = report.tolist()
    rounds.settings_differ = largest != -minus_smallest
    return Agreement(of_params[: len(params)], of_params[len(params) :], n_rounds)


def error_of(faults, groups, find_unused_parameters):
    """Return an exception for the worst of `faults`, a list in the order of the parameters; None if it may be."""
    worst = max(faults)
    least_error = LATE if find_unused_parameters else MISSING
    if worst < least_error:
        return None
    names = [name for (name, _), fault in zip(named_params(groups), faults) if fault == worst]
    if worst == MOVED:
        return data_replaced(names[0])
    if worst == LOST:
        return gradient_lost(names[0])
    if worst == LATE:
        return RuntimeError(f"the gradient of parameter {names[0]} was assigned after that of backward() had left: too "
                            "late, go backward in no_sync(), and take DDP off the model")
    and_others = " and others" if len(names) > MOST_NAMES else ""
    return RuntimeError(f"no gradient on some rank for parameter {', '.join(names[:MOST_NAMES])}{and_others}: call "
                        "backward() before step(), use it in the loss, freeze it with requires_grad_(False), or pass "
                        "find_unused_parameters=True")
