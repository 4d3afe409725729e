"""What an optimizer class reads beside gradients, and what programs do with any optimizer of torch, ours too."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from guard.chained import Chained
from harness import STAGE_3, STAGE_4, STAGES
from tests.common import error_of, on_ranks, optimizer_of
from tests.pairs import Pair, parameter_of, sgd_of


class ByNameAndAttribute(torch.optim.SGD):
    """Finds biases by name, and steps them at a tenth of the rate. Finds other rates in an attribute of a parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            names = group.get("param_names", [""] * len(group["params"]))  # the constructor's trial has no names
            for name, param in zip(names, group["params"], strict=True):
                rate = group["lr"] * getattr(param, "lr_mul", 1.0)
                if name.endswith("bias"):
                    rate *= 0.1
                if param.grad is not None:
                    param.add_(param.grad, alpha=-rate)


class Polyak(torch.optim.SGD):
    """Subtracts gradient / (1 + loss)."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = 0.0 if closure is None else float(closure())
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                param.add_(param.grad, alpha=-1 / (1 + loss))


class Twice(Polyak):
    """Calls its closure twice in one step."""

    def step(self, closure=None):
        if closure is not None:
            closure()
        super().step(closure)


@pytest.mark.parametrize("stage", [*STAGES, "variants.muon", "variants.moments16"])
@on_ranks(2)
def test_a_class_finds_attributes_and_names_of_parameters(rank, stage):
    """Load a state_dict, and then set an attribute of a parameter: the class reads names and this attribute.

    test_own_classes.py has a class that reads attributes in its constructor.
    """
    pair = Pair(rank, stage, ByNameAndAttribute, nn.Module.named_parameters, seeds=[0], lr=0.1)
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    for model in pair.models:
        model.down.weight.lr_mul = 5.0
    pair.train(0, 1)
    pair.assert_same(is_exact=False)


@pytest.mark.parametrize("stage", [*STAGES, "variants.muon"])
@on_ranks(2)
def test_a_class_that_reads_the_loss_gets_a_closure_that_returns_the_mean(rank, stage):
    """The losses of two ranks are 5 and 15, their mean is 10. The gradients are 1 and 3: a step subtracts 2 / (1 + 10).

    A class that calls its closure twice is refused.
    """
    weight = parameter_of(1, rank)
    optimizer = optimizer_of(stage)([weight], Polyak)

    def closure():
        loss = weight.sum() * (1 + 2 * rank.number)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 10
    torch.testing.assert_close(weight.detach(), torch.full_like(weight, 1 - 2 / 11))
    refused = optimizer_of(stage)([weight], Twice)
    assert "Twice calls its closure again in one step" in error_of(lambda: refused.step(closure))
    assert "step" not in vars(refused.optimizer)  # the inner optimizer has the step of its class again


@pytest.mark.shared_guard
@on_ranks(2, result=[{"loss": 1}, True])
def test_a_closure_may_return_what_is_no_number(rank, stage, result):
    """Numbers are averaged over the ranks; everything else is returned as it is."""
    weight = parameter_of(0, rank)
    optimizer = sgd_of(stage, [weight])

    def closure():
        weight.sum().backward()
        return result

    assert optimizer.step(closure) == result


@pytest.mark.shared_guard
@on_ranks(2)
def test_hooks_of_state_dicts_are_called(rank, stage):
    calls = []
    optimizer = sgd_of(stage, [parameter_of(0, rank)])
    optimizer.register_state_dict_pre_hook(lambda _: calls.append("saves"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 3})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["mine"]))
    optimizer.register_load_state_dict_post_hook(lambda _: calls.append("has loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["saves", 3, "has loaded"]


@on_ranks(2)
def test_a_norm_of_type_zero_is_refused_where_there_are_shards(rank):
    optimizer = sgd_of(STAGE_3, [parameter_of(0, rank)])
    refusal = error_of(lambda: optimizer.clip_grad_norm_(1.0, 0), ValueError)
    assert "norm_type is 0: it must be above 0" in refusal


@pytest.mark.shared_guard
@on_ranks(2)
def test_a_method_of_a_class_behind_a_mixin_can_be_patched_before_there_is_an_instance(rank, stage):
    class Mixin:
        pass

    class Mine(Mixin, optimizer_of(stage)):
        pass

    with mock.patch.object(Mine, "step", autospec=True):
        Mine.step("an optimizer")  # calls the mock, which takes what the method takes
    weight = parameter_of(0, rank)
    optimizer = Mine([weight], torch.optim.SGD, lr=1.0)
    weight.sum().backward()
    optimizer.step()
    assert weight.eq(-1).all()


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_chain_has_what_an_optimizer_has_also_on_a_rank_that_lacks_an_expert(rank, stage):
    """Prefetch, clip, step with a closure, ask for a finite norm, and be refused when adding a group.

    Rank 0 alone has an expert. On both ranks the norm is that of 4 gradients of 3 and 9 gradients of 4.
    """
    group = dist.new_group([0])
    shared = parameter_of(3, rank, n=4)
    expert = parameter_of(4, rank, n=9)
    model = nn.ParameterList([shared, expert])
    optimizers = [sgd_of(stage, [shared])]
    if rank.number == 0:
        optimizers.append(sgd_of(stage, [expert], process_group=group))
    chain = Chained(*optimizers)
    module_hooks = chain.prefetch_params(model)
    assert len(module_hooks) == (1 if stage == STAGE_4 else 0)

    def closure(factor=1.0):
        (factor * (3 * shared.sum() + 4 * expert.sum())).backward()
        return float(rank.number)

    closure()
    norm = chain.clip_grad_norm_(1e-3).item()
    assert norm == pytest.approx((4 * 3**2 + 9 * 4**2) ** 0.5, rel=1e-6)
    chain.zero_grad()
    assert chain.step(closure) == 0.5
    chain.finish_param_sync()
    assert shared.eq(0).all()
    chain.zero_grad()
    closure(torch.inf)
    error = error_of(lambda: chain.clip_grad_norm_(1.0, error_if_nonfinite=True))
    assert "the norm of all gradients is inf" in error
    refusal = error_of(lambda: chain.add_param_group({"params": []}), TypeError)
    assert "call add_param_group() of one in Chained.optimizers" in refusal
