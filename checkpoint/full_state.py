"""An optimizer's state as one dict, or on other ranks: assembled from its pieces and cut again.

All of it goes through memory, the state of one parameter at a time. So a rank holds its old part, its new part, the
result if it wants one, and one whole parameter. Large models go by files.
"""

import copy
import math
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from guard.schema import lead_of

from .optimizers import (
    Piece,
    all_params,
    group_of,
    indexed_groups,
    install,
    itself,
    local,
    offsets_of,
    paths_of_common,
    pieces_of,
    placed,
    prepared,
    schemas_of,
)
from .ranks import all_gather, errors_on_all, rank_and_size, rank_in
from .states import agree, check_states, filled, flat, layout_of, local_states, told_of, tree_of

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
    refuse_several_groups(optimizer)
    group, dst = group_of(optimizer), None if to_all else 0
    rank = rank_in(group) if to_all else rank_and_size(group)[0]
    if rank < 0:
        return {}
    with errors_on_all(NOT_READ, group):
        pieces = pieces_of(optimizer)
        states = local_states(optimizer, pieces)
    layouts = agreed(optimizer, states, pieces, NOT_READ, group)
    params, values = all_params(optimizer), {index: flat(state) for index, state in states.items()}
    state = {}
    for index, layout in layouts.items():
        sent = wholes(layout, values.get(index), pieces.get(index), params[index], group, dst)
        its_values = {path: on_cpu(whole, params[index], path in layout.cut) for path, whole in sent}
        if dst in (None, rank):
            state[index] = filled(layout.tree, its_values)
    return {"state": state, "param_groups": indexed_groups(optimizer)} if dst in (None, rank) else {}


@torch.no_grad()
def load_full_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Load the `state_dict` of rank 0: a plain torch optimizer's, or `full_state_dict`'s. Collective.

    Load the model first, because main parameters start from the 16-bit parameters if there is no "main_param". Raises
    ValueError on every rank, before anything is changed, if the state_dict is from another model or optimizer.
    """
    optimizer = itself(optimizer)
    refuse_several_groups(optimizer)
    group, params, plan, values = group_of(optimizer), all_params(optimizer), None, {}
    if rank_in(group) == 0:
        try:
            plan, values = plan_of(optimizer, state_dict)
            pickle.dumps(plan)  # fails now, and not while the others wait
        except Exception as error:  # the other ranks wait for the plan
            plan = error if isinstance(error, ValueError) else ValueError(f"this state_dict can't be read: {error!r}")
    plan, *_ = all_gather(plan, group)
    if isinstance(plan, ValueError):
        raise plan
    groups, layouts = copy.deepcopy(plan)  # without other ranks it is the caller's own, which a step would change
    before = {index: whole_piece(params[index]) for index in layouts}
    exchange(optimizer, layouts, values, before, groups, NOT_LOADED, group, into_params=True)


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
    params, before = all_params(optimizer), pieces_of(optimizer)
    with errors_on_all(NOT_MOVED, None):
        states = local_states(optimizer, before, all_main_params=True)
    sources, groups = agreed_sources(optimizer, process_group)
    layouts = agreed(optimizer, states, before, NOT_MOVED, None)
    for index, param in enumerate(params):
        if optimizer.rank < 0:
            param.grad = None  # a gradient of a rank outside counts nowhere, and would be part of the next step here
        for parts, source in sources.items():  # for ranks that join
            offsets, shape = parts[index]
            is_own = (offsets, shape) == part_of(param)
            dist.broadcast(local(param) if is_own else local(param).new_empty(shape), src=source)
    values = {index: flat(state) for index, state in states.items()}
    del states  # and the memory that the parameters leave
    optimizer.move_to(process_group)
    exchange(optimizer, layouts, values, before, groups, NOT_MOVED, None)


def refuse_several_groups(optimizer):
    if len({*getattr(optimizer, "n_ranks", ())}) > 1:
        raise RuntimeError("the optimizers have process groups of their own: save and load them one by one")


def agreed(optimizer, states, pieces, what, group):
    """Return index -> Layout of each state that there is: see `agree`."""
    names = [f"parameter {index}" for index in range(len(all_params(optimizer)))]
    layouts = agree(optimizer, states, pieces, names, what, group)
    layouts = {index: layouts[name] for index, name in enumerate(names) if layouts.get(name) and layouts[name].tree}
    for index, layout in layouts.items():
        stacked = [path for path, entry in layout.cut.items() if entry.lead]
        if stacked and isinstance(all_params(optimizer)[index], DTensor):
            raise ValueError(f"the state of {names[index]} has {stacked[0]}, which can't be kept: a stack of DTensors")
    return layouts


def exchange(optimizer, layouts, values, before, groups, what, group, into_params=False):
    """Install the states of `layouts`, of which this rank has `values` for its pieces `before`, and `groups`."""
    params = all_params(optimizer)
    with errors_on_all(what, group):  # takes all memory: what follows can't fail on one rank
        pieces = pieces_of(optimizer)
        rooms = {index: room_for(layouts[index], piece) for index, piece in pieces.items() if index in layouts}
        ready = prepared(optimizer, {index: filled(layouts[index].tree, room) for index, room in rooms.items()}, groups)
        refuse_too_large(layouts, params)
    for index, layout in layouts.items():
        for path, whole in wholes(layout, values.get(index), before.get(index), params[index], group):
            if index in pieces and isinstance(whole, torch.Tensor):
                elements = slice(*pieces[index][1:3]) if path in layout.cut else slice(None)
                room = rooms[index][path]
                room.copy_((whole[..., elements] if path in layout.cut else whole).reshape(room.shape))
            if path == "main_param" and into_params:
                local(params[index]).copy_(whole.view(local(params[index]).shape))
            del whole
    with errors_on_all(what, group):
        install(optimizer, ready)


def room_for(layout, piece) -> dict:
    """Return path -> value in the state of a piece, tensors uninitialized, as `prepared` wants them."""
    room = {path: entry.value for path, (_, entry) in layout.common.items()}
    common = [(path, entry) for path, (_, entry) in layout.common.items() if entry.spec]
    for path, entry in [*layout.cut.items(), *common]:
        shape = (*entry.lead, *piece.main.shape) if path in layout.cut else entry.spec.shape
        tensor = torch.empty(shape, dtype=entry.spec.dtype, device=piece.main.device)
        room[path] = tensor if path == "step" else placed(tensor, piece.main)
    return room


def refuse_too_large(layouts, params):
    """Raise an error if there is no memory for the largest state of a whole parameter."""
    largest = {}  # device -> bytes
    for index, layout in layouts.items():
        n_bytes = sum(math.prod(entry.lead) * params[index].numel() * entry.spec.dtype.itemsize
                      for entry in layout.cut.values())
        largest[params[index].device] = max(largest.get(params[index].device, 0), n_bytes)
    for device, n_bytes in largest.items():
        torch.empty(n_bytes, dtype=torch.uint8, device=device)


def wholes(layout, values, piece, param, group, dst=None):
    """Return an iterator over (path, value) of a parameter's state on rank `dst`, None: on all. Collective.

    A tensor that is cut has the elements of the whole parameter, or of a DTensor's local part: (*lead, elements).
    `values`: path -> what this rank has for its `piece`.
    """
    rank, _ = rank_and_size(group)
    is_receiver, device, own_offsets = dst in (None, rank), param.device, offsets_of(param)

    def room(*shape):
        return torch.empty(*entry.lead, *shape, dtype=entry.spec.dtype, device=device) if is_receiver else None

    for path, entry in layout.cut.items():
        whole = room(local(param).numel())
        for owner, offsets, start, stop in layout.parts:
            place = whole[..., start:stop] if is_receiver and offsets == own_offsets else None
            part = place if place is not None and place.is_contiguous() else room(stop - start)
            if owner == rank:
                own = part_of_state(local(values[path]), entry.lead, piece, start, stop).to(device).contiguous()
                part = own if place is None else part.copy_(own)
            send(part, owner, dst, group)
            if place is not None and part is not place:
                place.copy_(part)
        if is_receiver:
            yield path, whole
        del whole, place, part  # before there is the next one
    for path, (owner, entry) in layout.common.items():
        value = entry.value
        if entry.spec:
            value = torch.empty(entry.spec.shape, dtype=entry.spec.dtype, device=device) if is_receiver else None
            if owner == rank:
                value = local(values[path]).to(device).contiguous()
            send(value, owner, dst, group)
        if is_receiver:
            yield path, value


def part_of_state(value, lead, piece, start, stop):
    """Return (*lead, stop - start): flat elements `start` to `stop`, of a tensor that has those of `piece`."""
    flat = value if value.dim() == len(lead) + 1 else value.reshape(*lead, -1)
    return flat if (start, stop) == piece[1:3] else flat[..., start - piece.start : stop - piece.start]


def send(tensor, owner, dst, group):
    """Send the tensor of rank `owner` to rank `dst`, None: to all. Collective."""
    rank, world_size = rank_and_size(group)
    if dst is None and world_size > 1:
        dist.broadcast(tensor, group=group, group_src=owner)
    elif owner != dst is not None and rank == owner:
        dist.send(tensor, group=group, group_dst=dst, tag=TAG)
    elif owner != dst is not None and rank == dst:
        dist.recv(tensor, group=group, group_src=owner, tag=TAG)


def on_cpu(whole, param, is_cut):
    """Return a value on the CPU, in the shape of the parameter. For a DTensor, a DTensor on the device of its mesh."""
    if not isinstance(whole, torch.Tensor):
        return whole
    whole = whole.cpu().clone() if whole.dim() == 0 else whole.cpu()
    if not is_cut:
        return whole
    whole = whole.view((*whole.shape[:-1], *local(param).shape))
    if not isinstance(param, DTensor):
        return whole
    layout = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(whole, param.device_mesh, param.placements, run_check=False, **layout)


def whole_piece(param) -> Piece:
    return Piece(param, 0, local(param).numel(), local(param))


def part_of(param):
    """Return where the local part of a DTensor begins, and its shape."""
    return offsets_of(param), tuple(local(param).shape)


def plan_of(optimizer, state_dict):
    """Return (groups, index -> Layout), index -> path -> value. Raises ValueError: they aren't this optimizer's."""
    if not (isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()):
        raise ValueError("rank 0 must pass a dict with 'state' and 'param_groups', such as an optimizer's state_dict()")
    params, states, groups = all_params(optimizer), state_dict["state"], state_dict["param_groups"]
    given, own = ([len(group["params"]) for group in listed] for listed in (groups, optimizer.param_groups))
    if given != own:
        raise ValueError(f"this state_dict has groups of {given} parameters, this optimizer has {own}")
    if unknown := states.keys() - range(len(params)):
        raise ValueError(f"this state_dict has a state of {min(unknown, key=str)!r}: parameters must be indices")
    schemas, layouts, values = schemas_of(optimizer, groups), {}, {}
    check_states(schemas, [f"parameter {index}" for index in range(len(params))], states,
                 {index: param.shape for index, param in enumerate(params)})
    for index, state in sorted(states.items()):
        piece, name, values[index] = whole_piece(params[index]), f"parameter {index}", flat(state)
        refuse_other_parts(values[index], params[index], name)
        entries = {path: told_of(value, piece) for path, value in values[index].items()}
        where = offsets_of(params[index]), piece.start, piece.stop
        layouts[index] = layout_of(name, {where: (0, tree_of(state), entries)}, paths_of_common(schemas[index]))
    return (groups, layouts), values


def refuse_other_parts(values, param, name):
    """Raise ValueError unless DTensors in a state are of the same parts as `param`."""
    for path, value in values.items():
        if isinstance(value, torch.Tensor):
            lead, own_lead = lead_of(value.shape, param.shape), lead_of(local(value).shape, local(param).shape)
            if lead != own_lead or lead and isinstance(param, DTensor):
                raise ValueError(f"{path} of {name} is a {type(value).__name__} in this state_dict, the parameter "
                                 f"is a {type(param).__name__}, with another part on this rank")


def agreed_sources(optimizer, process_group):
    """Return parts of a rank -> who sends these; the parameter groups. Raises on every rank if it can't move."""
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
    parts = tuple(part_of(param) for param in all_params(optimizer))
    everyone = all_gather((indexed_groups(optimizer), optimizer.has_grads, optimizer.rank, to, parts, error), None)
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
    members = [[rank for rank, to in enumerate(all_to) if to and all_parts[rank] == parts] for parts in sources]
    if not all(members) or any(sorted(all_to[rank]) != ranks for ranks in members for rank in ranks):
        raise RuntimeError("reshard() to a process group must be called with it, and no other, on each of its ranks")
    if len(set(map(len, members))) > 1:
        raise RuntimeError(f"reshard() to process groups of {[*map(len, members)]} ranks: tensor-parallel ranks, which "
                           "have other parts of DTensors, must move to as many")
    return sources, all_groups[firsts[0]]
