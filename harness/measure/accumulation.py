"""How long a micro-batch takes, of steps of several."""

import contextlib
import gc
import time

import torch
import torch.distributed as dist

from harness.measure.setup import adamw, make_batches, make_model
from harness.rows import catalogue
from harness.rows.choice import Choice
from harness.rows.results import AccumulatedRow
from harness.run.workers import on_rank_0

MICRO_BATCHES = (1, 2, 4, 8)  # a step


def time_accumulation(rank, settings, choice, micro_batches, in_no_sync):
    """Milliseconds a micro-batch: one exchange a step (`in_no_sync`), or one for each micro-batch."""
    way, batches = catalogue.find(*choice), make_batches(settings, rank)
    gc.collect()
    training = way.build(make_model(settings, rank, way.dtype), adamw(settings))

    def step():
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with training.no_sync() if in_no_sync and not is_last else contextlib.nullcontext():
                training.forward_backward(batches[micro % len(batches)])
        training.update()
        training.zero_grad()
    step()
    training.finish()
    dist.barrier()
    n_steps = max(2, settings.steps // 2 // micro_batches)
    start = time.perf_counter()
    for _ in range(n_steps):
        step()
    training.finish()
    slowest = torch.tensor((time.perf_counter() - start) / n_steps / micro_batches * 1000, device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def time_rows(workers, settings, ddp_mb=None, progress=lambda text: None):
    """One exchange a step in several rows, and in stage 4 also one for each micro-batch, interleaved.

    `ddp_mb`: the bucket size of DDP's row -> list of AccumulatedRows, one for each number of micro-batches. The more of
    them a step has, the fewer steps a round has, and 2 at least.
    """
    ways = {"no_sync_ms": (Choice("stage 4 overlap"), True), "each_ms": (Choice("stage 4 overlap"), False),
            "compute_ms": (Choice("compute only"), True), "ddp_ms": (Choice(catalogue.REFERENCE, ddp_mb), True),
            "stage3_ms": (Choice("stage 3 grad buffer"), True)}
    found = [AccumulatedRow(k) for k in MICRO_BATCHES]
    for turn in range(settings.rounds):
        for row in found:
            for field, (choice, in_no_sync) in ways.items():
                k, how = row.micro_batches, "" if in_no_sync else ", reduced one by one"
                progress(f"round {turn + 1}: {k} micro-batches, {choice.name}{how}")
                fewer = settings._replace(steps=max(2, settings.steps // k))
                getattr(row, field).append(on_rank_0(workers, time_accumulation, fewer, choice, k, in_no_sync))
    return found
