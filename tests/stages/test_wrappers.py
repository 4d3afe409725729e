"""Wrappers around the optimizer, as Lightning and Fabric make them: the same training, through either of two kinds.

Each is an instance of a subclass that is made at run time, and has an `optimizer` of its own: the one that it wraps.
tests/frameworks/ has the real ones.
"""

import contextlib

import pytest
import torch

import checkpoint
from tests.common import STAGES, Net, Replicated, assert_same, batch, leave_late, loss_of, optimizer_of, trainable

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


def contract(rank, stage, wrap):
    """Clip, give a step up, accumulate, add a group, read and reset a state, save, load: through the wrapper."""
    model, reference = Net(seed=rank.rank), Replicated(rank, lr=0.01, groups=lambda model: trainable(model)[:-1])
    if wrap is Counting:
        optimizer = inner = type("Mine", (Counting, optimizer_of(stage)), {})(trainable(model)[:-1], lr=0.01)
    else:
        inner = optimizer_of(stage)(trainable(model)[:-1], lr=0.01)
        optimizer = wrap(inner)
    if stage == FOUR:
        optimizer.prefetch_params(model)
        assert inner.prefetching
        if rank.rank == 0:
            leave_late(inner, 0.05)
    for one, its_model in ((optimizer, model), (reference.optimizer, reference.model)):
        one.add_param_group({"params": trainable(its_model)[-1:], "lr": 0.1})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    theirs = torch.optim.lr_scheduler.StepLR(reference.optimizer, 1, gamma=0.5)
    for step in range(6):
        with optimizer.no_sync() if step % 2 else contextlib.nullcontext():
            loss_of(model, *batch(step, rank.rank)).backward()
        if step == 2:
            assert stage not in (THREE, FOUR) or inner.has_grads
            optimizer.zero_grad()  # this batch is given up
            continue
        loss_of(model, *batch(step + 10, rank.rank)).backward()
        reference.backward(step, step + 10)
        norm = optimizer.clip_grad_norm_(0.05)
        expected = torch.nn.utils.clip_grad_norm_(trainable(reference.model), 0.05)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-4)
        if step == 3:  # and so is this one, after its gradients were averaged
            optimizer.zero_grad()
            reference.optimizer.zero_grad()
            continue
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        reference.optimizer.step()
        theirs.step()
        reference.optimizer.zero_grad()
        if step == 4:
            optimizer.load_state_dict(optimizer.state_dict())
            checkpoint.load_full_state_dict(optimizer, checkpoint.full_state_dict(inner))
            for one, its_model in ((optimizer, model), (reference.optimizer, reference.model)):
                for param in trainable(its_model):
                    if param in one.state:
                        one.state[param]["exp_avg"].zero_()
    optimizer.state = {}
    assert len(inner.state) == len(optimizer.state) == 0 and isinstance(optimizer, type(inner))
    assert_same(model, reference.model, exact=False)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wrap", [Delegating, Copying, Counting])
def test_a_wrapper_trains_like_the_optimizer_itself(run, stage, world_size, wrap):
    run(contract, stage, wrap)
