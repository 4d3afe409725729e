"""Records one step of a row from outside, as rank x time: what computes, what is in flight, how much is alive."""

import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from harness.measuring.every_row import attempt
from harness.measuring.examine import WARMUP_STEPS, Settings, make_batches, make_training
from harness.measuring.ledger import Ledger
from harness.measuring.memory import Memory
from harness.publishing import row_names
from harness.publishing.pictures import can_draw, svg, text
from harness.publishing.results import Message, RecordedStep, length, most_alive, overlap, union
from harness.ranks import command_line
from harness.ranks.command_line import COUNT, write
from harness.ranks.exchange import in_place_of_gloos
from harness.ranks.workers import WorkerError, Workers
from harness.training import rows as catalogue
from harness.training.models import MODELS

GAP_S = 0.0005  # Python needs this long between two operators; waiting for another rank takes longer
RECORDED_STEPS = 6  # the first leaves messages in flight for the second


class Recorder(Ledger):
    """Is a ledger that also lists when operators ran, in which phase of the step, and how much was alive.

    `busy`: [[start, end], …] in seconds of time.perf_counter, in order; `phases`: [(name, start, end), …]; `live`:
    [(time, bytes), …], what is alive from that time on, by a `memory` that has been entered.
    """

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        self.busy = []
        self.phases = []
        self.live = [(time.perf_counter(), memory.live)]

    @contextmanager
    def phase(self, name):
        start = time.perf_counter()
        yield
        self.phases.append((name, start, time.perf_counter()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        start = time.perf_counter()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        end = time.perf_counter()
        if (live := self.memory.live) != self.live[-1][1]:
            self.live.append((end, live))
        if function.namespace in ("c10d", "_c10d_functional"):
            return result
        if self.busy and start - self.busy[-1][1] < GAP_S:
            self.busy[-1][1] = end
        else:
            self.busy.append([start, end])
        return result


@in_place_of_gloos()
def record(rank, settings, base, bucket_mb=None):
    """Record steps of a row without pauses. Returns the step of median length, on this rank: see `one_step`."""
    if rank.device.type != "cpu":
        raise RuntimeError("on a GPU this would show when kernels are launched, not when they run: use torch.profiler")
    batches = make_batches(settings, rank)[:WARMUP_STEPS]
    with Memory(rank.device) as memory:
        training = make_training(rank, settings, catalogue.find(base, bucket_mb))
        for batch in batches:
            training.step(batch)
        training.finish()
        dist.barrier()
        with Recorder(memory) as recorder:
            for step in range(RECORDED_STEPS):
                tokens, targets = batches[step % WARMUP_STEPS]  # `memory` knows them by now
                with recorder.phase("forward"):
                    loss = training.forward(tokens, targets)
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("step"):
                    training.update()
                    training.zero_grad()
            training.finish()
        return one_step(recorder, median_step(recorder))


def median_step(recorder):
    """Return the number of the step of median length, the first left out. Collective, the same on all ranks.

    A step is as long as on the slowest rank. During any one step the machine may have been busy with something else.
    """
    spans = [span_of(recorder, number) for number in range(1, RECORDED_STEPS)]
    lengths = torch.tensor([end - start for start, end in spans], dtype=torch.float64)
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    return 1 + lengths.argsort()[len(lengths) // 2].item()


def span_of(recorder, number):
    """Return when a step's forward pass started and its step ended, in seconds of time.perf_counter()."""
    (_, start, _), _, (_, _, end) = recorder.phases[3 * number : 3 * number + 3]
    return start, end


def record_rows(workers, settings, rows, progress=lambda text: None):
    """Record every Row that has no error: sets its `timeline`, by rank."""
    for row in rows:
        if not row.error:
            progress(f"timeline: {row.name}")
            attempt(row, lambda: setattr(row, "timeline", workers.run(record, settings, *row.row_id)))


def one_step(recorder, number):
    """Return one of the recorded steps, not the first. Messages that cross its border (parameters that the next forward
    waits for) are shown within it: at the start those of the step before."""
    start, end = span_of(recorder, number)
    inside = [entry for entry in recorder.entries if entry.completed_at > start and entry.launched_at < end]
    spans = [(max(entry.launched_at, start), min(entry.completed_at, end)) for entry in inside]
    busy = [(max(a, start), min(b, end)) for a, b in recorder.busy if b > start and a < end]

    def since(*times):
        return tuple(round(moment - start, 6) for moment in times)
    return RecordedStep(
        exposed_seconds=round(length(union(spans)) - length(overlap(union(spans), busy)), 6), seconds=since(end)[0],
        phases=[(name, *since(a, b)) for name, a, b in recorder.phases if start <= a < end],
        busy=[since(a, b) for a, b in busy],
        communication=[Message(entry.kind, entry.size, *since(entry.launched_at, entry.completed_at))
                       for entry in inside],
        memory=most_alive(recorder.live, start, end))


def main():
    parser = command_line.Parser("timeline", __doc__)
    add, fail = parser.add_argument, parser.error
    add("--rows", default="", metavar="TEXT", help="only rows whose name holds TEXT, and ddp; all: ddp and the four "
        "stages, on rank 0")
    add("--ranks", type=COUNT, default=2, help="processes on this machine (default 2)")
    add("--model", choices=MODELS, default="tiny", help="(default tiny)")
    command_line.add_sizes(add, batch_size=8)
    add("--out", type=Path, default=Path("measured/timeline.svg"), help="of the picture")
    args = parser.parse_args()
    command_line.check_length(args.sequence_length, args.model, MODELS, fail)
    command_line.check_writable("--out", args.out, fail)
    if args.out.suffix != ".svg":
        fail(f"--out {args.out}: the picture is an SVG: let its name end in .svg")
    every = [row.name for row in catalogue.ROWS if row.dtype == "float32"]
    asked = row_names.LADDER if args.rows == "all" else [name for name in every if args.rows in name]
    if not asked:
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(every)}")
    settings = Settings(args.model, args.batch_size, args.sequence_length, steps=3)
    with Workers(args.ranks) as workers:
        rows = [(f"{name}, rank {rank}", step) for name in every if name in (*asked, row_names.REFERENCE)
                for rank, step in enumerate(workers.run(record, settings, name)[: 1 if args.rows == "all" else None])]
    title = f"One step, {args.ranks} ranks on one machine: {args.model}, {args.batch_size} x {args.sequence_length}"
    try:
        if can_draw():
            write("--out", args.out, svg(rows, title), fail)
    finally:  # the disk may be full
        print(text(rows))
    print(f"written to {args.out}" if can_draw() else "for the picture: pip install matplotlib")


if __name__ == "__main__":
    try:
        main()
    except WorkerError as error:
        sys.exit(f"timeline: {error}")
