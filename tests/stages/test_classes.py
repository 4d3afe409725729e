"""What an optimizer class reads beside gradients, and what programs do with an optimizer that is one of torch's."""

from unittest import mock

import pytest
import torch
from torch import nn

from guard.chained import Chained
from harness import STAGE_4, STAGES
from tests.common import error_of, on_ranks, optimizer_of
from tests.pairs import Pair, parameter_of, sgd_of


class ByNameAndAttribute(torch.optim.SGD):
    """Steps biases at a tenth of the rate, as some do by name, and others by an attribute as modded-nanogpt does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))
            for name, param in zip(names, group["params"], strict=True):
                factor = getattr(param, "lr_mul", 1.0) * (0.1 if name.endswith("bias") else 1.0)
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * factor)


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
@on_ranks(2)
def test_a_class_finds_attributes_and_names_of_parameters(rank, stage):
    """Set attributes before the constructor and after it; read names also after a state_dict was loaded."""
    def groups(model):
        model.up.weight.lr_mul = 3.0
        return [(name, param) for name, param in model.named_parameters() if param.requires_grad]

    pair = Pair(rank, stage, ByNameAndAttribute, groups, seeds=[0], lr=0.1)
    pair.train(0)
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    for model in pair.models:
        model.down.weight.lr_mul = 5.0
    pair.train(1)
    pair.assert_same(is_exact=False)


@pytest.mark.parametrize("stage", [*STAGES, "variants.muon"])
@on_ranks(2)
def test_a_class_that_reads_the_loss_gets_a_closure_that_returns_the_mean(rank, stage):
    """The losses of two ranks are 5 and 15, their mean 10, and the gradients 1 and 3: a step moves by 2 / (1 + 10)."""
    weight = parameter_of(1, rank)
    optimizer = optimizer_of(stage)([weight], Polyak, lr=1.0)

    def closure():
        loss = weight.sum() * (1 + 2 * rank.number)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 10
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 1 - 2 / 11))
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


@pytest.mark.shared_guard
@on_ranks(2)
def test_a_method_of_a_class_behind_a_mixin_can_be_patched_before_there_is_an_instance(rank, stage):
    mine = type("Mine", (type("Mixin", (), {}), optimizer_of(stage)), {})
    with mock.patch.object(mine, "step", autospec=True) as step:
        mine.step("self")
        step.assert_called_once()
    weight = parameter_of(0, rank)
    optimizer = mine([weight], torch.optim.SGD, lr=1.0)
    weight.sum().backward()
    optimizer.step()
    assert weight.eq(-1).all()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_chain_has_what_an_optimizer_has(rank, stage):
    """Prefetch, step with a closure, ask for a finite norm, and refuse to add a group."""
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).to(rank.device)
    chain = Chained(*(sgd_of(stage, layer.parameters()) for layer in model))
    before = [param.detach().clone() for param in model.parameters()]
    assert len(chain.prefetch_params(model)) == (3 if stage == STAGE_4 else 0)  # a hook for each module

    def closure(factor=1.0):
        (factor * sum(param.sum() for param in model.parameters())).backward()
        return float(rank.number)

    assert chain.step(closure) == 0.5
    chain.finish_param_sync()
    assert all(map(torch.equal, model.parameters(), [param - 1 for param in before]))
    chain.zero_grad()
    closure(torch.inf if rank.number else 1.0)
    error = error_of(lambda: chain.clip_grad_norm_(1.0, error_if_nonfinite=True))
    assert "the norm of all gradients is" in error
    assert "call add_param_group() of one in Chained.optimizers" in error_of(
        lambda: chain.add_param_group({"params": []}), TypeError)
