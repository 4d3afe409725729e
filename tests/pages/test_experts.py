"""The sample of docs/experts.md trains as one process does, however experts are spread, and goes on after a save."""

import math
import types

import pytest
import torch
import torch.distributed as dist

import checkpoint
from tests.common import mesh_of
from tests.pages.test_samples import FILES

STEPS = range(10)


def train(rank, ep, steps=STEPS, plain=False, load=None, save=None):
    """-> the losses of all tokens, and the last norm."""
    moe = types.ModuleType("moe")
    exec(FILES["moe.py"], vars(moe))
    mesh = mesh_of("cpu", (rank.world_size // ep, ep), ("edp", "ep"))
    model = moe.make_model(mesh["ep"].get_group())
    if plain:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    else:
        optimizer = moe.make_optimizer(model, mesh["edp"].get_group(), lr=0.01)
    if load:
        checkpoint.load(load, model, optimizer)
    losses = []
    for step in steps:
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(step)).chunk(rank.world_size)[rank.number]
        loss = torch.nn.functional.mse_loss(model(x), x[:, :4].tanh())
        loss.backward()
        if plain:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        else:
            norm = optimizer.clip_grad_norm_(0.2)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / rank.world_size
        dist.all_reduce(mean)
        losses.append(mean.item())
    if save:
        checkpoint.save(save, model, optimizer).result()
    return [*losses, norm.item()]


@pytest.fixture(scope="module")
def expected(pools):
    losses = pools.run(1, train, 1, plain=True)[0]
    assert losses[-2] < 0.9 * losses[0] and not math.isclose(losses[-1], 0.2)
    return losses


@pytest.mark.parametrize("world_size, ep", [(2, 2), (4, 2)])
def test_experts_train_as_in_one_process(pools, expected, world_size, ep):
    for losses in pools.run(world_size, train, ep):
        assert losses == pytest.approx(expected, abs=1e-5)


def test_experts_that_were_saved_on_two_ranks_go_on_where_they_are_spread_otherwise(pools, expected, tmp_path):
    folder = tmp_path / "saved"
    first = pools.run(4, train, 2, STEPS[:5], save=folder)[0][:-1]
    for world_size, ep in ((2, 1), (4, 4)):
        rest = pools.run(world_size, train, ep, STEPS[5:], load=folder)[0]
        assert [*first, *rest] == pytest.approx(expected, abs=1e-5), (world_size, ep)
