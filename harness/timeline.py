"""One step of a row, as rank x time: what computes when, and what travels when. Recorded from outside, no stage knows.

Computing is what the dispatcher runs: a dispatch mode notes when each operator starts and ends, and where nothing runs
for longer than GAP_S the rank waits. What travels is the ledger's.
"""

import time
from contextlib import contextmanager

import torch.distributed as dist

from harness import peers
from harness.ledger import Ledger
from harness.measure import _batches, _model, adamw

GAP_S = 0.0005  # Python needs this long between two operators; whoever waits for another rank, longer
WARMUP_STEPS = 3


class Recorder(Ledger):
    """A ledger that also writes down when operators ran and which phase of the step the rank was in.

    Attributes:
        busy: [[start, end], …] in seconds of time.perf_counter, in order.
        phases: [(name, start, end), …].
    """

    def __init__(self):
        super().__init__()
        self.busy, self.phases = [], []

    @contextmanager
    def phase(self, name):
        start = time.perf_counter()
        yield
        self.phases.append((name, start, time.perf_counter()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            return super().__torch_dispatch__(function, types, args, kwargs)
        start = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        end = time.perf_counter()
        if self.busy and start - self.busy[-1][1] < GAP_S:
            self.busy[-1][1] = end
        else:
            self.busy.append([start, end])
        return result


def record(rank, settings, name):
    """Record two steps of a row, without a pause before, between and after them -> dict of this rank, see `one_step`."""
    row, batches = peers.find(name), _batches(settings, rank)
    training = row.build(_model(settings, rank, row.dtype), adamw(settings))
    for step in range(WARMUP_STEPS):
        training.step(batches[step % len(batches)])
    training.finish()
    dist.barrier()
    with Recorder() as recorder:
        for step in range(3):
            tokens, targets = batches[step % len(batches)]
            with recorder.phase("forward"):
                loss = training.forward(tokens, targets)
            with recorder.phase("backward"):
                loss.backward()
            with recorder.phase("step"):
                training.update()
                training.zero_grad()
        training.finish()
    return one_step(recorder)


def one_step(recorder):
    """The second step of the recorded ones, from the start of its forward to the start of the next one's.

    What travels across that border (parameters that the next forward waits for) is shown where it is seen: at the
    start, that of the step before.
    """
    forwards = [start for name, start, _ in recorder.phases if name == "forward"]
    start, end = forwards[1], forwards[2]
    inside = [entry for entry in recorder.entries if entry.completed_at > start and entry.launched_at < end]
    spans = [(max(entry.launched_at, start), min(entry.completed_at, end)) for entry in inside]
    busy = [(max(a, start), min(b, end)) for a, b in recorder.busy if b > start and a < end]
    return {
        "seconds": end - start,
        "phases": [(name, a - start, b - start) for name, a, b in recorder.phases if start <= a < end],
        "busy": [(a - start, b - start) for a, b in busy],
        "communication": [
            {"kind": entry.kind, "bytes": entry.size, "wire_bytes": entry.wire_bytes,
             "start": entry.launched_at - start, "end": entry.completed_at - start} for entry in inside],
        "exposed_seconds": length(union(spans)) - length(overlap(union(spans), busy)),
    }


def union(spans):
    """Spans that may overlap -> the same time, in spans that don't, in order."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def overlap(ones, others):
    """The time that lies in both; each a list of disjoint spans."""
    return [(max(a, c), min(b, d)) for a, b in ones for c, d in others if max(a, c) < min(b, d)]


def length(spans):
    return sum(end - start for start, end in spans)
