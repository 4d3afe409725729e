"""For whoever brings an optimizer with a train() and an eval() mode, as schedule-free ones have.

The inner optimizer then writes other weights into what this rank owns, so the ranks bring them to each other. Shown by
tests/stages/test_users.py, `test_train_and_eval_reach_the_parameters_of_all_ranks`.
"""

import functools

import torch

from .groups import copy_hyperparameters


class Modes:
    has_grads = False  # whether this rank is between backward() and step(); stages 3 and 4 know

    @property
    def train(self):
        """Switch to train mode, where the optimizer class has one. Collective."""
        return functools.partial(self._switch, self.optimizer.train)  # or an AttributeError: then there is none here

    @property
    def eval(self):
        """Switch to eval mode, where the optimizer class has one. Collective."""
        return functools.partial(self._switch, self.optimizer.eval)

    @torch.no_grad()
    def _switch(self, method, *args, **kwargs):
        if self.has_grads:
            raise RuntimeError("train() or eval() between backward() and step(): call step() or zero_grad() first")
        self._take_model_changes()
        self.pass_on_hyperparameters()
        method(*args, **kwargs)
        copy_hyperparameters(self.optimizer.param_groups, self.param_groups)
        self.sync_params()

    def _take_model_changes(self):
        """Stages 3 and 4 step copies, which follow what others have written into the model."""
