"""An optimizer's state as one dict, or on other ranks: a gather of its parts, and a cut.

All of it goes through memory, the state of one parameter at a time: ranks send each other pickled tensors of the CPU.
One rank holds the whole. Large models go by files.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from guard.flat_shard import FlatShard
from guard.groups import all_params
from guard.state_dict import box_of, loaded_value, parts_of, state_dict_of

from .files import copy_on_cpu, keep_own_options, saver_for, unwrapped_optimizer
from .ranks import UnfitModel, all_gather, broadcast, errors_on_all, gather, rank_and_size, saver_of

NOT_READ, NOT_LOADED, NOT_MOVED = (f"the state can't be {done}" for done in ("put together", "loaded", "moved"))


@torch.no_grad()
def full_state_dict(optimizer: torch.optim.Optimizer, to_all: bool = False) -> dict[str, Any]:
    """The state_dict() of the plain torch optimizer, on rank 0 of its process group, or on all ranks. Collective.

    Tensors are whole, and on the CPU. Returns {} on the other ranks. For 16-bit parameters the state is in fp32, and
    has a "main_param". With tensor parallelism all ranks of the mesh call it.

    Raises RuntimeError on every rank if a state can't be put together from the ranks' parts.
    """
    optimizer = unwrapped_optimizer(optimizer)
    refuse_several_groups(optimizer)
    if getattr(optimizer, "rank", 0) < 0 and not to_all:
        return {}
    group = saver_for(optimizer).state_group
    if hasattr(optimizer, "refuse_different_settings"):
        optimizer.refuse_different_settings()
    with errors_on_all(NOT_READ, group):
        own = own_state_dict(optimizer)
    first = None if to_all else first_rank(optimizer, group)
    state = whole_states(own["state"], len(all_params(optimizer)), first, NOT_READ, group)
    is_kept = first in (None, rank_and_size(group)[0])
    return {"state": state, "param_groups": own["param_groups"]} if is_kept else {}


@torch.no_grad()
def load_full_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Load the `state_dict` of rank 0: a plain torch optimizer's, or `full_state_dict`'s. Collective.

    Load the model first, because main parameters start from the 16-bit parameters if there is no "main_param". Raises
    ValueError on every rank, before anything is changed, if the state_dict is from another model or optimizer.
    """
    optimizer = unwrapped_optimizer(optimizer)
    refuse_several_groups(optimizer)
    group = saver_for(optimizer).state_group
    source = first_rank(optimizer, group)
    with errors_on_all(NOT_LOADED, group, as_value_error):
        own = cut_states(optimizer, state_dict, source, group)
    optimizer.load_state_dict(own)


@torch.no_grad()
def reshard(optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | int | None) -> None:
    """Move parameters and state to the ranks of `process_group`. Collective over all ranks of the program.

    A rank outside of `process_group` keeps the current parameters and no state; a later group may include it again.
    What the optimizer doesn't know, such as buffers of the model, stays as it is on each rank.

    In a tensor-parallel model only the data-parallel dimension moves: each rank passes the new group of ranks that have
    the same parts of DTensors as itself, and keeps its own part.

    Raises TypeError on every rank if the optimizer is not of stage 3 or 4; RuntimeError between backward() and step(),
    or if ranks with the same parts are in several process groups, or if a state can't be put together.
    """
    optimizer = unwrapped_optimizer(optimizer)
    if not hasattr(optimizer, "move_to"):
        raise TypeError(f"reshard() moves optimizers of stages 3 and 4: a {type(optimizer).__name__} is none")
    params, group = all_params(optimizer), saver_of(None).state_group
    if optimizer.rank >= 0:
        optimizer.refuse_different_settings()
    sources, first = agreed_sources(optimizer, process_group, group)
    with errors_on_all(NOT_MOVED, group):
        own = state_dict_of(optimizer) if optimizer.rank >= 0 else {"state": {}}
    own["state"] = whole_states(own["state"], len(params), first, NOT_MOVED, group)
    for index, param in enumerate(params):
        if optimizer.rank < 0:
            param.grad = None  # a gradient of a rank outside counts nowhere, and would be part of the next step here
        for boxes, source in sources.items():  # for ranks that join
            local = getattr(param, "_local_tensor", param)
            value = local if boxes == boxes_of_params(params) else local.new_empty(boxes[index][1])
            dist.broadcast(value.detach(), src=source)
    optimizer.move_to(process_group)
    with errors_on_all(NOT_MOVED, group):
        own = cut_states(optimizer, own, first, group)
    if optimizer.rank >= 0:
        optimizer.load_state_dict(own)


def first_rank(optimizer, group):
    """Return the rank that the first of the optimizer's process group has in `group`, whose order may be another."""
    own_group = getattr(optimizer, "process_group", None) or dist.group.WORLD
    return dist.get_group_rank(group, dist.get_global_rank(own_group, 0)) if group else 0


def as_value_error(error):
    return UnfitModel(str(error)) if isinstance(error, Exception) else error


def refuse_several_groups(optimizer):
    if len({*getattr(optimizer, "n_ranks", ())}) > 1:
        raise RuntimeError("the optimizers have process groups of their own: save and load them one by one")


def own_state_dict(optimizer):
    """Return this rank's state_dict without fresh entries: of a parameter that was never stepped there is nothing."""
    return state_dict_of(optimizer, with_fresh=False) if hasattr(optimizer, "pieces") else optimizer.state_dict()


def whole_states(states, n_params, to_rank, error_prefix, group):
    """Return index -> name -> whole value, from the parts of the ranks in `states`. Collective.

    to_rank: of the group, the rank that gets it; others get {}. None: all ranks.
    """
    wholes = {}
    for index in range(n_params):
        own = tree_map_only(torch.Tensor, torch.Tensor.cpu, states.get(index))
        parts_of_ranks = [parts for parts in gather(own, to_rank, group) if parts is not None]
        with errors_on_all(error_prefix, group):
            names = dict.fromkeys(name for parts in parts_of_ranks for name in parts)
            whole = {name: whole_of([parts[name] for parts in parts_of_ranks if name in parts],
                                    f"{name} of parameter {index}") for name in names}
            whole = {name: value for name, value in whole.items() if value is not NOTHING}
        if whole:
            wholes[index] = whole
    return wholes


NOTHING = object()  # in place of a value of which no rank has elements


def whole_of(values, label):
    """Return a whole value, on the CPU, from what the ranks have of it."""
    plain = [value for value in values if not isinstance(value, FlatShard)]
    if plain:
        return plain[0].cpu() if isinstance(plain[0], torch.Tensor) else plain[0]
    shards = [value for value in values if value.local.numel()]
    if not shards:
        return NOTHING
    whole = torch.empty(shards[0].shape, dtype=shards[0].dtype, device="cpu")
    n_elements = 0
    for shard in shards:
        shard.copy_into(whole)
        n_elements += 0 if shard.is_replica else shard.local.numel()
    if n_elements != whole.numel():
        raise ValueError(f"{label} is there for {n_elements} of its {whole.numel()} elements only: some ranks have "
                         "stepped it and others not, or cleared it")
    return whole


def cut_states(optimizer, state_dict, source, group):
    """Return the state_dict that this rank loads, cut from the whole one of rank `source` of the group. Collective.

    Raises ValueError, when all has been sent: the state_dict is of something else.
    """
    is_source = rank_and_size(group)[0] == source
    is_state_dict = isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()
    rest = {key: value for key, value in state_dict.items() if key != "state"} if is_source and is_state_dict else None
    rest = copy.deepcopy(broadcast(rest, source, group))  # without other ranks it is the caller's own
    if rest is None:
        raise ValueError("rank 0 must pass a dict with 'state' and 'param_groups', such as an optimizer's state_dict()")
    members = [member for member in getattr(optimizer, "optimizers", [optimizer]) if hasattr(member, "pieces")]
    parts = [part for member in members if member.rank >= 0 for part in parts_of(member)]
    failure = None
    state = {}
    for number, key in enumerate(key for saved in rest["param_groups"] for key in saved["params"]):
        entries = tree_map_only(torch.Tensor, copy_on_cpu, state_dict["state"].get(key)) if is_source else None
        entries = broadcast(entries, source, group)
        try:
            if entries is not None:
                state[key] = {name: loaded_value(parts[number], name, value) for name, value in entries.items()
                              if parts[number].start < parts[number].stop} if members else entries
        except Exception as error:  # raised below: the other ranks are sent more
            failure = error
    if failure and getattr(optimizer, "rank", 0) >= 0:
        raise failure
    for group_options, own_options in zip(rest["param_groups"], optimizer.param_groups):
        keep_own_options(group_options, own_options)
    return {**rest, "state": state}


def boxes_of_params(params) -> tuple:
    """Return where the local part of each DTensor begins, and its shape."""
    return tuple(box_of(param) for param in params)


def agreed_sources(optimizer, process_group, group):
    """Return boxes of a rank -> the rank that sends these; and the first such rank. Raises, on every rank, if it can't
    move.
    """
    error, to = None, []
    try:
        no_group = None, dist.GroupMember.NON_GROUP_MEMBER
        if not isinstance(process_group, dist.ProcessGroup) and process_group not in no_group:
            kind = type(process_group).__name__
            raise TypeError(f'process_group must be a ProcessGroup, such as mesh["dp"].get_group(), not a {kind}')
        if dist.get_rank(process_group) >= 0:
            to = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    except (TypeError, ValueError) as refusal:  # it is something else, or was destroyed
        error = refusal
    n_params = [len(params["params"]) for params in optimizer.param_groups]
    own = n_params, optimizer.has_grads, optimizer.rank, to, boxes_of_params(all_params(optimizer)), error
    all_n_params, all_have_grads, ranks, all_to, all_boxes, errors = zip(*all_gather(own, group))
    if any(errors):
        raise error or next(filter(None, errors))
    if any(all_have_grads):
        raise RuntimeError("reshard() between backward() and step(): call step() or zero_grad() first")
    if any(n_params != all_n_params[0] for n_params in all_n_params):
        raise RuntimeError("the ranks have different parameter groups: some of them have called add_param_group()")
    firsts = [rank for rank, place in enumerate(ranks) if place == 0]
    sources = {all_boxes[rank]: rank for rank in firsts}
    if len(sources) < len(firsts):
        raise RuntimeError("reshard() of several process groups: each may have trained something else, as experts do")
    members = [[rank for rank, to in enumerate(all_to) if to and all_boxes[rank] == boxes] for boxes in sources]
    if not all(members) or any(sorted(all_to[rank]) != ranks for ranks in members for rank in ranks):
        raise RuntimeError("reshard() to a process group must be called with it, and no other, on each of its ranks")
    if len(set(map(len, members))) > 1:
        raise RuntimeError(f"reshard() to process groups of {[*map(len, members)]} ranks: tensor-parallel ranks, which "
                           "have other parts of DTensors, must move to as many")
    return sources, firsts[0]
