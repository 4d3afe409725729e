"""Measures one row, on every rank: is the row right, what does a rank send and hold, how long is a step, what is in it?

Every rank calls the functions here, and every_row.py puts the measurements of all rows together.

    row            a way to train, with a name; harness/training/rows.py lists all rows, each as a Configuration
    RowId          the name of a row, and maybe a size of its buckets
    rank           this process, a harness.ranks.meeting.Rank: its number, its device, the number of all ranks
    Training       what a row builds: a model and an optimizer, with the parts of a step as methods
    reference      the training that a row must agree with: DDP, or replicated training with fp32 copies of parameters
    formula        what a row should send and hold, as its Configuration says
    Ledger         lists the collectives that a rank starts
    Memory         counts the bytes that tensors take
    drain          to wait, after the last step, for the messages that this step has left in flight
    message        a collective, or a send or recv, in a recording
    in_place_of_gloos    makes torch's functions call collectives that are faster than gloo's
"""

import contextlib
import functools
import gc
import statistics
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness.measuring.ledger import COLLECTIVE_NAMESPACES, Ledger
from harness.measuring.memory import Memory
from harness.publishing.pictures import Message, RecordedStep, length, overlap, union
from harness.publishing.tables import Made, made_here
from harness.ranks.exchange import in_place_of_gloos
from harness.training import corpus, rows
from harness.training.models import GPT, MODELS

# Steps of a row are counted from 1. DDP makes its buckets anew in step 2, and after step 2 everything is allocated.
WARMUP_STEPS = 2
# After three steps a row must agree with its reference. Step 2 is the first that begins with gathered parameters and
# with moments of AdamW that aren't zero, and in step 3 a Ledger counts.
CHECKED_STEPS = 3


class Settings(NamedTuple):
    """Options of a measurement: how rows are trained."""
    model: str = "tiny"
    batch_size: int = 4  # sequences per rank
    sequence_length: int = 128  # bytes
    rounds: int = 3  # in each round every row is timed once
    steps: int = 3  # of each row that are timed in a round
    seed: int = 0  # of the model's weights and of the batches


class Conditions(NamedTuple):
    """The machine and the model of a measurement."""
    made: Made  # machine, release of torch, commit and date
    ranks: str  # backend, number of ranks, and threads, in words
    device: str  # "cpu" or "cuda"
    parameters: int  # number of the model's elements


def adamw(settings):
    """Return the arguments of AdamW, the same in every row. `tolerance` says why eps isn't 1e-8."""
    return dict(lr=MODELS[settings.model].lr, weight_decay=0.1, eps=1e-6, fused=True)


def make_model(settings, rank, dtype, starts_apart=False):
    """Make a model. Every rank gets the same weights; with `starts_apart` each rank gets other weights.

    A row that starts apart is right only if its constructor gives all ranks the weights of rank 0.
    """
    seed = settings.seed + rank.number if starts_apart else settings.seed
    torch.manual_seed(seed)
    return GPT(MODELS[settings.model]).to(rank.device, getattr(torch, dtype))


@functools.lru_cache(maxsize=1)
def make_batches(settings, rank):
    """Make all batches of a measurement before it, (tokens, targets) each. All rows train on the same batches."""
    train, _ = corpus.split(corpus.load_bytes())
    batches = corpus.Batches(train, settings.batch_size, settings.sequence_length, rank.number, rank.world_size,
                             settings.seed, rank.device)
    n_steps = max(CHECKED_STEPS, WARMUP_STEPS + settings.steps)
    return [batches.batch(step) for step in range(n_steps)]


def describe(rank, settings):
    """Return the Conditions of a measurement."""
    numel = sum(param.numel() for param in make_model(settings, rank, "float32").parameters())
    words = f"{rank.backend}, {rank.world_size} rank(s) x {torch.get_num_threads()} thread(s)"
    machine = None
    if rank.device.type == "cuda":
        machine = torch.cuda.get_device_name(rank.device)
        n_gpus = torch.cuda.device_count()
        if n_gpus < rank.world_size:
            words += f" that share {n_gpus} GPU(s)"
    return Conditions(made_here(machine), words, rank.device.type, numel)


def default_model(rank):
    """Return the name of a model that is large enough for this rank's device: a short step can't be timed well."""
    return "medium" if rank.device.type == "cuda" else "tiny"


# -------------------------------------------------------------- Is a row right, and what does a rank send and hold?


def tolerance(world_size):
    """Return by how much a right row's parameters may differ from the reference's after CHECKED_STEPS steps in fp32.

    On one or two ranks every order of summation gives the same bits. On more ranks, sums differ in the last bits. A
    gradient may be nothing but this noise, for example the gradient of attention's key bias, because softmax cancels
    the bias. AdamW divides a gradient by its size, so with a small eps it would make a step of up to lr from noise.
    Differences of 2e-7 were measured on 3 and 4 ranks with eps = 1e-6, and of 4e-6 with eps = 1e-8. A wrong row moves a
    parameter by lr: 1e-4 to 1e-3.
    """
    return 0.0 if world_size <= 2 else 1e-5


@functools.lru_cache(maxsize=2)
def reference_params(settings, rank, build, dtype):
    """Train the reference for CHECKED_STEPS steps. Returns rank 0's parameters, on every rank. Collective.

    `build` makes the Training of the reference.
    """
    training = build(make_model(settings, rank, dtype), adamw(settings))
    for batch in make_batches(settings, rank)[:CHECKED_STEPS]:
        training.step(batch)
    params = training.full_params()
    for param in params:
        dist.broadcast(param, src=0)
    return params


class Examined(NamedTuple):
    """One rank's figures of a row. The row's formula gives the fields whose names end in `_theory`."""
    difference: float  # the largest |own - reference| of any element of a parameter, over all ranks
    collectives: dict  # {kind: how many}, in one step
    wire_bytes: int  # that a rank sends in one step, on average
    wire_bytes_theory: int
    memory_bytes: dict  # {phase: bytes}: see `count_memory`
    bytes_per_param: float  # bytes that this rank holds after a step, for each parameter of the model
    bytes_per_param_theory: float


@in_place_of_gloos()
def examine(rank, settings, row_id):
    """Train a row for three steps: Memory counts in steps 1 and 2, a Ledger in step 3. Returns Examined."""
    # The row must agree with the reference to the bit, and CUDA's faster sums add in an order that varies.
    torch.use_deterministic_algorithms(rank.device.type == "cuda", warn_only=True)
    configuration = rows.find(*row_id)
    batches = make_batches(settings, rank)
    expected = reference_params(settings, rank, configuration.reference, configuration.dtype)
    gc.collect()  # so that the row before is gone, and isn't counted
    training, memory_bytes, held_bytes = count_memory(rank, settings, configuration, batches[:2])
    with Ledger() as ledger:
        training.step(batches[2])
        training.finish()
    params = training.full_params()
    torch.use_deterministic_algorithms(False)
    numel = sum(param.numel() for param in training.model.parameters())
    return Examined(
        difference=largest_difference(params, expected),
        collectives=ledger.collectives,
        wire_bytes=ledger.wire_bytes,
        wire_bytes_theory=round(configuration.wire_bytes(numel, rank.world_size)),
        memory_bytes=memory_bytes,
        bytes_per_param=held_bytes / numel,
        bytes_per_param_theory=configuration.bytes_per_param(numel, rank.world_size, training.optimizer))


def count_memory(rank, settings, configuration, batches):
    """Build a row and train two steps. Returns (Training, {phase: bytes in memory}, bytes held after the second step).

    A phase is a moment here:
        model: after the model was built
        optimizer: after the optimizer was built
        backward: after the backward pass of step 1
        step: after step 1, which makes the optimizer's state
        peak: the most at any moment of the build and of both steps
        reserved: only on a GPU: what torch's allocator has taken, for tensors and in reserve
    """
    with Memory(rank.device) as memory:  # settle() waits until gloo has freed its tensors, and returns the live bytes
        model = make_model(settings, rank, configuration.dtype, configuration.starts_apart)
        memory_bytes = {"model": memory.live}
        training = configuration.build(model, adamw(settings))
        memory_bytes["optimizer"] = memory.settle()
        for number, batch in enumerate(batches, 1):
            training.forward_backward(batch)
            after_backward = memory.settle()
            training.update()
            training.finish()
            held_bytes = memory.settle()
            if number == 1:
                memory_bytes["backward"] = after_backward
                memory_bytes["step"] = held_bytes
            training.zero_grad()
        memory_bytes["peak"] = memory.peak
        if rank.device.type == "cuda":
            memory_bytes["reserved"] = memory.reserved
    return training, memory_bytes, held_bytes


def largest_difference(tensors, expected):
    """Return the largest difference of an element from the expected element, over all ranks. Collective.

    A nan counts as the largest float.
    """
    pairs = zip(tensors, expected, strict=True)
    differences = torch.stack([(tensor - expected_tensor).abs().max().float() for tensor, expected_tensor in pairs])
    largest = differences.max().nan_to_num(nan=torch.finfo(torch.float32).max)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


@in_place_of_gloos()
def time_steps(rank, settings, row_id):
    """Time one row. Returns (median ms per step, ms to drain)."""
    batches = make_batches(settings, rank)
    training = make_training(rank, settings, row_id)
    for batch in batches[:WARMUP_STEPS]:
        training.step(batch)
    timed_batches = batches[WARMUP_STEPS : WARMUP_STEPS + settings.steps]
    return time_warm_steps(rank, training.step, timed_batches, training.finish)


def make_training(rank, settings, row_id):
    """Build a row, after the memory of the row before it was freed. Returns a Training."""
    gc.collect()
    configuration = rows.find(*row_id)
    return configuration.build(make_model(settings, rank, configuration.dtype), adamw(settings))


def time_warm_steps(rank, step, inputs, finish):
    """Call and time `step(step_input)` for each of `inputs`, after steps to warm up.

    Returns (median ms per step, ms to drain), both of the slowest rank, on every rank. Collective.

    A step lasts from the end of the step before to its own end. So it includes the wait for parameters that the step
    before has sent. `finish()` drains. No barrier stands between steps, because it would wait for messages in flight.
    """
    ends_of_steps = [timestamp(rank.device)]
    for step_input in inputs:
        step(step_input)
        ends_of_steps.append(timestamp(rank.device))
    finish()
    drain_ms = milliseconds(ends_of_steps[-1], timestamp(rank.device))
    step_ms = statistics.median(map(milliseconds, ends_of_steps, ends_of_steps[1:]))
    of_slowest_rank = torch.tensor([step_ms, drain_ms], device=rank.device)
    dist.all_reduce(of_slowest_rank, op=dist.ReduceOp.MAX)
    return of_slowest_rank.tolist()


def timestamp(device):
    """Return the time in seconds; on a GPU an event, which gets its time when the GPU has done all work before it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start, end):
    """Return the time between two results of `timestamp`."""
    if isinstance(start, float):  # both are seconds, on a CPU
        return (end - start) * 1000
    end.synchronize()  # the CPU waits until the event has a time
    return start.elapsed_time(end)


def clip(training, max_norm):
    """Clip the gradients by the optimizer's own method, or by torch's function where the optimizer has no method."""
    own_clip = getattr(training.optimizer, "clip_grad_norm_", None)
    if own_clip:
        own_clip(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), max_norm)


# ---------------------------------------------- What is in a step: when does a rank compute, when do messages travel?


# A span is a pair (start, end) of moments. `union` merges spans that overlap, `overlap` returns what two lists of spans
# have in common, and `length` adds up the seconds of spans. Communication is exposed while a message is in flight and
# the rank doesn't compute.

GAP_S = 0.0005  # between two operators Python needs less time, and a wait for another rank takes more
RECORDED_STEPS = 6  # steps 0 to 5; step 0 isn't shown, because it doesn't wait for parameters of a step before it


class Recorder(Ledger):
    """Is a Ledger that also lists when operators ran, and phases of steps. Times are seconds of time.perf_counter."""

    def __init__(self):
        super().__init__()
        self.busy = []  # spans [start, end], in order, of operators with no gap between them
        self.phases = []  # (name, start, end), which `phase` appends

    @contextlib.contextmanager
    def phase(self, name):
        """Return a context, which lasts as long as the phase `name` of a step."""
        start = time.perf_counter()
        yield
        self.phases.append((name, start, time.perf_counter()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Call the operator `function`, as torch asks, and note when it ran, unless it communicates."""
        start = time.perf_counter()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        end = time.perf_counter()
        if function.namespace in COLLECTIVE_NAMESPACES:
            return result
        if self.busy and start - self.busy[-1][1] < GAP_S:  # [-1][1] is the end of the last span
            self.busy[-1][1] = end
        else:
            self.busy.append([start, end])
        return result


@in_place_of_gloos()
def record(rank, settings, row_id):
    """Record steps of a row on a CPU. Returns the step of median length, as this rank's RecordedStep. Collective."""
    batches = make_batches(settings, rank)[:WARMUP_STEPS]
    training = make_training(rank, settings, row_id)
    for batch in batches:
        training.step(batch)
    training.finish()
    dist.barrier()
    with Recorder() as recorder:
        for number in range(RECORDED_STEPS):  # the few batches take turns
            with recorder.phase("forward"):
                loss = training.forward(*batches[number % len(batches)])
            with recorder.phase("backward"):
                loss.backward()
            with recorder.phase("step"):
                training.update()
                training.zero_grad()
        training.finish()
    messages = [Message(entry.kind, entry.size, entry.launched_at, entry.completed_at) for entry in recorder.entries]
    return recorded_step(Recording(recorder.phases, recorder.busy, messages), median_step(recorder.phases))


class Recording(NamedTuple):
    """What was recorded of several steps. Times are seconds of any clock."""
    phases: list  # (name, start, end) of each phase: a step has three, forward, backward and step
    busy: list  # spans in which the rank computes, disjoint and in order
    messages: list  # of Messages: (kind, bytes, start, end)


def span_of(phases, number):
    """Return the span of step `number`: from the start of its first phase to the end of its last phase.

    phases: (name, start, end) of each phase, three for a step.
    """
    _, start, _ = phases[3 * number]
    _, _, end = phases[3 * number + 2]
    return start, end


def median_step(phases):
    """Return the number of the step of median length, the same on all ranks. Step 0 is left out. Collective.

    A step is as long as it is on the slowest rank. Other programs may delay some steps, hence the median.
    """
    spans = [span_of(phases, number) for number in range(1, RECORDED_STEPS)]
    lengths = torch.tensor([end - start for start, end in spans], dtype=torch.float64)
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    numbers = 1 + lengths.argsort()  # numbers of the steps, the shortest step first; 1 + because step 0 is left out
    return numbers[len(numbers) // 2].item()


def recorded_step(recording, number):
    """Return step `number` of a Recording as a RecordedStep.

    A message may cross the border of two steps, as parameters for the next forward pass do. Of its exposed time, only
    the part in this step counts.
    """
    start, end = span_of(recording.phases, number)
    # Messages that were in flight in the step.
    messages = [message for message in recording.messages if message.end > start and message.start < end]
    in_flight = overlap([(start, end)], union((message.start, message.end) for message in messages))
    busy = overlap([(start, end)], recording.busy)

    def since_start(moment):
        return round(moment - start, 6)

    phases = recording.phases[3 * number : 3 * number + 3]  # a step has three
    # Exposed: the seconds with a message in flight, less those in which the rank computes meanwhile.
    return RecordedStep(
        exposed_seconds=round(length(in_flight) - length(overlap(in_flight, busy)), 6),
        seconds=since_start(end),
        phases=[(name, since_start(began), since_start(ended)) for name, began, ended in phases],
        busy=[(since_start(began), since_start(ended)) for began, ended in busy],
        communication=[message._replace(start=since_start(message.start), end=since_start(message.end))
                       for message in messages])
