"""Access to optimizers: of a stage by the interface in checkpoint/__init__.py, others by torch's own.

A parameter's index is its place in all groups, as in torch's own state_dict.
"""

import itertools
import numbers
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map_only

from guard.schema import Schema, Spec, leading_dims_of, leaves, schema_of

from .errors import UnfitModel
from .ranks import Saver, saver_of

# Hyperparameters about how this process computes, and not about the model, so they are saved but not loaded.
HOW_IT_COMPUTES = {"fused", "foreach", "capturable", "differentiable"}
RANGE = (13,)  # the shape of a range to find out with: a number that nothing else in a state is likely to have
TRIED: dict[tuple, Schema | None] = {}  # kind of optimizer and parameter -> what a trial has found, which takes 80 ms


class Piece(NamedTuple):
    """What this rank updates of a parameter: flat elements `start` to `stop`, of a DTensor's local part."""

    param: torch.Tensor
    start: int
    stop: int
    main: torch.Tensor  # what the inner optimizer has for it

    @property
    def has_main_param(self):
        """Tell whether `main` is a parameter of its own, in fp32, and not memory of `param`."""
        return self.main.dtype != self.param.dtype


def all_params(optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def unwrapped_optimizer(optimizer):
    """Return the stage's optimizer in a wrapper, such as accelerate's, Lightning's or Fabric's; else `optimizer`."""
    wrapped = getattr(optimizer, "optimizer", None)
    return unwrapped_optimizer(wrapped) if hasattr(wrapped, "pieces") else optimizer


def inner_of(optimizer):
    return getattr(optimizer, "optimizer", optimizer)


def group_of(optimizer):
    """Return the process group whose ranks share the work; None: all ranks. Plain optimizers have None."""
    return getattr(optimizer, "process_group", None)


def saver_for(optimizer) -> Saver:
    """Return the Saver of the ranks that share the model: with DTensors, all ranks of their meshes. Collective."""
    meshes = dict.fromkeys(param.device_mesh for param in all_params(optimizer) if isinstance(param, DTensor))
    return saver_of(group_of(optimizer), meshes)


def local(tensor):
    """Return the part of a DTensor that is on this rank; any other tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def offsets_of(tensor, name="a tensor") -> tuple:
    """Return where the local part of a DTensor begins in each dimension. Raises UnfitModel: it isn't one box."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    for placement in tensor.placements:
        if type(placement) not in (Shard, Replicate):
            raise UnfitModel(f"{name} is a DTensor with placement {placement}: only Shard and Replicate are kept")
    (chunk,) = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def pieces_of(optimizer) -> dict[int, Piece]:
    """Return index -> Piece, without empty ones. All are whole with a plain optimizer."""
    params = all_params(optimizer)
    if hasattr(optimizer, "pieces"):
        pieces = [Piece(*piece) for piece in optimizer.pieces()]
    elif any(isinstance(param, DTensor) for param in params):
        raise UnfitModel("parameters are DTensors: torch.distributed.checkpoint.state_dict has their optimizer's state")
    else:
        pieces = [Piece(param, 0, param.numel(), param) for param in params]
    index_of = {id(param): index for index, param in enumerate(params)}
    return {index_of[id(piece.param)]: piece for piece in pieces if piece.start < piece.stop}


def steps_ranges(optimizer) -> bool:
    """Tell whether a rank may update a range of a parameter, as in stages 3 and 4, and not only whole parameters."""
    return any(hasattr(member, "move_to") for member in members_of(optimizer))


def members_of(optimizer) -> list:
    """Return the optimizers of guard.chained.Chained; of any other optimizer, itself."""
    return getattr(optimizer, "optimizers", [optimizer])


def hyperparameters(group) -> dict:
    """Return the hyperparameters of a group that are loaded from a checkpoint."""
    return {key: value for key, value in group.items() if key not in {"params", "param_names", *HOW_IT_COMPUTES}}


def indexed_groups(optimizer) -> list[dict]:
    """Return the groups as in a plain torch optimizer's state_dict, with indices of parameters."""
    indices = itertools.count()
    return [{**{key: as_python(value) for key, value in group.items()},
             "params": [next(indices) for _ in group["params"]]} for group in optimizer.param_groups]


def as_python(value):
    """Return a number of NumPy's, as a schedule may leave, as Python's: torch.load(weights_only=True) refuses those."""
    return value.item() if isinstance(value, numbers.Number) and hasattr(value, "item") else value


# ------------------------------------------------------------------------------------------ what a state consists of


def schemas_of(optimizer, saved_groups=None) -> list[Schema | None]:
    """Return what is kept of each parameter. None: nobody knows. Raises ValueError: no step works with what was saved.
    """
    schemas = []
    saved_groups = iter(saved_groups or optimizer.param_groups)
    for owner, group in [(member, group) for member in members_of(optimizer) for group in member.param_groups]:
        make = getattr(owner, "make_optimizer", type(inner_of(owner)))
        saved = next(saved_groups)
        options = hyperparameters(group), hyperparameters(saved)
        kind = getattr(make, "func", make), repr((getattr(make, "keywords", {}), *map(with_sign_of_lr, options)))
        for param in group["params"]:
            shape, dtype = local(param).shape, param.dtype
            if steps_ranges(owner):  # each element by itself
                shape = RANGE
                dtype = torch.promote_types(dtype, torch.float32)
            key = kind, shape, dtype, param.device
            if key not in TRIED:
                TRIED[key] = schema_of(make, *options, shape, dtype, param.device)
            schemas.append(TRIED[key])
    return schemas


def with_sign_of_lr(options):
    """Return hyperparameters without a float as learning rate: it makes no other state, unless it is negative, say."""
    return {key: value > 0 if key in ("lr", "initial_lr") and type(value) is float else value
            for key, value in options.items()}


def paths_of_common(schema) -> set[str]:
    """Return the paths of tensors in a state that have not the parameter's shape."""
    return {".".join(map(str, path)) for path, value in leaves(schema.entries if schema else {})
            if isinstance(value, Spec) and leading_dims_of(value.shape, schema.shape) is None}


# ------------------------------------------------------------------------------------------------------------ loading


class Ready(NamedTuple):
    """Everything that `install` puts into an optimizer."""

    main_params: list  # (main parameter, its new value)
    states: dict  # main parameter -> its state, on the right device
    groups: list[dict]  # new hyperparameters of each group


def prepare(optimizer, states, groups) -> Ready:
    """Do everything that can fail in loading `states`, index -> name -> value, and the hyperparameters of `groups`."""
    ready = Ready([], {}, [hyperparameters(saved) for saved in groups])
    for index, piece in pieces_of(optimizer).items():
        state = dict(states.get(index, {}))
        main_param = state.pop("main_param", None)
        if piece.has_main_param:
            own = local(piece.param).reshape(-1)[piece.start : piece.stop]
            ready.main_params.append((piece.main, own if main_param is None else main_param))
        ready.states[piece.main] = {key: value if key == "step" else placed(value, piece.main)
                                    for key, value in state.items()}
    for group, options in zip(optimizer.param_groups, ready.groups):
        for key in options.keys() & group.keys():
            if isinstance(options[key], torch.Tensor) and isinstance(group[key], torch.Tensor):  # a learning rate, say
                options[key] = options[key].to(group[key].device)
    return ready


def install(optimizer, ready):
    """Replace the inner optimizer's state, and all hyperparameters."""
    inner = inner_of(optimizer)
    for main, value in ready.main_params:
        main.copy_(value)
    for group, options in zip(optimizer.param_groups, ready.groups):
        group.update(options)
    if inner is not optimizer:
        optimizer.pass_on_hyperparameters()
    of_torch = {place: {key: value for key, value in ready.states[main].items() if is_for_torch(key, value)}
                for place, main in enumerate(all_params(inner)) if ready.states.get(main)}
    inner.load_state_dict({"state": of_torch, "param_groups": inner.state_dict()["param_groups"]})
    for main, state in ready.states.items():
        for key, value in state.items():
            if not is_for_torch(key, value):
                inner.state[main][key] = value


def is_for_torch(key, value):
    """Tell whether load_state_dict keeps the value: it makes integer tensors floats, and changes texts and deques."""
    is_float = isinstance(value, torch.Tensor) and (value.is_floating_point() or key == "step")
    return is_float or value is None or isinstance(value, numbers.Number)


def placed(value, main):
    """Return `value` with tensors on the device of `main`, in its strides, floats in its dtype; itself if they are so.
    """
    def place(tensor):
        dtype = main.dtype if tensor.is_floating_point() else tensor.dtype
        if tensor.shape == main.shape and tensor.stride() != torch.empty_like(main, device="meta").stride():
            return torch.empty_like(main, dtype=dtype).copy_(tensor)
        return tensor.to(main.device, dtype)

    return tree_map_only(torch.Tensor, place, value)
