"""Finds out what state an optimizer keeps, to check what a file or a dict wants to load.

A fused kernel reads as many elements of a moment as the parameter has, so with a moment that is too small it would read
foreign memory. Therefore a second optimizer runs one step on a parameter of the same shape, a FakeTensor if possible.
The state to load must look like the state after this step. Shown by tests/checkpoint/test_states.py.
"""

import collections
import copy
import numbers
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .groups import hyperparameters
from .hooks import without_global_hooks

LIST_TYPES = list, tuple, collections.deque
ANYTHING = "a scalar, or of the parameter's shape"  # for entries that come after the first step, such as slow weights
COMPUTABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class Spec(NamedTuple):
    """Describes a tensor without its data."""
    shape: tuple
    dtype: torch.dtype

    def __str__(self):
        return f"{str(self.dtype).removeprefix('torch.')} of shape {tuple(self.shape)}"


class Schema(NamedTuple):
    """Describes the state that an optimizer keeps for a parameter."""
    entries: dict  # name -> what a step makes of it, tensors as Spec
    from_start: bool  # whether there is a state before the first step, as Adagrad has
    shape: tuple  # of the parameter that was stepped


def with_specs(value):
    """Return `value` with a Spec in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: with_specs(item) for key, item in value.items()}
    return type(value)(map(with_specs, value)) if type(value) in LIST_TYPES else value


def schema_of(make_optimizer, current, saved, shape, dtype, device) -> Schema | None:
    """Return what the optimizer keeps for such a parameter, with the hyperparameters `current` overridden by `saved`.

    None: the class can't update one parameter alone. Raises ValueError: it can, but not with the hyperparameters
    `saved`.
    """
    schema, reason = try_step(make_optimizer, {**current, **saved}, shape, dtype, device)
    if schema is None and try_step(make_optimizer, current, shape, dtype, device)[0]:
        raise ValueError(f"the optimizer can't step with the hyperparameters that were saved: {reason}")
    return schema


def try_step(make_optimizer, options, shape, dtype, device):
    """Step a parameter of this shape, dtype and device. Returns (Schema, None), or (None, reason of the failure)."""
    for mode in FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():  # some optimizers need real values
        try:
            group = copy.deepcopy(options)
            with mode, without_global_hooks(), torch.no_grad():
                param = torch.zeros(shape, dtype=dtype, device=device)
                param.grad = torch.zeros_like(param)
                optimizer = make_optimizer([{**group, "params": [param]}])
                from_start = bool(optimizer.state.get(param))
                optimizer.step()
                return Schema(with_specs(dict(optimizer.state[param])), from_start, tuple(shape)), None
        except Exception as failure:  # it needs a closure, matrices, …
            reason = reason_of(failure)
    return None, reason.splitlines()[0][:200]  # torch's texts may have many lines


def reason_of(failure):
    """Return the text of a failure. Raises it again if it isn't the optimizer class's, as when memory runs out."""
    kinds = MemoryError, OSError, ImportError, torch.OutOfMemoryError, torch.AcceleratorError
    if isinstance(failure, kinds) or "DefaultCPUAllocator" in str(failure):  # a plain RuntimeError
        raise failure
    return f"{type(failure).__name__}: {failure}"


def leading_dims_of(shape, like):
    """Return the leading dimensions of `shape`, before those of the parameter shape `like`; None: it has others."""
    n_lead = len(shape) - len(like)
    return tuple(shape[:n_lead]) if n_lead >= 0 and tuple(shape[n_lead:]) == tuple(like) else None


def leaves(value, path=()):
    """Yield (path, value) of everything in `value`, or of a container (path, class) and then what is in it."""
    is_container = type(value) in (dict, *LIST_TYPES)
    yield path, type(value) if is_container else value
    if is_container:
        for key, item in value.items() if type(value) is dict else enumerate(value):
            yield from leaves(item, (*path, key))


def check_state(schema, state, like, name):
    """Raise ValueError unless a `state` with Specs of a parameter of shape `like` is empty or fits the schema."""
    if schema is None or not (state or schema.from_start):
        return
    expected, actual = dict(leaves(schema.entries)), dict(leaves(state))
    if not isinstance(state, dict) or not schema.entries.keys() <= state.keys():
        expected_names, names = (", ".join(map(str, entries)) or "nothing" for entries in (schema.entries, state))
        raise ValueError(f"the state of {name} is of another optimizer: {names:.200}, this one keeps {expected_names}")
    for path in {**expected, **actual}:
        in_first_item = tuple(0 if type(key) is int else key for key in path)  # a list grows
        entry, value = expected.get(path, expected.get(in_first_item, ANYTHING)), actual.get(path)
        if not fits(entry, value, schema.shape, like):
            place = f"{'.'.join(map(str, path)):.60} in the state of {name}"  # cut, because a file may hold anything
            raise ValueError(f"{place} is of another optimizer: {value!s:.60}, not {entry!s:.60}")


def fits(entry, value, trial_shape, like):
    """Return whether `value`, for a parameter of shape `like`, may take the place of `entry`.

    A trial step of a parameter of `trial_shape` has made `entry`.
    """
    if entry is ANYTHING or entry is None:
        # Whatever is no tensor, a scalar, or of the parameter's shape, maybe stacked.
        return not isinstance(value, Spec) or not value.shape or leading_dims_of(value.shape, like) is not None
    if not isinstance(entry, Spec) or not isinstance(value, Spec):
        are_numbers = isinstance(entry, numbers.Number) and isinstance(value, numbers.Number)
        is_container = isinstance(entry, type)  # `leaves` gives its class, which must be the same
        return entry is value or are_numbers or (type(entry) is type(value) and not is_container)
    entry_lead, value_lead = leading_dims_of(entry.shape, trial_shape), leading_dims_of(value.shape, like)
    # A stack, of the last gradients for example, may be longer or shorter, but not empty.
    is_stack = bool(entry_lead) and len(entry_lead) == len(value_lead or ()) and all(value_lead)
    is_shaped = value_lead == entry_lead if entry_lead is not None else value.shape == entry.shape
    return (is_shaped or is_stack) and (value.dtype == entry.dtype or {value.dtype, entry.dtype} <= COMPUTABLE)


def checked_state_dict(make_optimizer, inner, state_dict):
    """Return a state_dict for the optimizer `inner`, with moments that have the strides of its parameters.

    Raises ValueError, before anything is changed, unless the state fits the schema.
    """
    current, saved = ([(group, key) for group in groups for key in group["params"]]
                      for groups in (inner.param_groups, state_dict["param_groups"]))  # as many, or torch raises
    states = dict(state_dict["state"])
    for index, ((group, param), (saved_group, key)) in enumerate(zip(current, saved)):
        options = hyperparameters(group), hyperparameters(saved_group)
        schema = schema_of(make_optimizer, *options, param.shape, param.dtype, param.device)
        check_state(schema, with_specs(states.get(key, {})), param.shape, f"parameter {index} of this rank")
        if key in states:
            states[key] = {name: torch.empty_like(param, dtype=value.dtype).copy_(value)
                           if isinstance(value, torch.Tensor) and value.shape == param.shape else value
                           for name, value in states[key].items()}
    return {**state_dict, "state": states}
