"""Wrappers around the optimizer, as Lightning and Fabric make them: the same training, through either of two kinds.

Each is an instance of a subclass that is made at run time, and has an `optimizer` of its own: the one that it wraps.
tests/frameworks/ has the real ones.
"""

import contextlib

import torch

import checkpoint
from tests.common import STAGES, on_ranks, optimizer_of, trainable
from tests.pairs import Pair, backward, deliver_when_asked

THREE, FOUR = STAGES[2:]


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
    """No wrapper: a class of the user's own, in front of ours."""

    n_steps = 0

    def step(self, *args, **kwargs):
        self.n_steps += 1
        return super().step(*args, **kwargs)


def counting(stage):
    return type("Mine", (Counting, optimizer_of(stage)), {})


def but_the_last(model):
    return trainable(model)[:-1]


@on_ranks(1, 2, 3, wrap=[Delegating, Copying, Counting])
def test_a_wrapper_trains_like_the_optimizer_itself(rank, stage, wrap):
    """Clip, give a step up, accumulate, add a group, read and reset a state, save, load: through the wrapper."""
    pair = Pair(rank, stage, groups=but_the_last, of=counting if wrap is Counting else optimizer_of)
    inner, model = pair.optimizer, pair.model
    pair.optimizer = optimizer = inner if wrap is Counting else wrap(inner)
    if stage == FOUR:
        optimizer.prefetch_params(model)
        assert inner.prefetching
        deliver_when_asked(inner)
    for one, its_model in zip(pair.optimizers, pair.models):
        one.add_param_group({"params": trainable(its_model)[-1:], "lr": 0.1})
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5) for one in pair.optimizers]
    for step in range(6):
        with optimizer.no_sync() if step % 2 else contextlib.nullcontext():
            backward(model, rank, step)
        if step == 2:
            assert stage not in (THREE, FOUR) or inner.has_grads
            optimizer.zero_grad()  # this batch is given up
            continue
        backward(model, rank, step + 10)
        pair.replicated.backward(step, step + 10)
        pair.clip(0.05, rtol=1e-4)
        if step == 3:  # and so is this one, after its gradients were averaged
            for one in pair.optimizers:
                one.zero_grad()
            continue
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        if step == 4:
            optimizer.load_state_dict(optimizer.state_dict())
            checkpoint.load_full_state_dict(optimizer, checkpoint.full_state_dict(inner))
            for one, its_model in zip(pair.optimizers, pair.models):
                for param in trainable(its_model):
                    if param in one.state:
                        one.state[param]["exp_avg"].zero_()
    optimizer.state = {}
    assert len(inner.state) == len(optimizer.state) == 0 and isinstance(optimizer, type(inner))
    pair.assert_same(is_exact=False)
