"""This rank's part of the state: read and reset by parameter, as ReLoRA and pruning do, and saved as one part of d.

A rank has state for what it updates: nothing of some parameters, and in stages 3 and 4 flat pieces of others. Shown by
tests/stages/test_users.py, `test_a_state_that_is_reset_as_in_torch`, tests/stages/test_contract.py,
`test_resumes_from_its_state_dict`, and tests/checkpoint/test_checkpoint.py.
"""

from collections import defaultdict
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from .groups import all_params, name_of, spread_over
from .schema import checked_state_dict


class ByParameter(MutableMapping):
    """The inner optimizer's state by parameter of the model, though `inner` may update only pieces of parameters.

    A parameter that only other ranks update has no state here, and writes to it are ignored, so that all ranks can run
    the same code.

    Attributes:
        main_param: parameter of the model -> what this rank updates of it, the tensor that `inner` knows.
        elsewhere: parameters of the model of which this rank updates nothing.
        looked_at: parameters whose state somebody has accessed since the last step.
    """

    def __init__(self, inner, params, pieces):
        self.inner = inner
        self.main_param = {param: main for param, _, _, main in pieces}
        self.elsewhere = set(params).difference(self.main_param)
        self.looked_at = set()

    def _key(self, param):
        self.looked_at.add(param)
        return self.main_param.get(param, param)

    def __getitem__(self, param):
        return {} if param in self.elsewhere else self.inner.state[self._key(param)]

    def __setitem__(self, param, state):
        if param not in self.elsewhere:
            self.inner.state[self._key(param)] = state

    def __delitem__(self, param):
        if param not in self.elsewhere:
            del self.inner.state[self._key(param)]

    def __contains__(self, param):
        return self._key(param) in self.inner.state

    def __iter__(self):
        param_of = {main: param for param, main in self.main_param.items()}
        return (param_of.get(key, key) for key in self.inner.state)

    def __len__(self):
        return len(self.inner.state)

    # Not MutableMapping's own versions: `inner.state` is a defaultdict, so they would never find a key missing.

    def get(self, param, default=None):
        return self[param] if param in self else default

    def pop(self, param, *default):
        return self.inner.state.pop(self._key(param), *default)

    def setdefault(self, param, default=None):
        if param not in self:
            self[param] = default
        return self[param]

    def replace(self, state):
        self.inner.state = defaultdict(dict, {self._key(key): value for key, value in state.items()})

    def refuse_whole(self, groups):
        """Refuse a reset to zeros_like(param), as in ReLoRA: it would fail in the middle of the step, or not at all."""
        for param in self.looked_at & self.main_param.keys():  # a key may be a name
            main = self.main_param[param]
            for key, value in self.inner.state.get(main, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == param.shape != main.shape:
                    raise RuntimeError(f"{key} of parameter {name_of(param, groups)} has the shape of the whole in "
                                       "optimizer.state, where flat pieces of this rank are: use .zero_(), or delete "
                                       "optimizer.state[param]")
        self.looked_at.clear()


def state_of_rank(optimizer):
    """-> what `state_dict` returns: the inner optimizer's, with keys that say which part of which parameter it is.

    Two more entries: `main_params` has the main parameters that are not parts of the model's own parameters. `bounds`
    says where flat pieces lie, and must be equal to load the state. For a DTensor it includes the rank in the other
    dimensions of the mesh, because other parts look alike.
    """
    params, inner = all_params(optimizer), optimizer.optimizer
    for key in [key for key, state in inner.state.items() if isinstance(key, torch.Tensor) and not state]:
        del inner.state[key]  # an empty entry, made when somebody read it; maybe another rank updates the parameter
    index_of = {id(param): index for index, param in enumerate(params)}
    part, names, main_params, bounds = inner.state_dict(), {}, {}, {}
    for param, start, stop, main in optimizer.pieces():
        index = index_of[id(param)]
        names[id(main)] = (f"elements {start} to {stop} of parameter {index}, on rank {optimizer.rank} of "
                           f"{optimizer.world_size}: checkpoint.full_state_dict(optimizer) has the whole")
        if main is not param:  # torch's own tools print these words when they refuse it
            bounds[index] = start, stop, *map(dist.get_rank, spread_over(param))
        if main.dtype != param.dtype:
            main_params[index] = main
    name_of_index = {index: names[id(main)] for index, main in enumerate(all_params(inner))}
    part["state"] = {name_of_index.get(key, key): state for key, state in part["state"].items()}
    for group in part["param_groups"]:
        group["params"] = [name_of_index[index] for index in group["params"]]
    return {**part, "rank": optimizer.rank, "world_size": optimizer.world_size, "main_params": main_params,
            "bounds": bounds}


def state_for_rank(optimizer, state_dict):
    """-> [(main parameter, its saved value), …]; a state_dict for the inner optimizer.

    Raises ValueError: the state_dict is from another rank, other shards, or another optimizer.
    """
    here, made_by = state_of_rank(optimizer), (state_dict.get("rank"), state_dict.get("world_size"))
    if made_by != (here["rank"], here["world_size"]):
        raise ValueError(f"this state_dict is of (rank, world size) {made_by}, this is "
                         f"{here['rank'], here['world_size']}: a file of one rank has one part of {made_by[1]}, save "
                         "checkpoint.full_state_dict(optimizer) for the whole, which, as a plain optimizer's, is for "
                         "checkpoint.load_full_state_dict(optimizer, state_dict)")
    mains, saved = here["main_params"], state_dict.get("main_params", {})
    if (here["bounds"], mains.keys()) != (state_dict.get("bounds", {}), saved.keys()):
        raise ValueError("this state_dict is of other shards, by another bucket_cap_mb, grad_dtype or "
                         "tensor-parallel rank say: use full_state_dict()")
    of_inner = checked_state_dict(optimizer.make_optimizer, optimizer.optimizer, state_dict)
    return [(main, saved[index]) for index, main in mains.items()], of_inner


def follow(main_param, now):
    """Update main_param from `now`, the values in the model. Where main_param rounds to `now`, it keeps its fp32 value.

    Both are the same tensor unless parameters have 16 bits, or main_param is on the CPU, as in variants/offload.py.
    """
    if main_param is not now:
        main_param.copy_(torch.where((now := now.to(main_param.device)) != main_param.to(now.dtype), now, main_param))
