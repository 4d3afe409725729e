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
from .ranks import all_gather, rank_and_size

# Hyperparameters about how this process computes, and not about the model, so they are saved but not loaded.
HOW_IT_COMPUTES = {"fused", "foreach", "capturable", "differentiable"}
GROUPS: dict = {}  # (group of all ranks, some of the ranks) -> their group; torch never frees a group


class Piece(NamedTuple):
    """What this rank updates of a parameter: flat elements `start` to `stop`, of a DTensor's local part."""

    start: int
    stop: int
    main: torch.Tensor  # what the inner optimizer has for it
    base: int = 0  # elements of the whole before the local part, see boxes.py; 0 where the whole doesn't matter

    @property
    def in_whole(self):
        return self.base + self.start, self.base + self.stop


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
    ranks, names = {*dist.get_process_group_ranks(group or dist.group.WORLD)}, dist.distributed_c10d._world.pg_names
    n_groups = {len(names)}
    for along in dict.fromkeys(one for mesh in meshes for one in mesh.get_all_groups()):
        for theirs, their_n in all_gather((ranks, n_groups), along):
            ranks, n_groups = ranks | theirs, n_groups | their_n
    if len(ranks) == dist.get_world_size():
        return None
    key = dist.group.WORLD, tuple(sorted(ranks))
    if key not in GROUPS:  # The ranks outside don't call this. Then ...
        while len(names) < max(n_groups):  # ... torch names a group by the number of groups that a rank is in
            dist.new_group([dist.get_rank()], use_local_synchronization=True)
        GROUPS[key] = dist.new_group(key[1], use_local_synchronization=True)
    return GROUPS[key]


def pieces_in_whole(optimizer) -> dict[int, Piece]:
    """-> `pieces_of(optimizer)`, each with its `base` in the whole parameter."""
    params = all_params(optimizer)
    return {index: piece._replace(base=box_of(params[index]).base) for index, piece in pieces_of(optimizer).items()}


def pieces_of(optimizer) -> dict[int, Piece]:
    """-> index -> Piece, without empty ones. With a plain torch optimizer, every rank has all parameters."""
    params = all_params(optimizer)
    if hasattr(optimizer, "pieces"):
        pieces = optimizer.pieces()
    elif any(map(is_meshed, params)):
        raise UnfitModel("parameters are DTensors: torch.distributed.checkpoint.state_dict has their optimizer's state")
    else:
        pieces = [(param, 0, param.numel(), param) for param in params]
    index_of = {id(param): index for index, param in enumerate(params)}
    return {index_of[id(param)]: Piece(start, stop, main) for param, start, stop, main in pieces if start < stop}


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

    -> for `install`, all on the right device, in the right dtype: [(main parameter, its value), …]; place -> state for
    the inner optimizer's load_state_dict; main parameter -> values that load_state_dict would convert; the groups.
    """
    inner, params = inner_of(optimizer), all_params(optimizer)
    place_of = {id(main): place for place, main in enumerate(all_params(inner))}
    mains, for_torch, ours = [], {}, {}
    for index, piece in pieces_of(optimizer).items():
        state = dict(states.get(index, {}))
        main_param = state.pop("main_param", None)
        if piece.main.dtype != params[index].dtype:
            own = local(params[index]).reshape(-1)[piece.start : piece.stop]
            mains.append((piece.main, own if main_param is None else main_param))
        ours[piece.main], rest = {}, {}
        for key, value in state.items():
            target = rest if is_for_torch(key, value) else ours[piece.main]
            target[key] = value if key == "step" else placed(value, piece.main)
        if rest:
            for_torch[place_of[id(piece.main)]] = rest
    taken = [hyperparameters(saved) for saved in groups]
    for group, its in zip(optimizer.param_groups, taken):
        for key in its.keys() & group.keys():
            if isinstance(its[key], torch.Tensor) and isinstance(group[key], torch.Tensor):  # a learning rate, say
                its[key] = its[key].to(group[key].device)
    return mains, for_torch, ours, taken


@torch.no_grad()
def install(optimizer, ready):
    """Replace the inner optimizer's state, and all hyperparameters."""
    inner, (mains, for_torch, ours, groups) = inner_of(optimizer), ready
    for main, value in mains:
        main.copy_(value)
    for group, taken in zip(optimizer.param_groups, groups):
        group.update(taken)
    if inner is not optimizer:
        optimizer.pass_on_hyperparameters()
    inner.load_state_dict({"state": for_torch, "param_groups": inner.state_dict()["param_groups"]})
    for main, kept in ours.items():
        if kept:
            inner.state[main].update(kept)


def is_for_torch(key, value):
    """Whether load_state_dict keeps the value; it converts integer tensors to floats, and changes texts and deques."""
    is_float = isinstance(value, torch.Tensor) and (value.is_floating_point() or key == "step")
    return is_float or value is None or isinstance(value, numbers.Number)


def placed(value, main):
    """-> `value` with its tensors on the device of `main`, and floats in its dtype, as torch's load_state_dict does."""
    if isinstance(value, torch.Tensor):
        return value.to(main.device, main.dtype if value.is_floating_point() else None)
    if isinstance(value, dict):
        return type(value)((key, placed(item, main)) for key, item in value.items())
    if isinstance(value, collections.deque):
        return collections.deque((placed(item, main) for item in value), value.maxlen)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(placed(item, main) for item in value)
    return value


def check_hyperparameters(optimizer, groups):
    """Raise ValueError if a hyperparameter in `groups` has another kind than here, such as a text for a number.

    None fits everything, because it means that nobody has chosen a value.
    """
    for number, (group, saved) in enumerate(zip(optimizer.param_groups, groups)):
        for key, value in hyperparameters(saved).items():
            if key in group and not are_alike(group[key], value):
                raise ValueError(f"{key} of group {number} is {str(value)[:40]!r}, here it is {group[key]!r}")


def are_alike(ours, theirs):
    kinds = (numbers.Number, torch.Tensor), str, (list, tuple), dict
    ours_is, theirs_is = ([isinstance(value, kind) for kind in kinds] for value in (ours, theirs))
    if ours is None or theirs is None or not any(ours_is):
        return True
    if ours_is[2] and theirs_is[2]:
        return len(ours) == len(theirs) and all(map(are_alike, ours, theirs))
    if isinstance(ours, bool) or isinstance(theirs, bool):  # a fused kernel knows the difference
        return type(ours) is type(theirs)
    return ours_is == theirs_is and (not ours_is[0] or is_number(theirs) or not is_number(ours))


def is_number(value):
    """A finite one, which may be a tensor of one element."""
    try:
        return (not isinstance(value, torch.Tensor) or value.numel() == 1) and math.isfinite(value)
    except (OverflowError, TypeError):  # of too many digits, or complex
        return False


def refuse_outsider(optimizer):
    if getattr(optimizer, "rank", 0) < 0:
        raise RuntimeError("this rank is in no process group since reshard(): it has no part in the state")


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


def untied(model) -> dict:
    """-> state_of(model) with each tensor once, under the first of its names."""
    names = {}
    for name, tensor in state_of(model).items():
        names.setdefault(id(tensor), (name, tensor))
    return dict(names.values())


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
