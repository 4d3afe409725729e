"""The two samples that are no part of a core run as they stand: README.md's in 60 seconds, chapter 3's rung between.

Both are equal to replicated training to the bit, on two ranks.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.common import STAGES
from tests.ranks import ROOT


def sample(page, opening):
    """-> the block of Python of a page that begins so."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(opening)]
    return found


def batches_of(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 6, generator=generator) for _ in range(5)]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


class Loss(nn.Module):
    """What the page writes as `model(batch)`."""

    def __init__(self):
        super().__init__()
        self.model = make_model()

    def forward(self, batch):
        return self.model(batch).pow(2).sum()


def replicated(rank, make_optimizer):
    model = Loss()
    forward, optimizer = DistributedDataParallel(model), make_optimizer(model.parameters())
    for batch in batches_of(rank.rank):
        forward(batch).backward()
        optimizer.step()
        forward.zero_grad()
    return model


def in_60_seconds(rank):
    model = Loss()
    names = {"torch": torch, "dist": dist, "model": model, "rank": rank.rank, "d": rank.world_size,
             "batches": batches_of(rank.rank)}
    exec(sample("README.md", "model = "), names)
    assert len(names["optimizer"].state) == 2  # of four parameters
    pairs = zip(model.parameters(), replicated(rank, torch.optim.AdamW).parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("world_size", [2])
def test_the_idea_in_60_seconds_is_ddp_to_the_bit(run, world_size):
    assert all(run(in_60_seconds))


def rung_between(rank):
    names, model = {"torch": torch, "dist": dist}, Loss()
    exec(sample(f"{STAGES[2]}/README.md", "# not in the core"), names)
    for batch in batches_of(rank.rank):
        model(batch).backward()
        names["step"](list(model.parameters()), 0.1, rank.rank, rank.world_size)
        model.zero_grad()
    pairs = zip(model.parameters(), replicated(rank, lambda params: torch.optim.SGD(params, lr=0.1)).parameters(),
                strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("world_size", [2])
def test_the_rung_between_2_and_3_is_ddp_to_the_bit(run, world_size):
    assert all(run(rung_between))
