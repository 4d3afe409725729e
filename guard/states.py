"""Gives programs `optimizer.state`, a mapping: parameter of the model -> state.

Situation: a program resets states, as ReLoRA and pruning do. It has the parameters of the model. But in the distributed
optimizers of this project an *inner optimizer*, such as torch's AdamW, has the states. Their keys are *main
parameters*, the tensors that this rank updates:

- in stages 1 and 2 (two of the four versions) whole parameters;
- in stages 3 and 4 flat pieces of parameters, or fp32 copies of the pieces if the parameters have 16 bits.

Shown by tests/stages/test_users.py, `test_a_state_that_is_reset_as_in_torch`.
"""

import functools
from collections import defaultdict
from collections.abc import MutableMapping

import torch

from .groups import mesh_groups_of

# Name of an entry that state_dict() adds to a state: the main parameter, if it is an fp32 copy.
MAIN_PARAM = "main_param"
# In place of a value that this rank doesn't have, because torch's functions for saving need the names of all entries.
MISSING = torch.empty(0)


class ByParameter(MutableMapping):
    """Maps parameters of the model to the states that the inner optimizer keeps for their main parameters.

    If this rank has no state of a parameter yet, or never has one, the mapping returns a state with the names of all
    entries, and with MISSING as their values. If only other ranks update a parameter, a state that a program assigns
    here is ignored, so that all ranks can run the same code.

    Attributes:
        inner: the inner optimizer.
        main_param: parameter of the model -> its main parameter, only for parameters that this rank updates.
        param_of: main parameter -> parameter of the model.
        range_of: parameter of the model -> (start, stop): the flat elements that this rank updates.
        foreign_params: the parameters of the model of which this rank updates no element.
        main_params_by_mesh_groups: process groups -> main parameters. A key is the tuple of the groups over which some
            DTensors are spread, or () for plain parameters. Every rank has the same keys in the same order, because
            `total_norm` in scaling.py communicates for each key.
        mesh_groups: the process groups in these keys, each group once.
        norm_dtype, device: dtype and device of the norm of all gradients, for `total_norm`.
        accessed_params: parameters whose state a program has accessed since `cut_whole_tensors` last looked at them.
        names_of: weak reference to a function: parameter -> names of the entries that its state has after a step.

    The constructor's argument `pieces` is [(param, start, stop, main), …]: this rank updates the flat elements start to
    stop of `param`, as the main parameter `main`.
    """

    def __init__(self, inner, params, pieces, names_of):
        self.inner = inner
        self.names_of = names_of
        self.main_param = {}
        self.range_of = {}
        for param, start, stop, main in pieces:
            self.main_param[param] = main
            self.range_of[param] = start, stop
        self.param_of = {main: param for param, main in self.main_param.items()}
        self.foreign_params = set(params).difference(self.main_param)
        self.main_params_by_mesh_groups: dict[tuple, list] = {mesh_groups_of(param): [] for param in params}
        for param, main in self.main_param.items():
            self.main_params_by_mesh_groups[mesh_groups_of(param)].append(main)
        # The sum joins the keys, which are tuples, to one tuple. `fromkeys` drops repeated groups and keeps the order.
        self.mesh_groups = dict.fromkeys(sum(self.main_params_by_mesh_groups, ()))
        self.norm_dtype = functools.reduce(torch.promote_types, {param.dtype for param in params}, torch.float32)
        self.device = params[0].device
        self.accessed_params = set()

    def _accessed_key(self, param):
        """Note that a program accesses the state of `param`. Return the key that this state has in `inner.state`.

        `param` may also be a key of another kind, such as a text. `inner.state` has the same key.
        """
        self.accessed_params.add(param)
        return self.main_param.get(param, param)

    def __getitem__(self, param):
        """Return the state of `param`, with MISSING for entries that this rank doesn't have."""
        state = {} if param in self.foreign_params else self.inner.state[self._accessed_key(param)]
        # names_of() returns the function to which the weak reference refers.
        names = self.names_of()(param) if isinstance(param, torch.Tensor) else ()
        # Without a state all entries are missing. The inner optimizer's states never have MAIN_PARAM.
        missing = [name for name in names if not state or name == MAIN_PARAM]
        return StateOfParameter(state, missing) if missing else state

    def __setitem__(self, param, state):
        if param not in self.foreign_params:
            self.inner.state[self._accessed_key(param)] = without_missing(state)

    def __delitem__(self, param):
        if param not in self.foreign_params:
            del self.inner.state[self._accessed_key(param)]

    def __contains__(self, param):
        return self._accessed_key(param) in self.inner.state

    def __bool__(self):
        """Return True. torch's get_state_dict() calls `step` if the state is empty, and it may be empty on one rank."""
        return True

    def __iter__(self):
        return (self.param_of.get(key, key) for key in self.inner.state)  # a key that is no main parameter stays

    def __len__(self):
        return len(self.inner.state)

    # MutableMapping's own versions of the next three methods wait for a KeyError, which a defaultdict never raises.

    def get(self, param, default=None):
        return self[param] if param in self else default

    def pop(self, param, *default):
        if param in self.foreign_params:
            return default[0] if default else {}
        return self.inner.state.pop(self._accessed_key(param), *default)

    def setdefault(self, param, default=None):
        if param not in self:
            self[param] = default
        return self[param]

    def replace(self, state):
        """Replace all states by the states in `state`, a mapping that a program has assigned to `optimizer.state`."""
        own = {self._accessed_key(key): without_missing(value) for key, value in state.items()}
        self.inner.state = defaultdict(dict, own)

    def cut_whole_tensors(self):
        """Cut this rank's piece out of each tensor of a whole parameter's shape that a program has put into a state.

        ReLoRA, for example, resets a state to zeros_like(param). A tensor in the dtype of the parameter is converted to
        the dtype of the main parameter.
        """
        for param in self.accessed_params & self.main_param.keys():  # the parameters that this rank updates
            main = self.main_param[param]
            start, stop = self.range_of[param]
            local_param = getattr(param, "_local_tensor", param)  # this rank's part, if `param` is a DTensor
            state = self.inner.state.get(main, {})
            for name, value in state.items():
                whole = getattr(value, "_local_tensor", value)
                if not isinstance(whole, torch.Tensor) or whole.shape != local_param.shape or name == "step":
                    continue  # "step", torch's name for a count of steps, may have the shape of a scalar parameter
                is_in_model_dtype = whole.dtype == param.dtype and param.dtype != main.dtype
                if whole.shape != main.shape or is_in_model_dtype:
                    dtype = main.dtype if is_in_model_dtype else whole.dtype
                    state[name] = whole.reshape(-1)[start:stop].to(main.device, dtype, copy=True).view_as(main)
        self.accessed_params.clear()


def without_missing(state):
    """Return a copy of `state`, which a program has assigned, without entries that are MISSING.

    There are such entries if the program assigns the state of another parameter. What is no dict is returned as it is.
    """
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if value is not MISSING}


class StateOfParameter(MutableMapping, dict):  # type: ignore[misc, metaclass]
    """A state for programs to read and write. It also has the names of entries that the real state doesn't have.

    Reading such an entry returns MISSING. Writing changes the real state. The class is a subclass of dict because torch
    tests for a dict, but the dict itself stays empty.
    """

    def __init__(self, real_state, missing=()):
        self.real_state = real_state  # the dict that the inner optimizer has
        self.missing = dict.fromkeys(missing, MISSING)  # the argument is a list of names

    def __getitem__(self, name):
        return self.real_state[name] if name in self.real_state else self.missing[name]

    def __setitem__(self, name, value):
        self.real_state[name] = value

    def __delitem__(self, name):
        del self.real_state[name]

    def __iter__(self):
        return iter({**self.real_state, **self.missing})

    def __len__(self):
        return len({**self.real_state, **self.missing})


def update_main_param(main_param, param):
    """Copy the elements of `param` that other code has changed into `main_param`.

    `param` is the model's memory of the same elements. It is the same tensor unless parameters have 16 bits, or
    `main_param` is on the CPU, as in variants/offload.py. An fp32 element that rounds to the 16-bit element stays,
    because it is more precise.
    """
    if main_param is not param:
        param = param.to(main_param.device)
        is_changed = param != main_param.to(param.dtype)
        main_param.copy_(torch.where(is_changed, param, main_param))
