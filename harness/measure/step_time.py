"""How long a step of a row takes, in the middle of a run. Runs on every rank."""

import gc
import statistics
import time

import torch
import torch.distributed as dist

from harness.measure.setup import WARMUP_STEPS, adamw, make_batches, make_model
from harness.rows import catalogue


@catalogue.in_its_context
def time_steps(rank, settings, base, bucket_mb=None):
    """-> milliseconds of a steady step, and of the drain after the last, each on the slowest rank: see `steady`."""
    way, batches = catalogue.find(base, bucket_mb), make_batches(settings, rank)
    gc.collect()
    training = way.build(make_model(settings, rank, way.dtype), adamw(settings))
    for batch in batches[:WARMUP_STEPS]:
        training.step(batch)
    return steady(rank, training.step, batches[WARMUP_STEPS:WARMUP_STEPS + settings.steps], training.finish)


def steady(rank, step, batches, finish):
    """-> milliseconds of a step of a run that has begun and goes on, and of what is under way when it ends.

    A step's time is from one point of the loop to the same point of the next: the median of `batches` steps. So it has
    the waits for parameters that the step before has sent; and nothing waits at the end for those that the last one
    sends, which a run pays once: the drain. No barrier between the steps: it would wait for what travels.
    """
    marks = [mark(rank.device)]
    for batch in batches:
        step(batch)
        marks.append(mark(rank.device))
    finish()
    drain = milliseconds(marks[-1], mark(rank.device))
    step_ms = statistics.median(map(milliseconds, marks, marks[1:]))
    slowest = torch.tensor([step_ms, drain], device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def mark(device):
    """A moment: on a GPU, when its queue gets there."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start, end):
    if isinstance(start, float):
        return (end - start) * 1000
    end.synchronize()
    return start.elapsed_time(end)
