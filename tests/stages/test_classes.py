"""What an optimizer class reads beside gradients, and what programs do with an optimizer that is one of torch's."""

from unittest import mock

import pytest
import torch
from torch import nn

from guard.chained import Chained
from harness import FOUR, STAGES, THREE
from tests.common import Net, error_of, on_ranks, optimizer_of, trainable
from tests.pairs import Pair, assert_same, backward, parameter_of, sgd_of


class ByAttribute(torch.optim.SGD):
    """As modded-nanogpt's optimizers."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * getattr(param, "lr_mul", 1.0))


class ByName(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for name, param in zip(group.get("param_names", [""] * len(group["params"])), group["params"], strict=True):
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * (0.1 if name.endswith("bias") else 1.0))


class Polyak(torch.optim.SGD):
    """`n_calls`: of the closure, in one step."""

    n_calls = 1

    @torch.no_grad()
    def step(self, closure=None):
        losses = [] if closure is None else [closure() for _ in range(self.n_calls)]
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.add_(param.grad, alpha=-self.param_groups[0]["lr"] / (1 + sum(map(float, losses))))


class Twice(Polyak):
    n_calls = 2


@pytest.mark.parametrize("stage", [*STAGES, "variants.muon", "variants.moments16"])
@on_ranks(2, optimizer_cls=[ByAttribute, ByName])
def test_a_class_finds_attributes_and_names_of_parameters(rank, stage, optimizer_cls):
    """Also attributes that are set after the constructor, and names after a state_dict was loaded."""
    def groups(model):
        for name, param in model.named_parameters():
            if name.startswith("up"):
                param.lr_mul = 3.0
        return [(name, param) for name, param in model.named_parameters() if param.requires_grad]

    pair = Pair(rank, stage, optimizer_cls, groups, seeds=[0], lr=0.1)
    pair.train(0)
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    for model in pair.models:
        model.down.weight.lr_mul = 5.0
    pair.train(1)
    pair.assert_same(is_exact=False)


@pytest.mark.parametrize("stage", [*STAGES, "variants.muon"])
@on_ranks(2)
def test_a_class_that_reads_the_loss_gets_a_closure_that_returns_the_mean(rank, stage):
    weight, plain = parameter_of(1, rank), parameter_of(1, rank)
    optimizer, reference = optimizer_of(stage)([weight], Polyak, lr=0.1), Polyak([plain], lr=0.1)
    for _ in range(2):
        for one, param, factor in ((optimizer, weight, 1 + 2 * rank.rank), (reference, plain, 2)):
            def closure(one=one, param=param, factor=factor):
                one.zero_grad()
                loss = param.square().sum() * factor
                loss.backward()
                return loss

            if one is reference:
                loss = closure()
                one.step(lambda loss=loss: loss)
            else:
                mean = one.step(closure)
        torch.testing.assert_close(mean, loss.detach())
    torch.testing.assert_close(weight, plain)
    refused = optimizer_of(stage)([parameter_of(1, rank)], Twice, lr=0.1)
    (param,) = refused.param_groups[0]["params"]
    assert "Twice calls its closure again in one step" in error_of(
        lambda: refused.step(lambda: (param.sum().backward(), 1.0)[1]))
    assert "step" not in vars(refused.optimizer)  # it is the class's again


@pytest.mark.shared_guard
@on_ranks(2)
def test_hooks_of_state_dicts_are_called(rank, stage):
    calls, optimizer = [], sgd_of(stage, [parameter_of(0, rank)])
    optimizer.register_state_dict_pre_hook(lambda one: calls.append(one is optimizer))
    optimizer.register_state_dict_post_hook(lambda one, state: {**state, "mine": 3})
    optimizer.register_load_state_dict_pre_hook(lambda one, state: calls.append(state.pop("mine")) or state)
    optimizer.register_load_state_dict_post_hook(lambda one: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [True, 3, "loaded"]


@on_ranks(2)
def test_a_norm_of_type_zero_is_refused_where_there_are_shards(rank, stage):
    """torch counts the tensors that have a gradient."""
    optimizer = sgd_of(stage, [parameter_of(0, rank), parameter_of(0, rank)])
    sum(param.sum() for param in optimizer.param_groups[0]["params"]).backward()
    if stage in STAGES[:2]:
        assert optimizer.clip_grad_norm_(1.0, 0) == 2
    else:
        assert "norm_type is 0: it must be above 0" in error_of(lambda: optimizer.clip_grad_norm_(1.0, 0), ValueError)


class Mixin:
    pass


@pytest.mark.shared_guard
@on_ranks(2)
def test_a_method_of_a_class_behind_a_mixin_can_be_patched_before_there_is_an_instance(rank, stage):
    mine = type("Mine", (Mixin, optimizer_of(stage)), {})
    with mock.patch.object(mine, "step", autospec=True) as step:
        mine.step("self")
        step.assert_called_once()
    weight = parameter_of(0, rank)
    optimizer = mine([weight], torch.optim.SGD, lr=1.0)
    weight.sum().backward()
    optimizer.step()
    assert weight.eq(-1).all()
    assert "step() got an unexpected keyword argument" in error_of(lambda: optimizer.step(inv_scale=2.0), TypeError)


@pytest.mark.parametrize("stage", [THREE])
@on_ranks(2)
def test_a_compiled_training_step_is_that_of_one_that_is_not(rank, stage):
    model, twin = (nn.Linear(8, 4).to(rank.device) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    for one, compiles in ((model, True), (twin, False)):
        optimizer = sgd_of(stage, one.parameters())

        def go(x, one=one, optimizer=optimizer):
            loss = one(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()
        run = torch.compile(go, backend="aot_eager") if compiles else go
        for step in range(3):
            run(torch.full((3, 8), 0.1 * (step + rank.rank), device=rank.device))
    assert_same(model, twin, exact=False)


@pytest.mark.parametrize("stage", [THREE, FOUR])
@on_ranks(2)
def test_of_a_model_that_was_moved_torchs_clipping_says_so(rank, stage):
    """As Trainer's constructor does, after its optimizer was built."""
    model = Net(seed=0)
    optimizer = sgd_of(stage, trainable(model))
    for param in model.parameters():
        param.data = param.data.clone()
    backward(model, rank, 0)
    error = error_of(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert "the data of parameter of shape () was replaced, by model.to(), Trainer (see docs/frameworks.md)" in error
    optimizer.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_chain_has_what_an_optimizer_has(rank, stage):
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).to(rank.device)
    chain = Chained(*(sgd_of(stage, layer.parameters()) for layer in model))
    before = [param.detach().clone() for param in model.parameters()]
    assert len(chain.prefetch_params(model)) == (len(list(model.modules())) if stage == FOUR else 0)

    def closure():
        sum(param.sum() for param in model.parameters()).backward()
        return float(rank.rank)
    assert chain.step(closure) == 0.5
    chain.finish_param_sync()
    assert all(map(torch.equal, model.parameters(), [param - 1 for param in before]))
    chain.zero_grad()
    sum(param.sum() for param in model.parameters()).mul(torch.inf if rank.rank else 1.0).backward()
    error = error_of(lambda: chain.clip_grad_norm_(1.0, error_if_nonfinite=True))
    assert "the norm of all gradients is" in error and not chain.clip_grad_norm_(1.0).isfinite()
    chain.zero_grad()
    assert "call add_param_group() of one in Chained.optimizers" in error_of(
        lambda: chain.add_param_group({"params": []}), TypeError)
