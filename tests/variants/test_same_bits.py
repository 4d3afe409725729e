"""variants/same_bits.py: the same bits on 1, 2, 4 and 8 ranks; what that takes; and what it refuses."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from checkpoint import full_state_dict, load, reshard, save
from harness.measuring.ledger import Ledger
from harness.training import corpus
from harness.training.models import GPT, MODELS
from tests.common import error_of, on_ranks, one_rank_of, situation
from variants import same_bits

LEAVES = 8
ADAMW = {"lr": 3e-3, "weight_decay": 0.1, "fused": True}


@functools.cache
def text():
    return corpus.split(corpus.load_bytes())[0]


class Text(nn.Module):
    """A small GPT beside a layer that leaf 5 alone uses. `forward` returns the loss of a leaf."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.gpt, self.rare = GPT(MODELS["nano"]).to(dtype), nn.Linear(33, 7, bias=False).to(dtype)

    def forward(self, step, leaf):
        torch.manual_seed(LEAVES * step + leaf)  # of what is drawn: the tokens, and dropout
        loss = self.gpt(*corpus.Batches(text(), 1, 16, leaf, LEAVES).batch(step))
        return loss + F.dropout(self.rare.weight, 0.5).square().sum().float() if leaf == 5 else loss


def optimizer_for(model, optimizer_cls=torch.optim.AdamW, **kwargs):
    return same_bits.DistributedOptimizer(model.named_parameters(), optimizer_cls, leaves=LEAVES, bucket_cap_mb=0.02,
                                          find_unused_parameters=True, **kwargs or ADAMW)


def run_leaves(model, optimizer, step, scaler=None):
    """-> the loss of a step."""
    losses = [model(step, leaf) for leaf in optimizer.own_leaves()]
    for loss in losses:
        (scaler.scale(loss) if scaler else loss).backward()
    return optimizer.mean_over_leaves(losses)


def trained(rank, steps, optimizer, model, scaler=None):
    """-> the loss and the norm of each of `steps`."""
    logged = []
    for step in steps:
        loss = run_leaves(model, optimizer, step, scaler)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
            logged.append((loss, torch.tensor(scaler.get_scale())))
        else:
            logged.append((loss, optimizer.clip_grad_norm_(0.5)))
            optimizer.step()
        optimizer.zero_grad()
    return logged


def kept(model, optimizer, logged):
    """-> losses and norms, parameters, moments: a list of tensors, the same on every rank."""
    state = full_state_dict(optimizer, to_all=True)["state"]
    moments = [state[index][name] for index in sorted(state) for name in sorted(state[index])]
    return [tensor.detach() for tensor in (*sum(logged, ()), *model.parameters(), *moments)]


def situations():
    """name -> (optimizer's class, arguments, dtype of the model, whether a GradScaler is used, numbers of ranks)."""
    return {"AdamW": (torch.optim.AdamW, ADAMW, torch.float32, False, (1, 2, 4, 8)),
            "SGD, bf16": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, torch.bfloat16, False, (1, 4)),
            "AdamW, GradScaler": (torch.optim.AdamW, ADAMW, torch.float32, True, (1, 4))}


@on_ranks(4)
def test_average_over_a_group_counts_its_leaves(rank):
    """Experts: groups of two ranks with four leaves, of eight in all; each leaf's gradient is 1."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    for average_over in (dist.group.WORLD, 8):
        weight = torch.nn.Parameter(torch.ones(4, device=rank.device))
        optimizer = same_bits.DistributedOptimizer([weight], torch.optim.SGD, lr=1.0, leaves=4,
                                                   process_group=groups[rank.number % 2], average_over=average_over)
        for _ in optimizer.own_leaves():
            weight.sum().backward()
        optimizer.step()
        assert weight.eq(0.5).all()


def train_in(rank, name):
    optimizer_cls, kwargs, dtype, is_scaled, _ = situations()[name]
    model = Text(dtype)
    optimizer = optimizer_for(model, optimizer_cls, **kwargs)
    optimizer.prefetch_params(model)
    # A scale of 2^60 overflows: the first steps are left out.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60) if is_scaled else None
    return kept(model, optimizer, trained(rank, range(4), optimizer, model, scaler))


def is_same(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("name", situations())
def test_losses_norms_parameters_and_moments_have_the_same_bits_on_1_2_4_and_8_ranks(pools, name):
    d_alone, *other_ds = situations()[name][-1]
    (alone,) = pools.run(d_alone, train_in, name)
    assert len(alone) > 60 and alone[-1].isfinite().all()
    for d in other_ds:
        with situation(f"{d} ranks"):
            assert all(is_same(alone, kept) for kept in pools.run(d, train_in, name))


def tree_sum(tensors):
    """What the docstring says, written by recursion."""
    half = len(tensors) // 2
    return tree_sum(tensors[:half]) + tree_sum(tensors[half:]) if half else tensors[0]


@pytest.mark.parametrize("world_size", [4])
def test_a_step_is_plain_torchs_on_the_tree_of_the_leaves_gradients(run, world_size):
    model, plain = Text(), Text()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for step in range(3):
        grads = [torch.autograd.grad(plain(step, leaf), list(plain.parameters()), allow_unused=True,
                                     materialize_grads=True) for leaf in range(LEAVES)]
        for param, leaves in zip(plain.parameters(), zip(*grads)):
            param.grad = tree_sum(leaves) / LEAVES
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        optimizer.step()
    *_, (params, norms) = run(three_unclipped_steps)
    assert norms[-1] == pytest.approx(norm.item(), rel=1e-5)
    assert is_same(params, list(plain.parameters())) and len(params) == len(list(model.parameters()))


def three_unclipped_steps(rank):
    model = Text()
    optimizer, norms = optimizer_for(model), []
    for step in range(3):
        run_leaves(model, optimizer, step)
        norms.append(optimizer.clip_grad_norm_(1e9).item())
        optimizer.step()
    return [param.detach() for param in model.parameters()], norms


# ------------------------------------------------------------------ the mistakes: each makes bits depend on the ranks


# ----------------------------------------------------------------------------------------- other ranks, bytes, memory


def go_on(rank, folder, steps):
    model = Text()
    optimizer = optimizer_for(model)
    if steps[0]:
        load(f"{folder}/{steps[0]}/all", model, optimizer)
    logged = trained(rank, steps, optimizer, model)
    save(f"{folder}/{steps[-1] + 1}/all", model, optimizer)  # a folder for each run
    return kept(model, optimizer, logged[-1:])


def test_a_run_that_goes_from_4_to_2_ranks_is_the_run_on_one(pools, tmp_path):
    """Move by a checkpoint after two steps, and without a file after two more."""
    pools.run(4, go_on, tmp_path / "moved", range(2))
    moved = pools.run(2, go_on, tmp_path / "moved", range(2, 4))
    alone = pools.run(1, go_on, tmp_path / "alone", range(4))
    assert is_same(moved[0], alone[0])
    assert is_same(pools.run(4, reshard_to_two)[0], alone[0])


def reshard_to_two(rank):
    """Take two steps on four ranks, and two on two of them. A number of ranks that doesn't fit is refused."""
    model = Text()
    optimizer = optimizer_for(model)
    trained(rank, range(2), optimizer, model)
    three, two = [dist.new_group(list(range(n))) for n in (3, 2)]
    assert "leaves is 8: it must be a power of two, a multiple of 3 ranks" in error_of(
        lambda: reshard(optimizer, three), ValueError)
    reshard(optimizer, two)
    if rank.number < 2:
        return kept(model, optimizer, trained(rank, range(2, 4), optimizer, model)[-1:])


@pytest.mark.parametrize("world_size, most", [(1, 3), (2, 2), (4, 1), (8, 0)])
def test_a_rank_holds_a_partial_sum_for_each_level_of_its_tree_and_sends_what_stage_4_sends(world_size, most):
    """Whole gradients, of 4 bytes a parameter; none where a rank has one leaf."""
    with one_rank_of(world_size), Ledger() as ledger:
        weight = nn.Parameter(torch.zeros(8192))
        optimizer, held = same_bits.DistributedOptimizer([weight], leaves=LEAVES, lr=0.1), []
        broadcast = ledger.wire_bytes
        for _ in optimizer.own_leaves():
            weight.sum().backward()
            held.append(sum(grad.nbytes for total in optimizer.buckets[0].partial_sums for grad in total))
        optimizer.step()
    assert max(held) == most * weight.nbytes and held[-1] == 0
    counted = 4 * world_size + 2 * 4 * 31  # backward passes; parameters that were used
    assert ledger.wire_bytes - broadcast == pytest.approx(
        2 * weight.nbytes * (world_size - 1) / world_size, abs=counted)


# ------------------------------------------------------------------------------------------------------------ refusals


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_every_rank_before_anything_changes(rank):
    """Refuse numbers of leaves, also where ranks differ, and a closure. A DTensor: test_variants.py."""
    weight = nn.Parameter(torch.full((40,), float(rank.number)))
    for leaves in (0, 6, 1):
        assert f"leaves is {leaves}: it must be a power of two, a multiple of 2 ranks" in error_of(
            lambda leaves=leaves: same_bits.DistributedOptimizer([weight], leaves=leaves), ValueError)
    assert "disagree on parameters or arguments: leaves is 8 on rank 0 and 4" in error_of(
        lambda: same_bits.DistributedOptimizer([weight], leaves=4 if rank.number else 8), ValueError)
    assert weight.eq(rank.number).all()
    optimizer = same_bits.DistributedOptimizer([weight], leaves=2)
    assert "takes no closure" in error_of(lambda: optimizer.step(lambda: 0.0), ValueError)


@on_ranks(2)
def test_a_leaf_too_many_or_too_few_is_an_error_on_every_rank_and_nothing_is_left_of_it(rank):
    """Run one backward pass where two are due, or as many as differ by rank. Then train on."""
    weight = nn.Parameter(torch.ones(40))
    optimizer = same_bits.DistributedOptimizer([weight], torch.optim.SGD, leaves=4, lr=1.0)
    for n_passes, words in (
            ((1, 1), "1 backward passes since the last step: each rank computes 2 of 4 leaves"),
            ((2, 3), "backward passes since the last step is 2.0 on rank 0 and 3.0 on rank 1"),
            ((2, 0), "backward passes since the last step is 2.0 on rank 0 and 0.0 on rank 1")):
        for finish in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            for _ in range(n_passes[rank.number]):
                weight.sum().backward()
            assert error_of(finish).startswith(words)
    assert (weight == 1).all()
    for _ in optimizer.own_leaves():
        with optimizer.no_sync():  # a loop that accumulates needs no change
            weight.sum().backward()
    optimizer.step()
    assert (weight == 0).all()
