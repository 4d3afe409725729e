"""The sample of docs/experts.md trains as one process does, however experts are spread over ranks."""

import functools
import math
import types

import pytest
import torch
import torch.distributed as dist

from tests.common import mesh_of
from tests.pages.test_samples import FILES


def train(rank, n_expert_ranks, is_plain=False):
    """Return the losses of all tokens, and the last norm."""
    moe = types.ModuleType("moe")
    exec(FILES["moe.py"], vars(moe))
    mesh = mesh_of("cpu", (rank.world_size // n_expert_ranks, n_expert_ranks), ("edp", "ep"))
    model = moe.make_model(mesh["ep"].get_group())
    if is_plain:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        clip = functools.partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()))
    else:
        optimizer = moe.make_optimizer(model, mesh["edp"].get_group(), lr=0.01)
        clip = optimizer.clip_grad_norm_
    losses = []
    for step in range(10):
        tokens = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
        x = tokens.chunk(rank.world_size)[rank.number]
        loss = torch.nn.functional.mse_loss(model(x), x[:, :4].tanh())
        loss.backward()
        norm = clip(0.2)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / rank.world_size
        dist.all_reduce(mean)
        losses.append(mean.item())
    return [*losses, norm.item()]


@pytest.fixture(scope="module")
def expected(pools):
    (losses,) = pools.run(1, train, 1, is_plain=True)
    assert losses[-2] < 0.9 * losses[0] and not math.isclose(losses[-1], 0.2)
    return losses


@pytest.mark.parametrize("world_size, n_expert_ranks", [(2, 2), (4, 2)])
def test_experts_train_as_in_one_process(pools, expected, world_size, n_expert_ranks):
    for losses in pools.run(world_size, train, n_expert_ranks):
        assert losses == pytest.approx(expected, abs=1e-5)
