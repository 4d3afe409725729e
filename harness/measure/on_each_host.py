"""What each of the ranks on two hosts does: it measures the rows, in step with the other."""

import json
import os
import sys

import torch.distributed as dist

from harness.measure import accumulation, every_row, recorder
from harness.measure.namespaces import TCP
from harness.measure.setup import Settings
from harness.measure.two_host_options import ROWS, bits_per_second
from harness.rows import bucket_sizes
from harness.run import meeting
from harness.run.workers import WorkerError

SWEEP_ROUNDS, SWEEP_STEPS = 2, 5  # at most: it finds a size, and the row with that size is then measured as any other


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
    together, swept, tuned = Together(rank), {}, args.tuned or []
    if args.sweep:
        short = settings._replace(rounds=min(args.rounds, SWEEP_ROUNDS), steps=min(args.steps, SWEEP_STEPS))
        swept = {"sweep": every_row.measure_rows(together, short, bucket_sizes.names(args.rows), progress)}
        tuned = bucket_sizes.best(swept["sweep"]["rows"])
    names = bucket_sizes.beside([name for name in ROWS if args.rows in name or name in always],
                           [name for name in tuned if args.rows in name or name.startswith("ddp,")])
    result = {**every_row.measure_rows(together, settings, names, progress), **swept}
    recorder.record_rows(together, settings, result["rows"], progress)
    accumulating = [row for row in result["rows"] if row["name"] in always]
    if args.accumulation and not any("error" in row for row in accumulating):  # what is wrong gets no time
        ddp = next((name for name in tuned if name.startswith("ddp,")), "ddp")
        short = settings._replace(rounds=min(args.rounds, 2))
        every_row.attempt(accumulating[-1], lambda: result.update(accumulation={
            "conditions": {**result["conditions"], "rounds": short.rounds}, "ddp": ddp,
            "rows": accumulation.accumulation(together, short, ddp, progress)}))
    if rank.rank == 0:
        print(f"\r{'':60}\r", end="", file=sys.stderr)
        result["conditions"].update(rate=args.rate, bits_per_second=bits_per_second(args.rate), hosts=2, tcp=TCP,
                                    cores_per_host=len(os.sched_getaffinity(0)))
        args.json.write_text(json.dumps(result))
    meeting.disconnect()
