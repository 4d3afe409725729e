"""Measures on one GPU how much time overlap saves in whole steps, with the network simulated.

    python -m harness.measuring.gpu_step [--json measured/cuda.json]        # or: make bench WHAT=cuda

One process plays rank 0 of 8, and a collective moves no bytes. Like a collective of NCCL, it occupies a stream of its
own, for as long as the bytes would take on a link of 200 Gbit/s. Kernels that need the result wait for that stream. So
one GPU shows the steps of 8 GPUs. One difference is left: NCCL's own kernels would slow other kernels down. Without a
GPU the program prints one line.
"""
# The words of this file:
#   row        a way to train; the catalogue, harness/training/rows.py, lists all rows
#   build      a function of a model and AdamW's arguments, which returns a Training
#   Training   an object with a model, an optimizer, and the parts of a step as methods
#   stage      an optimizer of this project, in a folder stage*/
#   host       the CPU side of a rank
#   stream     a queue of kernels on the GPU
#   _sleep     torch.cuda._sleep(cycles) starts a kernel that only counts cycles of the GPU's clock
#   span       a pair (start, end). `union` merges spans that overlap, `overlap` returns what two lists of spans have in
#              common, `length` adds up their seconds
#   exposed    a message in flight is exposed while no kernel computes
#   Recording  phases, spans of computing and messages of several steps; `recorded_step` returns one of these steps
#   RecordedStep  a step: `phases` [(name, start, end), …], `busy` (spans of computing), `communication` (a list of
#              Messages), `seconds` in all, and `exposed_seconds`

import functools
import itertools
import time
from unittest import mock

from harness.ranks import command_line

fail = functools.partial(command_line.fail, "cuda")  # ends the program, with a message and exit code 2


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
from harness.measuring import overhead
from harness.measuring.examine import Recording, recorded_step
from harness.measuring.ledger import wire_bytes
from harness.publishing.pictures import Message, length, overlap, to_draw, union
from harness.publishing.tables import Report, column, made_here, name_column, ratio, save_and_show, sheet_of
from harness.ranks import exchange
from harness.ranks.meeting import rank_0_of
from harness.training import rows as catalogue
from harness.training.models import GPT, MODELS

ADAMW = {"lr": 1e-4, "fused": True}
MODEL = "medium"
BATCH_SIZE = 4  # on an H100 computing alone then takes about as long (1.15 times) as DDP's messages on the link
SEQUENCE_LENGTH = 512
D = 8  # number of ranks
BYTES_PER_S = 25e9  # a link of 200 Gbit/s for each GPU
ROUNDS = 3  # in each round a step of every row is recorded
WARMUP_STEPS = 3
PROFILED_STEPS = 4  # steps 0 to 3 of a recording
SHOWN_STEP = 2  # the number of the step that is shown; it has a step before it and a step after it
PHASES = "forward", "backward", "step"
GAP_S = 5e-5  # a shorter gap between two kernels isn't drawn
MARK_S = 5e-6  # a kernel that marks the start of a phase takes less time; every message on the Link takes more


class Arrival:
    """Stands in for torch's Work of a collective in flight: `wait` makes the current stream wait, not the host.

    `event`: a torch.cuda.Event in the link's stream, behind the message.
    """

    def __init__(self, event):
        self.event = event

    def wait(self, timeout=None):
        torch.cuda.current_stream().wait_event(self.event)

    def is_completed(self):
        return self.event.query()


class Link:
    """Plays the collectives of rank 0 of D, one after the other, at BYTES_PER_S."""

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device)  # on which messages take time
        # (kind, bytes of the full tensor) of each message. `recorded_by_profiler` empties it before each recording.
        self.carried = []
        self.cycles_per_s = measured_cycles_per_s()

    def carry(self, kind, n_bytes):
        """Send a message as soon as the current stream has done its work so far. Returns an Arrival at once."""
        self.carried.append((kind, n_bytes))
        # wire_bytes: how many bytes a rank sends in NCCL's ring.
        seconds = wire_bytes(kind, n_bytes, D, "nccl") / BYTES_PER_S
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(int(seconds * self.cycles_per_s))
            return Arrival(self.stream.record_event())

    def stand_in(self, kind):
        """Return a function to call in place of torch's collective of that kind.

        The larger of the collective's two tensors is the full tensor. The other is a rank's part.
        """
        def collective(*args, async_op=False, **kwargs):
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            arrival = self.carry(kind, max(tensor.nbytes for tensor in tensors))
            return arrival if async_op else arrival.wait()
        return collective

    def all_reduce_of_ddp(self, _, bucket):
        """Play DDP's all-reduce. DDP calls this communication hook with (None, bucket of gradients). Returns a Future.
        """
        bucket.buffer().div_(D)
        self.carry("all_reduce", bucket.buffer().nbytes)
        with torch.cuda.stream(self.stream):
            future = torch.futures.Future(devices=[self.stream.device])
            future.set_result(bucket.buffer())  # a wait for the future is a wait for what is on this stream so far
        return future

    def played(self):
        """Return a context in which this link plays torch's reduce-scatters and all-gathers."""
        # SCATTERS and GATHERS have the names of these functions, which differ between releases of torch.
        stand_ins = {name: self.stand_in("reduce_scatter") for name in exchange.SCATTERS}
        stand_ins |= {name: self.stand_in("all_gather") for name in exchange.GATHERS}
        return mock.patch.multiple(dist, **stand_ins)


def measured_cycles_per_s():
    """Measure how many cycles torch.cuda._sleep() counts per second."""
    cycles = 10**8
    torch.cuda._sleep(cycles // 10)  # loads the kernel
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return cycles / (time.perf_counter() - start)


def builds(link):
    """Return {name of a row: build}. Names in capitals are constants of the catalogue; REFERENCE is "ddp"."""
    # `is_alone`: DDP gets a gloo group with only this process, because DDP can't work with ranks that don't exist.
    ddp = catalogue.with_ddp(torch.optim.AdamW, hook=link.all_reduce_of_ddp, is_alone=True)
    return {
        "computing alone": catalogue.compute_only,
        catalogue.REFERENCE: ddp,
        "ddp, 100 MiB buckets": functools.partial(ddp, bucket_mb=100),
        catalogue.FSDP2: catalogue.fsdp2(reshard_after_forward=False),
        catalogue.GRAD_BUFFER: catalogue.stage(STAGE_3),
        "stage 4 overlap, no prefetch": catalogue.stage(STAGE_4),
        # With `prefetch` the gathered parameters arrive during the next forward pass.
        catalogue.OVERLAP: catalogue.stage(STAGE_4, prefetch=True),
    }


class GpuRow:
    """A row, with the steps that were recorded, one in each round."""

    def __init__(self, name, training):
        self.name = name
        self.training = training
        self.steps = []  # RecordedSteps, which `measure_overlap` appends

    @property
    def rounds_ms(self):
        return [1000 * step.seconds for step in self.steps]

    @property
    def median_step(self):
        """Return the RecordedStep of median length."""
        in_order = sorted(self.steps, key=lambda step: step.seconds)
        return in_order[len(in_order) // 2]


def measure_overlap(device):
    """Record steps of all rows in turn. Returns GpuRows."""
    link = Link(device)
    tokens = torch.randint(256, (BATCH_SIZE, SEQUENCE_LENGTH), device=device)
    batch = tokens, tokens  # the targets don't change the time
    rows = []
    with rank_0_of(D), link.played():  # the link in place of torch's collectives
        for name, build in builds(link).items():
            torch.manual_seed(0)
            with device:  # tensors are made on the GPU
                model = GPT(MODELS[MODEL])
            row = GpuRow(name, build(model, ADAMW))
            for _ in range(WARMUP_STEPS):
                row.training.step(batch)
            row.training.finish()  # waits for parameters in flight
            rows.append(row)
        for _ in range(ROUNDS):
            for row in rows:
                row.steps.append(recorded_by_profiler(row.training, link, batch))
    return rows


def recorded_by_profiler(training, link, batch):
    """Train PROFILED_STEPS steps under torch.profiler. Returns step SHOWN_STEP as a RecordedStep."""
    link.carried = []
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            torch.cuda._sleep(1)  # a kernel so short marks the start of a phase
            loss = training.forward(*batch)
            torch.cuda._sleep(1)
            loss.backward()
            torch.cuda._sleep(1)
            training.update()
            training.zero_grad()
        training.finish()
    # torch's profiler has no public method for this list, which has an event for each kernel.
    events = profiler.profiler.kineto_results.events()
    kernels = [(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
               for event in events if event.device_type() == DeviceType.CUDA]
    return shown_step(kernels, link.carried)


def shown_step(kernels, carried):
    """Return step SHOWN_STEP of a recording as a RecordedStep.

    `kernels`: [(name, start, end), …], in ns. A kernel of torch.cuda._sleep has "spin" in its name. It marks the start
    of a phase, or is a message on the Link. `carried`: (kind, bytes) of each message, in order.
    """
    first_ns = min(start_ns for _, start_ns, _ in kernels)
    spins = []  # spans of marks and messages
    busy = []  # spans of kernels that compute
    for name, start_ns, end_ns in kernels:
        span = (start_ns - first_ns) / 1e9, (end_ns - first_ns) / 1e9
        if "spin" in name:
            spins.append(span)
        else:
            busy.append(span)
    spins.sort()
    marks = [start for start, end in spins if end - start < MARK_S]
    # A phase ends where the next phase begins. The last phase of all has no end, and is left out.
    phases = list(zip(itertools.cycle(PHASES), marks, marks[1:]))
    sent = [(start, end) for start, end in spins if end - start >= MARK_S]
    # The link carries messages in the order in which they were launched.
    messages = [Message(kind, n_bytes, start, end) for (kind, n_bytes), (start, end) in zip(carried, sent, strict=True)]
    step = recorded_step(Recording(phases, union(busy), messages), SHOWN_STEP)
    # Each span is made longer by GAP_S, so that `union` merges two spans with a short gap between them. Then each
    # merged span is made shorter again.
    with_gaps_closed = union((start, end + GAP_S) for start, end in step.busy)
    return step._replace(busy=[(start, end - GAP_S) for start, end in with_gaps_closed])


def overlap_sheet(rows):
    """Make the table of GpuRows."""
    ddp_ms = next(row.rounds_ms for row in rows if row.name == catalogue.REFERENCE)

    def phase_ms(row, number):
        """Return the length of phase `number` of the row's median step."""
        _, start, end = row.median_step.phases[number]
        return 1000 * (end - start)

    def in_flight_ms(row):
        """Return the time of the row's median step in which a message is in flight."""
        step = row.median_step
        in_flight = union((message.start, message.end) for message in step.communication)
        return 1000 * length(overlap([(0, step.seconds)], in_flight))

    def exposed_ms(row):
        return 1000 * row.median_step.exposed_seconds
    # Key of the column -> column.
    phase_columns = {name: column(name, functools.partial(phase_ms, number=number), "measured", ".1f")
                     for number, name in enumerate(PHASES)}
    return sheet_of(
        f"Whole steps of rank 0 of {D} on one GPU, beside a simulated link", rows, {
            "name": name_column(), "ms": column("ms/step", "rounds_ms", "measured", ".1f"),
            "over_ddp": column("x ddp", lambda row: ratio(row.rounds_ms, ddp_ms), "measured", ".2f"), **phase_columns,
            "in_flight": column("in flight\nms", in_flight_ms, "modelled", ".1f"),
            "exposed": column("exposed\nms", exposed_ms, "measured", ".1f")},
        [f"{MODEL}, float32, a batch of {BATCH_SIZE} x {SEQUENCE_LENGTH}. A collective moves nothing, but occupies a "
         f"stream of its own for as long as its bytes take at {BYTES_PER_S / 1e9:.0f} GB/s. Exposed: one is in flight "
         f"and no kernel computes. Median of {ROUNDS} step(s), recorded by torch.profiler."])


# A picture shows a step of each of these rows.
DRAWN = catalogue.REFERENCE, catalogue.GRAD_BUFFER, catalogue.OVERLAP


def main():
    args = options()
    if not torch.cuda.is_available():
        print("cuda: there is no GPU here: nothing was measured")
        return
    command_line.check_writable("--json", args.json, fail)
    device = torch.device("cuda", 0)
    rows = measure_overlap(device)
    sheets = {"overlap": overlap_sheet(rows), "host": overhead.measure_host(device)}
    drawn = to_draw([(row.name, row.median_step) for row in rows if row.name in DRAWN],
                    f"One recorded step of rank 0 of {D} on a GPU, beside a simulated link")
    save_and_show(args.json, Report(made_here(torch.cuda.get_device_name(device)), sheets, drawn=drawn), fail)


if __name__ == "__main__":
    main()
