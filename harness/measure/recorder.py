"""One step of a row, recorded from outside: what computes when, what travels when, how much is alive.

Computing is what the dispatcher runs: a dispatch mode notes when each operator starts and ends, and where nothing runs
for longer than GAP_S the rank waits. What travels is the ledger's. Memory is what is alive after each operator, of all
that was made since before the model was built, counted as in the bench (memory.py).
"""

import functools
import gc
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from harness.measure.every_row import attempt
from harness.measure.ledger import Ledger
from harness.measure.memory import Memory
from harness.measure.setup import WARMUP_STEPS, adamw, make_batches, make_model
from harness.rows import catalogue
from harness.rows.results import Message, RecordedStep
from harness.rows.spans import length, most_alive, overlap, union

GAP_S = 0.0005  # Python needs this long between two operators; whoever waits for another rank, longer
RECORDED_STEPS = 6  # the first is there for what it leaves under way


class Recorder(Ledger):
    """A ledger that also writes down when operators ran, in which phase of the step, and how much was alive.

    Args:
        memory: a `harness.measure.memory.Memory` that has been entered.

    Attributes:
        busy: [[start, end], …] in seconds of time.perf_counter, in order.
        phases: [(name, start, end), …].
        live: [(time, bytes), …]: what is alive from that time on.
    """

    def __init__(self, memory):
        super().__init__()
        self.memory = memory
        self.busy, self.phases, self.live = [], [], [(time.perf_counter(), memory.live)]

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


@catalogue.in_its_context
def record(rank, settings, base, bucket_mb=None):
    """Record steps of a row, with no pause between them -> the one of median length, on this rank: see `one_step`."""
    if rank.device.type != "cpu":
        raise RuntimeError("on a GPU this would show when kernels are launched, not when they run: use torch.profiler")
    way, batches = catalogue.find(base, bucket_mb), make_batches(settings, rank)[:WARMUP_STEPS]
    gc.collect()
    with Memory(rank.device) as memory:
        training = way.build(make_model(settings, rank, way.dtype), adamw(settings))
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
    """The number of the recorded step that is of median length, the first one aside. Collective, the same on all ranks.

    A step is as long as on the slowest rank. In a single one this machine may have been busy with something else.
    """
    spans = [span_of(recorder, number) for number in range(1, RECORDED_STEPS)]
    lengths = torch.tensor([end - start for start, end in spans], dtype=torch.float64)
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    return 1 + lengths.argsort()[len(lengths) // 2].item()


def span_of(recorder, number):
    """From the start of a step's forward until the next one's could start, in seconds of time.perf_counter()."""
    forward, _, step = recorder.phases[3 * number : 3 * number + 3]
    return forward[1], step[2]


def record_rows(workers, settings, rows, progress=lambda text: None):
    """Records every Row that has no error: its `timeline`, see `one_step`, by rank."""
    def record_row(row):
        row.timeline = workers.run(record, settings, *row.choice)
    for row in rows:
        if not row.error:
            progress(f"timeline: {row.name}")
            attempt(row, functools.partial(record_row, row))


def one_step(recorder, number):
    """One of the recorded steps, not the first -> RecordedStep, from the start of its forward until the next
    one's could start.

    What travels across that border (parameters that the next forward waits for) is shown where it is seen: at the
    start, that of the step before.
    """
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
