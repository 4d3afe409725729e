"""An optimizer's state as one dict, or on other ranks: assembled from its pieces and cut again.

The state of one parameter is sent at a time. So a rank holds its old part, its new part, the result if it wants one,
and one whole parameter.
"""

import copy
import math
import pickle
from typing import Any

import torch
import torch.distributed as dist

from guard.schema import lead_of

from .boxes import box_of, is_meshed, local
from .json_values import pack_apart, unpack
from .optimizers import all_params, group_of, install, itself, packed_groups, pieces_of, placed, prepared, whole_piece
from .ranks import all_gather, errors_on_all, rank_and_size, rank_in
from .states import agree, check_states, describe, fixed_paths, layout_of, local_states, said, schemas_of, state_key

TAG = 2**30 - 1  # of messages to rank 0: large enough that no user has it
NOT_READ, NOT_LOADED, NOT_MOVED = (f"the state can't be {done}" for done in ("put together", "loaded", "moved"))


@torch.no_grad()
def full_state_dict(optimizer: torch.optim.Optimizer, to_all: bool = False) -> dict[str, Any]:
    """The state_dict() of the plain torch optimizer, on rank 0, or on all ranks; on the CPU. Collective.

    Returns {} on the other ranks. For 16-bit parameters the state is in fp32; it has a "main_param" for each parameter
    that was updated, and whose state wasn't cleared since.

    Raises RuntimeError on every rank if a state can't be put together from the ranks' parts.
    """
    optimizer = itself(optimizer)
    group, dst = group_of(optimizer), None if to_all else 0
    rank, _ = rank_in(group) if to_all else rank_and_size(group)
    if rank < 0:
        return {}
    params, state = all_params(optimizer), {}
    with errors_on_all(NOT_READ, group):
        pieces = pieces_of(optimizer)
        states = local_states(optimizer, pieces)
    layouts, tensors = agreed(optimizer, states, pieces, NOT_READ, group)
    for index, wholes in sent(layouts, tensors, pieces, params, group, dst):
        kept, param = layouts[index].tensors, params[index]
        state[index] = unpack(layouts[index].tree, lambda _, key: on_cpu(wholes[key], kept[key], param))
    return {"state": state, "param_groups": packed_groups(optimizer)} if dst in (None, rank) else {}


@torch.no_grad()
def load_full_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Load the `state_dict` of rank 0: a plain torch optimizer's, or `full_state_dict`'s. Collective.

    Load the model first, because main parameters start from the 16-bit parameters if there is no "main_param". Raises
    ValueError on every rank, before anything is changed, if the state_dict is from another model or optimizer.
    """
    optimizer = itself(optimizer)
    group, params, plan, tensors = group_of(optimizer), all_params(optimizer), None, {}
    if rank_in(group)[0] == 0:
        try:
            plan, tensors = plan_of(optimizer, state_dict)
            pickle.dumps(plan)  # fails now, and not while the others wait
        except Exception as error:  # the other ranks wait for the plan
            plan = error if isinstance(error, ValueError) else ValueError(f"this state_dict can't be read: {error!r}")
    plan, *_ = all_gather(plan, group)
    if isinstance(plan, ValueError):
        raise plan
    groups, layouts = copy.deepcopy(plan)  # without other ranks it is the caller's own, which a step would change
    before = {index: whole_piece(params[index]) for index in layouts}
    moved(optimizer, layouts, tensors, before, groups, NOT_LOADED, group)


@torch.no_grad()
def reshard(optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | int | None) -> None:
    """Move parameters and state to the ranks of `process_group`. Collective over all ranks of the program.

    A rank outside of `process_group` keeps the current parameters and no state; a later group may include it again.
    What the optimizer doesn't know, such as buffers of the model, stays as it is on each rank. For a moment each rank
    holds one whole parameter.

    In a tensor-parallel model only the data-parallel dimension moves: each rank passes the new group of ranks that have
    the same parts of DTensors as itself, and keeps its own part.

    Raises TypeError on every rank if the optimizer is not of stage 3 or 4; RuntimeError between backward() and step(),
    or if ranks with the same parts are in several process groups, or if a state can't be put together.
    """
    optimizer = itself(optimizer)
    if not hasattr(optimizer, "move_to"):
        raise TypeError(f"reshard() moves optimizers of stages 3 and 4: a {type(optimizer).__name__} is none")
    params, before = all_params(optimizer), pieces_of(optimizer, in_whole=True)
    states = local_states(optimizer, before, all_main_params=True)
    sources, groups = agreed_sources(optimizer, process_group)
    layouts, tensors = agreed(optimizer, states, before, NOT_MOVED, None)
    for index, param in enumerate(params):
        if optimizer.rank < 0:
            param.grad = None  # a gradient of a rank outside counts nowhere, and would be part of the next step here
        for parts, source in sources.items():  # for ranks that join
            own, (offsets, sizes) = local(param), parts[index]
            dist.broadcast(own if (offsets, sizes) == box_of(param)[:2] else own.new_empty(sizes), src=source)
    del states  # and the memory that the parameters leave
    optimizer.move_to(process_group)
    moved(optimizer, layouts, tensors, before, groups, NOT_MOVED, None, in_whole=True)


def key_of(index):
    return state_key(f"parameter {index}")


def agreed(optimizer, states, pieces, what, group):
    """-> index -> Layout; key -> this rank's tensor: see `agree`."""
    params = all_params(optimizer)
    things = {key_of(index): (state, pieces[index]) for index, state in states.items()}
    names = [f"parameter {index}" for index in range(len(params))]
    by_key, tensors = agree(optimizer, things, names, what, group)
    layouts = {index: by_key[key_of(index)] for index in range(len(params)) if key_of(index) in by_key}
    for index, layout in layouts.items():
        stacked = [key for key, kept in layout.tensors.items() if kept.is_cut and kept.lead]
        if stacked and is_meshed(params[index]):
            path = stacked[0].removeprefix(key_of(index))
            raise ValueError(f"{said(key_of(index))} has {path}, which can't be kept: a stack of DTensors")
    return layouts, tensors


def moved(optimizer, layouts, tensors, before, groups, what, group, in_whole=False):
    """Install the states of `layouts`, of which this rank has `tensors` for its pieces `before`, and `groups`."""
    params = all_params(optimizer)
    with errors_on_all(what, group):  # takes all memory: what follows can't fail on one rank
        pieces = pieces_of(optimizer, in_whole)
        states, rooms = room_for(layouts, pieces, params)
        ready = prepared(optimizer, states, groups)
    for index, wholes in sent(layouts, tensors, before, params, group):
        for key in wholes if index in pieces else ():
            elements = slice(*pieces[index].in_whole) if layouts[index].tensors[key].is_cut else slice(None)
            rooms[key].copy_(wholes[key][..., elements].reshape(rooms[key].shape))
        if (key := f"{key_of(index)}main_param") in wholes and not in_whole:
            local(params[index]).copy_(wholes[key].view(local(params[index]).shape))
    with errors_on_all(what, group):
        install(optimizer, ready)


def sent(layouts, tensors, pieces, params, group, dst=None):
    """-> iterator, on rank `dst` (None: all), over (index, key -> whole tensor, (*lead, elements)). Collective.
    `tensors`: what this rank has of them, for its `pieces`. Without a base, a DTensor's whole is the local part."""
    rank, world_size = rank_and_size(group)
    is_receiver = dst in (None, rank)
    for index, layout in layouts.items():
        wholes, device = {}, params[index].device
        for key, kept in layout.tensors.items():
            if is_receiver:
                wholes[key] = torch.empty(*kept.lead, kept.owners[-1][2], dtype=kept.dtype, device=device)
            for owner, start, stop in kept.owners:
                part = kept.part(tensors[key], pieces[index], start, stop) if owner == rank else None
                if not is_receiver:
                    if owner == rank:  # a count of steps is on the CPU, which NCCL can't send from
                        dist.send(part.to(device).contiguous(), group=group, group_dst=dst, tag=TAG)
                    continue
                place = wholes[key][..., start:stop]
                there = place.contiguous()
                if owner == rank:
                    there.copy_(part)
                if dst is None and world_size > 1:
                    dist.broadcast(there, group=group, group_src=owner)
                elif owner != rank:
                    dist.recv(there, group=group, group_src=owner, tag=TAG)
                if there is not place:
                    place.copy_(there)
        if is_receiver:
            yield index, wholes
            wholes.clear()  # before there are the next ones


def room_for(layouts, pieces, params):
    """-> index -> state of each piece; key -> its tensor there, uninitialized, as `prepared` wants it."""
    states, rooms, largest = {}, {}, {}  # largest: device -> bytes of the largest state of a whole parameter there
    for index, layout in layouts.items():
        of_all = [math.prod(kept.lead) * kept.owners[-1][2] * kept.dtype.itemsize for kept in layout.tensors.values()]
        device = params[index].device
        largest[device] = max(largest.get(device, 0), sum(of_all))
        if index in pieces:
            main = pieces[index].main
            for key, kept in layout.tensors.items():
                room = torch.empty(kept.shape(main.shape), dtype=kept.dtype, device=main.device)
                rooms[key] = room if key == f"{key_of(index)}step" else placed(room, main)
            states[index] = unpack(layout.tree, lambda _, key: rooms[key])
    for device, n_bytes in largest.items():
        torch.empty(n_bytes, dtype=torch.uint8, device=device)  # there is memory for a whole parameter too
    return states, rooms


def on_cpu(whole, kept, param):
    """-> it in the shape of the parameter. For a DTensor, a DTensor on the device of its mesh."""
    whole = whole.cpu().view(kept.shape(local(param).shape))
    if not kept.is_cut or not is_meshed(param):
        return whole
    layout = {"shape": param.shape, "stride": param.stride()}
    return type(param).from_local(whole, param.device_mesh, param.placements, run_check=False, **layout)


def plan_of(optimizer, state_dict):
    """-> (groups, index -> Layout), key -> tensor. Raises ValueError: they aren't this optimizer's."""
    if not (isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()):
        raise ValueError("rank 0 must pass a dict with 'state' and 'param_groups', such as an optimizer's state_dict()")
    params, states, groups = all_params(optimizer), state_dict["state"], state_dict["param_groups"]
    theirs, ours = ([len(group["params"]) for group in those] for those in (groups, optimizer.param_groups))
    if theirs != ours:
        raise ValueError(f"this state_dict has groups of {theirs} parameters, this optimizer has {ours}")
    if unknown := states.keys() - range(len(params)):
        raise ValueError(f"this state_dict has a state of {min(unknown, key=str)!r}: parameters must be indices")
    schemas, layouts, tensors = schemas_of(optimizer, groups), {}, {}
    check_states(schemas, [f"parameter {index}" for index in range(len(params))], states,
                 {index: param.shape for index, param in enumerate(params)})
    for index, state in sorted(states.items()):
        part, its = describe(state, whole_piece(params[index]), key_of(index))
        refuse_other_parts(state, params[index], f"parameter {index}")
        layouts[index] = layout_of([(0, *part)], fixed_paths(schemas[index]), key_of(index))
        tensors.update(its)
    return (groups, layouts), tensors


def refuse_other_parts(state, param, name):
    """Raise ValueError unless DTensors in a state are of the same parts as `param`."""
    for path, value in pack_apart(state)[1].items():
        lead, its_lead = lead_of(value.shape, param.shape), lead_of(local(value).shape, local(param).shape)
        if lead != its_lead or lead and is_meshed(param):
            raise ValueError(f"{path} of {name} is a {type(value).__name__} in this state_dict, the parameter is a "
                             f"{type(param).__name__}, with another part on this rank")


def agreed_sources(optimizer, process_group):
    """-> boxes of a rank's parts -> who sends these; the parameter groups. Raises on every rank if it can't move."""
    error, to = None, []
    try:
        others = None, dist.GroupMember.NON_GROUP_MEMBER
        if not isinstance(process_group, dist.ProcessGroup) and process_group not in others:
            kind = type(process_group).__name__
            raise TypeError(f'process_group must be a ProcessGroup, such as mesh["dp"].get_group(), not a {kind}')
        if dist.get_rank(process_group) >= 0:
            to = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    except (TypeError, ValueError) as refusal:  # it is something else, or was destroyed
        error = refusal
    parts = tuple(box_of(param)[:2] for param in all_params(optimizer))
    everyone = all_gather((packed_groups(optimizer), optimizer.has_grads, optimizer.rank, to, parts, error), None)
    all_groups, all_have_grads, ranks, all_to, all_parts, errors = zip(*everyone)
    if any(errors):
        raise error or next(filter(None, errors))
    if any(all_have_grads):
        raise RuntimeError("reshard() between backward() and step(): call step() or zero_grad() first")
    if len({tuple(len(group["params"]) for group in groups) for groups in all_groups}) > 1:
        raise RuntimeError("the ranks have different parameter groups: some of them have called add_param_group()")
    firsts = [rank for rank, place in enumerate(ranks) if place == 0]
    sources = {all_parts[rank]: rank for rank in firsts}
    if len(sources) < len(firsts):
        raise RuntimeError("reshard() of several process groups: each may have trained something else, as experts do")
    members = [[rank for rank, theirs in enumerate(all_to) if theirs and all_parts[rank] == parts] for parts in sources]
    if not all(members) or any(sorted(all_to[rank]) != those for those in members for rank in those):
        raise RuntimeError("reshard() to a process group must be called with it, and no other, on each of its ranks")
    if len(set(map(len, members))) > 1:
        raise RuntimeError(f"reshard() to process groups of {[*map(len, members)]} ranks: tensor-parallel ranks, which "
                           "have other parts of DTensors, must move to as many")
    return sources, all_groups[firsts[0]]
