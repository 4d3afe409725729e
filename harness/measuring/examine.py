"""Measures one row, on every rank: whether it is right, what it sends and holds, and how long its step takes.

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

from harness.measuring.ledger import Ledger
from harness.measuring.memory import Memory
from harness.publishing.tables import Made, made_here
from harness.ranks.exchange import in_place_of_gloos
from harness.training import corpus, rows
from harness.training.models import GPT, MODELS

WARMUP_STEPS = 2  # DDP rebuilds its buckets in the second; everything is allocated after it
CHECKED_STEPS = 3  # step 2 first has exchanged parameters and moments that aren't zero; step 3 runs under the Ledger


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
    """Return AdamW's arguments, the same in every row, with fused kernels. `tolerance` says why eps isn't 1e-8."""
    return dict(lr=MODELS[settings.model].lr, weight_decay=0.1, eps=1e-6, fused=True)


def make_model(settings, rank, dtype, starts_apart=False):
    """Make a model with the same weights on every rank, or with other weights on each (`starts_apart`)."""
    torch.manual_seed(settings.seed + rank.number if starts_apart else settings.seed)
    return GPT(MODELS[settings.model]).to(rank.device, getattr(torch, dtype))


@functools.lru_cache(maxsize=1)
def make_batches(settings, rank):
    """Make as many batches as any measurement takes, in advance, so that no timed step makes one."""
    train, _ = corpus.split(corpus.load_bytes())
    batches = corpus.Batches(train, settings.batch_size, settings.sequence_length, rank.number, rank.world_size,
                             settings.seed, rank.device)
    return [batches.batch(step) for step in range(max(CHECKED_STEPS, WARMUP_STEPS + settings.steps))]


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
    """Return the name of a model whose step takes long enough on this rank's device to be compared."""
    return "medium" if rank.device.type == "cuda" else "tiny"


# ---------------------------------------------------------------- Whether a row is right, what it sends, what it holds


def tolerance(world_size):
    """Return the largest difference from ddp that a right row may show in a parameter, after CHECKED_STEPS fp32 steps.

    On one or two ranks every order of summation gives the same bits. On more, sums differ in the last bits. AdamW
    divides a gradient by its own size, so pure rounding noise becomes a step of up to lr. (The bias of attention's
    keys has such a gradient: softmax cancels it.) With eps = 1e-6 noise stays a ten-thousandth of lr: 2e-7 was measured
    on 3 and 4 ranks, and 4e-6 with eps = 1e-8. A wrong stage shows differences like lr: 1e-4 to 1e-3.
    """
    return 0.0 if world_size <= 2 else 1e-5


@functools.lru_cache(maxsize=2)
def reference_params(settings, rank, build, dtype):
    """Return rank 0's parameters before and after CHECKED_STEPS plain steps of the reference, on every rank."""
    model = make_model(settings, rank, dtype)
    before = [param.detach().clone() for param in model.parameters()]  # the same on every rank, which has one seed
    training = build(model, adamw(settings))
    for batch in make_batches(settings, rank)[:CHECKED_STEPS]:
        training.step(batch)
    after = training.full_params()
    for param in after:
        dist.broadcast(param, src=0)
    return before, after


class Examined(NamedTuple):
    """One rank's figures of a row after CHECKED_STEPS steps. Bytes are those of this rank.

    `difference`: the largest difference between a parameter of any rank and the reference's. `movement`: the largest
    difference between a parameter and its value before training. `memory_bytes`: by phase, see `count_memory`.
    """
    difference: float
    movement: float
    collectives: dict  # {kind: how many}
    wire_bytes: int
    wire_bytes_theory: int
    memory_bytes: dict
    bytes_per_param: float
    bytes_per_param_theory: float


@in_place_of_gloos()
def examine(rank, settings, row_id):
    """Train three steps, 1 and 2 under the memory counter, 3 under the ledger. Returns Examined."""
    # Two runs must agree to the bit; CUDA's faster sums have an order that varies.
    torch.use_deterministic_algorithms(rank.device.type == "cuda", warn_only=True)
    configuration = rows.find(*row_id)
    batches = make_batches(settings, rank)
    before, reference = reference_params(settings, rank, configuration.reference, configuration.dtype)
    gc.collect()
    training, memory_bytes, held = count_memory(rank, settings, configuration, batches[:2])
    with Ledger() as ledger:
        training.step(batches[2])
        training.finish()
    params = training.full_params()
    torch.use_deterministic_algorithms(False)
    numel = sum(param.numel() for param in training.model.parameters())
    return Examined(
        largest_difference(params, reference), largest_difference(params, before), ledger.collectives,
        ledger.wire_bytes, round(configuration.wire_bytes(numel, rank.world_size)), memory_bytes, held / numel,
        configuration.bytes_per_param(numel, rank.world_size, training.optimizer))


def count_memory(rank, settings, configuration, batches):
    """Build a row and train two steps. Returns (Training, {phase: bytes in memory}, bytes after the second step).

    | phase | bytes |
    | model, optimizer | after the model, and the optimizer, was built |
    | backward, step | after each, in step 1, which makes the state |
    | peak | the most at any moment of the build and of both steps |
    | reserved | on a GPU: what torch's allocator has taken, for tensors and in reserve |
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
            held = memory.settle()
            if number == 1:
                memory_bytes |= {"backward": after_backward, "step": held}
            training.zero_grad()
        memory_bytes["peak"] = memory.peak
        if rank.device.type == "cuda":
            memory_bytes["reserved"] = memory.reserved
    return training, memory_bytes, held


def largest_difference(tensors, expected):
    """Return the largest difference on any rank; a nan counts as the largest float. Collective."""
    pairs = zip(tensors, expected, strict=True)
    differences = torch.stack([(tensor - other).abs().max().float() for tensor, other in pairs])
    largest = differences.max().nan_to_num(nan=torch.finfo(torch.float32).max)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


@in_place_of_gloos()
def time_steps(rank, settings, row_id):
    """Time one row. Returns (median ms per step, ms to drain)."""
    training = make_training(rank, settings, rows.find(*row_id))
    batches = make_batches(settings, rank)
    for batch in batches[:WARMUP_STEPS]:
        training.step(batch)
    return time_warm_steps(rank, training.step, batches[WARMUP_STEPS:][:settings.steps], training.finish)


def make_training(rank, settings, configuration):
    gc.collect()
    return configuration.build(make_model(settings, rank, configuration.dtype), adamw(settings))


def time_warm_steps(rank, step, inputs, finish):
    """Time `step` for each of `inputs`, after warm-up. Returns (median ms per step, ms to drain), on the slowest rank.

    A step lasts from the end of one step to the end of the next, so it includes waiting for parameters that the
    previous step has sent. What the last step sends is waited for once, as the drain. There is no barrier between
    steps: it would wait for messages in flight.
    """
    times = [timestamp(rank.device)]
    for step_input in inputs:
        step(step_input)
        times.append(timestamp(rank.device))
    finish()
    drain = milliseconds(times[-1], timestamp(rank.device))
    step_ms = statistics.median(map(milliseconds, times, times[1:]))
    slowest = torch.tensor([step_ms, drain], device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def timestamp(device):
    """Return the time, or on a GPU an event that the GPU records when its queue reaches it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start, end):
    if isinstance(start, float):
        return (end - start) * 1000
    end.synchronize()
    return start.elapsed_time(end)


@in_place_of_gloos()
def time_accumulation(rank, settings, row_id, micro_batches, exchanges_each=False):
    """Return ms per micro-batch. `exchanges_each`: each micro-batch exchanges gradients, and not only the last one."""
    batches = make_batches(settings, rank)
    training = make_training(rank, settings, rows.find(*row_id))

    def step(_number):
        for micro in range(micro_batches):
            sends = exchanges_each or micro == micro_batches - 1
            with contextlib.nullcontext() if sends else training.no_sync():
                training.forward_backward(batches[micro % len(batches)])
        training.update()
        training.zero_grad()

    for number in range(WARMUP_STEPS):
        step(number)
    step_ms, _ = time_warm_steps(rank, step, range(settings.steps), training.finish)
    return step_ms / micro_batches
