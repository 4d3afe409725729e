"""Access to optimizers: of a stage by the interface in checkpoint/__init__.py, others by torch's own.

A parameter's index is its place in all groups, as in torch's own state_dict.
"""

import itertools
import math
import numbers
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from .boxes import box_of, is_meshed, local
from .errors import UnfitModel
from .ranks import all_gather, group_among, rank_and_size

# Hyperparameters about how this process computes, and not about the model, so they are saved but not loaded.
HOW_IT_COMPUTES = {"fused", "foreach", "capturable", "differentiable"}


class Piece(NamedTuple):
    """What this rank updates of a parameter: flat elements `start` to `stop`, of a DTensor's local part."""

    param: torch.Tensor
    start: int
    stop: int
    main: torch.Tensor  # what the inner optimizer has for it
    base: int = 0  # elements of the whole before the local part, see boxes.py; 0 where the whole doesn't matter

    @property
    def in_whole(self):
        return self.base + self.start, self.base + self.stop

    @property
    def has_main_param(self):
        """Whether `main` is a parameter of its own, in fp32, and not memory of `param`."""
        return self.main.dtype != self.param.dtype


def all_params(optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def itself(optimizer):
    """-> the stage's optimizer in a wrapper, such as accelerate's, Lightning's or Fabric's; else `optimizer`."""
    wrapped = getattr(optimizer, "optimizer", None)
    return itself(wrapped) if hasattr(wrapped, "pieces") else optimizer


def inner_of(optimizer):
    return getattr(optimizer, "optimizer", optimizer)


def group_of(optimizer):
    """-> the process group whose ranks share the work; None: all ranks. Plain optimizers have None."""
    return getattr(optimizer, "process_group", None)


def ranks_of(optimizer):
    """-> the process group that shares the model; with DTensors, all ranks of their meshes. Collective over these."""
    group = group_of(optimizer)
    meshes = dict.fromkeys(param.device_mesh for param in all_params(optimizer) if is_meshed(param))
    if not meshes or rank_and_size(group)[0] < 0:
        return group
    ranks = {*dist.get_process_group_ranks(group or dist.group.WORLD)}
    for along in dict.fromkeys(one for mesh in meshes for one in mesh.get_all_groups()):
        ranks = ranks.union(*all_gather(ranks, along))
    return None if len(ranks) == dist.get_world_size() else group_among(sorted(ranks))


def pieces_of(optimizer, in_whole=False) -> dict[int, Piece]:
    """-> index -> Piece, without empty ones, `in_whole`: each with its base. All are whole with a plain optimizer."""
    params = all_params(optimizer)
    if hasattr(optimizer, "pieces"):
        pieces = [Piece(*one) for one in optimizer.pieces()]
    elif any(map(is_meshed, params)):
        raise UnfitModel("parameters are DTensors: torch.distributed.checkpoint.state_dict has their optimizer's state")
    else:
        pieces = map(whole_piece, params)
    index_of = {id(param): index for index, param in enumerate(params)}
    return {index_of[id(one.param)]: one._replace(base=box_of(one.param).base if in_whole else 0)
            for one in pieces if one.start < one.stop}


def whole_piece(param) -> Piece:
    return Piece(param, 0, local(param).numel(), local(param))


def steps_ranges(optimizer) -> bool:
    """Whether a rank may update a range of a parameter, as in stages 3 and 4, and not only whole parameters."""
    return any(hasattr(one, "move_to") for one in getattr(optimizer, "optimizers", [optimizer]))


def hyperparameters(group) -> dict:
    """-> the hyperparameters of a group that are loaded from a checkpoint."""
    return {key: value for key, value in group.items() if key not in {"params", "param_names", *HOW_IT_COMPUTES}}


def packed_groups(optimizer) -> list[dict]:
    """-> the groups as in a plain torch optimizer's state_dict, with indices of parameters."""
    indices = itertools.count()
    # A schedule's NumPy numbers become Python's, because torch.load(weights_only=True) refuses them.
    return [{**{key: value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value
                for key, value in group.items()},
             "params": [next(indices) for _ in group["params"]]} for group in optimizer.param_groups]


def prepared(optimizer, states, groups):
    """Do everything that can fail in loading `states`, index -> name -> value, and hyperparameters. -> for `install`:
    [(main parameter, its value), …]; main parameter -> its state, on the right device; the groups."""
    mains, ours = [], {}
    for index, piece in pieces_of(optimizer).items():
        state = dict(states.get(index, {}))
        main_param = state.pop("main_param", None)
        if piece.has_main_param:
            own = local(piece.param).reshape(-1)[piece.start : piece.stop]
            mains.append((piece.main, own if main_param is None else main_param))
        ours[piece.main] = {key: value if key == "step" else placed(value, piece.main)
                            for key, value in state.items()}
    taken = [hyperparameters(saved) for saved in groups]
    for group, its in zip(optimizer.param_groups, taken):
        for key in its.keys() & group.keys():
            if isinstance(its[key], torch.Tensor) and isinstance(group[key], torch.Tensor):  # a learning rate, say
                its[key] = its[key].to(group[key].device)
    return mains, ours, taken


def install(optimizer, ready):
    """Replace the inner optimizer's state, and all hyperparameters."""
    inner, (mains, ours, groups) = inner_of(optimizer), ready
    for main, value in mains:
        main.copy_(value)
    for group, taken in zip(optimizer.param_groups, groups):
        group.update(taken)
    if inner is not optimizer:
        optimizer.pass_on_hyperparameters()
    of_torch = {place: {key: value for key, value in ours[main].items() if is_for_torch(key, value)}
                for place, main in enumerate(all_params(inner)) if ours.get(main)}
    inner.load_state_dict({"state": of_torch, "param_groups": inner.state_dict()["param_groups"]})
    for main, state in ours.items():
        for key, value in state.items():
            if not is_for_torch(key, value):
                inner.state[main][key] = value


def is_for_torch(key, value):
    """Whether load_state_dict keeps the value; it converts integer tensors to floats, and changes texts and deques."""
    is_float = isinstance(value, torch.Tensor) and (value.is_floating_point() or key == "step")
    return is_float or value is None or isinstance(value, numbers.Number)


def placed(value, main):
    """-> `value` with tensors on the device of `main`, in its strides, floats in its dtype; itself if they are so."""
    def place(tensor):
        dtype = main.dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.shape == main.shape and tensor.stride() != torch.empty_like(main, device="meta").stride():
            return torch.empty_like(main, dtype=dtype).copy_(tensor)
        return tensor.to(main.device, dtype)

    return tree_map_only(torch.Tensor, place, value)


def check_hyperparameters(optimizer, groups):
    """Raise ValueError if a hyperparameter in `groups` has another kind than here, such as a text for a number."""
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, groups)):
        for key, value in hyperparameters(saved).items():
            if key in group and not are_alike(group[key], value):
                raise ValueError(f"{key} of group {number} is {str(value)[:40]!r}, here it is {group[key]!r}")


def are_alike(ours, theirs):
    """None is like everything, because it means that nobody has chosen a value."""
    if ours is None or theirs is None:
        return True
    if isinstance(ours, (list, tuple)):
        return isinstance(theirs, (list, tuple)) and len(ours) == len(theirs) and all(map(are_alike, ours, theirs))
    if isinstance(ours, bool) or isinstance(theirs, bool):  # a fused kernel knows the difference
        return type(ours) is type(theirs)
    if isinstance(ours, (numbers.Number, torch.Tensor)):
        return is_number(theirs) or isinstance(theirs, (numbers.Number, torch.Tensor)) and not is_number(ours)
    return not isinstance(ours, (str, dict)) or isinstance(theirs, str if isinstance(ours, str) else dict)


def is_number(value):
    """A finite one, which may be a tensor of one element."""
    try:
        return (not isinstance(value, torch.Tensor) or value.numel() == 1) and math.isfinite(value)
    except (OverflowError, TypeError):  # of too many digits, or complex
        return False
