"""How long a micro-batch takes, of steps of several."""

import contextlib
import gc
import time

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known

from harness.measure.setup import adamw, make_batches, make_model
from harness.rows import catalogue
from harness.run.workers import on_rank_0

MICRO_BATCHES = (1, 2, 4, 8)  # a step


def time_accumulation(rank, settings, name, micro_batches, in_no_sync):
    """Milliseconds a micro-batch: one exchange a step (`in_no_sync`), or one for each micro-batch."""
    row, batches = catalogue.find(name), make_batches(settings, rank)
    gc.collect()
    training = row.build(make_model(settings, rank, row.dtype), adamw(settings))

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


def accumulation(workers, settings, ddp=catalogue.REFERENCE, progress=lambda text: None):
    """One exchange a step in several rows, and in stage 4 also one for each micro-batch, interleaved.

    `ddp`: the row that stands for DDP -> list of dicts, one for each number of micro-batches. The more of them a step
    has, the fewer steps a round has, and 2 at least.
    """
    ways = {"no_sync_ms": ("stage 4 overlap", True), "each_ms": ("stage 4 overlap", False),
            "compute_ms": ("compute only", True), "ddp_ms": (ddp, True), "stage3_ms": ("stage 3 grad buffer", True)}
    found = [{"micro_batches": k, **{key: [] for key in ways}} for k in MICRO_BATCHES]
    for turn in range(settings.rounds):
        for one in found:
            for key, (name, in_no_sync) in ways.items():
                k = one["micro_batches"]
                progress(f"round {turn + 1}: {k} micro-batches, {name}{'' if in_no_sync else ', reduced one by one'}")
                fewer = settings._replace(steps=max(2, settings.steps // k))
                one[key].append(on_rank_0(workers, time_accumulation, fewer, name, k, in_no_sync))
    return found
