"""Finds out, by one step on trial, which state an optimizer class keeps for a parameter.

The state of a parameter is a dict. Its *entries* are, for example, "exp_avg", a moment, and "step". A *Schema*
describes the entries. It is used in two situations:

- A program saves. All ranks must save entries of the same names, also a rank that has no state of a parameter. By a
  trial every rank finds the same names without a message.
- A program loads a state. A fused kernel reads as many elements of a moment as the parameter has. If the loaded moment
  is smaller, the kernel reads memory of something else. So the state is compared with the Schema before it is loaded.

For the trial a second optimizer of the class steps a parameter of the same shape. If the class can do it, the parameter
is a FakeTensor, which has no memory. Shown by tests/checkpoint/test_schema.py.
"""

import copy
import numbers
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .hooks import without_global_hooks

# Dtypes that an optimizer computes with. torch's load_state_dict() converts a tensor from any of them to another.
COMPUTABLE = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
# Results of trials, each of which takes 80 ms. schema_of() adds them, and makes the keys: the optimizer class, its
# arguments, and the kind of parameter.
TRIED: dict[tuple, "Schema | None"] = {}


class Spec(NamedTuple):
    """Describes a tensor without its data."""
    shape: tuple
    dtype: torch.dtype

    def __str__(self):
        return f"{str(self.dtype).removeprefix('torch.')} of shape {tuple(self.shape)}"


class Schema(NamedTuple):
    """Describes the state that an optimizer class keeps for a parameter, as a step on trial has shown it."""
    entries: dict  # name of an entry -> its value after the step, or a Spec if the value is a tensor
    from_start: bool  # whether there is a state before the first step, as in Adagrad
    shape: tuple  # shape of the parameter that was stepped on trial


def with_specs(state):
    """Return a copy of the dict `state` with a Spec in place of each tensor."""
    return {name: Spec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
            for name, value in state.items()}


def schema_of(make_optimizer, options, shape, dtype, device) -> Schema | None:
    """Return the Schema for a parameter of this shape, dtype and device, in a group with the hyperparameters `options`.

    None: the class can't update one parameter alone.

    make_optimizer: functools.partial of the optimizer class with its arguments, which takes parameter groups.
    """
    settings = repr((make_optimizer.keywords, with_sign_of_lr(options)))
    key = make_optimizer.func, settings, tuple(shape), dtype, device
    if key not in TRIED:
        TRIED[key] = try_step(make_optimizer, options, shape, dtype, device)
    return TRIED[key]


def with_sign_of_lr(options):
    """Return a copy of the hyperparameters with `lr > 0`, a bool, in place of lr.

    So a schedule doesn't need a new trial for each learning rate.
    """
    rates = {key: options.get(key) for key in ("lr", "initial_lr")}
    # A rate that is a tensor stays, because it may be on a GPU.
    return options | {key: rate > 0 for key, rate in rates.items() if type(rate) is float}


def try_step(make_optimizer, options, shape, dtype, device):
    """Step a parameter of this shape, dtype and device. Return the Schema, or None if the step fails."""
    # In FakeTensorMode tensors have no memory. For optimizers that need real values the step is tried once more: in
    # no_grad(), which changes nothing here, because stepped_alone() enters it anyway.
    for mode in FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        try:
            own_options = copy.deepcopy(options)
            with mode:
                param = torch.zeros(shape, dtype=dtype, device=device)
                state, from_start = stepped_alone(make_optimizer, own_options, param)
                return Schema(with_specs(state), from_start, tuple(shape))
        except Exception as failure:  # the class can't do this step: it needs a closure, or a matrix, for example
            reason_of(failure)  # raises the failure again if the class isn't to blame
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
    """Return a text about an exception in a trial. Raise the exception if the class isn't to blame.

    For example, the machine has no memory left.
    """
    kinds = MemoryError, OSError, ImportError, torch.OutOfMemoryError, torch.AcceleratorError
    # If the CPU has no memory left, torch raises a RuntimeError that names its allocator.
    if isinstance(failure, kinds) or "DefaultCPUAllocator" in str(failure):
        raise failure
    return f"{type(failure).__name__}: {failure}"


def fresh_state(make_optimizer, options, main):
    """Return a state for the parameter `main` as if it had not been stepped: moments of zeros, and a count of 0.

    A second optimizer steps a copy of `main` with a gradient of zeros, so no tensor of the program changes. The weight
    decay is 0 in this step, because it would make a momentum other than zero. Then the count is set to 0.

    Returns {} if the step fails.
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
    """Raise ValueError unless the `state` of a parameter of this shape fits the schema.

    name: a text for the message, in which ":.60" cuts a text at 60 letters.
    """
    # Without a schema every state fits. An empty state fits unless the class makes a state in its constructor.
    if schema is None or not (state or schema.from_start):
        return
    if not schema.entries.keys() <= state.keys():
        names = ", ".join(map(str, state)) or "nothing"
        expected = ", ".join(map(str, schema.entries)) or "nothing"
        raise ValueError(f"the state of {name} is of another optimizer: {names:.200}, this one keeps {expected}")
    for key, value in with_specs(state).items():
        entry = schema.entries.get(key)
        if not fits(entry, value, schema.shape, tuple(shape)):
            expected = "a scalar, or of the parameter's shape" if entry is None else entry  # str() describes a Spec
            raise ValueError(f"{key!s:.60} in the state of {name} is of another optimizer: {value!s:.60}, not "
                             f"{expected!s:.60}")


def fits(entry, value, trial_shape, shape):
    """Return whether the state of a parameter of `shape` may have `value` where the trial step has made `entry`.

    value: a Spec in place of a tensor, or any value that is no tensor.
    entry: a Spec or a value, from the Schema of a parameter of `trial_shape`. None: the trial has made no entry of this
        name, but a later step of the class may. For example, some classes keep slow weights.
    """
    if entry is None:
        return not isinstance(value, Spec) or value.shape in ((), shape)
    if isinstance(entry, Spec) and isinstance(value, Spec):
        expected = shape if entry.shape == trial_shape else entry.shape
        # `<=` of sets: both dtypes are in COMPUTABLE.
        are_dtypes_alike = value.dtype == entry.dtype or {value.dtype, entry.dtype} <= COMPUTABLE
        return value.shape == expected and are_dtypes_alike
    are_numbers = isinstance(entry, numbers.Number) and isinstance(value, numbers.Number)
    return are_numbers or type(entry) is type(value)
