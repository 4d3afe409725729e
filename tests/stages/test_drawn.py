"""Calls methods of an optimizer in an order that is drawn, and compares with one process that has all data.

Other tests call one or two of these methods. On one or two ranks half of the draws are equal to the bit; in the others,
calls add up gradients in another order than one process does. A failure names the calls, and the seed, which draws the
same calls again.
"""

import copy
import random

import pytest
import torch
from torch import nn

from harness import STAGE_3, STAGE_4
from tests.common import STAGES, no_sync_if, on_its_device, trainable
from tests.pairs import UNFUSED, Pair, deliver_when_asked

# eps: rounding noise in a gradient near 0 must not become a whole step.
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3, **UNFUSED}
SGD = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1, **UNFUSED}
ADAGRAD = {"lr": 0.02, "eps": 1e-3, **UNFUSED}
DRAWN_FROM = [(torch.optim.SGD, SGD), (torch.optim.AdamW, ADAMW), (torch.optim.Adagrad, ADAGRAD)]


def loss_of_some(model, x, y):
    """Return a loss of those parameters beside which `x` has a positive number: others on each rank, in each step.

    One parameter is always among them, because stage 4 wants a gradient in each pass.
    """
    loss = model.embed.weight.square().sum()
    for param, number in zip(trainable(model), x.flatten()):
        if number > 0:
            loss = loss + param.square().sum()
    return loss


class Drawn(Pair):
    """A Pair with what the calls need. `wrap`: optimizer of the stage -> another object, which takes its place."""

    def __init__(self, rank, stage, seed, wrap):
        self.stage = stage
        self.wrap = wrap
        self.draw = random.Random(seed)  # the same on every rank
        self.n_batches = 0
        self.is_exact = True  # whether all sums so far were in the order in which one process adds
        optimizer_cls, kwargs = self.draw.choice(DRAWN_FROM)
        own = {}
        prefetch = False
        if stage == STAGE_4:
            prefetch = self.draw.random() < 0.5
            own = {"find_unused_parameters": True, "bucket_cap_mb": self.draw.choice([None, 1e-6, 1e-4])}
        super().__init__(rank, stage, optimizer_cls, own=own, prefetch=prefetch, **kwargs)

    def build(self, groups):
        super().build(groups)
        self.optimizer = self.wrap(self.optimizer)
        if self.prefetches:
            deliver_when_asked(self.optimizer)

    def next_batch(self):
        self.n_batches += 1
        return self.n_batches

    def step(self):
        if self.stage == STAGE_3:  # its buffer has zeros for a parameter that no rank uses
            for param in trainable(self.replicated.model):
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        super().step()

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def use_all_parameters(training):
    training.train(training.next_batch())


def use_some_parameters(training):
    training.assert_same(training.is_exact)  # all ranks wait for all parameters now, and for none in the pass
    training.backward(training.next_batch(), loss_of=loss_of_some)
    training.step()


def accumulate(training):
    """Run two passes, inside no_sync() or outside, and maybe a third one outside."""
    training.is_exact = False
    with no_sync_if(training.optimizer, training.draw.random() < 0.5):
        training.backward(training.next_batch(), training.next_batch())
    if training.draw.random() < 0.5:
        training.backward(training.next_batch())
    training.step()


def clip(training):
    training.is_exact = False
    training.backward(training.next_batch())
    training.clip(0.5, training.draw.choice([1.0, 2.0, torch.inf]))
    training.step()


def drop_gradients(training):
    training.backward(training.next_batch())
    training.zero_grad()


def freeze_or_unfreeze(training):
    for model in training.models:
        model.up.requires_grad_(not model.up.bias.requires_grad)
    training.zero_grad()


def add_group(training):
    """Add a parameter of ones. Ranks have other values before: add_param_group() broadcasts rank 0's."""
    values = [1.0 + training.rank.number, 1.0]
    for optimizer, model, value in zip(training.optimizers, training.models, values):
        param = nn.Parameter(torch.full((1 + training.n_batches,), value))
        model.register_parameter(f"late_{len(list(model.parameters()))}", param)
        optimizer.add_param_group({"params": [param], "lr": 0.01})


def save_and_load(training):
    saved = copy.deepcopy(training.optimizer.state_dict())
    first, *added = [{"params": group["params"]} for group in training.optimizer.param_groups]
    training.build([first])
    for group in added:
        training.optimizer.add_param_group(group)
    training.optimizer.load_state_dict(saved)


EXACT = [use_all_parameters, use_some_parameters, drop_gradients, freeze_or_unfreeze, add_group, save_and_load]
UP_TO_ROUNDING = [accumulate, clip]


@on_its_device
def drawn(rank, stage, seeds, wrap=lambda optimizer: optimizer):
    for seed in seeds:
        training = Drawn(rank, stage, seed, wrap)
        calls = training.draw.choices(training.draw.choice([EXACT, EXACT + UP_TO_ROUNDING]), k=10)
        try:
            for call in calls:
                call(training)
            training.assert_same(training.is_exact)
        except Exception as error:
            names = [call.__name__ for call in calls]
            raise AssertionError(f"seed {seed}, {names}: {type(error).__name__} {error}") from error


@pytest.mark.any_size  # 13 draws for each stage and size
def test_what_is_drawn_equals_one_process_with_all_data(run, stage, world_size):
    first = 100 * STAGES.index(stage) + 400 * world_size if stage in STAGES else 400 * world_size
    run(drawn, stage, range(first, first + 13))
