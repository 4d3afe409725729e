"""An optimizer's state as one dict, assembled from its pieces and cut again, maybe for other ranks.

One parameter is sent at a time. So a rank holds its old part, its new part, the result if it wants one, and one whole
parameter.
"""

import collections
import copy
import math
import pickle
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from guard.schema import described

from .json_values import SMALL, NotPackable, pack_apart, pack_data, unpack, unpack_data
from .optimizers import (
    all_params,
    check_hyperparameters,
    group_of,
    install,
    itself,
    local,
    packed_groups,
    pieces_of,
    prepared,
    refuse_outsider,
)
from .ranks import errors_on_all, rank_and_size
from .states import NotKept, agree_on_states, check_states, fixed_paths, local_states, with_data

TAG = 2**30 - 1  # of messages to rank 0: large enough that no user has it


@torch.no_grad()
def full_state_dict(optimizer: torch.optim.Optimizer, to_all: bool = False) -> dict[str, Any]:
    """The state_dict() of the plain torch optimizer, on rank 0, or on all ranks; on the CPU. Collective.

    Returns {} on the other ranks. For 16-bit parameters the state is in fp32; it has a "main_param" for each parameter
    that was updated, and whose state wasn't cleared since. With TORCH_DISTRIBUTED_DEBUG=DETAIL and three or more ranks,
    pass to_all=True, because torch then treats sends as collectives.

    Args:
        optimizer: a DistributedOptimizer of any stage, or a torch optimizer.

    Raises:
        RuntimeError: on every rank; some have a state for their part of a parameter, and others don't, or a state can't
            be put together from the ranks' parts.
    """
    optimizer = itself(optimizer)
    if to_all:
        refuse_outsider(optimizer)
    group, dst = group_of(optimizer), None if to_all else 0
    rank, _ = rank_and_size(group)
    if rank < 0:
        return {}
    params, state = all_params(optimizer), {}
    with errors_on_all("the state can't be put together", group):
        pieces = pieces_of(optimizer)
        states = local_states(optimizer, pieces)
    for index, tree, found in gather(optimizer, states, pieces, group, dst):
        state[index] = filled(tree, lambda path: found[path].on_cpu(params[index]))
    return {"state": state, "param_groups": packed_groups(optimizer)} if dst in (None, rank) else {}


@torch.no_grad()
def load_full_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any] | None) -> None:
    """Load the `state_dict` of rank 0: a plain torch optimizer's, or `full_state_dict`'s. Collective.

    Load the model first, because main parameters start from the 16-bit parameters if there is no "main_param".

    Raises:
        ValueError: on every rank, before anything is changed; the state_dict is from another model or optimizer.
    """
    optimizer = itself(optimizer)
    refuse_outsider(optimizer)
    group, params = group_of(optimizer), all_params(optimizer)
    groups, plan, tensors = broadcast_plan(optimizer, state_dict)
    with errors_on_all("the state can't be loaded", group):  # takes all memory: what follows can't fail on one rank
        pieces = pieces_of(optimizer)
        wholes, own = room_for(plan, params, pieces)
        states = {index: filled(plan[index][0], own[index].get) for index in own}
        ready = prepared(optimizer, states, groups)
    for (index, path), whole in wholes.items():
        travel(tensors.get((index, path)), whole.tensor.shape, whole.tensor.dtype, whole.tensor.device, 0, group, None,
               whole.tensor)
        if path == "main_param":
            local(params[index]).copy_(whole.tensor.view(local(params[index]).shape))
        if index in pieces:
            own[index][path].copy_(whole.part_for(pieces[index]))
    with errors_on_all("the state can't be loaded", group):
        install(optimizer, ready)


def room_for(plan, params, pieces):
    """-> (index, path) -> Whole, all in the same memory; index -> path -> what this rank keeps of it. Uninitialized."""
    specs = []
    for index, (_, cut, common) in plan.items():
        specs += [(index, path, (*lead, local(params[index]).numel()), dtype) for path, (lead, dtype) in cut.items()]
        specs += [(index, path, shape, dtype) for path, (shape, dtype) in common.items()]
    n_bytes = collections.Counter()
    for index, _, shape, dtype in specs:
        n_bytes[params[index].device] = max(n_bytes[params[index].device], math.prod(shape) * dtype.itemsize)
    shared = {device: torch.empty(n, dtype=torch.uint8, device=device) for device, n in n_bytes.items()}
    wholes, own = {}, {index: {} for index in plan if index in pieces}
    for index, path, shape, dtype in specs:
        flat = shared[params[index].device][: math.prod(shape) * dtype.itemsize].view(dtype)
        whole = wholes[index, path] = Whole(flat.view(shape), path in plan[index][1])
        if index in pieces:
            own[index][path] = whole.room_for(path, pieces[index])
    return wholes, own


class Whole(NamedTuple):
    """A whole tensor of a state: (*lead, numel of the parameter) if it `is_cut`, else in its own shape."""

    tensor: torch.Tensor
    is_cut: bool

    def on_cpu(self, param):
        """-> it in the shape of the parameter. For a DTensor, a DTensor on the device of its mesh."""
        whole = self.tensor.cpu()
        if not self.is_cut:
            return whole
        whole = whole.view((*whole.shape[:-1], *local(param).shape))
        if not hasattr(param, "device_mesh"):
            return whole
        layout = {"shape": param.shape, "stride": param.stride()}
        return type(param).from_local(whole, param.device_mesh, param.placements, run_check=False, **layout)

    def part_for(self, piece):
        """-> the part that belongs to a piece, in its shape."""
        if not self.is_cut:
            return self.tensor
        part = self.tensor[..., slice(*piece.in_whole)]
        return part.view((*part.shape[:-1], *piece.main.shape))

    def room_for(self, path, piece):
        """-> uninitialized memory for what the inner optimizer keeps of it.

        It has the strides of the piece, because fused kernels ignore strides. Floats have the piece's dtype, as after
        torch's load_state_dict, except the number of steps.
        """
        part, main = self.part_for(piece), piece.main
        dtype = main.dtype if part.is_floating_point() and path != "step" else part.dtype
        return torch.empty_like(main if part.shape == main.shape and self.is_cut else part, dtype=dtype)

    def cut_for(self, piece):
        """What the inner optimizer keeps for a piece."""
        if not self.is_cut:
            return self.tensor
        part = self.part_for(piece)
        return torch.empty_like(piece.main if part.shape == piece.main.shape else part, dtype=part.dtype).copy_(part)


def filled(tree, tensor_of):
    """-> a packed state with its tensors. `tensor_of(path)` -> a tensor whose data is not in it."""
    return unpack(tree, lambda name, what: unpack_data(what) if name == "data" else tensor_of(what))


def gather(optimizer, states, pieces, group, dst):
    """-> iterator over (index, packed state, path -> Whole) of each parameter that has a state. Collective.

    On rank `dst` of `group`; None: on all. Tensors are on the device of the parameter, and each is sent when the
    iterator reaches it. For a DTensor, the whole is the local part if `pieces` come from `pieces_of`, and the whole of
    all ranks if they come from `pieces_in_whole`.

    Raises:
        NotKept: on every rank, before anything is sent; a part of a state is on no rank, or it can't be assembled.
    """
    names = [f"parameter {index}" for index in range(len(all_params(optimizer)))]
    layouts, tensors = agree_on_states(optimizer, states, pieces, names, group)
    for index, layout in layouts.items():
        stacked = [path for path, (lead, _) in layout.cut.items() if lead]
        if stacked and hasattr(all_params(optimizer)[index], "device_mesh"):
            raise NotKept(f"the state of {names[index]} has {stacked[0]}, a stack of DTensors: it can't be kept")
    return put_together(layouts, tensors, pieces, all_params(optimizer)[0].device, group, dst)


def put_together(layouts, tensors, pieces, device, group, dst):
    rank, _ = rank_and_size(group)
    for index, layout in layouts.items():
        mine, found = tensors.get(index, {}), {}
        numel = layout.owners[-1][2]
        for path, (lead, dtype) in layout.cut.items():
            whole = torch.empty(*lead, numel, dtype=dtype, device=device) if dst in (None, rank) else None
            for owner, start, stop in layout.owners:
                part = part_of(mine[path], lead, pieces[index], start, stop) if owner == rank else None
                place = whole[..., start:stop] if whole is not None else None
                travel(part, (*lead, stop - start), dtype, device, owner, group, dst, place)
            found[path] = Whole(whole, True)
        for path, (owner, (shape, dtype, *_)) in layout.common.items():
            part = mine[path] if owner == rank else None
            found[path] = Whole(travel(part, shape, dtype, device, owner, group, dst), False)
        if dst in (None, rank):
            yield index, layout.tree, found


def travel(part, shape, dtype, device, owner, group, dst, place=None):
    """Send a tensor from rank `owner`, where it is `part`, to rank `dst`; None: to all. -> the tensor on these ranks.

    `place`: memory to receive it in; None: new memory.
    """
    rank, world_size = rank_and_size(group)
    if dst not in (None, rank):
        if owner == rank:
            part = part.to(device)  # a count of steps is on the CPU, which NCCL can't send from
            dist.send(part.contiguous(), group=group, group_dst=dst, tag=TAG)
        return None
    there = place if place is not None and place.is_contiguous() else torch.empty(shape, dtype=dtype, device=device)
    if owner == rank:
        there.copy_(part.reshape(shape) if part.shape != there.shape else part)
    if dst is None and world_size > 1:
        dist.broadcast(there, group=group, group_src=owner)
    elif owner != rank:
        dist.recv(there, group=group, group_src=owner, tag=TAG)
    if place is not None and there is not place:
        place.copy_(there)
    return there


def part_of(tensor, lead, piece, start, stop):
    """-> (*lead, stop - start): elements start to stop of the whole, from a tensor that has those of `piece`."""
    flat = tensor if tensor.dim() == len(lead) + 1 else tensor.reshape(*lead, -1)
    first, last = piece.in_whole
    return flat if (start, stop) == (first, last) else flat[..., start - first : stop - first]


def broadcast_plan(optimizer, state_dict):
    """Broadcast what rank 0 finds in its `state_dict`. -> groups, index -> (packed state, cut, common), tensors.

    The other ranks get no tensors yet. Raises ValueError on all ranks.
    """
    group, plan, tensors = group_of(optimizer), [None], {}
    rank, world_size = rank_and_size(group)
    if rank == 0:
        try:
            plan[0], tensors = plan_of(optimizer, state_dict)
            pickle.dumps(plan)  # fails now, and not while the others wait
        except ValueError as error:
            plan[0] = error
        except Exception as error:  # the other ranks wait for the plan
            plan[0] = ValueError(f"this state_dict can't be read: {error!r}")
    if world_size > 1:
        dist.broadcast_object_list(plan, group=group, group_src=0)
    if isinstance(plan[0], ValueError):
        raise plan[0]
    return *copy.deepcopy(plan[0]), tensors  # on rank 0 it is the caller's own, which a step would change


def plan_of(optimizer, state_dict):
    """-> (groups, index -> (packed state, path -> (lead, dtype), path -> (shape, dtype))), (index, path) -> tensor."""
    check_indices(optimizer, state_dict)
    plan, tensors = {}, {}
    names = [f"parameter {index}" for index in range(len(all_params(optimizer)))]
    packed = {}
    for index, state in sorted(state_dict["state"].items()):
        try:
            packed[index] = pack_apart(state)
        except NotPackable as refusal:
            where = f"the state of {names[index]} has {refusal.path}"
            raise ValueError(f"{where}, which can't be loaded: {refusal}") from None
    states = {names[index]: described(state) for index, state in state_dict["state"].items()}
    check_hyperparameters(optimizer, state_dict["param_groups"])
    schemas = check_states(optimizer, names, states, state_dict["param_groups"])
    for index, (tree, found) in packed.items():
        cut, common = cut_and_common(found, all_params(optimizer)[index], fixed_paths(schemas[index]), names[index])
        small = {path: pack_data(found[path]) for path, (shape, _) in common.items() if math.prod(shape) <= SMALL}
        common = {path: what for path, what in common.items() if path not in small}
        plan[index] = with_data(tree, small), cut, common
        tensors.update({(index, path): local(found[path]) for path in (*cut, *common)})
    return (state_dict["param_groups"], plan), tensors


def cut_and_common(found, param, fixed, name):
    """-> path -> (lead, dtype) of tensors to cut; path -> (shape, dtype) of the others. `found`: path -> tensor."""
    cut, common = {}, {}
    for path, value in found.items():
        n_lead = value.dim() - param.dim()
        is_cut = n_lead >= 0 and value.shape[n_lead:] == param.shape
        if path == "main_param" or is_cut and path not in fixed:
            check_like(param, value, f"{path} of {name}", n_lead)
            cut[path] = tuple(value.shape[:n_lead]), value.dtype
        else:
            common[path] = tuple(value.shape), value.dtype
    return cut, common


def check_indices(optimizer, state_dict):
    if not (isinstance(state_dict, dict) and {"state", "param_groups"} <= state_dict.keys()):
        raise ValueError("rank 0 must pass a dict with 'state' and 'param_groups', such as an optimizer's state_dict()")
    sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != ours:
        raise ValueError(f"this state_dict has groups of {sizes} parameters, this optimizer has {ours}")
    unknown = state_dict["state"].keys() - range(sum(ours))
    if unknown:
        raise ValueError(f"this state_dict has a state of {min(unknown, key=str)!r}: parameters must be indices")


def check_like(param, value, name, n_lead):
    """Raise ValueError unless `value` has the shape of `param`; for DTensors also the shape of the local part."""
    if value.shape[n_lead:] != param.shape:
        raise ValueError(f"{name} is {tuple(value.shape)} in this state_dict, the parameter is {tuple(param.shape)}")
    if n_lead and hasattr(param, "device_mesh") or local(value).shape[n_lead:] != local(param).shape:
        raise ValueError(f"{name} is a {type(value).__name__} in this state_dict, the parameter is a "
                         f"{type(param).__name__}, with another part on this rank")
