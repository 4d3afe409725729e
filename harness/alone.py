"""What one process that plays rank 0 of d finds out: what stages hold and gather on any number of ranks."""

import contextlib
import statistics
import sys

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed import fake_pg as fake_pg  # makes the backend "fake" known

import stage2_allgather
import stage3_gradbuffer
import stage4_overlap
from harness.examine import adamw
from harness.gpt import GPT, MODELS
from harness.memory import Memory
from harness.results import CapRow, GatheredRow, StateRow


@contextlib.contextmanager
def rank_0_of(d, rank=0):
    """While it is entered this process plays rank 0 of d, or another: torch's fake process group sends nothing."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=d)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # which init_process_group wraps, each time once more


STATE_RANKS = (1, 2, 4, 8, 64, 1024)
STATE_ROWS = [  # stage, dtypes of parameters and gradients, formula; that as a function of d and of b, see the notes
    (3, stage3_gradbuffer, "bfloat16", "bfloat16", "4 + 16/d", lambda d, b: 4 + 16 / d),
    (3, stage3_gradbuffer, "bfloat16", "float32", "6 + 12/d", lambda d, b: 6 + 12 / d),
    (3, stage3_gradbuffer, "float32", "float32", "8 + 8/d", lambda d, b: 8 + 8 / d),
    (4, stage4_overlap, "bfloat16", "float32", "2 + 16/d + b", lambda d, b: 2 + 16 / d + b),
    (4, stage4_overlap, "float32", "float32", "4 + 12/d + b", lambda d, b: 4 + 12 / d + b),
]


def model_state(settings):
    """Bytes a parameter that stages 3 and 4 hold after a step, at any number of ranks -> list of StateRows. b: stage
    4's two bucket buffers."""
    rows = []
    for stage, package, dtype, grad_dtype, formula, theory in STATE_ROWS:
        counts = {d: state_bytes(settings, d, package, dtype, grad_dtype) for d in STATE_RANKS}
        rows.append(StateRow(f"stage {stage} {dtype}/{grad_dtype}", formula,
                             {d: counted for d, (counted, _) in counts.items()},
                             {d: theory(d, b) for d, (_, b) in counts.items()}))
    return rows


def state_bytes(settings, d, package, dtype, grad_dtype):
    """-> bytes a parameter, and how many of them are bucket buffers. Of what outlives a step: the batch is one byte."""
    # Stage 4 keeps sums in fp32 whatever the parameters are; reduce_dtype: exchanges as it does on gloo.
    choice = "reduce_dtype" if package is stage4_overlap else "grad_dtype"
    with rank_0_of(d), Memory("cpu") as memory:
        model = GPT(MODELS[settings.model]).to(getattr(torch, dtype))
        optimizer = package.DistributedOptimizer(model.parameters(), **adamw(settings),
                                                 **{choice: getattr(torch, grad_dtype)})
        tokens = torch.zeros(1, 1, dtype=torch.int64)
        model(tokens, tokens).backward()
        optimizer.step()
        numel = sum(param.numel() for param in model.parameters())
        return memory.live / numel, getattr(optimizer, "bucket_buffer_bytes", 0) / numel


GATHERED = [  # stage, and how many elements its all-gathers bring together in a step, padding included
    (2, stage2_allgather, lambda optimizer: optimizer.world_size * max(
        sum(param.numel() for param in shard) for shard in optimizer.shards)),
    (3, stage3_gradbuffer, lambda optimizer: sum(buffer.flat_params.numel() for buffer in optimizer.buffers)),
    (4, stage4_overlap, lambda optimizer: sum(bucket.flat_params.numel() for bucket in optimizer.buckets)),
]


def gathered(settings):
    """Elements that a step gathers, over those that the model has, at any number of ranks -> GatheredRows.

    As the optimizers have shared them out; this process plays rank 0 of d, and nothing is stepped.
    """
    rows = [GatheredRow(f"stage {stage}", {}) for stage, _, _ in GATHERED]
    for d in STATE_RANKS:
        with rank_0_of(d):
            for row, (_, package, n_gathered) in zip(rows, GATHERED):
                params = list(GPT(MODELS[settings.model]).parameters())
                optimizer = package.DistributedOptimizer(params)
                row.over_numel[d] = n_gathered(optimizer) / sum(param.numel() for param in params)
    return rows


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
