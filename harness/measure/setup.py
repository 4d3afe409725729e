"""What is trained while it is measured: settings, model, batches, the same for every row."""

import functools
from typing import NamedTuple

import torch

from harness.train import corpus
from harness.train.gpt import GPT, MODELS

WARMUP_STEPS = 2  # DDP rebuilds its buckets in the second; everything is allocated after it
CHECKED_STEPS = 3  # the second is the first that reads parameters which were exchanged, and moments which are not zero


class Settings(NamedTuple):
    """`batch_size`: sequences a rank; `steps`: of which one round takes the time; `data`: a path, or None."""
    model: str = "tiny"
    batch_size: int = 4
    sequence_length: int = 128
    rounds: int = 3
    steps: int = 3
    data: str | None = None
    seed: int = 0


def adamw(settings):
    """AdamW's settings, the same in every row: torch's fused kernels too. Why not its eps of 1e-8: see `tolerance`."""
    return dict(lr=MODELS[settings.model].lr, weight_decay=0.1, eps=1e-6, fused=True)


def make_model(settings, rank, dtype, starts_apart=False):
    """The same weights on every rank; `starts_apart`: other ones on every rank but 0."""
    torch.manual_seed(settings.seed + starts_apart * rank.rank)
    return GPT(MODELS[settings.model]).to(rank.device, getattr(torch, dtype))


@functools.lru_cache(maxsize=1)
def make_batches(settings, rank):
    """As many batches as any measurement takes, made in advance: making them is nobody's step time."""
    train, _ = corpus.split(corpus.load_bytes(settings.data))
    batches = corpus.Batches(train, settings.batch_size, settings.sequence_length, rank.rank, rank.world_size,
                               settings.seed, rank.device)
    return [batches.batch(step) for step in range(max(CHECKED_STEPS, WARMUP_STEPS + settings.steps))]
