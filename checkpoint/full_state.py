"""An optimizer's state as one dict, or on other ranks: put together from its pieces and cut again.

All of it goes through memory, the state of one parameter at a time: ranks send each other pickled tensors of the CPU. A
rank holds its old part, its new part, the result if it wants one, and one whole parameter's state a few times. Large
models go by files.
"""

import copy
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from guard.schema import leading_dims_of

from .optimizers import (
    Piece,
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
from .states import PieceReport, agree, check_states, entry_of, filled, flat, layout_of, local_states, tree_of

NOT_READ, NOT_LOADED, NOT_MOVED = (f"the state can't be {done}" for done in ("put together", "loaded", "moved"))


@torch.no_grad()
def full_state_dict(optimizer: torch.optim.Optimizer, to_all: bool = False) -> dict[str, Any]:
    """The state_dict() of the plain torch optimizer, on rank 0, or on all ranks; on the CPU. Collective.

    Returns {} on the other ranks. For 16-bit parameters the state is in fp32; it has a "main_param" for each parameter
    that was updated, and whose state wasn't cleared since.

    Raises RuntimeError on every rank if a state can't be put together from the ranks' parts.
    """
    optimizer = unwrapped_optimizer(optimizer)
    refuse_several_groups(optimizer)
    if not to_all and rank_and_size(group_of(optimizer))[0] < 0:
        return {}
    group = saver_of(group_of(optimizer)).group
    with errors_on_all(NOT_READ, group):
        pieces = pieces_of(optimizer)
        states = local_states(optimizer, pieces)
    layouts, params = agreed(optimizer, states, pieces, NOT_READ, group), all_params(optimizer)
    dst = None if to_all else 0
    state = {}
    for index, values in whole_states(layouts, states, pieces, params, NOT_READ, group, dst):
        cut = {path: in_shape(values[path], params[index]) for path in layouts[index].cut}
        state[index] = filled(layouts[index].tree, {**values, **cut})
    is_receiver = dst in (None, rank_and_size(group)[0])
    return {"state": state, "param_groups": indexed_groups(optimizer)} if is_receiver else {}


@torch.no_grad()
def load_full_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Load the `state_dict` of rank 0: a plain torch optimizer's, or `full_state_dict`'s. Collective.

    Load the model first, because main parameters start from the 16-bit parameters if there is no "main_param". Raises
    ValueError on every rank, before anything is changed, if the state_dict is from another model or optimizer.
    """
    optimizer = unwrapped_optimizer(optimizer)
    refuse_several_groups(optimizer)
    group, plan, states = saver_of(group_of(optimizer)).group, None, {}
    if rank_and_size(group)[0] == 0:
        try:
            plan, states = plan_of(optimizer, state_dict)
            pickle.dumps(plan)  # fails now, and not while the others wait
        except Exception as error:  # the other ranks wait for the plan
            plan = error if isinstance(error, ValueError) else ValueError(f"this state_dict can't be read: {error!r}")
    plan, *_ = all_gather(plan, group)
    if isinstance(plan, ValueError):
        raise plan
    groups, layouts = copy.deepcopy(plan)  # without other ranks it is the caller's own, which a step would change
    pieces = {index: whole_piece(param) for index, param in enumerate(all_params(optimizer))}
    install_states(optimizer, layouts, states, pieces, groups, NOT_LOADED, group, into_params=True)


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
    params, pieces, group = all_params(optimizer), pieces_of(optimizer), saver_of(None).group
    with errors_on_all(NOT_MOVED, group):
        states = local_states(optimizer, pieces, all_main_params=True)
    sources, groups = agreed_sources(optimizer, process_group, group)
    layouts = agreed(optimizer, states, pieces, NOT_MOVED, group)
    for index, param in enumerate(params):
        if optimizer.rank < 0:
            param.grad = None  # a gradient of a rank outside counts nowhere, and would be part of the next step here
        for parts, source in sources.items():  # for ranks that join
            offsets, shape = parts[index]
            is_own = (offsets, shape) == part_of(param)
            dist.broadcast(local(param) if is_own else local(param).new_empty(shape), src=source)
    optimizer.move_to(process_group)
    install_states(optimizer, layouts, states, pieces, groups, NOT_MOVED, group)


def refuse_several_groups(optimizer):
    if len({*getattr(optimizer, "n_ranks", ())}) > 1:
        raise RuntimeError("the optimizers have process groups of their own: save and load them one by one")


def agreed(optimizer, states, pieces, error_prefix, group):
    """Return index -> Layout of each state that there is: see `agree`."""
    names = [f"parameter {index}" for index in range(len(all_params(optimizer)))]
    layouts = agree(optimizer, states, pieces, names, error_prefix, group)
    layouts = {index: layouts[name] for index, name in enumerate(names) if layouts.get(name) and layouts[name].tree}
    for index, layout in layouts.items():
        stacked = [path for path, entry in layout.cut.items() if entry.lead]
        if stacked and isinstance(all_params(optimizer)[index], DTensor):
            raise ValueError(f"the state of {names[index]} has {stacked[0]}, which can't be kept: a stack of DTensors")
    return layouts


def whole_states(layouts, states, pieces, params, error_prefix, group, dst=None):
    """Iterate over (index, path -> value) of each parameter's state on rank `dst`, None: on all. Collective.

    A tensor that is cut has all elements of the parameter, or of a DTensor's local part: (*lead, elements). `states`:
    index -> what this rank has for its piece. Values are copies on the CPU.
    """
    (rank, _), failure = rank_and_size(group), None
    for index, layout in layouts.items():
        values, n_elements, offsets = {}, local(params[index]).numel(), offsets_of(params[index])
        for part in layout.parts:
            own = {}
            if part.rank == rank:
                try:
                    own = copied_part(states[index], layout, pieces[index], part)
                except Exception as error:  # the other ranks wait for this one's parts
                    failure = error
            for path, value in (passed_on(own, part.rank, dst, group) or {}).items():
                if path not in layout.cut:
                    values.setdefault(path, value)
                elif part.offsets == offsets:
                    if path not in values:
                        values[path] = value.new_empty(*value.shape[:-1], n_elements)
                    values[path][..., part.start : part.stop] = value
        if dst in (None, rank) and layout.cut.keys() | layout.common.keys() <= values.keys():
            yield index, values
    with errors_on_all(error_prefix, group):
        if failure:
            raise failure


def copied_part(state, layout, piece, part):
    """Return path -> value of a state, of which tensors that are cut have the elements of `part`, as (*lead, n)."""
    own = slice(part.start - piece.start, part.stop - piece.start)
    copies = {}
    for path, value in flat(state).items():
        if path in layout.cut:
            value = local(value).reshape(*layout.cut[path].lead, -1)[..., own]
        copies[path] = local(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else as_python(value)
    return copies


def passed_on(value, owner, dst, group):
    """Return the `value` of rank `owner` on rank `dst`, None: on all; None on the others. Collective."""
    (rank, world_size), box = rank_and_size(group), [value]
    if dst is None and world_size > 1:
        dist.broadcast_object_list(box, group=group, group_src=owner)
    elif owner != dst is not None and rank == owner:
        dist.send_object_list(box, group=group, group_dst=dst)
    elif owner != dst is not None and rank == dst:
        dist.recv_object_list(box, group=group, group_src=owner)
    return box[0] if dst in (None, rank) else None


def install_states(optimizer, layouts, states, pieces, groups, error_prefix, group, into_params=False):
    """Cut the states of `layouts`, of which this rank has `states` for `pieces`, anew, and install them and `groups`.

    into_params: main parameters replace the model's parameters, too.
    """
    params, main_params, new_states, failure = all_params(optimizer), [], {}, None
    with errors_on_all(error_prefix, group):
        new_pieces = pieces_of(optimizer)
    for index, values in whole_states(layouts, states, pieces, params, error_prefix, group):
        try:
            if into_params and "main_param" in values:
                main_params.append((local(params[index]), values["main_param"].to(params[index].dtype)))
            if index in new_pieces:
                new_states[index] = cut_state(values, layouts[index], new_pieces[index])
        except Exception as error:  # the other ranks go on
            failure = error
    with errors_on_all(error_prefix, group):
        if failure:
            raise failure
        ready = prepare(optimizer, new_states, groups)
    with errors_on_all(error_prefix, group):
        for param, value in main_params:
            param.copy_(value.view(param.shape))
        install(optimizer, ready)


def cut_state(values, layout, piece):
    """Return the state of a piece, of the `values` of the whole parameter."""
    own = slice(piece.start, piece.stop)
    cut = {path: values[path][..., own].reshape((*values[path].shape[:-1], *piece.main.shape)).clone()
           for path in layout.cut}
    return filled(layout.tree, {**values, **cut})


def in_shape(value, param):
    """Return (*lead, elements) in the shape of a parameter. For a DTensor, a DTensor on the device of its mesh."""
    value = value.view((*value.shape[:-1], *local(param).shape))
    if not isinstance(param, DTensor):
        return value
    layout = {"shape": param.shape, "stride": param.stride()}
    return DTensor.from_local(value, param.device_mesh, param.placements, run_check=False, **layout)


def whole_piece(param) -> Piece:
    return Piece(param, 0, local(param).numel(), local(param))


def part_of(param):
    """Return where the local part of a DTensor begins, and its shape."""
    return offsets_of(param), tuple(local(param).shape)


def plan_of(optimizer, state_dict):
    """Return (groups, index -> Layout), index -> state. Raises ValueError: they aren't this optimizer's."""
    if not (isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()):
        raise ValueError("rank 0 must pass a dict with 'state' and 'param_groups', such as an optimizer's state_dict()")
    params, states, groups = all_params(optimizer), state_dict["state"], state_dict["param_groups"]
    given, own = ([len(group["params"]) for group in listed] for listed in (groups, optimizer.param_groups))
    if given != own:
        raise ValueError(f"this state_dict has groups of {given} parameters, this optimizer has {own}")
    if unknown := states.keys() - range(len(params)):
        raise ValueError(f"this state_dict has a state of {min(unknown, key=str)!r}: parameters must be indices")
    schemas, layouts = schemas_of(optimizer, groups), {}
    check_states(schemas, [f"parameter {index}" for index in range(len(params))], states,
                 {index: param.shape for index, param in enumerate(params)})
    for index, state in sorted(states.items()):
        piece, name = whole_piece(params[index]), f"parameter {index}"
        values = flat(state)
        refuse_other_parts(values, params[index], name)
        entries = {path: entry_of(value, piece) for path, value in values.items()}
        report = PieceReport((offsets_of(params[index]), piece.start, piece.stop), tree_of(state), entries)
        layouts[index] = layout_of(name, [(0, report)], paths_of_common(schemas[index]))
    return (groups, layouts), states


def refuse_other_parts(values, param, name):
    """Raise ValueError unless DTensors in a state are of the same parts as `param`."""
    for path, value in values.items():
        if isinstance(value, torch.Tensor):
            lead = leading_dims_of(value.shape, param.shape)
            own_lead = leading_dims_of(local(value).shape, local(param).shape)
            if lead != own_lead or lead and isinstance(param, DTensor):
                raise ValueError(f"{path} of {name} is a {type(value).__name__} in this state_dict, the parameter "
                                 f"is a {type(param).__name__}, with another part on this rank")


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
    parts = tuple(part_of(param) for param in all_params(optimizer))
    own = indexed_groups(optimizer), optimizer.has_grads, optimizer.rank, to, parts, error
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
