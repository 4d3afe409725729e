"""For whoever brings an optimizer with a train() and an eval() mode, as schedule-free ones have.

The inner optimizer then writes other weights into what this rank owns, so the ranks bring them to each other. The same
file stands in every stage. Shown by tests/stages/test_users.py,
`test_train_and_eval_reach_the_parameters_of_all_ranks`.
"""

import functools

import torch

from ..optimizer import hyperparameters


class Modes:
    has_grads = False  # stages 3 and 4 know whether this rank is between backward() and step()

    @property
    def train(self):
        """Switch to train mode, where the optimizer class has one. Collective."""
        return functools.partial(self.switch, self.optimizer.train)  # or an AttributeError: then there is none here

    @property
    def eval(self):
        """Switch to eval mode, where the optimizer class has one. Collective."""
        return functools.partial(self.switch, self.optimizer.eval)

    @torch.no_grad()
    def switch(self, method, *args, **kwargs):
        if self.has_grads:
            raise RuntimeError("train() or eval() between backward() and step(): call step() or zero_grad() first")
        self.take_model_changes()
        self.pass_on_hyperparameters()
        method(*args, **kwargs)
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            group.update(hyperparameters(own))
        self.publish_params()

    def take_model_changes(self):
        """Stages 3 and 4 step copies."""

    def publish_params(self):
        self.sync_params()
