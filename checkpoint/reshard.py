"""Parameters and state move to other ranks while a program runs, and without a file. Stages 3 and 4."""

import torch
import torch.distributed as dist

from .full_state import filled, gather
from .optimizers import all_params, install, itself, packed_groups, pieces_of, refuse_no_group
from .states import local_states


@torch.no_grad()
def reshard(optimizer: torch.optim.Optimizer, process_group: dist.ProcessGroup | int | None) -> None:
    """Move to the ranks of `process_group`, with parameters and state. Collective over all ranks there are.

    A rank outside of `process_group` has the parameters of this moment and no state; a later group may have it
    again. What the optimizer doesn't know, such as buffers of the model, stays as it is on each rank.

    Raises:
        TypeError: the optimizer is none of stages 3 and 4.
        RuntimeError: between backward() and step(); or the ranks are in several process groups so far, or now; or
            some have a state for their part of a parameter, and others don't; or there are DTensors. On every rank.
    """
    optimizer = itself(optimizer)
    if not hasattr(optimizer, "move_to"):
        raise TypeError(f"reshard() moves optimizers of stages 3 and 4: a {type(optimizer).__name__} is none")
    params = all_params(optimizer)
    if any(hasattr(param, "device_mesh") for param in params):
        raise RuntimeError("reshard() can't move DTensors: another group of ranks is another mesh")
    states = local_states(optimizer, pieces_of(optimizer), all_main_params=True)
    source, groups = agreed_source(optimizer, process_group)
    wholes = gather(optimizer, states, None, dst=None)
    for param in params:
        if optimizer.rank < 0:
            param.grad = None  # a gradient of a rank outside counts nowhere, and would be part of the next step here
        dist.broadcast(param, src=source)  # to the ranks that join
    del states  # and the memory that the parameters leave
    optimizer.move_to(process_group)
    install(optimizer, own_pieces(optimizer, wholes), groups)


def own_pieces(optimizer, wholes) -> dict:
    """-> index -> this rank's part of what `wholes` yields."""
    pieces, states = pieces_of(optimizer), {}
    for index, tree, found in wholes:
        if index in pieces:
            states[index] = filled(tree, lambda path: found[path].cut_for(pieces[index]))
    return states


def agreed_source(optimizer, process_group):
    """-> the rank that the parameters come from, and its groups. Raises on every rank what speaks against a move."""
    error, to = None, []
    try:
        refuse_no_group(process_group)
        if dist.get_rank(process_group) >= 0:
            to = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    except (TypeError, ValueError) as refusal:  # it is something else, or was destroyed
        error = refusal
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (packed_groups(optimizer), optimizer.has_grads, optimizer.rank, to, error))
    all_groups, all_have_grads, ranks, all_to, errors = zip(*everyone)
    if any(errors):
        raise error or next(filter(None, errors))
    if any(all_have_grads):
        raise RuntimeError("reshard() between backward() and step(): call step() or zero_grad() first")
    if len({tuple(len(group["params"]) for group in groups) for groups in all_groups}) > 1:
        raise RuntimeError("the ranks have different parameter groups: some of them have called add_param_group()")
    if ranks.count(0) > 1:
        raise RuntimeError("reshard() of several process groups: each may have trained something else, as experts do")
    members = [rank for rank, theirs in enumerate(all_to) if theirs]
    if not members or any(sorted(all_to[rank]) != members for rank in members):
        raise RuntimeError("reshard() to a process group must be called with it, and no other, on each of its ranks")
    return ranks.index(0), all_groups[ranks.index(0)]
