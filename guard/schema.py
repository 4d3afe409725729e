"""Finds out which state an optimizer keeps: to make entries on a rank without state, and to check a state_dict.

A fused kernel reads as many elements of a moment as the parameter has. If the moment that a program loads is smaller,
the kernel reads foreign memory. So a second optimizer runs one step on a parameter of the same shape, a FakeTensor if
possible, and shows the right shape. Every rank finds the same entries, without a message. Shown by
tests/checkpoint/test_schema.py.
"""

import copy
import numbers
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .hooks import without_global_hooks

# Dtypes that an optimizer computes with: a load converts a tensor from one to another.
COMPUTABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
TRIED: dict[tuple, "Schema | None"] = {}  # kind of optimizer and parameter -> its schema, since a trial takes 80 ms


class Spec(NamedTuple):
    """Describes a tensor without its data."""
    shape: tuple
    dtype: torch.dtype

    def __str__(self):
        return f"{str(self.dtype).removeprefix('torch.')} of shape {tuple(self.shape)}"


class Schema(NamedTuple):
    """Describes the state that an optimizer keeps for a parameter, as a trial step has shown it."""
    entries: dict  # name -> value after the step; in place of a tensor its Spec
    from_start: bool  # whether there is a state before the first step, as in Adagrad
    shape: tuple  # of the parameter that was stepped


def with_specs(state):
    """Return `state` with a Spec in place of each tensor."""
    return {name: Spec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()}


def schema_of(make_optimizer, options, shape, dtype, device) -> Schema | None:
    """Return the Schema for a parameter of this shape, dtype and device, with the hyperparameters `options`.

    None: the class can't update one parameter alone.
    """
    settings = repr((make_optimizer.keywords, with_sign_of_lr(options)))
    key = make_optimizer.func, settings, tuple(shape), dtype, device
    if key not in TRIED:
        TRIED[key] = try_step(make_optimizer, options, shape, dtype, device)
    return TRIED[key]


def with_sign_of_lr(options):
    """Return hyperparameters with `lr > 0` in place of lr, so that a schedule needs no new trial of each learning rate.
    """
    rates = {key: options.get(key) for key in ("lr", "initial_lr")}
    return options | {key: rate > 0 for key, rate in rates.items() if type(rate) is float}  # a tensor may be on a GPU


def try_step(make_optimizer, options, shape, dtype, device):
    """Step a parameter of this shape, dtype and device. Return the Schema, or None if the step fails."""
    # Fake tensors take no memory. Some optimizers need real values, so the second context has no effect.
    for mode in FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            own_options = copy.deepcopy(options)
            with mode:
                param = torch.zeros(shape, dtype=dtype, device=device)
                state, from_start = stepped_alone(make_optimizer, own_options, param)
                return Schema(with_specs(state), from_start, tuple(shape))
        except Exception as failure:  # a class may need a closure, or matrices
            reason_of(failure)  # raises it again if it has another cause
    return None


def stepped_alone(make_optimizer, options, param):
    """Step `param` once with a gradient of zeros. Return (its state, whether it had a state before the step)."""
    param.grad = torch.zeros_like(param)
    with without_global_hooks(), torch.no_grad():
        optimizer = make_optimizer([{**options, "params": [param]}])
        had_state = bool(optimizer.state.get(param))
        optimizer.step()
    return optimizer.state[param], had_state


def reason_of(failure):
    """Return the text of a failure in a trial. Raises the failure again if the class isn't to blame, as without memory.
    """
    kinds = MemoryError, OSError, ImportError, torch.OutOfMemoryError, torch.AcceleratorError
    if isinstance(failure, kinds) or "DefaultCPUAllocator" in str(failure):  # torch's RuntimeError: no memory
        raise failure
    return f"{type(failure).__name__}: {failure}"


def fresh_state(make_optimizer, options, main):
    """Return a state for `main` as before its first step: made by a step with a gradient of zeros, with a count of 0.

    {}: the step fails. Another optimizer steps a copy of `main`, so no tensor of the program changes. (torch steps the
    program's own optimizer so, before it loads a state.) The step has no weight decay, which would fill a momentum.
    """
    own_options = copy.deepcopy(options)
    if "weight_decay" in own_options:
        own_options["weight_decay"] = 0.0
    try:
        with torch.random.fork_rng([main.device] if main.is_cuda else []):
            state, _ = stepped_alone(make_optimizer, own_options, main.detach().clone())
    except Exception as failure:
        reason_of(failure)
        return {}
    if isinstance(state.get("step"), torch.Tensor):
        state["step"].zero_()
    elif "step" in state:
        state["step"] = 0
    return state


def check_state(schema, state, shape, name):
    """Raise ValueError unless the `state` of a parameter of this shape is empty or fits the schema."""
    if schema is None or not (state or schema.from_start):
        return
    if not schema.entries.keys() <= state.keys():
        names = ", ".join(map(str, state)) or "nothing"
        expected = ", ".join(map(str, schema.entries)) or "nothing"
        raise ValueError(f"the state of {name} is of another optimizer: {names:.200}, this one keeps {expected}")
    for key, value in with_specs(state).items():
        entry = schema.entries.get(key)
        if not fits(entry, value, schema.shape, tuple(shape)):
            expected = "a scalar, or of the parameter's shape" if entry is None else entry  # a Spec has a text
            raise ValueError(f"{key!s:.60} in the state of {name} is of another optimizer: {value!s:.60}, not "
                             f"{expected!s:.60}")


def fits(entry, value, trial_shape, shape):
    """Return whether `value`, a Spec or no tensor, may be in the state of a parameter of `shape`, in place of `entry`.

    entry: of a Schema, for a parameter of `trial_shape`. None: a later step makes the entry, as with slow weights.
    """
    if entry is None:
        return not isinstance(value, Spec) or value.shape in ((), shape)
    if isinstance(entry, Spec) and isinstance(value, Spec):
        expected = shape if entry.shape == trial_shape else entry.shape
        are_dtypes_alike = value.dtype == entry.dtype or {value.dtype, entry.dtype} <= COMPUTABLE
        return value.shape == expected and are_dtypes_alike
    are_numbers = isinstance(entry, numbers.Number) and isinstance(value, numbers.Number)
    return are_numbers or type(entry) is type(value)
