"""Gathers the state of a distributed optimizer into one dict, loads such a dict, and moves a state to other ranks.

In a distributed optimizer each rank has a part of the state. It updates some whole parameters in the versions called
stages 1 and 2, and flat pieces of parameters in stages 3 and 4.

    entry         a value in the state of a parameter, which is a dict, under a name such as "exp_avg"
    main_param    the entry that is the fp32 copy of a 16-bit parameter
    FlatShard     an entry of which each rank has a part: a tensor with the shape of the whole, and this rank's elements
    Chained       joins several optimizers of one model (guard/chained.py)

The ranks send each other the state of one parameter at a time: tensors on the CPU, pickled. In the end one rank has the
whole state in memory. So save a large model in files instead.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from guard.flat_shard import FlatShard
from guard.groups import all_params
from guard.state_dict import loaded_value, parts_of, state_dict_of

from .files import copy_on_cpu, saver_for, unwrapped_optimizer, with_own_options
from .ranks import UnfitModel, all_gather, errors_on_all, saver_of

# Beginnings of error texts.
NOT_READ = "the state can't be put together"
NOT_LOADED = "the state can't be loaded"
NOT_MOVED = "the state can't be moved"


@torch.no_grad()
def full_state_dict(optimizer: torch.optim.Optimizer, to_all: bool = False) -> dict[str, Any]:
    """Return the state_dict that a plain torch optimizer would have, with whole tensors on the CPU. Collective.

    to_all: whether all ranks get the state_dict. Otherwise the first rank gets it, and the other ranks get {}.

    For 16-bit parameters the state is in fp32, and has an entry "main_param". With tensor parallelism all ranks of the
    device mesh call this function.

    Raises RuntimeError on every rank if a state can't be put together from the ranks' parts.
    """
    optimizer = unwrapped_optimizer(optimizer)
    refuse_several_groups(optimizer)
    # After reshard() `rank` is -1 on a rank without a part. A Chained has no such attribute.
    is_left_out = getattr(optimizer, "rank", 0) < 0
    if is_left_out and not to_all:
        return {}
    group = saver_for(optimizer).state_group  # a process group of all ranks that have parts, for messages with states
    if hasattr(optimizer, "refuse_different_settings"):
        optimizer.refuse_different_settings()
    with errors_on_all(NOT_READ, group):
        own = own_state_dict(optimizer)
    to_rank = None if to_all else 0  # None: the state goes to all ranks
    state = whole_states(own["state"], len(all_params(optimizer)), to_rank, NOT_READ, group)
    if not to_all and dist.get_rank(group) > 0:
        return {}
    return {"state": state, "param_groups": tree_map_only(torch.Tensor, copy_on_cpu, own["param_groups"])}


def refuse_several_groups(optimizer):
    """Raise RuntimeError for a Chained whose optimizers have process groups of different sizes."""
    # `n_ranks` of a Chained: for each of its optimizers the number of ranks that have it. Others have no `n_ranks`.
    numbers_of_ranks = getattr(optimizer, "n_ranks", ())
    if len(set(numbers_of_ranks)) > 1:
        raise RuntimeError("the optimizers have process groups of their own: save and load them one by one")


def own_state_dict(optimizer):
    """Return this rank's state_dict. It has no entries for parameters that were never stepped.

    Only the state_dict() of a Chained has such entries, as before a first step.
    """
    is_chained = not hasattr(optimizer, "pieces")  # a Chained has no method `pieces`
    return optimizer.state_dict() if is_chained else state_dict_of(optimizer, with_fresh=False)


def whole_states(states, n_params, to_rank, error_prefix, group):
    """Return the state with whole values: {index of a parameter: {name of an entry: whole value}}. Collective.

    Args:
        states: {index of a parameter: {name of an entry: this rank's part of the value}}.
        n_params: number of parameters. Not every rank has a state of each parameter.
        to_rank: the rank of the group that gets the whole values; other ranks get {}. None: all ranks get them.
        error_prefix: the beginning of the error on all ranks if the parts don't make a whole.
    """
    state_of_index = {}
    for index in range(n_params):
        own_entries = tree_map_only(torch.Tensor, torch.Tensor.cpu, states.get(index, {}))
        entries_of_ranks = gather_to(own_entries, to_rank, group)
        with errors_on_all(error_prefix, group):
            parts_of_entry = {}  # name of an entry -> the parts of its value that ranks have
            for entries in entries_of_ranks:
                for name, value in entries.items():
                    parts = parts_of_entry.setdefault(name, [])
                    # A rank without a part of the parameter has FlatShards without elements, which are left out.
                    if not isinstance(value, FlatShard) or value.local.numel():
                        parts.append(value)
            whole_state = {name: whole_value(parts, f"{name} of parameter {index}")
                           for name, parts in parts_of_entry.items() if parts}
        if whole_state:
            state_of_index[index] = whole_state
    return state_of_index


def gather_to(value, to_rank, group) -> list:
    """Return, on rank `to_rank` of the group, a list of the `value` of each rank. On other ranks return []. Collective.

    The list is in rank order. If `to_rank` is None, all ranks return the list.
    """
    if to_rank is None:
        return all_gather(value, group)
    values = None  # gather_object() requires a list on the rank that receives, and None on all other ranks
    if dist.get_rank(group) == to_rank:
        values = [None] * dist.get_world_size(group)
    dist.gather_object(value, values, group=group, group_dst=to_rank)
    return values or []


def whole_value(parts, label):
    """Return the whole value of an entry, on the CPU, from the parts that ranks have.

    parts: FlatShards, each with some of the elements, or values of another kind, which are whole on each rank.
    label: the name of the value, for a message.
    Raises ValueError: the FlatShards don't cover the whole value.
    """
    for part in parts:
        if not isinstance(part, FlatShard):  # it is whole
            return part
    whole = torch.empty(parts[0].shape, dtype=parts[0].dtype, device="cpu")
    for shard in parts:
        shard.copy_into(whole)
    n_elements = sum(shard.local.numel() for shard in parts if not shard.is_replica)
    if n_elements != whole.numel():
        raise ValueError(f"{label} is there for {n_elements} of its {whole.numel()} elements only: some ranks have "
                         "stepped it and others not, or cleared it")
    return whole


@torch.no_grad()
def load_full_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Load the first rank's `state_dict`, made by `full_state_dict` or by a plain torch optimizer. Collective.

    Other ranks may pass None. Load the model first: if the state_dict has no "main_param" entries, the fp32 copies get
    the values of the 16-bit parameters.

    Raises ValueError on every rank, before anything is changed, if the state_dict is from another model or optimizer.
    """
    optimizer = unwrapped_optimizer(optimizer)
    refuse_several_groups(optimizer)
    group = saver_for(optimizer).state_group
    optimizer.load_state_dict(cut_state_dict(optimizer, state_dict, 0, NOT_LOADED, group))


def cut_state_dict(optimizer, state_dict, source, error_prefix, group):
    """Return the state_dict that this rank loads: this rank's part of the `state_dict` of rank `source`. Collective.

    source: rank in `group`. What other ranks pass as `state_dict` isn't read.
    error_prefix: the beginning of the error if a state doesn't fit.
    Raises UnfitModel on every rank: rank `source` has passed no state_dict, or a state doesn't fit.
    """
    is_source = dist.get_rank(group) == source
    is_state_dict = isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()
    without_state = None  # a copy of the state_dict without its entry "state", which is large
    if is_source and is_state_dict:
        without_state = {key: value for key, value in state_dict.items() if key != "state"}
    without_state = broadcast(without_state, source, group)
    if without_state is None:
        raise UnfitModel("rank 0 must pass a dict with 'state' and 'param_groups', such as an optimizer's state_dict()")
    # A Part for each parameter: it says what elements this rank updates. After reshard() a rank may have no parts.
    parts = []
    for member in getattr(optimizer, "optimizers", [optimizer]):  # a Chained has several optimizers
        if member.rank >= 0:
            parts += parts_of(member)
    # For each parameter of the state_dict, in order, the key of its state.
    keys = [key for saved_group in without_state["param_groups"] for key in saved_group["params"]]
    state = {}
    for number, key in enumerate(keys):
        entries = None
        if is_source:
            entries = tree_map_only(torch.Tensor, copy_on_cpu, state_dict["state"].get(key, {}))
        entries = broadcast(entries, source, group)
        with errors_on_all(error_prefix, group, as_unfit_model):
            # If the state_dict has more parameters than the optimizer, `load_state_dict` refuses it later.
            if number < len(parts) and parts[number].start < parts[number].stop:
                state[key] = {name: loaded_value(parts[number], name, value) for name, value in entries.items()}
    groups = [*without_state["param_groups"]]
    # If the numbers of groups differ, `load_state_dict` refuses that later, too.
    for number, own_group in enumerate(optimizer.param_groups[: len(groups)]):
        groups[number] = with_own_options(groups[number], own_group)
    return {**without_state, "state": state, "param_groups": groups}


def broadcast(value, source, group):
    """Return the `value` that rank `source` of the group has, an object that can be pickled. Collective."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


def as_unfit_model(error):
    """Return an UnfitModel with the text of `error`. An error that ends the program, such as an interrupt, stays."""
    return UnfitModel(str(error)) if isinstance(error, Exception) else error


# ---------------------------------------------------------------------------------------------------- to other ranks


@torch.no_grad()
def reshard(optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | int | None) -> None:
    """Move parameters and state to the ranks of `process_group`. Collective over all ranks of the program.

    A rank outside of `process_group` keeps its parameters, and has no state afterwards. A later call with another
    process group may include this rank again. Tensors that the optimizer doesn't have, such as buffers of the model,
    stay as they are on each rank.

    Raises on every rank:
        TypeError: the optimizer is not of stage 3 or 4, or has DTensors.
        RuntimeError: a rank is between backward() and step(); or several process groups have a state; or the parts of
            the state don't make a whole.
    """
    optimizer = unwrapped_optimizer(optimizer)
    params = all_params(optimizer)
    if not hasattr(optimizer, "move_to") or any(isinstance(param, DTensor) for param in params):
        raise TypeError("reshard() moves optimizers of stages 3 and 4 without DTensors: move this "
                        f"{type(optimizer).__name__} by save() on the old ranks and load() on the new")
    if optimizer.rank >= 0:  # the rank is in the present process group; else it is -1
        optimizer.refuse_different_settings()
    all_ranks = saver_of(None).state_group
    # The whole state goes to this rank, which sends the new ranks their parts.
    source = checked_source(optimizer, process_group, all_ranks)
    with errors_on_all(NOT_MOVED, all_ranks):
        state_dict = state_dict_of(optimizer) if optimizer.rank >= 0 else {"state": {}}
    state_dict["state"] = whole_states(state_dict["state"], len(params), source, NOT_MOVED, all_ranks)
    for param in params:
        if optimizer.rank < 0:
            param.grad = None  # this rank wasn't in the training, so its gradient must not count in the next step
        dist.broadcast(param.detach(), src=source)  # a rank that wasn't in the training has old values
    optimizer.move_to(process_group)  # from here on optimizer.rank is the rank in `process_group`
    new_state_dict = cut_state_dict(optimizer, state_dict, source, NOT_MOVED, all_ranks)
    if optimizer.rank >= 0:
        optimizer.load_state_dict(new_state_dict)


class Move(NamedTuple):
    """The facts that each rank sends to all other ranks before a move."""

    old_rank: int  # this rank's number in the present process group; -1 if it isn't in the group
    new_ranks: list  # the ranks of the new process group; empty if this rank isn't in that group
    n_params: list  # for each parameter group the number of parameters
    has_grads: bool  # whether the rank is between backward() and step()


def checked_source(optimizer, process_group, all_ranks):
    """Return the rank that is first in the present process group. Collective over `all_ranks`.

    Raises an error on every rank if a move isn't possible.
    """
    with errors_on_all(NOT_MOVED, all_ranks):
        new_ranks = ranks_of(process_group)
    n_params = [len(group["params"]) for group in optimizer.param_groups]
    moves = all_gather(Move(optimizer.rank, new_ranks, n_params, optimizer.has_grads), all_ranks)
    sources = [rank for rank, move in enumerate(moves) if move.old_rank == 0]  # the first rank of each process group
    targets = [rank for rank, move in enumerate(moves) if move.new_ranks]  # all ranks that get a state, in order
    if any(move.has_grads for move in moves):
        raise RuntimeError("reshard() between backward() and step(): call step() or zero_grad() first")
    if any(move.n_params != n_params for move in moves):
        raise RuntimeError("the ranks have different parameter groups: some of them have called add_param_group()")
    if len(sources) > 1:
        raise RuntimeError("reshard() of several process groups: each may have trained something else, as experts do")
    # Each of the targets must have passed a process group of exactly the targets.
    if not targets or any(sorted(moves[rank].new_ranks) != targets for rank in targets):
        raise RuntimeError("reshard() to a process group must be called with it, and no other, on each of its ranks")
    return sources[0]


def ranks_of(process_group):
    """Return the ranks of `process_group`, or [] if this rank isn't in the group. None is the group of all ranks.

    Raises TypeError if `process_group` is something else; ValueError if the group doesn't exist any more.
    """
    is_group = process_group is None or isinstance(process_group, dist.ProcessGroup)
    is_outside = process_group == dist.GroupMember.NON_GROUP_MEMBER  # new_group() returns it on other ranks
    if not is_group and not is_outside:
        raise TypeError('process_group must be a ProcessGroup, such as mesh["dp"].get_group(), not a '
                        f"{type(process_group).__name__}")
    if dist.get_rank(process_group) < 0:
        return []
    return dist.get_process_group_ranks(process_group or dist.group.WORLD)
