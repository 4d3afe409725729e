"""Drawn at random: models, groups, optimizers, and scripts of calls, each compared with one process that has all data.

Gradients are whole numbers that d divides: they have the same sum in whatever order, in 16 bits too. So everything is
equal to the bit, but what a norm of order 2 has scaled. A failure says the seed and the calls so far; the same seed
draws the same again.
"""

import contextlib
import copy
import inspect
import random
from unittest import mock

import pytest
import torch
from torch import nn

from tests.common import OPTIMIZERS, STAGES, on_its_device, optimizer_of
from tests.pairs import deliver_when_asked

SHAPES = [(), (1,), (3,), (16,), (33,), (5, 7), (2, 3, 4)]
CALLS = ["step", "step", "accumulate", "no_sync", "clip", "zero_grad", "closure", "save", "lr", "add", "read"]
FROZEN = ["freeze", "frozen on some ranks"]  # and unfrozen when others have momentum
WITH_UNUSED = ["part", "nothing"]  # some ranks don't use some parameters; step() without a backward pass


class Drawn:
    """One draw, on one rank: `model` and `optimizer` are trained by all of them, `reference` by this process alone.

    `wrap`: an optimizer -> a wrapper of it, which is used instead.
    """

    def __init__(self, rank, stage, seed, wrap):
        self.rank, self.stage, self.wrap = rank, stage, wrap
        self.draw = random.Random(seed)  # the same on every rank
        self.model, self.values, self.called, self.older, self.is_exact = [], [], [], [], True
        self.optimizer_cls, kwargs = OPTIMIZERS[self.draw.choice([*OPTIMIZERS])]
        self.kwargs = {**kwargs, **self.draw.choice([{"fused": True}, {"foreach": False}, {"foreach": True}])}
        if self.optimizer_cls is torch.optim.SGD:  # foreach writes into the gradients then
            self.kwargs["nesterov"] = self.draw.random() < 0.5
        known = inspect.signature(optimizer_of(stage)).parameters
        has_buckets = "bucket_cap_mb" in known
        self.has_zeros = "grad_dtype" in known  # for the gradient of what nobody has used, where others have None
        self.has_main_params = self.has_zeros or has_buckets  # of 16-bit parameters, in fp32
        floats = [torch.float32, torch.float32, torch.float64, torch.bfloat16] if stage in STAGES else [torch.float32]
        self.may_be = self.draw.sample(floats, 2) if self.has_main_params else [self.draw.choice(floats)]
        self.own = {}
        if self.has_zeros and torch.float64 not in self.may_be:
            self.own["grad_dtype"] = self.draw.choice([None, torch.float32])
        if has_buckets:
            self.own["bucket_cap_mb"] = self.draw.choice([None, 1e-6, 1e-4])
            self.own["find_unused_parameters"] = self.draw.random() < 0.7
        self.may_call = [*CALLS]
        if self.optimizer_cls is not torch.optim.SGD or "foreach" in self.kwargs:  # torch's fused SGD begins once
            self.may_call += FROZEN[: 1 if self.has_zeros else 2]
            self.may_call += WITH_UNUSED * self.own.get("find_unused_parameters", True)
        self.prefetches = has_buckets and self.draw.random() < 0.5
        self.groups = [[self.drawn_group() for _ in range(self.draw.randint(1, 3))]]  # and those that are added
        self.reference = self.optimizer_cls(self.of(self.values, *self.groups[0]), **self.kwargs)
        self.build()

    def tensor(self, shape, number):
        return torch.tensor([number() for _ in range(torch.Size(shape).numel())]).view(shape)

    def drawn_group(self):
        """-> a group of new parameters, by their places in `model`, with settings of its own."""
        places = range(len(self.model), len(self.model) + self.draw.randint(1, 3))
        for _ in places:
            shape, dtype = self.draw.choice(SHAPES), self.draw.choice(self.may_be)
            value = self.tensor(shape, self.draw.random).to(dtype)
            self.model.append(nn.Parameter(value + self.rank.rank))  # that of rank 0 counts
            self.values.append(value.to(torch.promote_types(dtype, torch.float32)) if self.has_main_params else value)
            self.values[-1].grad = torch.zeros_like(self.values[-1]) if self.has_zeros else None
        settings = {"lr": self.draw.choice([0.001, 0.02, 0.1]), "weight_decay": self.draw.choice([0.0, 0.1])}
        return {"params": places, **{key: value for key, value in settings.items() if self.draw.random() < 0.5}}

    @staticmethod
    def of(tensors, *groups):
        return [{**group, "params": [tensors[place] for place in group["params"]]} for group in groups]

    def build(self):
        first, *later = self.groups
        params = self.of(self.model, *first)
        with mock.patch("guard.probe.check"):  # the trial, which test_probe.py is about, takes as long as the calls
            self.optimizer = self.wrap(optimizer_of(self.stage)(params, self.optimizer_cls, **self.own, **self.kwargs))
            for added in later:
                self.optimizer.add_param_group(self.of(self.model, *added)[0])
        if self.prefetches:
            self.optimizer.prefetch_params(nn.ParameterList(self.model))
            if self.stage in STAGES:
                deliver_when_asked(self.optimizer)

    def trained(self):
        return [place for place, param in enumerate(self.model) if param.requires_grad]

    def backward(self, part=False, freezes=False):
        """Of every rank in the reference, of this one in the model. What a rank doesn't use it may freeze."""
        trained, d = self.trained(), self.rank.world_size
        if part:  # all read what is under way: a rank without a pass would in its step, where others want its gradients
            assert all(param.isfinite().all() for param in self.model)
        for rank in range(d):
            n_used = self.draw.randint(0, len(trained)) if part else len(trained)
            used, losses = self.draw.sample(trained, n_used), []
            for place, (param, value) in enumerate(zip(self.model, self.values)):
                mean = self.tensor(param.shape, lambda: self.draw.randint(-4, 4))
                if place in used:
                    value.grad = mean.to(value) if value.grad is None else value.grad + mean
                    losses.append((param * (d * mean).to(param)).sum().double())
            if rank == self.rank.rank:
                own_used, own_losses = used, losses
        for place in trained if freezes else []:
            self.model[place].requires_grad_(place in own_used)
        if own_losses:
            sum(own_losses).backward()

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.reference.zero_grad(set_to_none=not self.has_zeros)

    def step(self, closure=None):
        """In both, and what follows it. -> the loss of `closure`"""
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
            with self.optimizer.no_sync() if name == "no_sync" else contextlib.nullcontext():
                self.backward()
            self.backward()
            self.step()
        elif name == "frozen on some ranks":
            trained = self.trained()
            self.backward(part=True, freezes=True)
            self.step()
            for place in trained:
                self.model[place].requires_grad_(True)
        elif name == "freeze":  # before the backward pass, or after; or unfreeze
            place, is_late = self.draw.randrange(len(self.model)), self.draw.random() < 0.5
            param, value, freezes = self.model[place], self.values[place], self.model[place].requires_grad
            if freezes and len(self.trained()) == 1:
                return
            if freezes and is_late:
                self.backward()
            else:
                self.zero_grad()  # the zeros of an older optimizer would count as a gradient
                value.grad = torch.zeros_like(value) if self.has_zeros and not freezes else None
            param.requires_grad_(not freezes)
            if not (freezes and is_late):
                self.backward()
            self.step()
            value.grad = None if freezes else value.grad
        elif name == "clip":
            self.backward()
            order = torch.inf if torch.bfloat16 in self.may_be else self.draw.choice([1.0, 2.0, torch.inf])
            self.is_exact &= order != 2
            norms = [self.optimizer.clip_grad_norm_(2.0, order), nn.utils.clip_grad_norm_(self.values, 2.0, order)]
            assert torch.allclose(*(norm.double() for norm in norms), rtol=1e-6), norms
            self.draw.choice([self.step, self.zero_grad])()
        elif name == "closure":
            loss = self.step(lambda: self.backward() or float(self.rank.rank))
            assert loss == (self.rank.world_size - 1) / 2
        elif name == "save":  # and go on with an optimizer that is new; the model is, too, or the older one lives on
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
            self.groups.append([self.drawn_group()])
            self.optimizer.add_param_group(self.of(self.model, *self.groups[-1])[0])
            groups = [*map(dict, self.reference.param_groups), *self.of(self.values, *self.groups[-1])]
            state, self.reference = self.reference.state, self.optimizer_cls(groups, **self.kwargs)
            self.reference.state.update(state)  # torch < 2.13 makes Adagrad's in the constructor only
        else:
            for place, (param, value) in enumerate(zip(self.model, self.values)):
                is_equal = torch.equal if self.is_exact else torch.allclose
                assert is_equal(param, value.to(param.dtype)), f"parameter {place} is {param.tolist()}, not {value}"


@on_its_device
def drawn(rank, stage, seeds, wrap=lambda optimizer: optimizer):
    for seed in seeds:
        one = Drawn(rank, stage, seed, wrap)
        try:
            for _ in range(8):
                one.call(one.draw.choice(one.may_call))
            one.call("read")
        except Exception as error:
            raise AssertionError(f"seed {seed}, {one.optimizer_cls.__name__} of {one.kwargs}, {one.own}, "
                                 f"after {one.called}: {type(error).__name__} {error}") from error


@pytest.mark.any_size  # with a stage each that is 16 times 13 draws, 208 in all
def test_what_is_drawn_equals_one_process_with_all_data(run, stage, world_size):
    first = 100 * STAGES.index(stage) + 400 * world_size if stage in STAGES else 400 * world_size
    run(drawn, stage, range(first, first + 13))
