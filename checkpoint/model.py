"""The tensors of a model, by the names that they have without wrappers."""

import torch

from .boxes import cuts_of
from .errors import UnfitModel
from .json_values import DTYPES
from .optimizers import all_params


def unwrapped(model):
    while isinstance(model, torch.nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


def bare(name):
    return name.replace("_orig_mod.", "")  # a compiled layer adds this


def state_of(model) -> dict:
    """model.state_dict() with the tensors themselves, by names that torch.compile hasn't changed."""
    state = {bare(name): value for name, value in model.state_dict(keep_vars=True).items()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        value = state.get(bare(name), tensor)
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
            raise UnfitModel(
                f"parameter {index} of the optimizer isn't in model.state_dict(): pass the model it trains"
            )
    return [name_of[id(param)] for param in all_params(optimizer)]
