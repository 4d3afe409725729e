"""Optimizer classes that people write themselves: what trains in plain torch trains in each stage, or is refused."""

import pytest
import torch

from harness import STAGE_1, STAGE_2, STAGES
from tests.common import Net, error_of, on_ranks, optimizer_of
from tests.pairs import Pair, parameter_of

BF16 = "variants.remainder16"
ROUNDED = {"variants.wire16": 3e-3, "variants.moments16": 1e-3, BF16: 3e-2}  # -> by how much
VARIANTS = ["variants.blocks", "variants.finite", "variants.muon", "variants.offload", "variants.per_parameter",
            "variants.same_bits", "tests.variants.on_pairs", *ROUNDED]


class Own(torch.optim.Optimizer):
    """SGD by hand. A kind of class changes the constructor, or what is done with one parameter, or the end."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.n_calls = 0
        self.prepare()

    def prepare(self):
        pass

    finish = prepare

    def params(self):
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.n_calls += 1
        for param in self.params():
            if param.grad is not None:
                self.step_one(param, self.param_groups[0]["lr"])
        self.finish()

    def step_one(self, param, lr):
        param.sub_(param.grad, alpha=lr)


def own(**members):
    return type("Own", (Own,), members)


def assign_grad(self, param, lr):
    param.grad = param.grad.sign()
    Own.step_one(self, param, lr)


def free_grad(self, param, lr):
    Own.step_one(self, param, lr)
    param.grad = None


def assign_data(self, param, lr):
    param.data = param.data - lr * param.grad


def assign_data_late(self, param, lr):
    """Lookahead: every second step goes back half of the way, to a copy."""
    Own.step_one(self, param, lr)
    slow = self.state[param].setdefault("slow", param.clone())
    if self.state[param].setdefault("n", 0) % 2:
        param.data = (param.data + slow) / 2
    self.state[param]["n"] += 1


def list_params(self):
    listed = Own.params(self)
    self.params = lambda: listed


def list_copies(self):
    """Sophia, Lookahead: copies of the parameters."""
    self.copies = {param: param.detach().clone() for param in Own.params(self)}


def step_from_copy(self, param, lr):
    param.copy_(self.copies[param].sub_(param.grad, alpha=lr))


def read_attributes(self):
    self.factors = {param: getattr(param, "factor", 1.0) for param in Own.params(self)}


class Wraps(Own):
    """SAM, Lookahead: an optimizer in an optimizer, built from the groups."""

    def prepare(self):
        self.inner = torch.optim.SGD(self.param_groups)

    def step(self, closure=None):
        self.inner.step()


class Optimistic(Own):
    """Keeps the gradient of the step before."""

    def step_one(self, param, lr):
        param.sub_(2 * param.grad - self.state[param].get("last", param.grad), alpha=lr)
        self.state[param]["last"] = param.grad


class WantsRequiresGrad(Own):
    def step_one(self, param, lr):
        if param.requires_grad:
            super().step_one(param, lr)


KINDS = {
    "p.grad = …": own(step_one=assign_grad),
    "p.grad = None": own(step_one=free_grad),
    "p.data = …": own(step_one=assign_data),
    "p.data = … in some steps": own(step_one=assign_data_late),
    "zero_grad() in the end": own(finish=Own.zero_grad),
    "parameters listed in the constructor": own(prepare=list_params),
    "parameters copied in the constructor": own(prepare=list_copies, step_one=step_from_copy),
    "attributes read in the constructor": own(
        prepare=read_attributes, step_one=lambda self, param, lr: Own.step_one(self, param, lr * self.factors[param])),
    "an inner optimizer": Wraps,
}
DROP_GRADS = [kind for kind in KINDS if "zero_grad" in kind or "None" in kind]


class Awkward(Net):
    """Tied and scalar parameters, in the dtype of the weights, some with an attribute."""

    def __init__(self, seed):
        super().__init__(seed)
        self.up.weight.factor = self.scale.factor = 3.0

    def forward(self, x):
        return super().forward(x.to(self.scale.dtype)).float()


def groups_of(model):
    """-> two groups, the second with a single element: one of the ranks has nothing of it."""
    return [{"params": [param for param in model.parameters() if param.requires_grad and param.dim()]},
            {"params": [model.scale]}]


def pair_of(rank, stage, optimizer_cls):
    def net(seed):
        return Awkward(seed).bfloat16() if stage == BF16 else Awkward(seed)
    return Pair(rank, stage, optimizer_cls, groups_of, net=net, lr=0.1,
                own={"leaves": 2} if stage == "variants.same_bits" else {})


def trains_alike(pair, stage):
    before = [param.detach().clone() for param in pair.model.parameters()]
    pair.train(*range(4))
    if stage in ROUNDED:
        for param, expected in zip(*(model.parameters() for model in pair.models), strict=True):
            torch.testing.assert_close(param, expected, rtol=ROUNDED[stage], atol=ROUNDED[stage])
    else:
        pair.assert_same(is_exact=False)
    moved = [(param - old).abs().max() for param, old in zip(pair.model.parameters(), before) if param.requires_grad]
    assert min(moved) > 1e-3


@pytest.mark.parametrize("stage", [*STAGES, *VARIANTS])
@on_ranks(2, kind=KINDS)
def test_a_class_of_ones_own_trains_as_in_plain_torch(rank, stage, kind):
    if stage == BF16 and "attributes" in kind:
        return  # the reference's copies in 32 bits have none
    trains_alike(pair_of(rank, stage, KINDS[kind]), stage)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_what_is_written_into_the_model_counts_for_a_class_that_assigns_data(rank, stage):
    """Also through `data`, of which no version counter tells."""
    pair = pair_of(rank, stage, KINDS["p.data = …"])
    for step in range(3):
        pair.train(step)
        for model in pair.models:
            for param in model.parameters():
                param.data.mul_(0.5)
    pair.assert_same(is_exact=False)


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2, kind=DROP_GRADS)
def test_a_loop_leaves_zero_grad_to_the_class(rank, stage, kind):
    pair = pair_of(rank, stage, KINDS[kind])
    for step in range(4):
        pair.backward(step)
        pair.optimizer.step()
        pair.replicated.optimizer.step()
    pair.assert_same(is_exact=False)


@pytest.mark.parametrize("stage", [*STAGES, "variants.muon", "variants.per_parameter"])
@on_ranks(2, kind=[Optimistic, WantsRequiresGrad])
def test_a_class_that_keeps_gradients_is_refused_where_they_are_views(rank, stage, kind):
    """Right in torch, where zero_grad() makes new ones; or where parameters require gradients."""
    if stage in (STAGE_1, STAGE_2):
        trains_alike(pair_of(rank, stage, kind), stage)
    else:
        error = error_of(lambda: optimizer_of(stage)([parameter_of(0, rank)], kind), ValueError)
        assert f"{kind.__name__} steps views otherwise than parameters" in error
        assert "keep p.grad.clone()" in error


def split_groups(self):
    """By weight decay, say."""
    self.param_groups = [{**group, "params": [param]} for group in self.param_groups for param in group["params"]]


def copy_params(self):
    """apex' FP16_Optimizer, for copies in 32 bits."""
    for group in self.param_groups:
        group["params"] = [param.detach().float().clone() for param in group["params"]]


@pytest.mark.parametrize("stage", [*STAGES, "variants.muon"])
@on_ranks(2, prepare=[split_groups, copy_params])
def test_a_class_that_makes_groups_of_its_own_is_refused(rank, stage, prepare):
    """A rate that a scheduler sets would reach another group."""
    params = [parameter_of(0, rank) for _ in range(3)]
    error = error_of(lambda: optimizer_of(stage)(params, own(prepare=prepare)), ValueError)
    assert "Own replaces param_groups, or parameters in them, in its constructor" in error
