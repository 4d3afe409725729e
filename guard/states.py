"""Gives users `optimizer.state`, by parameters of the model: ReLoRA and pruning, for example, reset states.

The inner optimizer has states of the tensors that this rank updates: whole parameters, or in stages 3 and 4 flat pieces
of parameters. Shown by tests/stages/test_users.py, `test_a_state_that_is_reset_as_in_torch`.
"""

import functools
from collections import defaultdict
from collections.abc import MutableMapping

import torch

from .groups import mesh_groups_of

MAIN_PARAM = "main_param"  # the entry with the main parameter, if it is another tensor than the model's parameter
MISSING = torch.empty(0)  # stands for a value that another rank has; torch's functions for saving need its name here


class ByParameter(MutableMapping):
    """Maps parameters of the model to the states that the inner optimizer keeps for them, or for pieces of them.

    This rank may have no state of a parameter, because another rank updates it or no step has been taken. Then the
    mapping returns a state whose entries have their names, and empty values. If only other ranks update a parameter, a
    state that a program assigns here is ignored, so that all ranks can run the same code.

    Attributes:
        inner: the inner optimizer.
        main_param: parameter of the model -> its main parameter, which `inner` steps.
        param_of: main parameter -> parameter of the model.
        range_of: parameter of the model -> (start, stop): the flat elements that this rank updates.
        foreign_params: the parameters of the model of which this rank updates no element.
        main_params_by_mesh_groups: the process groups over which DTensors are spread, a tuple -> main parameters of
            these DTensors; () -> main parameters of all other parameters. `total_norm` communicates for each key, so
            every rank has the same keys in the same order.
        mesh_groups: the process groups in these keys, each once.
        norm_dtype, device: dtype and device of the norm of all gradients.
        accessed_params: parameters whose state a program has accessed since the last step.
        names_of: weak reference to a function: parameter -> names of the entries that its state has after a step.
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
        self.mesh_groups = dict.fromkeys(sum(self.main_params_by_mesh_groups, ()))  # of all keys, which are tuples
        self.norm_dtype = functools.reduce(torch.promote_types, {param.dtype for param in params}, torch.float32)
        self.device = params[0].device
        self.accessed_params = set()

    def _accessed_key(self, param):
        """Return the key of `param` in `inner.state`, and note that a program accesses this state."""
        self.accessed_params.add(param)
        return self.main_param.get(param, param)

    def __getitem__(self, param):
        """Return the state of `param`, with the names of entries that this rank hasn't."""
        state = {} if param in self.foreign_params else self.inner.state[self._accessed_key(param)]
        names = self.names_of()(param) if isinstance(param, torch.Tensor) else ()
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
        """Return True: torch's get_state_dict() calls `step` if the state is empty, which may be on this rank alone."""
        return True

    def __iter__(self):
        return (self.param_of.get(key, key) for key in self.inner.state)  # a key may be no tensor

    def __len__(self):
        return len(self.inner.state)

    # MutableMapping's own versions would never find a key missing, because `inner.state` is a defaultdict.

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
        """Replace all states, as `optimizer.state = state` does in torch."""
        own = {self._accessed_key(key): without_missing(value) for key, value in state.items()}
        self.inner.state = defaultdict(dict, own)

    def cut_whole_tensors(self):
        """Cut this rank's piece out of each tensor of the parameter's own shape that a user has put into a state.

        ReLoRA, for example, resets a state to zeros_like(param). A tensor in the dtype of the parameter is converted to
        the dtype of the main parameter. A rank that updates nothing of the parameter does nothing.
        """
        for param in self.accessed_params & self.main_param.keys():  # programs also keep states under strings
            main = self.main_param[param]
            start, stop = self.range_of[param]
            local_param = getattr(param, "_local_tensor", param)  # of a DTensor
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
    """Return a state that a user has assigned, without the entries of a StateOfParameter that are MISSING."""
    if not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if value is not MISSING}


class StateOfParameter(MutableMapping, dict):  # type: ignore[misc, metaclass]
    """A state that also has names of entries which are missing on this rank. Writing changes the real state.

    It is a dict because torch asks for one; the dict's own content stays empty.
    """

    def __init__(self, real_state, missing=()):
        self.real_state = real_state  # the inner optimizer's
        self.missing = dict.fromkeys(missing, MISSING)

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

    An fp32 element of `main_param` stays if it rounds to the element of `param`. `param` and `main_param` are the same
    tensor unless parameters have 16 bits, or main_param is on the CPU, as in variants/offload.py.
    """
    if main_param is not param:
        param = param.to(main_param.device)
        is_changed = param != main_param.to(param.dtype)
        main_param.copy_(torch.where(is_changed, param, main_param))
