"""How long a micro-batch takes, of steps of several."""

import contextlib
import gc

from harness.measure.setup import WARMUP_STEPS, adamw, make_batches, make_model
from harness.measure.step_time import steady
from harness.rows import catalogue
from harness.rows.choice import Choice
from harness.rows.results import AccumulatedRow
from harness.run.workers import on_rank_0

MICRO_BATCHES = (1, 2, 4, 8)  # a step


def time_accumulation(rank, settings, choice, micro_batches, in_no_sync):
    """Milliseconds a micro-batch of a steady step: one exchange a step (`in_no_sync`), or one for each micro-batch."""
    way, batches = catalogue.find(*choice), make_batches(settings, rank)
    gc.collect()
    training = way.build(make_model(settings, rank, way.dtype), adamw(settings))

    def step(_):
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with training.no_sync() if in_no_sync and not is_last else contextlib.nullcontext():
                training.forward_backward(batches[micro % len(batches)])
        training.update()
        training.zero_grad()
    with way.inside():
        for number in range(WARMUP_STEPS):
            step(number)
        step_ms, _ = steady(rank, step, range(max(2, settings.steps // 2 // micro_batches)), training.finish)
    return step_ms / micro_batches


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
