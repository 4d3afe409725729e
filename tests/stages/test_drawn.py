"""Draws models, groups, optimizers and calls at random, and compares each draw with one process that has all data.

Gradients are whole numbers that d divides: they have the same sum in whatever order, in 16 bits too. So parameters are
equal to the bit, until a norm of order 2 scales a gradient. A failure says the seed, which draws the same again, and
the calls so far.
"""

import copy
import functools
import inspect
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.common import OPTIMIZERS, STAGES, no_sync_if, on_its_device, optimizer_of
from tests.pairs import deliver_when_asked

SHAPES = [(), (1,), (3,), (16,), (33,), (5, 7), (2, 3, 4)]
CALLS = ["step", "step", "accumulate", "no_sync", "clip", "zero_grad", "closure", "save", "lr", "add", "read"]
WITH_UNUSED = ["part", "nothing"]  # some ranks don't use some parameters; step() without a backward pass


def weighted_sum(param, weights, factor):
    return (param * weights).sum().double() * factor


class Drawn:
    """Holds what was drawn, on one rank. All ranks train `model`; each alone trains `values` with all data.

    Parameters are named by their place in both lists. `wrap`: a function of the optimizer that returns another one.
    """

    def __init__(self, rank, stage, seed, wrap):
        self.rank, self.stage, self.wrap = rank, stage, wrap
        self.draw = random.Random(seed)  # the same on every rank
        self.model, self.values = [], []
        self.called = []  # names of calls
        self.older = []  # optimizers that were replaced
        self.is_exact = True
        self.optimizer_cls, kwargs = OPTIMIZERS[self.draw.choice([*OPTIMIZERS])]
        self.kwargs = {**kwargs, **self.draw.choice([{"fused": True}, {"foreach": False}, {"foreach": True}])}
        if self.optimizer_cls is torch.optim.SGD:  # with nesterov and foreach torch writes into the gradients
            self.kwargs["nesterov"] = self.draw.random() < 0.5
        arguments = inspect.signature(optimizer_of(stage)).parameters
        has_buckets = "bucket_cap_mb" in arguments
        self.has_zeros = "grad_dtype" in arguments  # stage 3: a parameter that nobody uses has a gradient of zeros
        self.has_main_params = self.has_zeros or has_buckets  # of 16-bit parameters, in fp32
        floats = [torch.float32, torch.float32, torch.float64, torch.bfloat16] if stage in STAGES else [torch.float32]
        self.dtypes = self.draw.sample(floats, 2) if self.has_main_params else [self.draw.choice(floats)]
        self.options = {}  # of the stage
        if self.has_zeros and torch.float64 not in self.dtypes:
            self.options["grad_dtype"] = self.draw.choice([None, torch.float32])
        if has_buckets:
            self.options["bucket_cap_mb"] = self.draw.choice([None, 1e-6, 1e-4])
            self.options["find_unused_parameters"] = self.draw.random() < 0.7
        self.calls = [*CALLS]  # to draw from
        if self.optimizer_cls is not torch.optim.SGD or "foreach" in self.kwargs:  # fused, all momentum begins at once
            self.calls.append("freeze")
            if not self.has_zeros:
                self.calls.append("frozen on some ranks")
            if self.options.get("find_unused_parameters", True):
                self.calls += WITH_UNUSED
        self.prefetches = has_buckets and self.draw.random() < 0.5
        self.checkpoints = self.draw.random() < 0.3
        # Lists of groups: those of the constructor, then those that each call of add_param_group() adds.
        self.groups = [[self.drawn_group() for _ in range(self.draw.randint(1, 3))]]
        self.reference = self.optimizer_cls(self.with_params(self.values, self.groups[0]), **self.kwargs)
        self.build()

    def tensor(self, shape, number):
        return torch.tensor([number() for _ in range(torch.Size(shape).numel())]).view(shape)

    def drawn_group(self):
        """Make new parameters. Return their group, with places for parameters, and with settings of its own."""
        places = range(len(self.model), len(self.model) + self.draw.randint(1, 3))
        for _ in places:
            shape, dtype = self.draw.choice(SHAPES), self.draw.choice(self.dtypes)
            value = self.tensor(shape, self.draw.random).to(dtype)
            self.model.append(nn.Parameter(value + self.rank.number))  # the stage takes rank 0's
            self.values.append(value.to(torch.promote_types(dtype, torch.float32)) if self.has_main_params else value)
            self.values[-1].grad = torch.zeros_like(self.values[-1]) if self.has_zeros else None
        settings = {"lr": self.draw.choice([0.001, 0.02, 0.1]), "weight_decay": self.draw.choice([0.0, 0.1])}
        return {"params": places, **{key: value for key, value in settings.items() if self.draw.random() < 0.5}}

    @staticmethod
    def with_params(tensors, groups):
        """Return `groups` with `tensors` for places."""
        return [{**group, "params": [tensors[place] for place in group["params"]]} for group in groups]

    def build(self):
        first, *added = [self.with_params(self.model, groups) for groups in self.groups]
        settings = {**self.options, **self.kwargs}
        with mock.patch("guard.probe.check"):  # it takes as long as the calls, and test_probe.py tests it
            self.optimizer = self.wrap(optimizer_of(self.stage)(first, self.optimizer_cls, **settings))
            for (group,) in added:
                self.optimizer.add_param_group(group)
        if self.prefetches:
            self.optimizer.prefetch_params(nn.ParameterList(self.model))
            if self.stage in STAGES:
                deliver_when_asked(self.optimizer)

    def trained(self):
        return [place for place, param in enumerate(self.model) if param.requires_grad]

    def backward(self, part=False, freezes=False):
        """Run this rank's backward pass in `model`, and those of all ranks in `values`.

        part: each rank uses some of the parameters. freezes: it freezes the others.
        """
        trained, d = self.trained(), self.rank.world_size
        if part:  # wait for parameters now: a rank that uses none would wait in its step, when others send gradients
            assert all(param.isfinite().all() for param in self.model)
        for rank in range(d):
            n_used = self.draw.randint(0, len(trained)) if part else len(trained)
            used = self.draw.sample(trained, n_used)
            losses = []
            for place, (param, value) in enumerate(zip(self.model, self.values)):
                mean = self.tensor(param.shape, lambda: self.draw.randint(-4, 4))
                if place in used:
                    times = self.draw.randint(1, 2) if self.checkpoints else 1
                    value.grad = (times * mean).to(value) if value.grad is None else value.grad + times * mean
                    losses += times * [functools.partial(weighted_sum, param, (d * mean).to(param))]
            if rank == self.rank.number:
                own_used, own_losses = used, losses
        for place in trained if freezes else []:
            self.model[place].requires_grad_(place in own_used)
        if own_losses and self.checkpoints:  # each loss has a backward pass of its own, inside of this one
            factor = torch.ones((), requires_grad=True)  # such a checkpoint needs an input with a gradient
            sum(checkpoint(loss, factor, use_reentrant=True) for loss in own_losses).backward()
        elif own_losses:
            sum(loss(1) for loss in own_losses).backward()

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.reference.zero_grad(set_to_none=not self.has_zeros)

    def step(self, closure=None):
        """Step both optimizers and zero their gradients. Return the loss of `closure`."""
        loss = self.optimizer.step(closure)
        self.reference.step()
        self.zero_grad()
        return loss

    def call(self, name):
        self.called.append(name)
        if name in ("step", "part", "nothing"):
            if name != "nothing":
                self.backward(part=name == "part")
            self.step()
        elif name == "zero_grad":
            self.backward()
            self.zero_grad()
        elif name in ("accumulate", "no_sync"):
            with no_sync_if(self.optimizer, name == "no_sync"):
                self.backward()
            self.backward()
            dist.all_reduce(torch.ones(()))  # a message of the user's
            self.step()
        elif name == "frozen on some ranks":
            trained = self.trained()
            self.backward(part=True, freezes=True)
            self.step()
            for place in trained:
                self.model[place].requires_grad_(True)
        elif name == "freeze":
            self.freeze_or_unfreeze(self.draw.randrange(len(self.model)), is_late=self.draw.random() < 0.5)
        elif name == "clip":
            self.backward()
            order = torch.inf if torch.bfloat16 in self.dtypes else self.draw.choice([1.0, 2.0, torch.inf])
            self.is_exact &= order != 2
            norms = [self.optimizer.clip_grad_norm_(2.0, order), nn.utils.clip_grad_norm_(self.values, 2.0, order)]
            assert torch.allclose(*(norm.double() for norm in norms), rtol=1e-6), norms
            self.draw.choice([self.step, self.zero_grad])()
        elif name == "closure":
            loss = self.step(lambda: self.backward() or float(self.rank.number))  # backward() returns None
            assert loss == (self.rank.world_size - 1) / 2  # the mean
        elif name == "save":  # and load into a new optimizer. Its model is new, too, or the older optimizer lives on
            saved = copy.deepcopy(self.optimizer.state_dict())
            if self.draw.random() < 0.5:
                self.model = [nn.Parameter(param.detach().clone(), param.requires_grad) for param in self.model]
            elif self.draw.random() < 0.5:
                self.older.append(self.optimizer)
            self.build()
            self.optimizer.load_state_dict(saved)
        elif name == "lr":
            group = self.draw.randrange(len(self.reference.param_groups))
            for optimizer in (self.optimizer, self.reference):
                optimizer.param_groups[group]["lr"] = 0.3 / len(self.called)
        elif name == "add":
            added = [self.drawn_group()]
            self.groups.append(added)
            self.optimizer.add_param_group(*self.with_params(self.model, added))
            groups = [*map(dict, self.reference.param_groups), *self.with_params(self.values, added)]
            state = self.reference.state
            self.reference = self.optimizer_cls(groups, **self.kwargs)  # torch < 2.13 makes Adagrad's state only here
            self.reference.state.update(state)
        else:
            for place, (param, value) in enumerate(zip(self.model, self.values)):
                is_equal = torch.equal if self.is_exact else torch.allclose
                assert is_equal(param, value.to(param.dtype)), f"parameter {place} is {param.tolist()}, not {value}"

    def freeze_or_unfreeze(self, place, is_late):
        """Freeze a trained parameter, unless it is the last one, before a backward pass or after it; or unfreeze it."""
        param, value = self.model[place], self.values[place]
        freezes = param.requires_grad
        if freezes and len(self.trained()) == 1:
            return
        if freezes and is_late:
            self.backward()
            param.requires_grad_(False)
        else:
            self.zero_grad()  # the zeros of an older optimizer would count as a gradient
            value.grad = torch.zeros_like(value) if self.has_zeros and not freezes else None
            param.requires_grad_(not freezes)
            self.backward()
        self.step()
        if freezes:
            value.grad = None


@on_its_device
def drawn(rank, stage, seeds, wrap=lambda optimizer: optimizer):
    for seed in seeds:
        training = Drawn(rank, stage, seed, wrap)
        try:
            for _ in range(8):
                training.call(training.draw.choice(training.calls))
            training.call("read")
        except Exception as error:
            raise AssertionError(f"seed {seed}, {training.optimizer_cls.__name__} {training.kwargs} {training.options}"
                                 f", after {training.called}: {type(error).__name__} {error}") from error


@pytest.mark.any_size  # 13 draws for each stage and size
def test_what_is_drawn_equals_one_process_with_all_data(run, stage, world_size):
    first = 100 * STAGES.index(stage) + 400 * world_size if stage in STAGES else 400 * world_size
    run(drawn, stage, range(first, first + 13))
