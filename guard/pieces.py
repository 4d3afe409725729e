"""For whoever looks at the state, saves it, loads it, or moves it to other ranks. What this rank owns are flat pieces.

Shown by tests/stages/test_contract.py, `test_the_state_of_a_parameter_can_be_reset`, and
tests/checkpoint/test_checkpoint.py.
"""

from collections import defaultdict

import torch

from .groups import all_params, name_of
from .states import ByParameter


class StateOfPieces:
    """What it needs of its stage: `_owned_ranges()`, an iterator over what `pieces` returns; `_take_model_changes()`,
    so that main parameters follow what others wrote into the model; and `_let_go()`, which hands the parameters back.
    """

    @torch.no_grad()
    def shard(self, groups):
        super().shard(groups)
        self._main_param = {param: main for param, _, _, main in self._owned_ranges()}
        self._looked_at = set()  # parameters whose state somebody has asked for

    def step_own(self):
        self._refuse_whole_states()
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
        return ByParameter(self.optimizer.state, self._elsewhere, self._main_param, self._looked_at)

    @state.setter
    def state(self, state):
        main_param = self.__dict__.get("_main_param", {})  # there is none yet where torch's constructor sets it
        self.optimizer.state = defaultdict(dict, {main_param.get(key, key): value for key, value in state.items()})

    def _refuse_whole_states(self):
        """Of a reset by zeros_like(param), say, as ReLoRA's: it would fail in the middle of the step, or not at all."""
        for param in self._looked_at & self._main_param.keys():
            main = self._main_param[param]
            for key, value in self.optimizer.state.get(main, {}).items():
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == param.shape != main.shape:
                    raise RuntimeError(f"{key} of parameter {name_of(param, self.param_groups)} has the shape of the "
                                       "whole in optimizer.state, where flat pieces of this rank are: use .zero_(), or "
                                       "delete optimizer.state[param]")
        self._looked_at.clear()

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

    def _parts_in(self, state_dict):
        here, saved = self.state_dict(), state_dict.get("main_params", {})
        if (here["bounds"], here["main_params"].keys()) != (state_dict.get("bounds"), saved.keys()):
            raise ValueError("this state_dict is of other shards, by another bucket_cap_mb, grad_dtype or "
                             "tensor-parallel rank say: use full_state_dict()")
        for index, main in here["main_params"].items():
            if (saved[index].shape, saved[index].dtype) != (main.shape, main.dtype):
                raise ValueError(f"main_params of this state_dict doesn't fit parameter {index}: {saved[index].shape}")
        return [(main, saved[index]) for index, main in here["main_params"].items()]


def follow(main_param, now):
    """Somebody has written `now` into the model. An element that main_param rounds to keeps its fp32 value."""
    now = now.to(main_param.device)  # which variants/offload.py has on the host
    main_param.copy_(torch.where(now != main_param.to(now.dtype), now, main_param))
