"""What gradients are divided by: tokens that differ by rank and micro-batch, and experts on a part of the ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from checkpoint import full_state_dict
from guard.chained import Chained
from harness import ONE, STAGES, THREE
from tests.common import error_of, on_ranks, optimizer_of
from tests.pairs import parameter_of, sgd_of


def tokens_of(rank, step, micro):
    """A micro-batch of its own length: (n, 6), 1 <= n <= 7."""
    n = 1 + (3 * rank + 2 * step + 4 * micro) % 7
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(100 * rank + 10 * step + micro), device="cpu")


def loss_sum(model, x):
    return (model(x) - x.flip(1)).square().mean(1).sum()


@on_ranks(factor=[None, float, torch.tensor], clips=[False, True])
def test_micro_batches_of_unequal_lengths_are_those_of_one_process(rank, stage, factor, clips):
    """Losses are sums over tokens. Their number is known before the backward pass, or after it: then by a factor."""
    torch.manual_seed(0)
    model, plain = (nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer, reference = (make(params, lr=0.01) for make, params in (
        (optimizer_of(stage), model.to(rank.device).parameters()), (torch.optim.AdamW, plain.parameters())))
    plain.load_state_dict(model.state_dict())
    for step in range(3):
        batches = [[tokens_of(r, step, micro) for micro in range(3)] for r in range(rank.world_size)]
        n_tokens = sum(len(x) for own in batches for x in own)
        scale = rank.world_size / n_tokens
        for number, x in enumerate(batches[rank.rank]):
            loss = loss_sum(model, x.to(rank.device)) * (1.0 if factor else scale)
            if number < 2:
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        (sum(loss_sum(plain, x) for own in batches for x in own) / n_tokens).backward()
        if factor:
            optimizer.scale_grads_(factor(scale))
        if clips:
            norm, expected = optimizer.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            torch.testing.assert_close(norm.cpu(), expected)
        for one in (optimizer, reference):
            one.step()
            one.zero_grad()
    for param, expected in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(param.detach().cpu(), expected.detach(), rtol=0, atol=2e-6)


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group, received = group, torch.empty_like(x)
        dist.all_to_all_single(received, x.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group), None


# dtype, whether average_over is a number, norm_type
CASES = [(torch.double, False, 1.0), (torch.double, True, 2.0), (torch.double, False, torch.inf),
         (torch.bfloat16, False, 2.0), (torch.bfloat16, True, torch.inf)]


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(4, case=CASES)
def test_experts_are_those_of_one_process(rank, stage, case):
    """EP 2 x EDP 2, each an expert: its gradient has come from two ranks' tokens, and is averaged over two of four."""
    dtype, number, norm_type = case
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    ep, edp = pairs[rank.rank // 2], pairs[2 + rank.rank % 2]
    torch.manual_seed(0)
    gate, *experts = (nn.Linear(8, 8) for _ in range(3))
    mine, plain = experts[rank.rank % 2], [nn.Linear(8, 8) for _ in range(3)]
    for ours, same in zip((gate, *experts), plain):
        ours.to(rank.device, dtype)
        same.to(rank.device, dtype).load_state_dict(ours.state_dict())
    same_expert = plain[1 + rank.rank % 2]
    chain = Chained(sgd_of(stage, gate.parameters()),
                    sgd_of(stage, mine.parameters(), process_group=edp, average_over=4 if number else dist.group.WORLD))

    def tokens(r):
        generator = torch.Generator().manual_seed(r)
        return torch.randn(4, 8, generator=generator, device="cpu").to(rank.device, dtype)  # two for each expert

    for _ in range(2):
        AllToAll.apply(mine(AllToAll.apply(gate(tokens(rank.rank)), ep)), ep).square().mean().backward()
        for r in range(4):
            hidden = plain[0](tokens(r))
            (torch.cat([plain[1](hidden[:2]), plain[2](hidden[2:])]).square().mean() / 4).backward()
        params = [param for module in plain for param in module.parameters()]
        expected = nn.utils.clip_grad_norm_(params, 0.1, norm_type)
        torch.testing.assert_close(chain.clip_grad_norm_(0.1, norm_type).to(expected), expected,
                                   **{} if dtype is torch.double else {"rtol": 0.02, "atol": 0})
        torch.optim.SGD(params, lr=1.0).step()
        chain.step()
        for one in (chain, torch.optim.SGD(params)):
            one.zero_grad()
    for one, other in ((gate, plain[0]), (mine, same_expert)):
        for param, expected in zip(one.parameters(), other.parameters()):
            torch.testing.assert_close(param, expected, rtol=0, atol=1e-6 if dtype is torch.double else 0.02)
    assert "save and load them one by one" in error_of(lambda: full_state_dict(chain))


@on_ranks(2, bad=["text", True, 0, -100, math.nan, math.inf, "other"])
def test_average_over_is_a_group_or_a_number_and_the_same_everywhere(rank, stage, bad):
    weight, over = parameter_of(1 + rank.rank, rank), 1 + rank.rank if bad == "other" else bad
    error = error_of(lambda: sgd_of(stage, [weight], average_over=over), ValueError)
    assert ("average_over is 1 on rank 0 and 2 on rank 1" if bad == "other" else f"average_over is {bad}: it") in error
    assert weight.eq(1 + rank.rank).all()
    if stage == ONE:
        error = error_of(lambda: sgd_of(stage, [weight], average_over=2, average_gradients=False), ValueError)
        assert "DDP has divided" in error


@on_ranks(2, dropped_by=["optimizer", "module"])
def test_gradients_that_come_after_a_scaled_average_are_refused(rank, stage, dropped_by):
    """They would be added to others that are divided by average_over already. Without that they are averaged too."""
    weight = parameter_of(0, rank, n=64)
    optimizer = sgd_of(stage, [weight], average_over=1)  # a sum
    weight.sum().backward()
    assert optimizer.clip_grad_norm_(1e6).item() == pytest.approx(2 * 8)
    assert optimizer.clip_grad_norm_(1e6).item() == pytest.approx(2 * 8)  # not twice as much
    words = "the buffer holds" if stage == THREE else "divided by average_over already"
    assert words in error_of(weight.sum().backward)
    if stage in STAGES[:2]:  # a group, too, would let all be averaged again
        group = {"params": [parameter_of(0, rank)]}
        assert "divided by average_over already" in error_of(lambda: optimizer.add_param_group(group))
    (optimizer if dropped_by == "optimizer" else nn.ParameterList([weight])).zero_grad()
    weight.sum().backward()
    optimizer.step()
    assert weight.unique().tolist() == [-2]
