"""What the tests of checkpoints share: models with their optimizers, training steps, a damaged file and a full disk."""

import contextlib
import resource
import sys
from unittest import mock

import torch

from harness import STAGE_4
from harness.ranks.meeting import Rank
from tests.common import STAGES, Net, batch, loss_of, optimizer_of

SHARDED = STAGES[2:]  # stages 3 and 4
ONE_PROCESS = Rank(0, 1, torch.device("cpu"), "gloo")  # stands for a program without process groups


def make_optimizer(stage, params, cls=torch.optim.AdamW, process_group=None, **kwargs):
    """Return the optimizer of a stage; without a stage, a plain torch optimizer."""
    if stage is None:
        return cls(params, **kwargs)
    if stage == STAGE_4:
        kwargs = {"bucket_cap_mb": 0.0003, **kwargs}  # several buckets
    return optimizer_of(stage)(params, cls, process_group=process_group, **kwargs)


def make_run(rank, stage, group=None, seed=0, dtype=torch.float32, cls=torch.optim.AdamW, steps=0, **kwargs):
    """Return a model of odd sizes and its optimizer, on the ranks of `group`, after some steps."""
    model = Net(seed=seed, frozen_seed=seed).to(rank.device, dtype)
    optimizer = make_optimizer(stage, model.parameters(), cls, process_group=group, **kwargs)
    train(rank, model, optimizer, range(steps))
    return model, optimizer


def train(rank, model, optimizer, steps):
    """Train on the same batches on every rank, so that the result doesn't depend on the number of ranks."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        x, y = batch(step, 0, device=rank.device)
        loss_of(model, x.to(dtype), y.to(dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-1 - len(content) // 8] ^= 1  # behind a header
    file.write_bytes(content)


@contextlib.contextmanager
def full_disk(n_bytes):
    """Limit the size of each file that this process writes, as a full disk does. Python writes no bytecode meanwhile.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        with mock.patch.object(sys, "dont_write_bytecode", True):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
