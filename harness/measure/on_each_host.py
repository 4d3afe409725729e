"""What each of the ranks on two hosts does: it measures the rows, in step with the other."""

import dataclasses
import os
import sys

import torch.distributed as dist

from harness.measure import accumulation, every_row, recorder
from harness.measure.namespaces import TCP
from harness.measure.setup import Settings
from harness.measure.two_host_options import CURVE, ROWS, VARIANTS, bits_per_second
from harness.rows import bucket_sizes, saved
from harness.rows.choice import is_asked
from harness.rows.results import Accumulation, Sweep
from harness.run import meeting
from harness.run.workers import WorkerError

SWEEP_ROUNDS, SWEEP_STEPS = 2, 5  # at most: it finds a size, and the row with that size is then measured as any other
CURVE_ROUNDS, CURVE_STEPS = 1, 3  # of the sweep that make curve makes at each rate


class Together:
    """What `Workers` is to a process that starts ranks, for ranks that torchrun started: each calls `run`."""

    def __init__(self, rank):
        self.rank, self.world_size = rank, rank.world_size

    def run(self, function, *args):
        """-> [function(rank 0, *args), function(rank 1, *args)], on every rank. Raises WorkerError where one fails."""
        result, error = None, None
        try:
            result = function(self.rank, *args)
        except Exception as failure:
            error = f"rank {self.rank.rank}: {type(failure).__name__}: {failure}".splitlines()[0]
        answers = [None] * self.world_size
        dist.all_gather_object(answers, (result, error))
        errors = [error for _, error in answers if error is not None]
        if errors:
            raise WorkerError(errors[0])
        return [result for result, _ in answers]


def measure_here(args):
    """On every rank: the rows, interleaved; rank 0 writes the result."""
    rank = meeting.connect(args.timeout)
    settings = Settings(args.model, args.batch_size, args.sequence_length, args.rounds, args.steps)
    always = ("ddp", "compute only") + ("stage 3 grad buffer", "stage 4 overlap") * args.accumulation

    def progress(text):
        if rank.rank == 0:
            print(f"\r{text:60}", end="", file=sys.stderr, flush=True)
    together, sweep, tuned, is_curve = Together(rank), None, args.tuned or [], args.rows == "curve"
    if args.sweep:
        most_rounds, most_steps = (CURVE_ROUNDS, CURVE_STEPS) if is_curve else (SWEEP_ROUNDS, SWEEP_STEPS)
        short = settings._replace(rounds=min(args.rounds, most_rounds), steps=min(args.steps, most_steps))
        sizes = bucket_sizes.of_ddp() if is_curve else bucket_sizes.choices(args.rows)
        found = every_row.measure_rows(together, short, sizes, progress)
        sweep, tuned = Sweep(found.conditions, found.rows), bucket_sizes.best(found.rows)
    named = CURVE if is_curve else [*ROWS, *VARIANTS] if args.rows else ROWS
    chosen = [choice for choice in named if is_curve or is_asked(args.rows, choice.name) or choice.name in always]
    sized = [choice for choice in tuned if not is_curve and args.rows in choice.name or choice.base == "ddp"]
    result = every_row.measure_rows(together, settings, bucket_sizes.beside(chosen, sized), progress)
    result.sweep = sweep
    if not is_curve and args.rows != "variants":  # of these a time is shown, and no picture
        recorder.record_rows(together, settings, result.rows, progress)
    if args.accumulation:
        time_accumulation(together, settings, result, always, tuned, progress)
    if rank.rank == 0:
        print(f"\r{'':60}\r", end="", file=sys.stderr)
        result.conditions = dataclasses.replace(
            result.conditions, rate=args.rate, bits_per_second=bits_per_second(args.rate), hosts=2, tcp=TCP,
            cores_per_host=len(os.sched_getaffinity(0)))
        args.json.write_text(saved.to_json(result), encoding="utf-8")
    meeting.disconnect()


def time_accumulation(together, settings, result, bases, tuned, progress):
    """The result's `accumulation`, if all the rows of `bases` are right: what is wrong gets no time."""
    rows = [row for row in result.rows if row.name in bases]
    if any(row.error for row in rows):
        return
    ddp_mb = next((choice.bucket_mb for choice in tuned if choice.base == "ddp"), None)
    short = settings._replace(rounds=min(settings.rounds, 2))

    def time_rows():
        found = accumulation.time_rows(together, short, ddp_mb, progress)
        conditions = dataclasses.replace(result.conditions, rounds=short.rounds)
        result.accumulation = Accumulation(conditions, found, ddp_mb)
    every_row.attempt(rows[-1], time_rows)
