"""For whoever looks at the state, saves it, loads it, or moves it to other ranks. What this rank owns are flat pieces.

Shown by tests/stages/test_contract.py, `test_the_state_of_a_parameter_can_be_reset`, and
tests/checkpoint/test_checkpoint.py.
"""

from collections import defaultdict
from collections.abc import MutableMapping

import torch

from .groups import all_params


class StateOfPieces:
    """What it needs of its stage: `_owned_ranges()`, an iterator over what `pieces` returns; `_take_model_changes()`,
    so that main parameters follow what others wrote into the model; and `_let_go()`, which hands the parameters back.
    """

    @torch.no_grad()
    def shard(self, groups):
        super().shard(groups)
        self._main_param = {param: main for param, _, _, main in self._owned_ranges()}

    def step_own(self):
        self._take_model_changes()
        super().step_own()

    def pieces(self):
        """-> [(param, start, stop, main), …]: this rank steps flat elements start to stop of `param`, as `main`."""
        with torch.no_grad():
            self._take_model_changes()
        return list(self._owned_ranges())

    def move_to(self, process_group):
        """Give up this rank's shards, if it has any, and take those of its place in `process_group`, without state."""
        self._let_go()
        self.optimizer.param_groups.clear()
        self.optimizer.state.clear()
        self._main_param = {}
        self._join(process_group)
        if self.rank >= 0:
            self.shard(self.param_groups)

    @property
    def state(self):
        """By parameter what this rank steps of it: flat pieces, and nothing of one that lies on other ranks.

        A dict that is assigned is copied.
        """
        return ByParameter(self.optimizer.state, self._main_param)

    @state.setter
    def state(self, state):
        main_param = self.__dict__.get("_main_param", {})  # there is none yet where torch's constructor sets it
        self.optimizer.state = defaultdict(dict, {main_param.get(key, key): value for key, value in state.items()})

    def _bounds(self):
        """-> index of a parameter -> what two state_dicts must have in common to be one for the other."""
        return {index: (start, stop) for index, start, stop, _ in self._indexed_pieces()}

    def _indexed_pieces(self):
        index_of = {id(param): index for index, param in enumerate(all_params(self))}
        return [(index_of[id(param)], *piece) for param, *piece in self.pieces()]

    def state_dict(self):
        kept = all_params(self)
        main_params = {index: main for index, _, _, main in self._indexed_pieces() if main.dtype != kept[index].dtype}
        return {**super().state_dict(), "main_params": main_params, "bounds": self._bounds()}

    def _take_parts(self, state_dict):
        here, saved = self.state_dict(), state_dict.get("main_params", {})
        if (here["bounds"], here["main_params"].keys()) != (state_dict.get("bounds"), saved.keys()):
            raise ValueError("this state_dict is of other shards, by another bucket_cap_mb, grad_dtype or "
                             "tensor-parallel rank say: use full_state_dict()")
        for index, main_param in here["main_params"].items():
            main_param.copy_(saved[index])


def follow(main_param, now):
    """Somebody has written `now` into the model. An element that main_param rounds to keeps its fp32 value."""
    now = now.to(main_param.device)  # which variants/offload.py has on the host
    main_param.copy_(torch.where(now != main_param.to(now.dtype), now, main_param))


class ByParameter(MutableMapping):
    """The inner optimizer's state by parameter of the model, though what is stepped are pieces of them.

    Args:
        states: parameter of the inner optimizer -> name -> a tensor of the piece's shape, or a scalar.
        main_param: parameter of the model -> this rank's piece of it, if there is one.
    """

    def __init__(self, states, main_param):
        self.states, self.main_param = states, main_param

    def _key(self, param):
        return self.main_param.get(param, param)

    def __getitem__(self, param):
        return self.states[self._key(param)]

    def __setitem__(self, param, state):
        self.states[self._key(param)] = state

    def __delitem__(self, param):
        del self.states[self._key(param)]

    def __contains__(self, param):
        return self._key(param) in self.states

    def __iter__(self):
        param_of = {main: param for param, main in self.main_param.items()}
        return (param_of.get(key, key) for key in self.states)

    def __len__(self):
        return len(self.states)

    # What MutableMapping makes of the methods above would not notice what isn't there: torch's `states` makes it.

    def get(self, param, default=None):
        return self.states.get(self._key(param), default)

    def pop(self, param, *default):
        return self.states.pop(self._key(param), *default)

    def setdefault(self, param, default=None):
        return self.states.setdefault(self._key(param), default)
