"""Records whole steps on a GPU, beside a simulated link, and so shows the time that overlap saves there.

    python -m harness.measuring.gpu_step [--json measured/cuda.json]        # or: make bench WHAT=cuda

One process plays rank 0 of 8. A collective moves nothing. It occupies a stream of its own, as NCCL's do, for as long as
its bytes take on a link of the given rate; kernels wait for it where they would wait for NCCL. So one GPU shows the
steps of 8 GPUs. But NCCL's own kernels would take some multiprocessors, and some of the memory's rate, from the others.
Without a GPU the program prints one line.
"""

import functools
import time
from typing import NamedTuple
from unittest import mock

from harness.ranks import command_line

fail = functools.partial(command_line.fail, "cuda")


def options():
    parser = command_line.Parser("cuda", __doc__)
    command_line.add_json(parser, "measured/cuda.json")
    return parser.parse_args()


if __name__ == "__main__":
    options()  # reports a mistake at once: the imports below load torch, which takes seconds

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from harness import STAGE_3, STAGE_4
from harness.measuring import host_time
from harness.measuring.ledger import wire_bytes
from harness.publishing.pictures import Message, RecordedStep, length, overlap, to_draw, union
from harness.publishing.tables import Report, column, made_here, name_column, ratio, save_and_show, sheet_of
from harness.ranks import exchange
from harness.ranks.meeting import rank_0_of
from harness.training import rows as catalogue
from harness.training.models import GPT, MODELS

ADAMW = {"lr": 1e-4, "fused": True}
D = 8  # number of ranks
BYTES_PER_S = 25e9  # a link of 200 Gbit/s for each GPU
SEQUENCE_LENGTH = 512
COMPUTES_OVER_BYTES = 1.25  # the batch is chosen for this ratio of plain training's time to that of DDP's all-reduce
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
        """Let a message begin when the current stream has done its work so far. Returns an Arrival."""
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
            future.set_result(bucket.buffer())  # complete when this stream has done its work so far
        return future

    def played(self):
        """Return a context in which torch's collectives are played."""
        return mock.patch.multiple(dist, **{name: self.plays("reduce_scatter") for name in exchange.SCATTERS},
                                   **{name: self.plays("all_gather") for name in exchange.GATHERS})


def seconds_of(function):
    """Time one call, until the GPU has done the call's kernels."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def cycles_per_s(cycles=10**8):
    """Measure the clock that torch.cuda._sleep() counts."""
    torch.cuda._sleep(cycles // 10)  # loads the kernel
    return cycles / seconds_of(lambda: torch.cuda._sleep(cycles))


def builds(link):
    """Return {name of a row: build(model, AdamW's arguments)}."""
    ddp = catalogue.with_ddp(torch.optim.AdamW, hook=link.all_reduce_of_ddp, is_alone=True)
    return {
        "computing alone": catalogue.compute_only,
        catalogue.REFERENCE: ddp,
        "ddp, 100 MiB buckets": functools.partial(ddp, bucket_mb=100),
        catalogue.FSDP2: catalogue.fsdp2(reshard_after_forward=False),
        catalogue.GRAD_BUFFER: catalogue.stage(STAGE_3),
        "stage 4 overlap, no prefetch": catalogue.stage(STAGE_4),
        catalogue.OVERLAP: catalogue.stage(STAGE_4, prefetch=True),
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
        seconds[size] = seconds_of(lambda: run(training, batch_of(size, device), n_steps=3)) / 3
    seconds_per_sequence = (seconds[large] - seconds[small]) / (large - small)
    return max(1, round(small + (wanted_s - seconds[small]) / seconds_per_sequence))


def profiled(training, link, batch):
    """Record one of several steps by torch.profiler. Returns a RecordedStep, without memory."""
    link.carried.clear()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            torch.cuda._sleep(1)  # marks the start of a phase
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
        trainings = {}
        steps = {}
        for name, build in builds(link).items():
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
    ddp_ms = next(row.rounds_ms for row in rows if row.name == catalogue.REFERENCE)

    def phase_ms(name):
        return lambda row: next(1000 * (end - start) for phase, start, end in row.step.phases if phase == name)

    def in_flight_ms(row):
        return 1000 * length(union((message.start, message.end) for message in row.step.communication))
    return sheet_of(
        f"Whole steps of rank 0 of {D} on one GPU, beside a simulated link", rows, {
            "name": name_column(), "ms": column("ms/step", "rounds_ms", "measured", ".1f"),
            "over_ddp": column("x ddp", lambda row: ratio(row.rounds_ms, ddp_ms), "measured", ".2f"),
            **{name: column(name, phase_ms(name), "measured", ".1f") for name in ("forward", "backward", "step")},
            "in_flight": column("in flight\nms", in_flight_ms, "modelled", ".1f"),
            "exposed": column("exposed\nms", lambda row: 1000 * row.step.exposed_seconds, "measured", ".1f")},
        [f"{conditions}. A collective moves nothing, but occupies a stream of its own for as long as its bytes take at "
         f"{BYTES_PER_S / 1e9:.0f} GB/s. Exposed: one is in flight and no kernel computes. Median of "
         f"{len(rows[0].rounds_ms)} step(s), recorded by torch.profiler."])


DRAWN = catalogue.REFERENCE, catalogue.GRAD_BUFFER, catalogue.OVERLAP
PICTURE = f"One recorded step of rank 0 of {D} on a GPU, beside a simulated link"


def measure(device, host_steps=60):
    """Measure whole steps, and the host's time. Returns a Report."""
    rows, conditions = measure_overlap(device)
    sheets = {"overlap": overlap_sheet(rows, conditions), "host": host_time.measure_host(340, 8, host_steps, device)}
    drawn = [(row.name, row.step) for row in rows if row.name in DRAWN]
    return Report(made_here(torch.cuda.get_device_name(device)), sheets, drawn=to_draw(drawn, PICTURE))


def main():
    args = options()
    if not torch.cuda.is_available():
        return print("cuda: there is no GPU here: nothing was measured")
    command_line.check_writable("--json", args.json, fail)
    save_and_show(args.json, measure(torch.device("cuda", 0)), fail)


if __name__ == "__main__":
    main()
