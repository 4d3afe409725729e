"""Measures on a GPU what updates of stages 3 and 4 cost beside plain AdamW, in time and memory, and what overlap saves.

    python -m harness.measuring.gpu_step [--json measured/cuda.json]        # or: make bench WHAT=cuda

One process plays rank 0 of d with torch's fake process group. First it times the sharded update: collectives return at
once, the batch is one byte long, and backward() is outside the clock. Then it times whole steps beside a played link.
Without a GPU it prints one line.
"""

import functools
import importlib
import statistics
import time
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch._C._distributed_c10d import FakeWork

from harness import STAGE_3, STAGE_4
from harness.measuring import host_time, memory
from harness.measuring.ledger import wire_bytes
from harness.publishing import results, row_names
from harness.publishing.results import Message, RecordedStep, Report, length, made_here, overlap, ratio, union
from harness.publishing.tables import column, made_line, names, sheet_of, sheet_text
from harness.ranks import command_line, exchange
from harness.ranks.meeting import rank_0_of
from harness.training import rows as catalogue
from harness.training.models import GPT, MODELS
from harness.training.replicated import UPDATE_BYTES

ADAMW = {"lr": 1e-4, "fused": True}
FUSED = "fused AdamW"  # torch's own, of the whole model
WARMUP_STEPS = 2  # the first one makes the state


def n_allocations(device):
    """Return how often torch's allocator was asked for memory; 0 on a CPU, whose allocator doesn't count."""
    return torch.cuda.memory_stats(device)["allocation.all.allocated"] if device.type == "cuda" else 0


def seconds_of(function, device):
    """Time one call, until the device has done what it launched."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


def copy_rate(device, n_bytes=2**30, repeats=10):
    """Return bytes per second, read and written, of a copy in the device's memory: what no update can exceed."""
    source = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = [seconds_of(lambda: target.copy_(source), device) for _ in range(repeats)]
    return 2 * n_bytes / statistics.median(times)


def at_once(*_, async_op=False, **__):
    """Stand in for a collective. torch's fake all-gather copies this rank's part d times, more than a step moves."""
    return FakeWork() if async_op else None


@mock.patch.multiple(dist, all_gather_into_tensor=at_once, reduce_scatter_tensor=at_once)
def time_steps(model, optimizer, device, n_steps):
    """Return (median seconds of `optimizer.step()`, number of allocations in the last step)."""
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=device)
    times = []
    for _ in range(WARMUP_STEPS + n_steps):
        model(tokens, tokens).backward()
        before = n_allocations(device)
        times.append(seconds_of(optimizer.step, device))
        allocations = n_allocations(device) - before
        optimizer.zero_grad()
    return statistics.median(times[WARMUP_STEPS:]), allocations


@dataclass
class UpdateRow:
    """What the update of one model costs. Where memory isn't enough, `error` says so and there are no figures."""
    stage: str  # a package, or FUSED
    model: str
    d: int
    step_ms: float | None = None
    bytes_per_s: float | None = None
    allocations: int | None = None  # of torch's allocator, as the next two: None on a CPU
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    error: str | None = None


def measure_update(stage, model_name, d, device, n_steps=10):
    """Time the update of one model by `stage`, a package or FUSED, as rank 0 of d. Returns an UpdateRow."""
    row = UpdateRow(stage, model_name, d)
    try:
        with rank_0_of(d):
            if device.type == "cuda":
                memory.forget_peaks(device)  # of the row before
            with device:  # a CPU takes longer to make up a billion weights than all that is measured
                model = GPT(MODELS[model_name])
            numel = sum(param.numel() for param in model.parameters())
            is_fused = stage == FUSED
            optimizer_cls = torch.optim.AdamW if is_fused else importlib.import_module(stage).DistributedOptimizer
            optimizer = optimizer_cls(model.parameters(), **ADAMW)
            seconds, row.allocations = time_steps(model, optimizer, device, n_steps)
            row.step_ms = seconds * 1000
            row.bytes_per_s = UPDATE_BYTES * numel / d / seconds
            if device.type == "cuda":
                row.peak_bytes = torch.cuda.max_memory_allocated(device)
                row.reserved_bytes = torch.cuda.max_memory_reserved(device)
    except torch.OutOfMemoryError as error:
        row.error = str(error).splitlines()[0]
    return row


def measure_updates(device, models=("medium", "large"), ranks=(1, 8), n_steps=10):
    """Measure plain AdamW, then both stages at each d, for each model. Returns UpdateRows."""
    cases = [(FUSED, 1), *((stage, d) for stage in (STAGE_3, STAGE_4) for d in ranks)]
    return [measure_update(stage, name, d, device, n_steps) for name in models for stage, d in cases]


def update_sheet(rows, bytes_per_s, conditions):
    """Make the table of UpdateRows; `bytes_per_s`: of a copy on the device; `conditions`: a line."""
    plain_ms = {row.model: row.step_ms for row in rows if row.stage == FUSED}

    def over_plain(row):
        return row.step_ms / plain_ms[row.model] if plain_ms[row.model] and row.d == 1 and not row.error else None
    return sheet_of(
        "The sharded update on a GPU", rows, {
            "name": names(lambda row: f"{row.model}: {row.stage}"), "d": column("d", "d"),
            "ms": column("step\nms", lambda row: "out of memory" if row.error else row.step_ms, "measured", ".2f"),
            "over_plain": column("x AdamW", over_plain, "measured", ".2f"),
            "gb_per_s": column("GB/s", "bytes_per_s", "measured", ".0f", unit=1e9),
            "over_copy": column("x copy", "bytes_per_s", "measured", ".2f", unit=bytes_per_s),
            "new": column("new", "allocations", "counted", ".0f"),
            "peak_mb": column("peak", "peak_bytes", "counted", ".0f", unit=1e6),
            "reserved_mb": column("reserved", "reserved_bytes", "counted", ".0f", unit=1e6)},
        [f"GB/s: {UPDATE_BYTES} bytes for each parameter that this rank owns, over the whole step; a copy on the "
         f"device moves {bytes_per_s / 1e9:.0f}. new: allocations in one step. Peak and reserved in MB.", conditions])


# ---------------------------------------------------------------------------- Whole steps, beside a link that is played
# A collective moves nothing. It occupies a stream of its own, as NCCL's do, for as long as its bytes take on a link of
# the given rate; what computes waits for it where it would wait for NCCL. So one GPU shows what d GPUs would do, except
# for what NCCL's kernels take from other kernels: some multiprocessors, and some of the memory's rate.


D, BYTES_PER_S = 8, 25e9  # a link of 200 Gbit/s for each GPU
SEQUENCE_LENGTH = 512
COMPUTES_OVER_BYTES = 1.25  # of plain training, over DDP's all-reduce: the batch is chosen so
PROFILED_STEPS = 4
GAP_S = 5e-5
MARK_NS = 5_000  # a kernel that marks where a phase begins is shorter, every message longer


class Arrival:
    """Stands in for a Work: `wait` makes the current stream wait, and not the host."""

    def __init__(self, event):
        self.event = event

    def wait(self, timeout=None):
        torch.cuda.current_stream().wait_event(self.event)

    def is_completed(self):
        return self.event.query()


class Link:
    """Plays the collectives of rank 0 of D, one after the other, at `bytes_per_s`."""

    def __init__(self, bytes_per_s, device):
        self.bytes_per_s = bytes_per_s
        self.stream = torch.cuda.Stream(device)
        self.carried = []  # (kind, bytes of the full tensor) of each collective
        self.cycles_per_s = cycles_per_s()

    def carry(self, kind, n_bytes):
        """Send when the current stream has come so far. Returns an Arrival."""
        self.carried.append((kind, n_bytes))
        seconds = wire_bytes(kind, n_bytes, D, "nccl") / self.bytes_per_s
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(int(seconds * self.cycles_per_s))
            return Arrival(self.stream.record_event())

    def plays(self, kind):
        """Return a stand-in for torch's collective of that kind; the larger of its two tensors is the whole."""
        def collective(*args, async_op=False, **kwargs):
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            arrival = self.carry(kind, max(tensor.nbytes for tensor in tensors))
            return arrival if async_op else arrival.wait()
        return collective

    def all_reduce_of_ddp(self, _, bucket):
        """Stand in for DDP's own communication hook."""
        bucket.buffer().div_(D)
        self.carry("all_reduce", bucket.buffer().nbytes)
        with torch.cuda.stream(self.stream):
            future = torch.futures.Future(devices=[self.stream.device])
            future.set_result(bucket.buffer())  # complete when this stream has come so far
        return future

    def played(self):
        """Return a context in which torch's collectives are played."""
        return mock.patch.multiple(dist, **{name: self.plays("reduce_scatter") for name in exchange.SCATTERS},
                                   **{name: self.plays("all_gather") for name in exchange.GATHERS})


def cycles_per_s(cycles=10**8):
    """Measure the clock that torch.cuda._sleep() counts."""
    torch.cuda._sleep(cycles // 10)  # loads the kernel
    return cycles / seconds_of(lambda: torch.cuda._sleep(cycles), torch.device("cuda"))


def configurations(link):
    ddp = catalogue.with_ddp(torch.optim.AdamW, hook=link.all_reduce_of_ddp, is_alone=True)
    return {
        "computing alone": catalogue.compute_only,
        row_names.REFERENCE: ddp,
        "ddp, 100 MiB buckets": functools.partial(ddp, bucket_mb=100),
        row_names.FSDP2: catalogue.fsdp2(reshard_after_forward=False),
        row_names.GRAD_BUFFER: catalogue.stage(STAGE_3),
        "stage 4 overlap, no prefetch": catalogue.stage(STAGE_4),
        row_names.OVERLAP: catalogue.stage(STAGE_4, prefetch=True),
    }


def run(training, batch, n_steps=3):
    for _ in range(n_steps):
        training.step(batch)
    training.finish()


def batch_of(size, device):
    tokens = torch.randint(256, (size, SEQUENCE_LENGTH), device=device)
    return tokens, tokens


def fitting_batch(model_name, device):
    """Return the batch size with which plain training takes COMPUTES_OVER_BYTES times as long as DDP's bytes."""
    model = GPT(MODELS[model_name]).to(device)
    training = catalogue.compute_only(model, ADAMW)
    n_bytes = 2 * (D - 1) / D * sum(param.nbytes for param in model.parameters())
    wanted_s = COMPUTES_OVER_BYTES * n_bytes / BYTES_PER_S
    small, large = 1, 9
    seconds = {}
    for size in (small, large):
        run(training, batch_of(size, device))
        seconds[size] = seconds_of(lambda: run(training, batch_of(size, device), 3), device) / 3
    seconds_per_sequence = (seconds[large] - seconds[small]) / (large - small)
    return max(1, round(small + (wanted_s - seconds[small]) / seconds_per_sequence))


def profiled(training, link, batch):
    """Record a step between other steps by torch.profiler. Returns a RecordedStep, without memory."""
    link.carried.clear()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            torch.cuda._sleep(1)  # a mark
            loss = training.forward(*batch)
            torch.cuda._sleep(1)
            loss.backward()
            torch.cuda._sleep(1)
            training.update()
            training.zero_grad()
        training.finish()
    return one_step([(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
                     for event in profiler.profiler.kineto_results.events() if event.device_type() == DeviceType.CUDA],
                    link.carried)


def one_step(kernels, carried):
    """Return the last step but one. `kernels`: [(name, start, end), …] of PROFILED_STEPS steps, in nanoseconds.

    Kernels called "spin" are marks, or messages of a link that is played: those that `carried` lists, in order.
    """
    spins = sorted((start, end) for name, start, end in kernels if "spin" in name)
    marks = [start for start, end in spins if end - start < MARK_NS]  # three in each step
    *_, first, backward, update, last, _, _ = marks

    def seconds(start, end):
        """Return when a kernel starts and ends, in seconds of the step."""
        return max(start - first, 0) / 1e9, (min(end, last) - first) / 1e9

    sent = [(start, end) for start, end in spins if end - start >= MARK_NS]
    messages = [Message(kind, n_bytes, *seconds(start, end))
                for (kind, n_bytes), (start, end) in zip(carried, sent, strict=True) if end > first and start < last]
    busy = union(seconds(start, end) for name, start, end in kernels
                 if "spin" not in name and end > first and start < last)
    in_flight = union((message.start, message.end) for message in messages)
    return RecordedStep(
        exposed_seconds=length(in_flight) - length(overlap(in_flight, busy)), seconds=(last - first) / 1e9,
        phases=[("forward", *seconds(first, backward)), ("backward", *seconds(backward, update)),
                ("step", *seconds(update, last))], communication=messages,
        # Kernels become one span where the gap between them is too short to be drawn.
        busy=[(start, end - GAP_S) for start, end in union((start, end + GAP_S) for start, end in busy)])


class GpuStep(NamedTuple):
    """Recorded steps beside a link that is played. `step`: of median length. `conditions`: model and batch."""
    name: str
    rounds_ms: list
    step: RecordedStep


def measure_overlap(device, model_name="medium", n_rounds=3):
    """Record steps of all configurations in turn. Returns ([GpuStep], model and batch in words)."""
    size = fitting_batch(model_name, device)
    link = Link(BYTES_PER_S, device)
    batch = batch_of(size, device)
    with rank_0_of(D), link.played():
        trainings, steps = {}, {}
        for name, build in configurations(link).items():
            torch.manual_seed(0)
            with device:
                model = GPT(MODELS[model_name])
            trainings[name] = build(model, ADAMW)
            steps[name] = []
            run(trainings[name], batch)
        for _ in range(n_rounds):
            for name, training in trainings.items():
                steps[name].append(profiled(training, link, batch))
    rows = [GpuStep(name, [1000 * step.seconds for step in recorded],
                    sorted(recorded, key=lambda step: step.seconds)[len(recorded) // 2])
            for name, recorded in steps.items()]
    return rows, f"{model_name}, float32, a batch of {size} x {SEQUENCE_LENGTH}"


def overlap_sheet(rows, conditions):
    """Make the table of GpuSteps."""
    ddp_ms = next(row.rounds_ms for row in rows if row.name == row_names.REFERENCE)

    def phase_ms(name):
        return lambda row: next(1000 * (end - start) for phase, start, end in row.step.phases if phase == name)

    def in_flight_ms(row):
        return 1000 * length(union((message.start, message.end) for message in row.step.communication))
    return sheet_of(
        f"Whole steps of rank 0 of {D} on one GPU, beside a simulated link", rows, {
            "name": names(), "ms": column("ms/step", "rounds_ms", "measured", ".1f"),
            "over_ddp": column("x ddp", lambda row: ratio(row.rounds_ms, ddp_ms), "measured", ".2f"),
            **{name: column(name, phase_ms(name), "measured", ".1f") for name in ("forward", "backward", "step")},
            "in_flight": column("in flight\nms", in_flight_ms, "modelled", ".1f"),
            "exposed": column("exposed\nms", lambda row: 1000 * row.step.exposed_seconds, "measured", ".1f")},
        [f"{conditions}. A collective moves nothing, but occupies a stream of its own for as long as its bytes take at "
         f"{BYTES_PER_S / 1e9:.0f} GB/s. Exposed: one is in flight and no kernel computes. Median of "
         f"{len(rows[0].rounds_ms)} step(s), recorded by torch.profiler."])


DRAWN = row_names.REFERENCE, row_names.GRAD_BUFFER, row_names.OVERLAP
PICTURE = f"One recorded step of rank 0 of {D} on a GPU, beside a simulated link"


def measure(device, host_steps=60):
    """Measure all of it. Returns a Report."""
    bytes_per_s = copy_rate(device)
    origin = replace(made_here(), machine=torch.cuda.get_device_name(device))
    n_steps = 10
    conditions = made_line(origin, "float32", f"median of {n_steps} steps, no communication")
    updates = update_sheet(measure_updates(device, n_steps=n_steps), bytes_per_s, conditions)
    host = host_time.measure_ranks(device, n_steps=host_steps)
    rows, words = measure_overlap(device)
    return Report(origin, {"updates": updates, "overlap": overlap_sheet(rows, words)}, host,
                  steps={row.name: row.step for row in rows if row.name in DRAWN}, title=PICTURE)


def main():
    parser = command_line.Parser("cuda", __doc__)
    command_line.add_json(parser, "measured/cuda.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        return print("cuda: there is no GPU here: nothing was measured")
    command_line.check_writable("--json", args.json, parser.error)
    report = measure(torch.device("cuda", 0))
    sheets = [*report.sheets.values(), *report.host.values()]
    command_line.write_and_show(args.json, results.to_json(report), parser.error,
                                lambda: print("\n".join(map(sheet_text, sheets))))


if __name__ == "__main__":
    main()
