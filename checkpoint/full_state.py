"""An optimizer's state as one dict, or on other ranks: put together from its pieces and cut again.

All of it goes through memory, the state of one parameter at a time: ranks send each other pickled tensors of the CPU. A
rank holds its old part, its new part, one whole parameter's state a few times, and the result if it wants one. When an
optimizer moves, the first of its ranks holds the result. Large models go by files.
"""

import copy
import pickle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from guard.schema import leading_dims_of

from .optimizers import (
    all_params,
    as_python,
    group_of,
    indexed_groups,
    install,
    local,
    offsets_of,
    paths_of_common,
    pieces_of,
    prepare,
    schemas_of,
    unwrapped_optimizer,
)
from .ranks import all_gather, errors_on_all, rank_and_size, saver_of
from .states import agree, check_states, filled, flat, local_states, refuse_unkept, tree_of

NOT_READ, NOT_LOADED, NOT_MOVED = (f"the state can't be {done}" for done in ("put together", "loaded", "moved"))


class Whole(NamedTuple):
    """The state of a whole parameter, or of a DTensor's local part."""

    tree: object  # see `tree_of`
    values: dict  # by path
    leads: dict  # path of a tensor with an element for each of the parameter's -> its dimensions before those


@torch.no_grad()
def full_state_dict(optimizer: torch.optim.Optimizer, to_all: bool = False) -> dict[str, Any]:
    """The state_dict() of the plain torch optimizer, on rank 0 of its process group, or on all ranks. Collective.

    Tensors are on the CPU. Returns {} on the other ranks. For 16-bit parameters the state is in fp32; it has a
    "main_param" for each parameter that was updated, and whose state wasn't cleared since.

    Raises RuntimeError on every rank if a state can't be put together from the ranks' parts.
    """
    optimizer = unwrapped_optimizer(optimizer)
    refuse_several_groups(optimizer)
    rank, _ = rank_and_size(group_of(optimizer))
    if rank < 0 and not to_all:
        return {}
    params, state = all_params(optimizer), {}
    for index, (tree, values, leads) in whole_states(optimizer, to_all):
        shaped = {path: in_shape(values[path], params[index]) for path in leads}
        state[index] = filled(tree, {**values, **shaped})
    if rank > 0 and not to_all:
        return {}
    return {"state": state, "param_groups": indexed_groups(optimizer)}


@torch.no_grad()
def load_full_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Load the `state_dict` of rank 0: a plain torch optimizer's, or `full_state_dict`'s. Collective.

    Load the model first, because main parameters start from the 16-bit parameters if there is no "main_param". Raises
    ValueError on every rank, before anything is changed, if the state_dict is from another model or optimizer.
    """
    optimizer = unwrapped_optimizer(optimizer)
    refuse_several_groups(optimizer)
    group = saver_of(group_of(optimizer)).group
    source = first_rank(optimizer, group)
    groups = None
    wholes = {}
    if rank_and_size(group)[0] == source:
        try:
            wholes = wholes_in(state_dict, optimizer)
            groups = state_dict["param_groups"]
            pickle.dumps(groups)  # fails now, and not while the others wait
        except Exception as error:  # the other ranks wait for the groups
            groups = error if isinstance(error, ValueError) else ValueError(f"this state_dict can't be read: {error!r}")
    groups = all_gather(groups, group)[source]
    if isinstance(groups, ValueError):
        raise groups
    groups = copy.deepcopy(groups)  # without other ranks they are the caller's own, which a step would change
    install_wholes(optimizer, wholes, groups, [source], source, NOT_LOADED, group, into_params=True)


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
    params, group = all_params(optimizer), saver_of(None).group
    sources, groups = agreed_sources(optimizer, process_group, group)
    own_source = sources[parts_of(params)]
    with errors_on_all(NOT_MOVED, group):
        wholes = dict(whole_states(optimizer, all_main_params=True)) if optimizer.rank >= 0 else {}
    for index, param in enumerate(params):
        if optimizer.rank < 0:
            param.grad = None  # a gradient of a rank outside counts nowhere, and would be part of the next step here
        for parts, source in sources.items():  # for ranks that join
            value = local(param) if source == own_source else local(param).new_empty(parts[index][1])
            dist.broadcast(value, src=source)
    optimizer.move_to(process_group)
    install_wholes(optimizer, wholes, groups, sources.values(), own_source, NOT_MOVED, group)


def refuse_several_groups(optimizer):
    if len({*getattr(optimizer, "n_ranks", ())}) > 1:
        raise RuntimeError("the optimizers have process groups of their own: save and load them one by one")


def first_rank(optimizer, group):
    """Return the rank that the first of the optimizer's process group has in `group`, whose order may be another."""
    if group is None:
        return 0
    return dist.get_group_rank(group, dist.get_global_rank(group_of(optimizer) or dist.group.WORLD, 0))


def whole_states(optimizer, to_all=False, all_main_params=False):
    """Iterate over (index, Whole) of each state that there is, on the first rank or on all. Collective."""
    group = saver_of(group_of(optimizer)).group
    params = all_params(optimizer)
    rank, _ = rank_and_size(group)
    names = [f"parameter {index}" for index in range(len(params))]
    dst = None if to_all else first_rank(optimizer, group)
    with errors_on_all(NOT_READ, group):
        pieces = pieces_of(optimizer)
        states = local_states(optimizer, pieces, all_main_params)
    layouts = agree(optimizer, states, pieces, names, NOT_READ, group)
    for index, (tree, leads, parts) in [(index, layouts[name]) for index, name in enumerate(names) if name in layouts]:
        stacked = [path for path, lead in leads.items() if lead]
        if stacked and isinstance(params[index], DTensor):
            raise ValueError(f"the state of {names[index]} has {stacked[0]}, which can't be kept: a stack of DTensors")
        values = {}
        for part in parts if tree else ():
            own = Whole(tree, flat(states[index]), leads) if part.rank == rank else None
            for path, value in passed_on(own, part.rank, dst, NOT_READ, group).values.items():
                if path not in leads:
                    values.setdefault(path, value)
                    continue
                if path not in values:
                    values[path] = value.new_empty(*leads[path], local(params[index]).numel())
                values[path][..., part.start : part.stop] = value.reshape(*leads[path], -1)
        if tree and dst in (None, rank):
            yield index, Whole(tree, values, leads)


def passed_on(whole, owner, dst, error_prefix, group):
    """Return the Whole of rank `owner` on rank `dst`, None: on all; elsewhere an empty one. Collective."""
    rank, world_size = rank_and_size(group)
    box = [Whole({}, {}, {})]
    with errors_on_all(error_prefix, group):
        if rank == owner:
            box = [whole._replace(values=copied(whole.values))]
    if dst is None and world_size > 1:
        dist.broadcast_object_list(box, group=group, group_src=owner)
    elif owner != dst is not None and rank == owner:
        dist.send_object_list(box, group=group, group_dst=dst)
    elif owner != dst is not None and rank == dst:
        dist.recv_object_list(box, group=group, group_src=owner)
    return box[0] if dst in (None, rank) else Whole({}, {}, {})


def copied(values):
    return {path: local(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else as_python(value)
            for path, value in values.items()}


def install_wholes(optimizer, wholes, groups, sources, own_source, error_prefix, group, into_params=False):
    """Install `groups`, and this rank's pieces of the `wholes`, index -> Whole, of rank `own_source`. Collective.

    `sources`: the ranks that have wholes. into_params: main parameters replace the model's parameters, too.
    """
    params = all_params(optimizer)
    main_params = []
    new_states = {}
    with errors_on_all(error_prefix, group):
        pieces = pieces_of(optimizer)
    all_indices = all_gather([*wholes], group)
    for source, index in [(rank, index) for rank in sources for index in all_indices[rank]]:
        whole = passed_on(wholes.get(index), source, None, error_prefix, group)
        with errors_on_all(error_prefix, group):
            if source == own_source and into_params and "main_param" in whole.values:
                main_params.append((local(params[index]), whole.values["main_param"].to(params[index].dtype)))
            if source == own_source and index in pieces:
                new_states[index] = cut_state(whole, pieces[index])
    with errors_on_all(error_prefix, group):
        ready = prepare(optimizer, new_states, groups)
    with errors_on_all(error_prefix, group):
        for param, value in main_params:
            param.copy_(value.view(param.shape))
        install(optimizer, ready)


def cut_state(whole, piece):
    """Return the state of a piece."""
    cut = {}
    for path, lead in whole.leads.items():
        value = whole.values[path].reshape(*lead, -1)[..., piece.start : piece.stop]
        cut[path] = value.reshape((*lead, *piece.main.shape)).clone()
    return filled(whole.tree, {**whole.values, **cut})


def in_shape(value, param):
    """Return (*lead, elements) in the shape of a parameter. For a DTensor, a DTensor on the device of its mesh."""
    value = value.view((*value.shape[:-1], *local(param).shape))
    if not isinstance(param, DTensor):
        return value
    layout = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(value, param.device_mesh, param.placements, run_check=False, **layout)


def wholes_in(state_dict, optimizer) -> dict[int, Whole]:
    """Return index -> Whole of the states in `state_dict`. Raises ValueError: they aren't this optimizer's."""
    if not (isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()):
        raise ValueError("rank 0 must pass a dict with 'state' and 'param_groups', such as an optimizer's state_dict()")
    params = all_params(optimizer)
    states = state_dict["state"]
    groups = state_dict["param_groups"]
    given, own = ([len(group["params"]) for group in listed] for listed in (groups, optimizer.param_groups))
    if given != own:
        raise ValueError(f"this state_dict has groups of {given} parameters, this optimizer has {own}")
    if unknown := states.keys() - range(len(params)):
        raise ValueError(f"this state_dict has a state of {min(unknown, key=str)!r}: parameters must be indices")
    schemas = schemas_of(optimizer, groups)
    names = [f"parameter {index}" for index in range(len(params))]
    check_states(schemas, names, states, {index: param.shape for index, param in enumerate(params)})
    wholes = {}
    for index, state in sorted(states.items()):
        whole = Whole(tree_of(state), flat(state), {})
        refuse_unkept(whole.values, names[index])
        for path, value in whole.values.items():
            if not isinstance(value, torch.Tensor):
                continue
            lead = leading_dims_of(local(value).shape, local(params[index]).shape)
            if lead != leading_dims_of(value.shape, params[index].shape) or lead and isinstance(params[index], DTensor):
                raise ValueError(f"{path} of {names[index]} is a {type(value).__name__} in this state_dict, the "
                                 f"parameter is a {type(params[index]).__name__}, with another part on this rank")
            if lead is not None and path not in paths_of_common(schemas[index]):
                whole.leads[path] = lead
        wholes[index] = whole
    return wholes


def parts_of(params) -> tuple:
    """Return where the local part of each DTensor begins, and its shape."""
    return tuple((offsets_of(param), tuple(local(param).shape)) for param in params)


def agreed_sources(optimizer, process_group, group):
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
    own = indexed_groups(optimizer), optimizer.has_grads, optimizer.rank, to, parts_of(all_params(optimizer)), error
    all_groups, all_have_grads, ranks, all_to, all_parts, errors = zip(*all_gather(own, group))
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
