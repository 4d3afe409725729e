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

LISTS = list, tuple, collections.deque
ANYTHING = "a scalar, or of the parameter's shape"  # for entries that come after the first step, such as slow weights
COMPUTABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}


class Spec(NamedTuple):
    """A tensor without its data."""

    shape: tuple
    dtype: torch.dtype

    def __str__(self):
        return f"{str(self.dtype).removeprefix('torch.')} of shape {tuple(self.shape)}"


class Schema(NamedTuple):
    entries: dict  # name -> what a step makes of it, tensors as Spec
    from_start: bool  # whether there is a state before the first step, as Adagrad has
    shape: tuple  # of the parameter that was stepped


def described(value):
    """-> `value` with a Spec in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return type(value)(map(described, value)) if type(value) in LISTS else value


def schema_of(make_optimizer, ours, saved, shape, dtype, device) -> Schema | None:
    """-> what the optimizer keeps for such a parameter, with the hyperparameters `ours` overridden by `saved`.

    None: the class can't update one parameter alone. Raises ValueError: it can, but not with the hyperparameters
    `saved`.
    """
    schema, reason = stepped(make_optimizer, {**ours, **saved}, shape, dtype, device)
    if schema is None and stepped(make_optimizer, ours, shape, dtype, device)[0]:
        raise ValueError(f"the optimizer can't step with the hyperparameters that were saved: {reason}")
    return schema


def stepped(make_optimizer, options, shape, dtype, device):
    """-> (Schema, None), or (None, reason)."""
    for mode in FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():  # some optimizers need real values
        try:
            own = copy.deepcopy(options)
            with mode, without_global_hooks(), torch.no_grad():
                param = torch.zeros(shape, dtype=dtype, device=device)
                param.grad = torch.zeros_like(param)
                optimizer = make_optimizer([{**own, "params": [param]}])
                from_start = bool(optimizer.state.get(param))
                optimizer.step()
                return Schema(described(dict(optimizer.state[param])), from_start, tuple(shape)), None
        except Exception as failure:  # it wants a closure, matrices, …
            reason = reason_of(failure)
    return None, reason.splitlines()[0][:200]


def reason_of(failure):
    """-> its text. Raises it again if it says nothing about the optimizer class, such as running out of memory."""
    kinds = MemoryError, OSError, ImportError, torch.OutOfMemoryError, torch.AcceleratorError
    if isinstance(failure, kinds) or "DefaultCPUAllocator" in str(failure):  # a plain RuntimeError
        raise failure
    return f"{type(failure).__name__}: {failure}"


def lead_of(shape, like):
    """-> the dimensions of `shape` before those of a parameter of shape `like`; None if it doesn't end with them."""
    n_lead = len(shape) - len(like)
    return tuple(shape[:n_lead]) if n_lead >= 0 and tuple(shape[n_lead:]) == tuple(like) else None


def leaves(value, path=()):
    """-> iterator over (path, value) of everything in `value`; for a container, (path, its class)."""
    is_container = type(value) in (dict, *LISTS)
    yield path, type(value) if is_container else value
    if is_container:
        for key, item in value.items() if type(value) is dict else enumerate(value):
            yield from leaves(item, (*path, key))


def check_state(schema, state, like, name):
    """Raise ValueError unless a described `state` of a parameter of shape `like` is empty or fits the schema."""
    if schema is None or not (state or schema.from_start):
        return
    expected, found = dict(leaves(schema.entries)), dict(leaves(state))
    if not isinstance(state, dict) or not schema.entries.keys() <= state.keys():
        kept, there = (", ".join(map(str, entries)) or "nothing" for entries in (schema.entries, state))
        raise ValueError(f"the state of {name} is of another optimizer: {there:.200}, this one keeps {kept}")
    for path in {**expected, **found}:
        as_first = tuple(0 if type(key) is int else key for key in path)  # a list grows
        wanted, value = expected.get(path, expected.get(as_first, ANYTHING)), found.get(path)
        if not fits(wanted, value, schema.shape, like):
            what = f"{'.'.join(map(str, path)):.60} in the state of {name}"
            raise ValueError(f"{what} is of another optimizer: {value!s:.60}, not {wanted!s:.60}")


def fits(expected, found, base, like):
    """Whether the value `found` may take the place of `expected`. `base`: shape of the parameter in the trial step."""
    if expected is ANYTHING or expected is None:
        return not isinstance(found, Spec) or not found.shape or lead_of(found.shape, like) is not None
    if not isinstance(expected, Spec) or not isinstance(found, Spec):
        both_numbers = isinstance(expected, numbers.Number) and isinstance(found, numbers.Number)
        return expected is found or both_numbers or type(expected) is type(found) is not type
    lead, their_lead = lead_of(expected.shape, base), lead_of(found.shape, like)
    is_stack = bool(lead) and len(lead) == len(their_lead or ()) and all(their_lead)
    is_shaped = their_lead == lead if lead is not None else found.shape == expected.shape
    return (is_shaped or is_stack) and (found.dtype == expected.dtype or {found.dtype, expected.dtype} <= COMPUTABLE)


def checked_state_dict(make_optimizer, inner, state_dict):
    """-> a state_dict for the optimizer `inner`, with moments that have the strides of its parameters.

    Raises ValueError, before anything is changed, unless the state fits the schema.
    """
    ours, theirs = ([(group, key) for group in groups for key in group["params"]]
                    for groups in (inner.param_groups, state_dict["param_groups"]))  # as many, or torch raises
    states = dict(state_dict["state"])
    for index, ((group, param), (saved, key)) in enumerate(zip(ours, theirs)):
        options = hyperparameters(group), hyperparameters(saved)
        schema = schema_of(make_optimizer, *options, param.shape, param.dtype, param.device)
        check_state(schema, described(states.get(key, {})), param.shape, f"parameter {index} of this rank")
        if key in states:
            states[key] = {name: torch.empty_like(param, dtype=value.dtype).copy_(value)
                           if isinstance(value, torch.Tensor) and value.shape == param.shape else value
                           for name, value in states[key].items()}
    return {**state_dict, "state": states}
