"""For whoever reads or resets optimizer.state by the parameters of the model, as ReLoRA and pruning do.

A rank has the state of what it steps: of some parameters nothing, in stages 3 and 4 of others flat pieces. Shown by
tests/stages/test_users.py, `test_a_state_that_is_reset_as_in_torch`.
"""

from collections.abc import MutableMapping


class ByParameter(MutableMapping):
    """The inner optimizer's state by parameter of the model, though what is stepped may be pieces of them.

    Of a parameter that other ranks step there is nothing, and what is written there is forgotten: all ranks write.

    Args:
        states: parameter of the inner optimizer -> name -> a tensor of the piece's shape, or a scalar.
        elsewhere: parameters of the model of which this rank steps nothing.
        main_param: parameter of the model -> this rank's piece of it, where that is another tensor.
        looked_at: a set, for the parameters whose state is asked for.
    """

    def __init__(self, states, elsewhere, main_param, looked_at):
        self.states, self.elsewhere, self.main_param, self.looked_at = states, elsewhere, main_param, looked_at

    def _key(self, param):
        return self.main_param.get(param, param)

    def __getitem__(self, param):
        if param in self.elsewhere:
            return {}
        self.looked_at.add(param)
        return self.states[self._key(param)]

    def __setitem__(self, param, state):
        if param not in self.elsewhere:
            self.looked_at.add(param)
            self.states[self._key(param)] = state

    def __delitem__(self, param):
        if param not in self.elsewhere:
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
        return self[param] if param in self else default

    def pop(self, param, *default):
        return self.states.pop(self._key(param), *default)

    def setdefault(self, param, default=None):
        if param not in self and param not in self.elsewhere:
            self[param] = default
        return self[param]
