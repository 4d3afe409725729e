"""Moves parameters and state to other ranks while a program runs, without a file. Stages 3 and 4."""

import torch
import torch.distributed as dist

from .boxes import box_of
from .full_state import filled, gather
from .optimizers import all_params, install, itself, local, packed_groups, pieces_in_whole, prepared
from .states import local_states


@torch.no_grad()
def reshard(optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | int | None) -> None:
    """Move parameters and state to the ranks of `process_group`. Collective over all ranks of the program.

    A rank outside of `process_group` keeps the current parameters and no state; a later group may include it again.
    What the optimizer doesn't know, such as buffers of the model, stays as it is on each rank. For a moment each rank
    holds one whole parameter.

    In a tensor-parallel model only the data-parallel dimension moves: each rank passes the new group of ranks that have
    the same parts of DTensors as itself, and keeps its own part.

    Raises, on every rank:
        TypeError: the optimizer is not of stage 3 or 4.
        RuntimeError: between backward() and step(); or ranks with the same parts are in several process groups, before
            or after the move; or some have a state for their part of a parameter, and others don't.
    """
    optimizer = itself(optimizer)
    if not hasattr(optimizer, "move_to"):
        raise TypeError(f"reshard() moves optimizers of stages 3 and 4: a {type(optimizer).__name__} is none")
    params = all_params(optimizer)
    pieces = pieces_in_whole(optimizer)
    states = local_states(optimizer, pieces, all_main_params=True)
    sources, groups = agreed_sources(optimizer, process_group)
    wholes = gather(optimizer, states, pieces, None, dst=None)
    for index, param in enumerate(params):
        if optimizer.rank < 0:
            param.grad = None  # a gradient of a rank outside counts nowhere, and would be part of the next step here
        bring_to_all(param, {parts[index]: source for parts, source in sources.items()})
    del states  # and the memory that the parameters leave
    optimizer.move_to(process_group)
    pieces, states = pieces_in_whole(optimizer), {}
    for index, tree, found in wholes:
        if index in pieces:
            states[index] = filled(tree, lambda path: found[path].cut_for(pieces[index]))
    install(optimizer, prepared(optimizer, states, groups))


def bring_to_all(param, sources):
    """Broadcast `param`, for ranks that join. `sources`: (offsets, sizes) -> a rank that has this part of `param`."""
    own = local(param)
    for part, source in sources.items():
        is_own = part == box_of(param)[:2]
        dist.broadcast(own if is_own else own.new_empty(part[1]), src=source)


def agreed_sources(optimizer, process_group):
    """-> parts -> the rank that sends them; the parameter groups. Raises on every rank if a move is impossible.

    Parts are what a rank has of each parameter; they are the same on all ranks unless there are DTensors.
    """
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
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (packed_groups(optimizer), optimizer.has_grads, optimizer.rank, to, parts, error))
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
