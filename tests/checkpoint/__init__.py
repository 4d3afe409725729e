"""What the tests of checkpoints share: models, optimizers, and their steps."""

import contextlib
import resource
import sys
from unittest import mock

import torch

from harness.ranks.meeting import Rank
from tests.common import STAGES, Net, batch, loss_of, optimizer_of

SHARDED = STAGES[2:]
ADAMW = {"lr": 0.01, "weight_decay": 0.1}
ONE = Rank(0, 1, torch.device("cpu"), "gloo")


def wrapped(stage, params, cls=torch.optim.AdamW, process_group=None, **kwargs):
    """A stage's optimizer; without stage a plain torch optimizer."""
    if stage is None:
        return cls(params, **kwargs)
    sizes = {"bucket_cap_mb": 0.0003} if stage == STAGES[3] else {}
    return optimizer_of(stage)(params, cls, process_group=process_group, **{**sizes, **kwargs})


def a_run(rank, stage, group=None, seed=0, dtype=torch.float32, cls=torch.optim.AdamW, steps=0, **kwargs):
    """A model of odd sizes, and its optimizer on the ranks of `group`; after some steps."""
    model = Net(seed=seed, frozen_seed=seed).to(rank.device, dtype)
    optimizer = wrapped(stage, model.parameters(), cls, process_group=group, **kwargs)
    train(rank, model, optimizer, range(steps))
    return model, optimizer


def small(rank, stage, *layers, dtype=torch.float32, **kwargs):
    """A model, and its optimizer after a step."""
    model = torch.nn.Sequential(*(layers or [torch.nn.Linear(7, 7)])).to(rank.device, dtype)
    optimizer = wrapped(stage, model.parameters(), **kwargs)
    step(model, optimizer)
    return model, optimizer


def alone(*layers):
    """The same without ranks, and in plain torch."""
    return small(ONE, None, *layers)


def step(model, optimizer):
    weight = next(model.parameters())
    model(weight.new_ones(2, model[0].in_features)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(rank, model, optimizer, steps):
    """Every rank has the same batch, so that what comes out doesn't depend on how many ranks there are."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        x, y = (part.to(dtype) for part in batch(step, 0, device=rank.device))
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-1 - len(content) // 8] ^= 1  # behind a header
    file.write_bytes(content)


@contextlib.contextmanager
def full_disk(n_bytes):
    """The limit that a file of this process may have stands for the disk: Python would write broken bytecode, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        with mock.patch.object(sys, "dont_write_bytecode", True):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
