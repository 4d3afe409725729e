"""Measures one row, on every rank: is the row right, what does a rank send and hold, how long is a step, what is in it?

A row names a way to train (`rows.Configuration`). every_row.py puts the measurements of all rows together.
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

# Of lists of spans, each a pair (start, end), pictures has `union` and `overlap`; `length` adds up the seconds.

WARMUP_STEPS = 2  # DDP rebuilds buckets in step 2; after step 2 everything is allocated
CHECKED_STEPS = 3  # step 2 is the first to use gathered parameters and nonzero moments; step 3 is for the Ledger


class Settings(NamedTuple):
    """Options of a measurement: how rows are trained."""
    model: str = "tiny"
    batch_size: int = 4  # sequences per rank
    sequence_length: int = 128
    rounds: int = 3  # in each, every row is timed once
    steps: int = 3  # timed in a round
    seed: int = 0


class Conditions(NamedTuple):
    """The machine and the model of a measurement. `ranks`: backend, ranks and threads in words."""
    made: Made
    ranks: str
    device: str
    parameters: int  # number of the model's elements


def adamw(settings):
    """Return the arguments of AdamW, the same in every row. `tolerance` says why eps isn't 1e-8."""
    return dict(lr=MODELS[settings.model].lr, weight_decay=0.1, eps=1e-6, fused=True)


def make_model(settings, rank, dtype, starts_apart=False):
    """Make a model. Every rank has the same weights; with `starts_apart` each rank has other weights."""
    seed = settings.seed + rank.number if starts_apart else settings.seed
    torch.manual_seed(seed)
    return GPT(MODELS[settings.model]).to(rank.device, getattr(torch, dtype))


@functools.lru_cache(maxsize=1)
def make_batches(settings, rank):
    """Make all batches that a measurement takes, in advance, so that no timed step makes a batch."""
    train, _ = corpus.split(corpus.load_bytes())
    batches = corpus.Batches(train, settings.batch_size, settings.sequence_length, rank.number, rank.world_size,
                             settings.seed, rank.device)
    n_steps = max(CHECKED_STEPS, WARMUP_STEPS + settings.steps)
    return [batches.batch(step) for step in range(n_steps)]


def describe(rank, settings):
    """Return the Conditions of a run."""
    numel = sum(param.numel() for param in make_model(settings, rank, "float32").parameters())
    words = f"{rank.backend}, {rank.world_size} rank(s) x {torch.get_num_threads()} thread(s)"
    machine = None
    if rank.device.type == "cuda":
        machine = torch.cuda.get_device_name(rank.device)
        n_gpus = torch.cuda.device_count()
        words += f" that share {n_gpus} GPU(s)" if n_gpus < rank.world_size else ""
    return Conditions(made_here(machine), words, rank.device.type, numel)


def default_model(rank):
    """Return the name of a model that is large enough for this rank's device: short steps are hard to compare."""
    return "medium" if rank.device.type == "cuda" else "tiny"


# -------------------------------------------------------------- Is a row right, and what does a rank send and hold?


def tolerance(world_size):
    """Return the largest difference from ddp that a right row may show in a parameter, after CHECKED_STEPS fp32 steps.

    On one or two ranks every order of summation gives the same bits. On more ranks, sums differ in the last bits. AdamW
    divides a gradient by the gradient's size, so pure rounding noise becomes a step of up to lr. (The gradient of
    attention's key bias is such noise, because softmax cancels that bias.) With eps = 1e-6, noise moves a parameter by
    a ten-thousandth of lr: 2e-7 was measured on 3 and 4 ranks, and 4e-6 with eps = 1e-8. A wrong row moves a
    parameter by lr: 1e-4 to 1e-3.
    """
    return 0.0 if world_size <= 2 else 1e-5


@functools.lru_cache(maxsize=2)
def reference_params(settings, rank, build, dtype):
    """Train the reference for CHECKED_STEPS steps. Returns rank 0's parameters, on every rank."""
    training = build(make_model(settings, rank, dtype), adamw(settings))
    for batch in make_batches(settings, rank)[:CHECKED_STEPS]:
        training.step(batch)
    params = training.full_params()
    for param in params:
        dist.broadcast(param, src=0)
    return params


class Examined(NamedTuple):
    """One rank's figures of a row. A `_theory` is what the formula gives."""
    difference: float  # the largest |own - reference| of any parameter, over all ranks
    collectives: dict  # {kind: how many}
    wire_bytes: int
    wire_bytes_theory: int
    memory_bytes: dict  # by phase: see `count_memory`
    bytes_per_param: float  # held after a step
    bytes_per_param_theory: float


@in_place_of_gloos()
def examine(rank, settings, row_id):
    """Train three steps: Memory counts in steps 1 and 2, the Ledger in step 3. Returns Examined."""
    # This run must agree with the reference's to the bit, and CUDA's faster sums add in an order that varies.
    torch.use_deterministic_algorithms(rank.device.type == "cuda", warn_only=True)
    configuration = rows.find(*row_id)
    batches = make_batches(settings, rank)
    expected = reference_params(settings, rank, configuration.reference, configuration.dtype)
    gc.collect()
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
    """Build a row and train two steps. Returns (Training, {phase: bytes in memory}, bytes after the second step).

    The phases are:
        model, optimizer: after the model was built; after the optimizer was built
        backward, step: after the backward pass of step 1; after step 1, which makes the optimizer's state
        peak: the most at any moment of the build and of both steps
        reserved: on a GPU, what torch's allocator has taken, for tensors and in reserve
    """
    with Memory(rank.device) as memory:
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
    """Return the largest difference on any rank. A nan counts as the largest float. Collective."""
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
    """Build a row, after the memory of the row before is free. Returns Training."""
    gc.collect()
    configuration = rows.find(*row_id)
    return configuration.build(make_model(settings, rank, configuration.dtype), adamw(settings))


def time_warm_steps(rank, step, inputs, finish):
    """Time `step(step_input)` of all `inputs`, after warm-up. Returns (median ms per step, ms to drain).

    Both are the slowest rank's.

    A step lasts from the end of one step to the end of the next, so a step includes the wait for parameters that the
    step before has sent. The drain is the wait for what the last step has sent. No barrier stands between steps,
    because a barrier would wait for messages in flight.
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
    """Return the time. On a GPU, return an event, which gets a time when the GPU has done all work before the event."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start, end):
    """Return the time between two timestamps."""
    if isinstance(start, float):  # seconds, of a CPU
        return (end - start) * 1000
    end.synchronize()
    return start.elapsed_time(end)


def clip(training, max_norm):
    """Clip the gradients by the optimizer's own method, or by torch's function where the optimizer has no method."""
    own_clip = getattr(training.optimizer, "clip_grad_norm_", None)
    if own_clip:
        own_clip(max_norm)
    else:
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), max_norm)


# ---------------------------------------------- What is in a step: when does a rank compute, when do messages travel?


GAP_S = 0.0005  # Python needs less time between two operators; waiting for another rank takes more
RECORDED_STEPS = 6  # step 0 isn't shown: unlike the others, it doesn't wait for parameters of a step before


class Recorder(Ledger):
    """Is a ledger that also lists when operators ran, and the phases of the steps, in seconds of time.perf_counter."""

    def __init__(self):
        super().__init__()
        self.busy = []  # [start, end] of operators between which there is no gap, in order
        self.phases = []  # (name, start, end)

    @contextlib.contextmanager
    def phase(self, name):
        start = time.perf_counter()
        yield
        self.phases.append((name, start, time.perf_counter()))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        start = time.perf_counter()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        end = time.perf_counter()
        if function.namespace in COLLECTIVE_NAMESPACES:
            return result
        if self.busy and start - self.busy[-1][1] < GAP_S:
            self.busy[-1][1] = end
        else:
            self.busy.append([start, end])
        return result


@in_place_of_gloos()
def record(rank, settings, row_id):
    """Record steps on a CPU, with no barrier between them. Returns this rank's RecordedStep of median length."""
    batches = make_batches(settings, rank)[:WARMUP_STEPS]
    training = make_training(rank, settings, row_id)
    for batch in batches:
        training.step(batch)
    training.finish()
    dist.barrier()
    with Recorder() as recorder:
        for number in range(RECORDED_STEPS):
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
    phases: list  # (name, start, end) of each phase; a step has three
    busy: list  # spans in which the rank computes, (start, end), disjoint and in order
    messages: list  # of Messages


def span_of(phases, number):
    """Return when step `number` starts and ends."""
    _, start, _ = phases[3 * number]
    _, _, end = phases[3 * number + 2]
    return start, end


def median_step(phases):
    """Return the number of the step of median length, without step 0. Collective, the same on all ranks.

    The length of a step is that on the slowest rank. The median leaves out steps that other programs have delayed.
    """
    spans = [span_of(phases, number) for number in range(1, RECORDED_STEPS)]
    lengths = torch.tensor([end - start for start, end in spans], dtype=torch.float64)
    dist.all_reduce(lengths, dist.ReduceOp.MAX)
    numbers = 1 + lengths.argsort()  # of the steps, the shortest first
    return numbers[len(numbers) // 2].item()


def recorded_step(recording, number):
    """Return step `number` of a Recording as a RecordedStep.

    A message may cross the border of two steps, as parameters for the next forward pass do. Then each step is exposed
    to its own part of the message.
    """
    start, end = span_of(recording.phases, number)
    messages = [message for message in recording.messages if message.end > start and message.start < end]
    in_flight = overlap([(start, end)], union((message.start, message.end) for message in messages))
    busy = overlap([(start, end)], recording.busy)

    def since_start(moment):
        return round(moment - start, 6)

    return RecordedStep(
        exposed_seconds=round(length(in_flight) - length(overlap(in_flight, busy)), 6),
        seconds=since_start(end),
        phases=[(name, since_start(began), since_start(ended))
                for name, began, ended in recording.phases[3 * number : 3 * number + 3]],
        busy=[(since_start(began), since_start(ended)) for began, ended in busy],
        communication=[message._replace(start=since_start(message.start), end=since_start(message.end))
                       for message in messages])
