"""Lets users read and reset the state by parameter, as ReLoRA and pruning do, and makes the state_dict of one rank.

A rank has state only for what it updates: whole parameters, or in stages 3 and 4 flat pieces of them. Shown by
tests/stages/test_users.py, `test_a_state_that_is_reset_as_in_torch`, tests/stages/test_contract.py,
`test_resumes_from_its_state_dict`, and tests/checkpoint/test_checkpoint.py.
"""

import functools
from collections import defaultdict
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from .groups import all_params, mesh_groups_of
from .schema import checked_state_dict


class ByParameter(MutableMapping):
    """Maps parameters of the model to the inner optimizer's state, though `inner` may update only pieces of them.

    A parameter that only other ranks update has no state, and writes to it are ignored, so that all ranks can run the
    same code.

    Attributes:
        main_param: parameter of the model -> the tensor in `inner` that this rank updates for it.
        param_of: that tensor -> the parameter of the model.
        range_of: parameter of the model -> (start, stop): the flat elements that this rank updates.
        foreign_params: parameters of the model of which this rank updates nothing.
        main_params_by_mesh_groups: what `mesh_groups_of` returns for a parameter -> main parameters of such parameters.
            Every rank has the same keys in the same order, because a norm communicates for each.
        norm_dtype, device: of the norm of all gradients.
        accessed_params: parameters whose state was accessed since the last step.
    """

    def __init__(self, inner, params, pieces):
        self.inner, pieces = inner, list(pieces)
        self.main_param = {param: main for param, _, _, main in pieces}
        self.range_of = {param: (start, stop) for param, start, stop, _ in pieces}
        self.param_of = {main: param for param, main in self.main_param.items()}
        self.foreign_params = set(params).difference(self.main_param)
        self.main_params_by_mesh_groups: dict[tuple, list] = {mesh_groups_of(param): [] for param in params}
        for param, main in self.main_param.items():
            self.main_params_by_mesh_groups[mesh_groups_of(param)].append(main)
        self.norm_dtype = functools.reduce(torch.promote_types, {param.dtype for param in params}, torch.float32)
        self.device = params[0].device
        self.accessed_params = set()

    def _key(self, param):
        """Return the key of `param` in `inner.state`, which is about to be accessed."""
        self.accessed_params.add(param)
        return self.main_param.get(param, param)

    def __getitem__(self, param):
        return {} if param in self.foreign_params else self.inner.state[self._key(param)]

    def __setitem__(self, param, state):
        if param not in self.foreign_params:
            self.inner.state[self._key(param)] = state

    def __delitem__(self, param):
        if param not in self.foreign_params:
            del self.inner.state[self._key(param)]

    def __contains__(self, param):
        return self._key(param) in self.inner.state

    def __iter__(self):
        return (self.param_of.get(key, key) for key in self.inner.state)

    def __len__(self):
        return len(self.inner.state)

    # Not MutableMapping's own versions: `inner.state` is a defaultdict, so they would never find a key missing.

    def get(self, param, default=None):
        return self[param] if param in self else default

    def pop(self, param, *default):
        if param in self.foreign_params:
            return default[0] if default else {}
        return self.inner.state.pop(self._key(param), *default)

    def setdefault(self, param, default=None):
        if param not in self:
            self[param] = default
        return self[param]

    def replace(self, state):
        self.inner.state = defaultdict(dict, {self._key(key): value for key, value in state.items()})

    def cut_whole_tensors(self):
        """Cut this rank's piece out of states that a user has set to tensors of the parameter's own shape.

        ReLoRA, for example, resets a state to zeros_like(param). Such a tensor in the dtype of the parameter is
        converted to that of the main parameter. Ranks that update nothing of the parameter have nothing to do, and no
        rank has to refuse.
        """
        for param in self.accessed_params & self.main_param.keys():  # a key that was accessed may be a name
            main, (start, stop) = self.main_param[param], self.range_of[param]
            local_param = getattr(param, "_local_tensor", param)  # of a DTensor
            state = self.inner.state.get(main, {})
            for key, value in state.items():
                value = getattr(value, "_local_tensor", value)
                if not isinstance(value, torch.Tensor) or value.shape != local_param.shape or key == "step":
                    continue  # "step", torch's name for a count of steps, may have the shape of a scalar parameter
                is_in_model_dtype = value.dtype == param.dtype != main.dtype
                if value.shape != main.shape or is_in_model_dtype:
                    dtype = main.dtype if is_in_model_dtype else value.dtype
                    state[key] = value.reshape(-1)[start:stop].to(main.device, dtype, copy=True).view_as(main)
        self.accessed_params.clear()


def state_of_rank(optimizer):
    """Return what `state_dict` returns: the inner optimizer's, with keys that name the part of the parameter.

    It has more entries. `n_steps` counts the steps before, so that files of different steps are noticed. `main_params`
    has the main parameters of another dtype than the model's parameters. `bounds` says where flat pieces lie, and must
    be equal to load the state. For a DTensor it includes the rank in the other dimensions of the mesh, because the
    parts on their ranks look alike.
    """
    params, inner = all_params(optimizer), optimizer.optimizer
    for key in [key for key, state in inner.state.items() if isinstance(key, torch.Tensor) and not state]:
        del inner.state[key]  # reading a missing state has made it, maybe for a parameter that another rank updates
    index_of = {id(param): index for index, param in enumerate(params)}
    part, keys, main_params, bounds = inner.state_dict(), {}, {}, {}
    for param, start, stop, main in optimizer.pieces():
        index = index_of[id(param)]
        # torch's own tools print this key in their error.
        keys[id(main)] = (f"elements {start} to {stop} of parameter {index}, on rank {optimizer.rank} of "
                          f"{optimizer.world_size}: checkpoint.full_state_dict(optimizer) has the whole")
        if main is not param:
            bounds[index] = start, stop, *map(dist.get_rank, mesh_groups_of(param))
        if main.dtype != param.dtype:
            main_params[index] = main.detach()  # without the attributes that it shares with `param`
    key_of_index = {index: keys[id(main)] for index, main in enumerate(all_params(inner))}
    part["state"] = {key_of_index.get(key, key): state for key, state in part["state"].items()}
    for group in part["param_groups"]:
        group["params"] = [key_of_index[index] for index in group["params"]]
    return {**part, "rank": optimizer.rank, "world_size": optimizer.world_size, "n_steps": optimizer._n_steps,
            "main_params": main_params, "bounds": bounds}


def state_for_rank(optimizer, state_dict):
    """Load `state_dict` into a copy of the inner optimizer. Returns [(main parameter, saved value), …] and the copy.

    Raises ValueError: the state_dict is from another rank, other shards, or another optimizer.
    """
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(f"load_state_dict() takes what state_dict() returned on this rank, not a "
                         f"{type(state_dict).__name__} without 'state' and 'param_groups'")
    if "world_size" not in state_dict:
        raise ValueError("this state_dict is a plain optimizer's, or a full one: load it with "
                         "checkpoint.load_full_state_dict(optimizer, state_dict)")
    current, origin = state_of_rank(optimizer), (state_dict.get("rank"), state_dict["world_size"])
    if origin != (current["rank"], current["world_size"]):
        raise ValueError(f"this state_dict is of (rank, world size) {origin}, this is "
                         f"{current['rank'], current['world_size']}: a file of one rank has one part of {origin[1]}, "
                         "save checkpoint.full_state_dict(optimizer) for the whole")
    main_params, saved_params = current["main_params"], state_dict.get("main_params", {})
    if (current["bounds"], shapes_of(main_params)) != (state_dict.get("bounds", {}), shapes_of(saved_params)):
        raise ValueError("this state_dict is of other shards, by another bucket_cap_mb, grad_dtype or "
                         "tensor-parallel rank say: use full_state_dict()")
    inner_copy = object.__new__(type(optimizer.optimizer))  # shallow: torch's load replaces `state` and `param_groups`
    vars(inner_copy).update(vars(optimizer.optimizer))
    inner_copy.load_state_dict(checked_state_dict(optimizer.make_optimizer, optimizer.optimizer, state_dict))
    return [(main, saved_params[index]) for index, main in main_params.items()], inner_copy


def shapes_of(main_params):
    return {index: main.shape for index, main in main_params.items()}


def update_main_param(main_param, param):
    """Copy the values of `param` into `main_param`, except where these round to them: there the fp32 values stay.

    Both are the same tensor unless parameters have 16 bits, or main_param is on the CPU, as in variants/offload.py.
    """
    if main_param is not param:
        param = param.to(main_param.device)
        main_param.copy_(torch.where(param != main_param.to(param.dtype), param, main_param))
