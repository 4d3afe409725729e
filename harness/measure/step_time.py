"""How long a step of a row takes. Runs on every rank."""

import gc
import time

import torch
import torch.distributed as dist

from harness.measure.setup import WARMUP_STEPS, adamw, make_batches, make_model
from harness.rows import catalogue


def time_steps(rank, settings, base, bucket_mb=None):
    """Milliseconds a step, from `steps` of them end to end, on the slowest rank.

    No barrier between the steps: it would wait for what travels, and overlap would look like speed. For the same reason
    the clock stops only when everything that the last step has started is finished.
    """
    way, batches = catalogue.find(base, bucket_mb), make_batches(settings, rank)
    gc.collect()
    training = way.build(make_model(settings, rank, way.dtype), adamw(settings))
    for batch in batches[:WARMUP_STEPS]:
        training.step(batch)
    training.finish()
    dist.barrier()
    start = time.perf_counter()
    for batch in batches[WARMUP_STEPS:WARMUP_STEPS + settings.steps]:
        training.step(batch)
    training.finish()
    slowest = torch.tensor((time.perf_counter() - start) / settings.steps * 1000, device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()
