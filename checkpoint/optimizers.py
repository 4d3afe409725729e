"""Access to models, and to optimizers: of a stage by the interface in checkpoint/__init__.py, others by torch's own.

A parameter's index is its place in all groups, as in torch's own state_dict.
"""

import collections
import math
import numbers
from typing import NamedTuple

import torch
import torch.distributed as dist

from .boxes import box_of, cuts_of
from .errors import UnfitModel
from .json_values import DTYPES
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


def local(tensor):
    """-> the part of a DTensor that is on this rank; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def itself(optimizer):
    """-> the stage's optimizer in a wrapper, such as accelerate's, Lightning's or Fabric's; else `optimizer`."""
    wrapped = getattr(optimizer, "optimizer", None)
    return itself(wrapped) if hasattr(wrapped, "pieces") else optimizer


def inner_of(optimizer):
    return getattr(optimizer, "optimizer", optimizer)


def is_meshed(param):
    return hasattr(param, "device_mesh")


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
    left_out = {"params", "param_names"} | HOW_IT_COMPUTES
    return {key: value for key, value in group.items() if key not in left_out}


def packed_groups(optimizer) -> list[dict]:
    """-> the groups as in a plain torch optimizer's state_dict, with indices of parameters.

    A schedule's NumPy numbers become Python's, because torch.load(weights_only=True) refuses them.
    """
    groups, n_before = [], 0
    for group in optimizer.param_groups:
        groups.append({key: value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value
                       for key, value in group.items()})
        groups[-1]["params"] = list(range(n_before, n_before + len(group["params"])))
        n_before += len(group["params"])
    return groups


@torch.no_grad()
def prepared(optimizer, states, groups):
    """Do everything that can fail in loading `states`, index -> name -> value, and hyperparameters.

    -> for `install`, all on the right device, in the right dtype: [(main parameter, its value), …]; main parameter ->
    its state; the groups.
    """
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


@torch.no_grad()
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
    if isinstance(value, torch.Tensor):
        dtype = main.dtype if value.is_floating_point() else value.dtype
        if value.shape == main.shape and value.stride() != torch.empty_like(main, device="meta").stride():
            return torch.empty_like(main, dtype=dtype).copy_(value)
        return value.to(main.device, dtype)
    if isinstance(value, dict):
        return type(value)((key, placed(item, main)) for key, item in value.items())
    if isinstance(value, collections.deque):
        return collections.deque((placed(item, main) for item in value), value.maxlen)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(placed(item, main) for item in value)
    return value


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


# ---------------------------------------------- a model: its tensors, by the names that they have without wrappers


def unwrapped(model):
    while isinstance(model, torch.nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def state_of(model) -> dict:
    """model.state_dict() with the tensors themselves, by names that torch.compile hasn't changed."""
    state = {name.replace("_orig_mod.", ""): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value = state.get(name.replace("_orig_mod.", ""), tensor)
        if value is not tensor and not (isinstance(value, torch.Tensor) and value.data_ptr() == tensor.data_ptr()):
            raise UnfitModel(f"model.state_dict() has a copy of {name}, made by a hook say: it could not be loaded")
    return state


def names_of(model, optimizer) -> list[str]:
    """The names that the parameters have in `state_of`, by index."""
    name_of = {}
    for name, value in state_of(model).items():
        if name.endswith("_extra_state"):
            raise UnfitModel(f"{name}, of a module's get_extra_state(), isn't kept here: pass it as `extra`")
        if not isinstance(value, torch.Tensor):
            kind = type(value).__name__
            raise UnfitModel(f"{name} in model.state_dict() is a {kind}, and no tensor: pass it as `extra`")
        if value.layout != torch.strided or value.dtype not in DTYPES.values():
            raise UnfitModel(f"{name} in model.state_dict() is {value.layout} of {value.dtype}, which isn't kept here")
        cuts_of(value, name)  # or the error that says how it can't be cut
        name_of.setdefault(id(value), name)  # the first of tied ones
    for index, param in enumerate(all_params(optimizer)):
        name = name_of.get(id(param))
        if name is None:
            raise UnfitModel(f"parameter {index} of the optimizer isn't in model.state_dict(): pass the model it "
                             "trains")
    return [name_of[id(param)] for param in all_params(optimizer)]
