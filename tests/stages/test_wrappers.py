"""Wrappers around the optimizer, as Lightning and Fabric make them: the same training, through either of two kinds.

Each is an instance of a subclass that is made at run time, and has an `optimizer` of its own: the one that it wraps.
tests/frameworks/ has the real ones.
"""

import torch

import checkpoint
from tests.common import STAGES, on_ranks, optimizer_of, trainable
from tests.pairs import Pair
from tests.stages.test_drawn import drawn


class Delegating:
    """lightning.pytorch.core.optimizer: all that is asked for by name is the optimizer's."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (Delegating, type(optimizer)), {})

    @property
    def optimizer(self):
        return self._optimizer

    def step(self, closure=None):
        return self._optimizer.step(closure)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)


class Copying:
    """Fabric's, of earlier versions: attributes are copied."""

    def __init__(self, optimizer):
        self.__dict__ = {key: value for key, value in vars(optimizer).items() if key not in ("state_dict", "step")}
        self.__class__ = type("Wrapped", (Copying, type(optimizer)), {})
        self._optimizer = self.optimizer = optimizer

    def step(self, closure=None):
        return self._optimizer.step(closure)


class Counting:
    n_steps = 0

    def step(self, *args, **kwargs):
        self.n_steps += 1
        return super().step(*args, **kwargs)


@on_ranks(1, 2, 3, wrap=[Delegating, Copying])
def test_a_wrapper_trains_like_the_optimizer_itself(rank, stage, wrap):
    drawn(rank, stage, range(6), wrap)


@on_ranks(2, wrap=[Delegating, Copying])
def test_a_wrapper_has_the_state_and_the_settings_of_the_optimizer(rank, stage, wrap):
    """A scheduler, a state that is read, reset, loaded and assigned, and, in stage 4, the prefetch."""
    pair = Pair(rank, stage)
    inner, pair.optimizer = pair.optimizer, wrap(pair.optimizer)
    if stage == STAGES[3]:
        pair.optimizer.prefetch_params(pair.model)
        assert inner.prefetching
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in pair.optimizers]
    for step in range(3):
        pair.train(step)
        for scheduler in schedulers:
            scheduler.step()
    checkpoint.load_full_state_dict(pair.optimizer, checkpoint.full_state_dict(inner))
    for one, model in zip(pair.optimizers, pair.models):
        for param in [param for param in trainable(model) if param in one.state]:
            one.state[param]["exp_avg"].zero_()
    pair.train(3)
    pair.assert_same()
    pair.optimizer.state = {}
    assert len(inner.state) == len(pair.optimizer.state) == 0 and isinstance(pair.optimizer, type(inner))


@on_ranks(2)
def test_a_class_of_the_users_in_front_of_ours_is_no_wrapper(rank, stage):
    pair = Pair(rank, stage, of=lambda stage: type("Mine", (Counting, optimizer_of(stage)), {}))
    pair.train(0, 1)
    pair.assert_same()
    assert pair.optimizer.n_steps == 2
