"""For whoever looks at the state, saves it, loads it, or moves it to other ranks. What this rank owns are flat pieces.

The same file stands in stages 3 and 4. Shown by tests/stages/test_contract.py,
`test_the_state_of_a_parameter_can_be_reset`, and tests/checkpoint/test_checkpoint.py.
"""

from collections import defaultdict
from collections.abc import MutableMapping

import torch
import torch.distributed as dist

from .refuse import all_params


class StateOfPieces:
    """What it needs of its stage: `owned_ranges()`, an iterator over what `pieces` returns; `take_model_changes()`, so
    that main parameters follow what others wrote into the model; and `let_go()`, which hands the parameters back.
    """

    def join(self, process_group):
        self.process_group = process_group
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)  # -1: in none

    @torch.no_grad()
    def shard(self, groups):
        super().shard(groups)
        self.main_param = {param: main for param, _, _, main in self.owned_ranges()}

    def pieces(self):
        """-> [(param, start, stop, main), …]: this rank steps flat elements start to stop of `param`, as `main`."""
        with torch.no_grad():
            self.take_model_changes()
        return list(self.owned_ranges())

    def move_to(self, process_group):
        """Give up this rank's shards, if it has any, and take those of its place in `process_group`, without state."""
        self.let_go()
        self.optimizer.param_groups.clear()
        self.optimizer.state.clear()
        self.main_param = {}
        self.join(process_group)
        if self.rank >= 0:
            self.shard(self.param_groups)

    @property
    def state(self):
        """By parameter what this rank steps of it: flat pieces, and nothing of one that lies on other ranks.

        A dict that is assigned is copied.
        """
        return ByParameter(self.optimizer.state, self.main_param)

    @state.setter
    def state(self, state):
        main_param = self.__dict__.get("main_param", {})  # there is none yet where torch's constructor sets it
        self.optimizer.state = defaultdict(dict, {main_param.get(key, key): value for key, value in state.items()})

    def bounds(self):
        """-> index of a parameter -> what two state_dicts must have in common to be one for the other."""
        index_of = {id(param): index for index, param in enumerate(all_params(self))}
        return {index_of[id(param)]: (start, stop) for param, start, stop, _ in self.pieces()}

    def main_params(self):
        """-> index of a parameter -> this rank's piece of it in fp32, where the parameter has 16 bits."""
        index_of = {id(param): index for index, param in enumerate(all_params(self))}
        return {index_of[id(param)]: main for param, _, _, main in self.pieces() if main.dtype != param.dtype}

    def state_dict(self):
        """This rank's part of the state, without communication: to be loaded on the same rank of as many.

        Raises:
            ValueError: somebody has put into `state` what is of no tensor that this rank steps.
        """
        return {
            **self._inner_state_dict(),
            "main_params": self.main_params(),
            "bounds": self.bounds(),
            "rank": self.rank,
            "world_size": self.world_size,
        }

    def load_state_dict(self, state_dict):
        """Take over what `state_dict` returned on this rank, without communication.

        Raises:
            ValueError: it was made by another rank, on another number of ranks, or with other shards.
        """
        made_by, here = (state_dict.get("rank"), state_dict.get("world_size")), (self.rank, self.world_size)
        if made_by != here:
            raise ValueError(f"this state_dict is of (rank, world size) {made_by}, this is {here}")
        main_params = self.main_params()
        saved = state_dict.get("bounds"), state_dict.get("main_params", {}).keys()
        if (self.bounds(), main_params.keys()) != saved:
            raise ValueError(
                "this state_dict is of other shards, by another bucket_cap_mb, grad_dtype or tensor-parallel rank say: "
                "use full_state_dict()"
            )
        for index, main_param in main_params.items():
            main_param.copy_(state_dict["main_params"][index])
        self._load_inner_state_dict(state_dict)


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
