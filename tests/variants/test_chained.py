"""Two optimizers as one: a clip over both equals torch's over the whole model; so do accumulation and a state_dict."""

import pytest
import torch
import torch.distributed as dist

import checkpoint
from guard.chained import Chained, method_of_each
from harness import STAGE_4
from harness.training.models import GPT, GPTConfig
from tests.common import Net, error_of, on_ranks, optimizer_of
from tests.pairs import SGD, UNFUSED, assert_same, backward, sgd_of
from tests.stages.test_contract import two_groups
from variants.muon_rows import MUON, split

SGD, ADAMW = {**SGD, **UNFUSED}, {"lr": 0.01, **UNFUSED}


class Plain:
    """torch's own optimizers, of a model that each rank has whole: the reference."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    step, zero_grad = method_of_each("step"), method_of_each("zero_grad")

    def clip_grad_norm_(self, *how):
        params = [param for group in self.param_groups for param in group["params"]]
        for param in params:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        return torch.nn.utils.clip_grad_norm_(params, *how)


def sgd_and_adamw(stage, model):
    """Make SGD for matrices and AdamW for the rest, of a stage, or torch's own if `stage` is None."""
    matrices, others = (group["params"] for group in two_groups(model))
    if stage is None:
        return Plain([torch.optim.SGD(matrices, **SGD), torch.optim.AdamW(others, **ADAMW)])
    optimizer_class = optimizer_of(stage)
    return Chained(optimizer_class(matrices, torch.optim.SGD, **SGD), optimizer_class(others, **ADAMW))


@on_ranks(norm_type=[2.0, torch.inf])
def test_two_optimizers_are_clipped_together(rank, stage, norm_type):
    """Take steps of two micro-batches, the first in no_sync(), and load the state into a new pair before the last."""
    model, reference = Net(seed=0), Net(seed=0)
    pair, plain = sgd_and_adamw(stage, model), sgd_and_adamw(None, reference)
    for step in range(3):
        if step == 2:
            saved = pair.state_dict()
            pair = sgd_and_adamw(stage, model)
            pair.load_state_dict(saved)
        with pair.no_sync():
            backward(model, rank, 2 * step)
        backward(model, rank, 2 * step + 1)
        backward(reference, rank, 2 * step, 2 * step + 1)
        norm, expected = pair.clip_grad_norm_(0.05, norm_type), plain.clip_grad_norm_(0.05, norm_type)
        assert torch.allclose(norm, expected, rtol=1e-5) and norm > 0.05
        for optimizer in (pair, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, reference, exact=False)


@on_ranks(3)
def test_groups_of_which_none_is_part_of_the_other_are_refused(rank):
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [2, 0])]
    first, second = [(0, 2), (0, 1), (1, 2)][rank.number]
    both = [optimizer_of(STAGE_4)([torch.nn.Parameter(torch.ones(3))], process_group=groups[i])
            for i in sorted((first, second))]
    assert "alike can't be known" in error_of(lambda: Chained(*both), ValueError)


@on_ranks(4)
def test_a_mesh_of_all_ranks_and_experts_on_some_are_clipped_together(rank):
    """No process group has the other's ranks: the groups of hybrid are [0, 1] and [2, 3]. The losses are the ranks'.

    The mean gradient of `dense` is 1.5; those of the two experts are 0.5 and 1. Each has four elements.
    """
    edp = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank.number % 2]
    dense, expert = (torch.nn.Parameter(torch.ones(4, device=rank.device)) for _ in range(2))
    chain = Chained(sgd_of("tests.variants.on_pairs", [dense]),
                    sgd_of(STAGE_4, [expert], process_group=edp, average_over=dist.group.WORLD))

    def closure():
        (dense.sum() * rank.number + expert.sum() * (1 + rank.number % 2)).backward()
        return float(rank.number)

    closure()
    norm = (4 * (1.5**2 + 0.5**2 + 1.0**2)) ** 0.5
    assert chain.clip_grad_norm_(norm / 2).item() == pytest.approx(norm)
    chain.step()
    for param, mean in ((dense, 1.5), (expert, (1 + rank.number % 2) / 2)):
        torch.testing.assert_close(param.detach(), torch.full_like(param, 1 - mean / 2))
    assert chain.step(closure) == 1.5


@on_ranks(2)
def test_all_gradients_have_come_before_any_parameters_leave(rank):
    """Otherwise `step` of the second optimizer, which asks all ranks, would wait for the parameters of the first."""
    model, order = Net(seed=0), []
    pair = sgd_and_adamw(STAGE_4, model)
    for optimizer in pair.optimizers:
        for bucket in optimizer.buckets:
            leave, come = bucket.start_param_sync, bucket.gradient.add
            bucket.start_param_sync = lambda leave=leave: [order.append("leave"), leave()][1]
            bucket.gradient.add = lambda parts, come=come: [order.append("come"), come(parts)][1]
    backward(model, rank, 0)
    pair.step()
    assert set(order) == {"come", "leave"} and order == sorted(order)


# ------------------------------------------------------------------------------------------------------------ training


def muon_and_adamw(model, is_plain):
    matrices, rest = split(model)
    if is_plain:
        return Plain([torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(rest, **ADAMW)])
    return Chained(optimizer_of("variants.muon")(matrices, torch.optim.Muon, **MUON),
                   optimizer_of(STAGE_4)(rest, torch.optim.AdamW, **ADAMW))


def train_a_gpt(rank, steps, is_plain=False, load=None, save=None):
    """Train on this rank's share of six sequences, with one clip for both optimizers. Return the mean losses."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layers=1, n_heads=2, width=32, block_size=16, lr=1e-3))
    pair = muon_and_adamw(model, is_plain)
    losses = []
    if load:
        checkpoint.load(load, model, pair)
    for step in steps:
        text = (torch.arange(17) + torch.arange(6)[:, None] * 5 + step) % 23
        own_text = text.chunk(rank.world_size)[rank.number]
        loss = model(own_text[:, :-1], own_text[:, 1:])
        loss.backward()
        pair.clip_grad_norm_(0.5)
        pair.step()
        pair.zero_grad()
        mean = loss.detach() / rank.world_size
        dist.all_reduce(mean)
        losses.append(mean.item())
    if save:
        checkpoint.save(save, model, pair).result()
    return losses


def test_a_gpt_by_muon_and_adamw_goes_on_on_another_number_of_ranks(pools, tmp_path):
    """Train 3 steps on 2 ranks and 3 on 3. Losses are those of torch's own optimizers, but for 1e-3.

    The norm is summed in another order, so its last bit differs, and Newton–Schulz works in bf16.
    """
    expected, *_ = pools.run(2, train_a_gpt, range(6), is_plain=True)
    assert expected[-1] < 0.9 * expected[0]
    first, *_ = pools.run(2, train_a_gpt, range(3), save=tmp_path / "saved")
    second, *_ = pools.run(3, train_a_gpt, range(3, 6), load=tmp_path / "saved")
    assert first + second == pytest.approx(expected, abs=1e-3)
