"""For whoever looks at the state, saves it, or loads it. What a rank of stages 1 and 2 owns are whole parameters.

Shown by tests/stages/test_contract.py, `test_resumes_from_its_state_dict`, and tests/checkpoint/test_checkpoint.py.
"""

from .groups import all_params
from .states import ByParameter


class WholeState:
    @property
    def state(self):
        """That of the inner optimizer: of the parameters that this rank steps, and no others."""
        return ByParameter(self.optimizer.state, self._elsewhere, {}, set())

    @state.setter
    def state(self, state):
        self.optimizer.state = state

    def pieces(self):
        """-> [(param, start, stop, main), …]: this rank steps flat elements start to stop of `param`, as `main`."""
        return [(param, 0, param.numel(), param) for param in all_params(self.optimizer)]

    def _parts_in(self, state_dict):
        """Whole parameters have no parts."""
        return []
