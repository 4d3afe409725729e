"""Tracks which gradients each backward pass has sent, and lets the ranks agree on that with one all-reduce per step.

A bucket is a list of parameters whose gradients are sent together. A round is a backward pass that sends every bucket
once. A rank may run several rounds before a step.

In the all-reduce the ranks agree on which parameters were used (experts, heads and skipped layers may not be), on the
number of rounds, and on whether something is wrong with a gradient. A rank's host, its CPU, knows all this without its
GPU. So the ranks agree in a gloo group, which sends CPU tensors, and no host waits for its GPU.

Shown by tests/stages/test_rounds.py, `test_no_step_waits_for_the_device`, and tests/stages/test_drawn.py.
"""

import collections
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist

from guard.dropping import gradient_lost
from guard.groups import checksum_of, named_params
from guard.refuse import backends_of, data_replaced

# What is wrong with the gradient of a parameter; 0 means nothing. A larger number is worse, because the ranks agree on
# the largest number that any rank has for this gradient.
MISSING = 1  # this rank has no gradient of the parameter
LATE = 2  # a program has assigned a gradient after the gradient of the backward pass had been sent
LOST = 3  # zero_grad() of a module couldn't drop the gradient, because it had been sent, together with other gradients
MOVED = 4  # a program has replaced the memory of the parameter, which this optimizer updates
MOST_NAMES = 9  # the most names of parameters in an error

HOST_GROUPS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # process group -> what host_group() returns
N_MADE: collections.Counter = collections.Counter()  # name of a group -> how many gloo groups were made for it


class Rounds:
    """Counts the rounds since the last step. Most attributes are changed by the optimizer, in distributed.py.

    Some wrappers copy the optimizer's attributes. They then share this object with the optimizer.
    Sets contain ids of parameters, because a tensor's own hash is slow.

    Attributes:
        n_ended: number of rounds that have ended.
        n_dropped: number of ended rounds whose gradients `model.zero_grad()` has dropped.
        is_open: whether a backward pass has begun a round that hasn't ended.
        went_backward: whether a backward pass has begun a round on this rank. After the ranks have agreed: on any rank.
        ids_sent: ids of the parameters whose gradient this rank has sent.
        ids_lost: ids in `ids_sent` whose gradient `model.zero_grad()` should have dropped.
        ids_waiting: ids of the parameters whose gradient came outside of a round, and is still in `param.grad`. (If the
            gradient comes inside a round, the parameter is in `ready` of its bucket until the bucket is sent.)
        unused_params: the parameters (no ids) that had no gradient on any rank when the ranks agreed last. They are not
            updated, because the optimizer sets the gradient of their main parameters to None. A main parameter is the
            part of a parameter that torch's optimizer steps on this rank, or an fp32 copy of this part.
        ids_with_grad: ids of the parameters that any rank has used since `zero_grad(set_to_none=True)`.
        ids_with_zeros: ids in `ids_with_grad` of the parameters that `zero_grad(set_to_none=False)` has left with
            zeros. They are updated even if no rank uses them, as in torch.
        settings: name -> value, of the parameter groups, and arguments of `clip_grad_norm_` or `scale_grads_`. The
            optimizer sets them before the ranks compare them.
        settings_differ: whether the settings differ between ranks, however little.
        is_synced: whether the ranks have agreed since the last gradient came, and every gradient was sent.
        backward_pass: a weak reference: called, it returns the current BackwardPass, or None if no pass runs.
        is_accumulating: whether the program is inside no_sync(), where gradients stay in `param.grad`.
    """

    def __init__(self):
        self.is_accumulating = False
        self.unused_params = set()
        self.ids_with_grad = set()
        self.ids_with_zeros = set()
        self.start()

    def start(self):
        """Count anew, after a step. `is_accumulating`, `unused_params`, `ids_with_grad` and `ids_with_zeros` stay."""
        self.n_ended = 0
        self.is_open = False
        self.went_backward = False
        self.settings = {}
        self.settings_differ = False
        self.backward_pass = lambda: None  # called like a weak reference to nothing
        self.drop()

    def zero(self, ids, set_to_none):
        """Note that zero_grad(set_to_none) was called for the parameters with these ids."""
        if set_to_none:
            self.ids_with_zeros -= ids
            self.ids_with_grad -= ids
        else:
            self.ids_with_zeros |= self.ids_with_grad & ids

    def drop(self):
        """Forget all gradients. The rounds that have sent them still count, and the ranks compare their number."""
        self.n_dropped = self.n_ended
        self.is_synced = False
        self.ids_sent = set()
        self.ids_waiting = set()
        self.ids_lost = set()


class BackwardPass:
    """Calls `at_end` when the current backward pass ends.

    A re-entrant checkpoint starts a backward pass inside another one. Then the end of the outer pass counts.
    torch keeps this object until then. If the pass fails, torch drops the object without a call, and weak references to
    the object die.
    """

    def __init__(self, at_end):
        self.at_end = at_end
        self.handle = None  # of the hook on a node of the outer pass, to remove it
        self._queue()

    def _queue(self, *_):
        """Let torch call this object when the backward pass that runs now ends. Hooks of nodes get arguments."""
        if self.handle is not None:
            self.handle.remove()  # a user may keep the graph, and the graph would keep this object
        torch.autograd.Variable._execution_engine.queue_callback(self)

    @torch.compiler.disable  # because a compiled function may call backward()
    def __call__(self):
        # The node that autograd is running. If there is a node, it is a re-entrant checkpoint in the graph of an outer
        # pass, and has started the pass that ends now.
        node = torch._C._current_autograd_node()
        if node is None:
            self.at_end()
        else:  # when the node has run, queue this object again, for the end of the outer pass
            self.handle = node.register_hook(self._queue)


def what_is_wrong(rounds, params, buckets):
    """Return {id of a parameter: LATE, LOST or MOVED}, as far as this rank knows. `agree_on_rounds` adds MISSING."""
    moved = []
    # A gradient in `param.grad` waits since no_sync(), or is ready to be sent, or else a program has assigned it.
    assigned = {id(param) for param in params if param.grad is not None} - rounds.ids_waiting
    for bucket in buckets:
        assigned.difference_update(map(id, bucket.ready))
        moved += bucket.moved_params()
    # After the ranks have agreed, every assignment is too late. Before that, an assignment is too late if a gradient of
    # this parameter was sent.
    late = assigned if rounds.is_synced else assigned & rounds.ids_sent
    # If a parameter has several faults, the worst counts, because the last dict wins.
    return dict.fromkeys(late, LATE) | dict.fromkeys(rounds.ids_lost, LOST) | dict.fromkeys(map(id, moved), MOVED)


def host_group(process_group, device):
    """Return a gloo group of the ranks of `process_group`, or None if `process_group` serves CPU tensors. Collective.

    Each process group gets one gloo group. This function doesn't call dist.new_group(), which names a group after the
    number of groups that this rank is in. Ranks that are in different numbers of groups would wait for each other under
    different names, for ever.
    """
    group = process_group or dist.group.WORLD
    if group not in HOST_GROUPS:
        HOST_GROUPS[group] = None
        if "cpu" not in backends_of(group):
            # A number in the name, because an earlier gloo group may have left entries under its name in the store.
            N_MADE[group.group_name] += 1
            name = f"{group.group_name} on the host, {N_MADE[group.group_name]}"
            store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
            # The timeout of `process_group`, private in torch, so that a missing rank is noticed as soon as there.
            timeout = group._get_backend(device).options._timeout
            HOST_GROUPS[group] = dist.ProcessGroupGloo(store, dist.get_rank(group), group.size(), timeout)
    return HOST_GROUPS[group]


class Agreement(NamedTuple):
    """What all ranks know after they have agreed. Lists are in the order of the parameters."""
    are_used: list  # for each parameter 1 if any rank has used it, else 0
    worst_faults: list  # for each parameter the worst fault of its gradient on any rank, or 0
    n_rounds: int  # the largest number of rounds on any rank


def agree_on_rounds(rounds, params, faults, process_group):
    """Return the Agreement of all ranks, and set `went_backward` and `settings_differ` of `rounds`. Collective.

    The step calls this function, and not the end of a backward pass: until the step another pass may follow, a program
    may assign gradients, and a scheduler may set the lr.

    faults: what `what_is_wrong` has returned on this rank.
    """
    n_rounds = rounds.n_ended
    are_used = []
    worst_faults = []
    for param in params:
        has_grad = param.grad is not None
        if has_grad:
            n_rounds = rounds.n_ended + 1  # no_sync() has kept this gradient: one more round will send it
        is_used = has_grad or id(param) in rounds.ids_sent
        is_missing = param.requires_grad and not is_used
        are_used.append(is_used)
        worst_faults.append(faults.get(id(param), MISSING if is_missing else 0))
    checksum = checksum_of(rounds.settings)
    # The all-reduce tells every rank, for each fact, the largest number on any rank. The largest -checksum is minus the
    # smallest checksum. Both are needed to see whether checksums differ.
    facts = [*are_used, *worst_faults, rounds.went_backward, n_rounds, checksum, -checksum]
    report = torch.tensor(facts, dtype=torch.int32, device="cpu")
    gloo_group = host_group(process_group, params[0].device)
    if gloo_group is None:
        dist.all_reduce(report, dist.ReduceOp.MAX, group=process_group)
    else:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        gloo_group.allreduce([report], options).wait()
    # The same facts in the same order: first two lists with a number for each parameter, then four others.
    *of_params, rounds.went_backward, n_rounds, largest, minus_smallest = report.tolist()
    rounds.settings_differ = largest != -minus_smallest
    return Agreement(of_params[: len(params)], of_params[len(params) :], n_rounds)


def error_of(faults, groups, find_unused_parameters):
    """Return an exception for the worst of `faults`, a list in the order of the parameters, or None.

    With `find_unused_parameters` a missing gradient is no error.
    """
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
