"""Stage 4's default bucket, by model."""

import statistics

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import stage4_overlap
from harness.measure.played_rank import rank_0_of
from harness.rows.results import CapRow
from harness.train.gpt import GPT, MODELS


def caps(d=2):
    """Stage 4's default bucket and what its two buffers hold, models nano … large -> list of CapRows.

    Tensors are without memory: the largest model has 4.8 GB of parameters.
    """
    rows = []
    for name, config in MODELS.items():
        with rank_0_of(d), FakeTensorMode():
            params = list(GPT(config).parameters())
            native, exchanged = (stage4_overlap.optimizer.ShardedOptimizer(params, reduce_dtype=dtype)
                                 for dtype in (None, torch.float32))
            numel = sum(param.numel() for param in params)
            b_native, b_exchanged = (
                sum(flat.nbytes for buffer in optimizer.idle for flat in {buffer.sent, buffer.received}) / numel
                for optimizer in (native, exchanged))
            sizes = [bucket.flat_params.nbytes for bucket in native.buckets]
            rows.append(CapRow(name, d, 4 * numel, len(sizes), statistics.median(sizes), max(sizes), b_native,
                               b_exchanged, 4 + 12 / d + b_native))
    return rows
