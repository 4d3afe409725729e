"""For whoever looks at the state, saves it, or loads it. What this rank owns are whole parameters.

Shown by tests/stages/test_contract.py, `test_resumes_from_its_state_dict`, and tests/checkpoint/test_checkpoint.py.
"""

from .refuse import all_params


class WholeState:
    @property
    def state(self):
        """That of the inner optimizer: of the parameters that this rank steps, and no others."""
        return self.optimizer.state

    @state.setter
    def state(self, state):
        self.optimizer.state = state

    def pieces(self):
        """-> [(param, start, stop, main), …]: this rank steps flat elements start to stop of `param`, as `main`."""
        return [(param, 0, param.numel(), param) for param in all_params(self.optimizer)]

    def state_dict(self):
        """This rank's part of the state, without communication: to be loaded on the same rank of as many.

        Raises:
            ValueError: somebody has put into `state` what is of no tensor that this rank steps.
        """
        return {**self._inner_state_dict(), "rank": self.rank, "world_size": self.world_size}

    def load_state_dict(self, state_dict):
        """Take over what `state_dict` returned on this rank, without communication.

        Raises:
            ValueError: it was made by another rank, or on another number of ranks.
        """
        made_by, here = (state_dict.get("rank"), state_dict.get("world_size")), (self.rank, self.world_size)
        if made_by != here:
            raise ValueError(f"this state_dict is of (rank, world size) {made_by}, this is {here}")
        self._load_inner_state_dict(state_dict)
