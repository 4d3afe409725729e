"""Optimizer classes that people write themselves: what trains in plain torch trains in each stage, or is refused."""

import pytest
import torch

from harness import STAGE_1, STAGE_2, STAGES
from tests.common import Net, error_of, on_ranks, optimizer_of
from tests.pairs import Pair, parameter_of

BF16 = "variants.remainder16"
# Variants that round something -> how far their parameters may be from those of plain torch.
ROUNDED = {"variants.wire16": 3e-3, "variants.moments16": 1e-3, BF16: 3e-2}
VARIANTS = ["variants.blocks", "variants.finite", "variants.muon", "variants.offload", "variants.per_parameter",
            "variants.same_bits", "tests.variants.on_pairs", *ROUNDED]


class Own(torch.optim.Optimizer):
    """SGD by hand. Each class below changes the constructor, or what is done with a parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.prepare()

    def prepare(self):
        pass

    def params(self):
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        lr = self.param_groups[0]["lr"]
        for param in self.params():
            if param.grad is not None:
                self.step_one(param, lr)

    def step_one(self, param, lr):
        param.sub_(param.grad, alpha=lr)


def own(**members):
    return type("Own", (Own,), members)


def assign_grad(self, param, lr):
    param.grad = 2 * param.grad
    Own.step_one(self, param, lr)


def free_grad(self, param, lr):
    Own.step_one(self, param, lr)
    param.grad = None


def assign_data(self, param, lr):
    param.data = param.data - lr * param.grad


def list_params(self):
    listed = Own.params(self)
    self.params = lambda: listed


def list_copies(self):
    """Sophia, Lookahead: copies of the parameters."""
    self.copies = {param: param.detach().clone() for param in self.params()}


def step_from_copy(self, param, lr):
    param.copy_(self.copies[param].sub_(param.grad, alpha=lr))


def read_attributes(self):
    self.factors = {param: getattr(param, "factor", 1.0) for param in self.params()}


def step_by_attribute(self, param, lr):
    Own.step_one(self, param, lr * self.factors[param])


class Wraps(Own):
    """SAM, Lookahead: an optimizer in an optimizer, built from the groups."""

    def prepare(self):
        self.inner = torch.optim.SGD(self.param_groups)

    def step(self, closure=None):
        self.inner.step()


class Optimistic(Own):
    """Keeps the gradient of the step before."""

    def step_one(self, param, lr):
        last = self.state[param].get("last", param.grad)
        param.sub_(2 * param.grad - last, alpha=lr)
        self.state[param]["last"] = param.grad


class WantsRequiresGrad(Own):
    def step_one(self, param, lr):
        if param.requires_grad:
            super().step_one(param, lr)


DROPS_GRADS = own(step_one=free_grad)
KINDS = {
    "p.grad = …": own(step_one=assign_grad),
    "p.grad = None": DROPS_GRADS,
    "p.data = …": own(step_one=assign_data),
    "parameters listed in the constructor": own(prepare=list_params),
    "parameters copied in the constructor": own(prepare=list_copies, step_one=step_from_copy),
    "attributes read in the constructor": own(prepare=read_attributes, step_one=step_by_attribute),
    "an inner optimizer": Wraps,
}


class Awkward(Net):
    """Takes inputs of any dtype. Two parameters have an attribute."""

    def __init__(self, seed):
        super().__init__(seed)
        self.up.weight.factor = 3.0
        self.scale.factor = 3.0

    def forward(self, x):
        return super().forward(x.to(self.scale.dtype)).float()


def awkward_in_bf16(seed):
    return Awkward(seed).bfloat16()


def groups_of(model):
    """Return two groups, of which the second has a single element: one of the ranks has nothing of the group."""
    params = [param for param in model.parameters() if param.requires_grad and param.dim() > 0]
    return [{"params": params}, {"params": [model.scale]}]


def pair_of(rank, stage, optimizer_cls):
    net = awkward_in_bf16 if stage == BF16 else Awkward
    own_arguments = {"leaves": 2} if stage == "variants.same_bits" else {}
    return Pair(rank, stage, optimizer_cls, groups_of, net=net, own=own_arguments, lr=0.1)


def halve_params(pair):
    """Write through `data`, which changes no version counter of autograd."""
    for model in pair.models:
        for param in model.parameters():
            param.data.mul_(0.5)


def trains_alike(pair, stage):
    """Take four steps, in which parameters move. Write into the model, and step again: it is that of plain torch."""
    model, reference = pair.models
    before = [param.detach().clone() for param in model.parameters()]
    pair.train(0, 1, 2, 3)
    for param, old in zip(model.parameters(), before, strict=True):
        assert not param.requires_grad or (param - old).abs().max() > 1e-3
    if stage != BF16:  # the reference steps copies in 32 bits, and doesn't see what is written
        halve_params(pair)
    pair.train(4)
    tolerance = ROUNDED.get(stage, 1e-5)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("stage", [*STAGES, *VARIANTS])
@on_ranks(2, kind=KINDS)
def test_a_class_of_ones_own_trains_as_in_plain_torch(rank, stage, kind):
    if stage == BF16 and "attributes" in kind:
        return  # the reference's copies in 32 bits have none
    trains_alike(pair_of(rank, stage, KINDS[kind]), stage)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_loop_leaves_zero_grad_to_the_class(rank, stage):
    """Train without zero_grad(), with a class that drops gradients in its step."""
    pair = pair_of(rank, stage, DROPS_GRADS)
    for step in range(4):
        pair.backward(step)
        for optimizer in pair.optimizers:
            optimizer.step()
    pair.assert_same(is_exact=False)


@pytest.mark.parametrize("stage", [*STAGES, "variants.muon", "variants.per_parameter"])
@on_ranks(2, kind=[Optimistic, WantsRequiresGrad])
def test_a_class_that_keeps_gradients_is_refused_where_they_are_views(rank, stage, kind):
    """Such a class is right in torch, where zero_grad() makes new gradients, and where parameters require gradients."""
    if stage in (STAGE_1, STAGE_2):
        trains_alike(pair_of(rank, stage, kind), stage)
    else:
        error = error_of(lambda: optimizer_of(stage)([parameter_of(0, rank)], kind), ValueError)
        assert f"{kind.__name__} steps views otherwise than parameters: keep p.grad.clone()" in error


def split_groups(self):
    """By weight decay, say."""
    self.param_groups = [{**group, "params": [param]} for group in self.param_groups for param in group["params"]]


@pytest.mark.parametrize("stage", [*STAGES, "variants.muon"])
@on_ranks(2)
def test_a_class_that_makes_groups_of_its_own_is_refused(rank, stage):
    """A rate that a scheduler sets would reach another group."""
    params = [parameter_of(0, rank) for _ in range(3)]
    error = error_of(lambda: optimizer_of(stage)(params, own(prepare=split_groups)), ValueError)
    assert "Own replaces param_groups, or parameters in them, in its constructor" in error
