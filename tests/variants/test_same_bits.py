"""variants/same_bits.py: the same bits on 1, 2, 4 and 8 ranks, what a rank holds for that, and what is refused."""

import pytest
import torch
from torch import nn

from checkpoint import full_state_dict, load, reshard, save
from tests.common import error_of, on_ranks, one_rank_of, situation
from variants.same_bits import DistributedOptimizer

LEAVES = 8


class Model(nn.Module):
    """Two layers with dropout, and a weight that leaf 5 alone uses. `forward` returns the loss of a leaf."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(33, 64), nn.Dropout(0.1), nn.Linear(64, 7)).to(dtype)
        self.rare = nn.Parameter(torch.ones(77, dtype=dtype))

    def forward(self, step, leaf):
        torch.manual_seed(LEAVES * step + leaf)  # of the data and of dropout
        x = torch.randn(4, 33).to(self.rare.dtype)
        loss = self.layers(x).float().square().mean()
        if leaf == 5:
            loss = loss + self.rare.float().square().sum()
        return loss


def trained(rank, dtype, steps, load_from=None, save_to=None):
    """Train. Return the losses and norms of all steps, the parameters and the moments: a list of tensors."""
    model = Model(dtype)
    optimizer = DistributedOptimizer(model.named_parameters(), leaves=LEAVES, bucket_cap_mb=1e-3, lr=3e-3, fused=True,
                                     find_unused_parameters=True)
    optimizer.prefetch_params(model)
    if load_from:
        load(load_from, model, optimizer)
    results = []
    for step in steps:
        losses = []
        for leaf in optimizer.own_leaves():
            losses.append(model(step, leaf))
            losses[-1].backward()
        results += [optimizer.mean_over_leaves(losses), optimizer.clip_grad_norm_(0.5)]
        optimizer.step()
        optimizer.zero_grad()
    if save_to:
        save(save_to, model, optimizer)
    results += [param.detach() for param in model.parameters()]
    for entries in full_state_dict(optimizer, to_all=True)["state"].values():
        results += [entries[name] for name in sorted(entries)]
    return results


def assert_same_bits(results, expected):
    assert len(results) == len(expected) and all(map(torch.equal, results, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_norms_parameters_and_moments_have_the_same_bits_on_1_2_4_and_8_ranks(pools, dtype):
    expected = pools.run(1, trained, dtype, range(4))[0]
    assert all(tensor.isfinite().all() for tensor in expected)
    for n_ranks in (2, 4, 8):
        for results in pools.run(n_ranks, trained, dtype, range(4)):
            with situation(f"{n_ranks} ranks"):
                assert_same_bits(results, expected)


def test_a_run_that_goes_from_4_to_2_ranks_is_the_run_on_one(pools, tmp_path):
    """Move by a checkpoint after two steps. Compare the last two steps."""
    pools.run(4, trained, torch.float32, range(2), save_to=tmp_path / "step 2")
    results = pools.run(2, trained, torch.float32, range(2, 4), load_from=tmp_path / "step 2")[0]
    expected = pools.run(1, trained, torch.float32, range(4))[0]
    assert_same_bits(results, expected[-len(results):])


@pytest.mark.parametrize("world_size, most", [(1, 3), (2, 2), (4, 1), (8, 0)])
def test_a_rank_holds_a_partial_sum_for_each_level_of_its_tree(world_size, most):
    """A sum is as large as the model. A rank with one leaf holds none."""
    with one_rank_of(world_size):
        weight = nn.Parameter(torch.zeros(8192))
        optimizer = DistributedOptimizer([weight], leaves=LEAVES)
        (bucket,) = optimizer.buckets
        n_sums = []
        for _ in optimizer.own_leaves():
            weight.sum().backward()
            n_sums.append(len(bucket.partial_sums))
        optimizer.step()
    assert max(n_sums) == most and n_sums[-1] == 0


@on_ranks(2)
def test_what_does_not_fit_is_refused_on_every_rank_before_anything_changes(rank):
    """Refuse numbers of leaves, also where ranks differ, experts, a move and a closure. DTensors: test_variants.py."""
    weight = nn.Parameter(torch.full((40,), float(rank.number)))

    def refusal(**arguments):
        return error_of(lambda: DistributedOptimizer([weight], **arguments), ValueError)

    for leaves in (0, 6, 1):
        assert f"leaves is {leaves}: it must be a power of two, a multiple of 2 ranks" in refusal(leaves=leaves)
    leaves_of_rank = [8, 4]
    assert "arguments: leaves is 8 on rank 0 and 4" in refusal(leaves=leaves_of_rank[rank.number])
    assert "takes no average_over" in refusal(leaves=8, average_over=2)
    assert weight.eq(rank.number).all()
    optimizer = DistributedOptimizer([weight], leaves=2)
    assert "reshard() moves no optimizer of" in error_of(lambda: reshard(optimizer, None), ValueError)
    assert "takes no closure" in error_of(lambda: optimizer.step(lambda: 0.0), ValueError)
    weight.sum().backward()
    assert "norm_type is 0: it must be above 0" in error_of(lambda: optimizer.clip_grad_norm_(1.0, 0), ValueError)


@on_ranks(2)
def test_a_leaf_too_many_or_too_few_is_an_error_on_every_rank_and_nothing_is_left_of_it(rank):
    """Run one backward pass where two are due, or numbers of passes that differ by rank. Then train on."""
    params = [nn.Parameter(torch.ones(40)), nn.Parameter(torch.ones(24))]
    optimizer = DistributedOptimizer(params, torch.optim.SGD, leaves=4, lr=1.0, bucket_cap_mb=1e-6)

    def backward(n_passes):
        for _ in range(n_passes):
            sum(param.sum() for param in params).backward()

    for passes_of_ranks, words in (
            ([1, 1], "1 backward passes since the last step: each rank computes 2 of 4 leaves"),
            ([2, 3], "backward passes since the last step is 2.0 on rank 0 and 3.0 on rank 1")):
        backward(passes_of_ranks[rank.number])
        assert error_of(optimizer.step).startswith(words)
    assert all((param == 1).all() for param in params)
    with optimizer.no_sync():  # a loop that accumulates needs no change
        backward(2)
    assert optimizer.clip_grad_norm_(100.0).item() == pytest.approx(8.0)  # 64 gradients of 1
    optimizer.step()
    assert all((param == 0).all() for param in params)
