"""Records one step of a row, on each rank: when it computes, when messages are in flight, how many bytes are alive."""

import functools
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from harness.ranks import command_line
from harness.ranks.command_line import COUNT
from harness.training.options import MODELS

fail = functools.partial(command_line.fail, "timeline")


def options():
    parser = command_line.Parser("timeline", __doc__)
    add = parser.add_argument
    add("--rows", default="", metavar="TEXT", help="only rows whose name holds TEXT, and ddp; all: ddp and the four "
        "stages, on rank 0")
    add("--ranks", type=COUNT, default=2, help="processes on this machine (default 2)")
    add("--model", choices=MODELS, default="tiny", help="(default tiny)")
    command_line.add_sizes(add, batch_size=8)
    add("--out", type=Path, default=Path("measured/timeline.svg"), help="of the picture")
    return parser.parse_args()


if __name__ == "__main__":
    options()  # reports a mistake at once: the imports below load torch, which takes seconds

import torch
import torch.distributed as dist

from harness.measuring.examine import WARMUP_STEPS, Settings, make_batches, make_training
from harness.measuring.ledger import Ledger
from harness.measuring.memory import Memory
from harness.publishing.pictures import (
    Message,
    RecordedStep,
    can_draw,
    caption,
    length,
    most_alive,
    overlap,
    svg,
    union,
)
from harness.ranks.exchange import in_place_of_gloos
from harness.ranks.workers import WorkerError, Workers
from harness.training import rows as catalogue

GAP_S = 0.0005  # Python needs this long between two operators; waiting for another rank takes longer
RECORDED_STEPS = 6  # the first isn't shown: unlike the others it doesn't wait for the parameters of a step before


class Recorder(Ledger):
    """Is a ledger that also lists when operators ran, the phases of the steps, and the bytes that were alive.

    `busy`: [[start, end], …] in seconds of time.perf_counter, in order. `phases`: [(name, start, end), …]. `live`:
    [(time, bytes alive from then on), …], which `memory` counts: enter it before.
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
def record(rank, settings, row_id):
    """Record steps of a row without pauses. Returns the step of median length, on this rank: see `one_step`."""
    if rank.device.type != "cpu":
        raise RuntimeError("on a GPU this would show when kernels are launched, not when they run: use torch.profiler")
    batches = make_batches(settings, rank)[:WARMUP_STEPS]
    with Memory(rank.device) as memory:
        training = make_training(rank, settings, catalogue.find(*row_id))
        for batch in batches:
            training.step(batch)
        training.finish()
        dist.barrier()
        with Recorder(memory) as recorder:
            for step in range(RECORDED_STEPS):
                with recorder.phase("forward"):
                    loss = training.forward(*batches[step % WARMUP_STEPS])
                with recorder.phase("backward"):
                    loss.backward()
                with recorder.phase("step"):
                    training.update()
                    training.zero_grad()
            training.finish()
        return one_step(recorder, median_step(recorder))


def median_step(recorder):
    """Return the number of the step of median length, without the first step. Collective, the same on all ranks.

    A step counts as long as on the slowest rank. Other programs may have delayed some of the steps.
    """
    spans = [span_of(recorder, number) for number in range(1, RECORDED_STEPS)]
    lengths = torch.tensor([end - start for start, end in spans], dtype=torch.float64)
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    return 1 + lengths.argsort()[len(lengths) // 2].item()


def span_of(recorder, number):
    """Return when a step's forward pass started and its step ended, in seconds of time.perf_counter()."""
    (_, start, _), _, (_, _, end) = recorder.phases[3 * number : 3 * number + 3]
    return start, end


def record_rows(workers, settings, rows, progress):
    """Record a step of every Row that has no error. Sets the Row's `step`, of rank 0, and its `exposed_ms`."""
    for row in rows:
        if row.error:
            continue
        progress(f"timeline: {row.row_id.name}")
        try:
            steps = workers.run(record, settings, row.row_id)
        except WorkerError as error:
            row.fail(str(error))
            continue
        row.step = steps[0]
        row.exposed_ms = max(1000 * step.exposed_seconds for step in steps)


def one_step(recorder, number):
    """Return the RecordedStep `number`, from 1 on.

    A message that crosses the border of two steps, as parameters for the next forward pass do, is cut there: each step
    has its part.
    """
    start, end = span_of(recorder, number)
    inside = [entry for entry in recorder.entries if entry.completed_at > start and entry.launched_at < end]
    spans = [(max(entry.launched_at, start), min(entry.completed_at, end)) for entry in inside]
    busy = overlap([(start, end)], recorder.busy)
    in_flight = union(spans)

    def since(*times):
        return tuple(round(moment - start, 6) for moment in times)
    return RecordedStep(
        exposed_seconds=round(length(in_flight) - length(overlap(in_flight, busy)), 6), seconds=since(end)[0],
        phases=[(name, *since(a, b)) for name, a, b in recorder.phases if start <= a < end],
        busy=[since(a, b) for a, b in busy],
        communication=[Message(entry.kind, entry.size, *since(entry.launched_at, entry.completed_at))
                       for entry in inside],
        memory=most_alive(recorder.live, start, end))


def main():
    args = options()
    command_line.check_length(args.sequence_length, args.model, MODELS, fail)
    command_line.check_writable("--out", args.out, fail)
    if not can_draw():
        fail("pictures need matplotlib: pip install matplotlib")
    if args.out.suffix != ".svg":
        fail(f"--out {args.out}: the picture is an SVG: let its name end in .svg")
    every = [row.name for row in catalogue.ROWS if row.dtype == "float32"]
    asked = catalogue.LADDER if args.rows == "all" else [name for name in every if args.rows in name]
    if not asked:
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(every)}")
    settings = Settings(args.model, args.batch_size, args.sequence_length, steps=3)
    rows = []
    with Workers(args.ranks) as workers:
        for name in every:
            if name in (*asked, catalogue.REFERENCE):
                steps = workers.run(record, settings, catalogue.RowId(name))
                drawn = steps[:1] if args.rows == "all" else steps
                rows += [(f"{name}, rank {rank}", step) for rank, step in enumerate(drawn)]
    title = f"One step, {args.ranks} ranks on one machine: {args.model}, {args.batch_size} x {args.sequence_length}"
    command_line.write("--out", args.out, svg(rows, title), fail)
    for name, step in rows:
        print(f"{name}: {caption(step)}")
    print(f"written to {args.out}")


if __name__ == "__main__":
    try:
        main()
    except WorkerError as error:
        sys.exit(f"timeline: {error}")
