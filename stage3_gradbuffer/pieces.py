"""State by parameter of the model, though what is stepped are pieces of them. The same file stands in stages 3 and 4."""

from collections import defaultdict
from collections.abc import MutableMapping

import torch.distributed as dist

from .checks import all_params, spread_over
from .inner import OptimizerWrapper


class StateOfPieces(MutableMapping):
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


class ShardedOptimizer(OptimizerWrapper):
    """What stages 3 and 4 save and load, without a file. None of it is the idea of a stage.

    Attributes, which the stage sets, beside those of OptimizerWrapper:
        rank: of this process in `process_group`; -1: in none.
        sharded_params: objects with `params`, `ranges`, `main_params` and `take_model_changes()`, as buffers have them.
        main_param: parameter of the model -> this rank's piece of it, if there is one: what the inner optimizer steps.
    """

    @property
    def state(self):
        """By parameter what this rank steps of it: flat pieces, and nothing of one that lies on other ranks.

        A dict that is assigned is copied.
        """
        return StateOfPieces(self.optimizer.state, self.main_param)

    @state.setter
    def state(self, state):
        main_param = self.__dict__.get("main_param", {})  # there is none yet where torch's constructor sets it
        self.optimizer.state = defaultdict(dict, {main_param.get(key, key): value for key, value in state.items()})

    def state_dict(self):
        """This rank's part of the state, without communication: to be loaded on the same rank of as many.

        Raises:
            ValueError: somebody has put into `state` what is of no tensor that this rank steps.
        """
        return {
            **self._inner_state_dict(),
            "main_params": self._main_params(),
            "bounds": self._bounds(),
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
        main_params = self._main_params()
        saved = state_dict.get("bounds"), state_dict.get("main_params", {}).keys()
        if (self._bounds(), main_params.keys()) != saved:
            raise ValueError(
                "this state_dict is of other shards, by another bucket_cap_mb, grad_dtype or tensor-parallel rank say: "
                "use full_state_dict()"
            )
        self.optimizer.load_state_dict(state_dict)
        for index, main_param in main_params.items():
            main_param.copy_(state_dict["main_params"][index])
        self._take_back_hyperparameters()

    def pieces(self):
        """-> [(param, start, stop, main), ...]: what this rank steps, as checkpoint/ asks for it."""
        shards = self.sharded_params
        for shard in shards:
            shard.take_model_changes()
        return [(shard.params[r.index], r.start, r.stop, main)
                for shard in shards for r, main in zip(shard.ranges, shard.main_params)]

    def _main_params(self):
        """-> index -> this rank's piece of it in fp32, where the parameter has 16 bits."""
        index_of = {id(param): index for index, param in enumerate(all_params(self))}
        return {index_of[id(param)]: main for param, _, _, main in self.pieces() if main.dtype != param.dtype}

    def _bounds(self):
        """-> index -> (start, stop) of its piece: what two state_dicts must have in common to be one for the other.

        And of a DTensor, this rank in the other dimensions of its mesh: there it has another part, which looks alike.
        """
        index_of = {id(param): index for index, param in enumerate(all_params(self))}
        return {index_of[id(param)]: (start, stop, *map(dist.get_rank, spread_over(param)))
                for param, start, stop, _ in self.pieces()}
