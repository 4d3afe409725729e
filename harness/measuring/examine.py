"""Examines a row on every rank: whether it is right, what it sends and holds, and how long its step takes."""

import contextlib
import functools
import gc
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness.measuring.ledger import Ledger
from harness.measuring.memory import KINDS, Memory, mark_grads, mark_state
from harness.publishing import row_names
from harness.publishing.results import AccumulatedRow, Conditions, Row, commit, cpu_name
from harness.publishing.row_names import RowId
from harness.ranks.exchange import in_place_of_gloos
from harness.ranks.workers import on_rank_0
from harness.training import corpus, rows
from harness.training.models import GPT, MODELS

WARMUP_STEPS = 2  # DDP rebuilds its buckets in the second; everything is allocated after it
CHECKED_STEPS = 3  # step 2 is the first with exchanged parameters and moments that aren't zero; step 3 is counted


class Settings(NamedTuple):
    """How rows are trained."""
    model: str = "tiny"
    batch_size: int = 4  # sequences per rank
    sequence_length: int = 128
    rounds: int = 3  # in each, every row is timed once
    steps: int = 3  # timed in a round
    data: str | None = None  # a path; None: the source of Python's standard library
    seed: int = 0


def adamw(settings):
    """Return AdamW's settings, the same in every row, with fused kernels. `tolerance` says why eps isn't 1e-8."""
    return dict(lr=MODELS[settings.model].lr, weight_decay=0.1, eps=1e-6, fused=True)


def make_model(settings, rank, dtype, starts_apart=False):
    """Make the same weights on every rank; `starts_apart`: other weights on every rank but 0."""
    torch.manual_seed(settings.seed + rank.rank if starts_apart else settings.seed)
    return GPT(MODELS[settings.model]).to(rank.device, getattr(torch, dtype))


@functools.lru_cache(maxsize=1)
def make_batches(settings, rank):
    """Make as many batches as any measurement takes, in advance: no step's time includes making them."""
    train, _ = corpus.split(corpus.load_bytes(settings.data))
    batches = corpus.Batches(train, settings.batch_size, settings.sequence_length, rank.rank, rank.world_size,
                               settings.seed, rank.device)
    return [batches.batch(step) for step in range(max(CHECKED_STEPS, WARMUP_STEPS + settings.steps))]


def describe(rank, settings):
    """Return the Conditions of a run on one host."""
    numel = sum(param.numel() for param in make_model(settings, rank, "float32").parameters())
    make_batches(settings, rank)  # bad --data fails before anything is measured
    on_gpu = rank.device.type == "cuda"
    return Conditions(
        machine=torch.cuda.get_device_name(rank.device) if on_gpu else cpu_name(), torch=torch.__version__,
        python=platform.python_version(), backend=rank.backend, device=rank.device.type,
        gpus=torch.cuda.device_count() if on_gpu else 0, ranks=rank.world_size,
        threads_per_rank=torch.get_num_threads(), **settings._asdict(), parameters=numel, warmup_steps=WARMUP_STEPS,
        tolerance=tolerance(rank.world_size), commit=commit(), date=date.today().isoformat())


def device_type(rank):
    return rank.device.type


def default_model(rank):
    """Return the name of a model whose step takes long enough to show something on this rank's device."""
    return "medium" if rank.device.type == "cuda" else "tiny"


# ---------------------------------------------------------------- Whether a row is right, what it sends, what it holds


def tolerance(world_size):
    """Return the largest difference from ddp that a right row may show in a parameter, after CHECKED_STEPS fp32 steps.

    On one or two ranks every order of summation gives the same bits. On more, sums differ in the last bits. AdamW
    divides a gradient by its own size, so a gradient that is nothing but rounding error would become a step of up to
    lr: softmax cancels the bias of attention's keys, for example. With eps = 1e-6 such noise is a ten-thousandth of lr:
    2e-7 at d = 3 and 4 (4e-6 with 1e-8). A wrong stage shows differences like lr: 1e-4 to 1e-3.
    """
    return 0.0 if world_size <= 2 else 1e-5


@functools.lru_cache(maxsize=2)
def reference_params(settings, rank, build, dtype):
    """Return rank 0's parameters before and after CHECKED_STEPS plain steps of the reference, on every rank."""
    model = make_model(settings, rank, dtype)
    before = [param.detach().clone() for param in model.parameters()]
    training = build(model, adamw(settings))
    for batch in make_batches(settings, rank)[:CHECKED_STEPS]:
        training.step(batch)
    after = training.full_params()
    for param in after:
        dist.broadcast(param, src=0)
    return before, after


@in_place_of_gloos()
def examine(rank, settings, base, bucket_mb=None):
    """Train three steps: 1 and 2 under the memory counter, 3 under the ledger. Returns (Row, movement).

    The Row's bytes are those of this rank, and its `max_abs_diff` is the largest difference between a parameter of any
    rank and the reference's. `movement` is the largest difference between a parameter and its value before training.
    """
    # CUDA has faster sums in an order that varies, but two runs must agree to the bit.
    torch.use_deterministic_algorithms(rank.device.type == "cuda", warn_only=True)
    configuration = rows.find(base, bucket_mb)
    batches = make_batches(settings, rank)
    before, reference = reference_params(settings, rank, configuration.reference, configuration.dtype)
    gc.collect()
    training, memory_fields = count_memory(rank, settings, configuration, batches[:2])
    dist.barrier()
    bytes_before = interface_bytes()
    with Ledger() as ledger:
        training.step(batches[2])
        training.finish()
    dist.barrier()
    line_bytes = None if bytes_before is None else interface_bytes() - bytes_before
    params = training.full_params()
    torch.use_deterministic_algorithms(False)
    numel = sum(param.numel() for param in training.model.parameters())
    row = Row(
        base, bucket_mb, configuration.kind, configuration.dtype, max_abs_diff=largest_difference(params, reference),
        collectives=ledger.collectives, message_bytes=ledger.message_bytes, wire_bytes=ledger.wire_bytes,
        line_bytes=line_bytes, wire_bytes_theory=round(configuration.wire_bytes(numel, rank.world_size)),
        bytes_per_param=sum(memory_fields["held_bytes"].values()) / numel,
        bytes_per_param_theory=configuration.bytes_per_param(numel, rank.world_size, training.optimizer),
        **memory_fields)
    return row, largest_difference(params, before)


def count_memory(rank, settings, configuration, batches):
    """Build a row and train two steps. Returns the Training, and {name: value} of a Row's fields of bytes in memory.

    `memory_bytes`, after each phase, are from step 1, which makes the state. `peak_bytes`, within each phase, are from
    step 2, in which the state exists already. `held_bytes`, by kind, are alive after step 2.
    """
    with Memory(rank.device) as memory:
        model = make_model(settings, rank, configuration.dtype, configuration.starts_apart)
        live_after = {"model": memory.live}
        training = configuration.build(model, adamw(settings))
        live_after["optimizer"] = memory.settle()
        build_peak = memory.peak
        first = memory_of_step(memory, training, batches[0])
        training.zero_grad()
        second = memory_of_step(memory, training, batches[1])
        held = {kind: memory.by_kind().get(kind, 0) for kind in KINDS}
        training.zero_grad()
        live_after |= {"backward": first.live_after["backward"], "step": first.live_after["step"],
                       "peak": max(build_peak, *first.peak_within.values(), *second.peak_within.values())}
        if rank.device.type == "cuda":  # what torch's allocator has taken, for tensors and in reserve
            live_after["reserved"] = memory.reserved
    return training, {"memory_bytes": live_after, "peak_bytes": {"build": build_peak, **second.peak_within},
                      "activation_bytes": second.activations, "held_bytes": held}


class StepMemory(NamedTuple):
    """Bytes in memory during one step."""
    peak_within: dict  # by phase
    live_after: dict  # by phase
    activations: int


def memory_of_step(memory, training, batch):
    """Train one step, without zeroing gradients. Returns StepMemory; every storage then has its kind, by Memory.mark.

    Activations are what the forward pass leaves alive, except for parameters, which FSDP2 gathers in it.
    """
    peak_within, live_after = {}, {}

    def live_without_params():
        memory.mark("parameters", training.model.parameters())
        return memory.live - memory.by_kind().get("parameters", 0)

    def end(phase):
        live_after[phase] = memory.settle()
        peak_within[phase] = memory.peak
        memory.reset_peak()
    memory.settle()
    memory.reset_peak()
    before = live_without_params()
    loss = training.forward(*batch)
    end("forward")
    activations = live_without_params() - before
    loss.backward()
    del loss
    end("backward")
    mark_grads(memory, training.model.parameters())
    training.update()
    training.finish()
    end("step")
    mark_state(memory, training.optimizer)
    return StepMemory(peak_within, live_after, activations)


def interface_bytes():
    """Return the bytes that gloo's network interface has sent, with headers; None if gloo has none of its own."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    lines = Path("/proc/net/dev").read_text().splitlines() if interface else []  # of this process's network
    sent_field = 9  # behind the interface's name and eight fields of what was received
    return next((int(line.split()[sent_field]) for line in lines if line.split()[0] == f"{interface}:"), None)


def largest_difference(tensors, expected):
    """Return the largest difference on any rank; a nan counts as the largest float. Collective."""
    pairs = zip(tensors, expected, strict=True)
    differences = torch.stack([(tensor - other).abs().max().float() for tensor, other in pairs])
    largest = differences.max().nan_to_num(nan=torch.finfo(torch.float32).max)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


@in_place_of_gloos()
def time_steps(rank, settings, base, bucket_mb=None):
    """Return what `time_warm_steps` returns for a row."""
    training = make_training(rank, settings, rows.find(base, bucket_mb))
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
    marks = [mark(rank.device)]
    for step_input in inputs:
        step(step_input)
        marks.append(mark(rank.device))
    finish()
    drain = milliseconds(marks[-1], mark(rank.device))
    step_ms = statistics.median(map(milliseconds, marks, marks[1:]))
    slowest = torch.tensor([step_ms, drain], device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def mark(device):
    """Return a timestamp; on a GPU an event, recorded when its queue gets there."""
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
def time_accumulation(rank, settings, row_id, micro_batches, in_no_sync):
    """Return ms per micro-batch, with one exchange per step (`in_no_sync`) or one for each micro-batch."""
    batches = make_batches(settings, rank)
    training = make_training(rank, settings, rows.find(*row_id))

    def step(_number):
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with training.no_sync() if in_no_sync and not is_last else contextlib.nullcontext():
                training.forward_backward(batches[micro % len(batches)])
        training.update()
        training.zero_grad()
    for number in range(WARMUP_STEPS):
        step(number)
    step_ms, _ = time_warm_steps(rank, step, range(settings.steps), training.finish)
    return step_ms / micro_batches


def time_rows(workers, settings, ddp_mb=None, progress=lambda text: None):
    """Time several rows with one exchange per step, and stage 4 also with one for each micro-batch, all in turn.

    `ddp_mb`: the bucket size of DDP's row. Returns an AccumulatedRow for each number of micro-batches. The more
    micro-batches a step has, the fewer steps a round has, but at least 2.
    """
    row_ids = {"no_sync_ms": RowId(row_names.OVERLAP), "each_ms": RowId(row_names.OVERLAP),
               "compute_ms": RowId(row_names.COMPUTE_ONLY), "ddp_ms": RowId(row_names.REFERENCE, ddp_mb),
               "stage3_ms": RowId(row_names.GRAD_BUFFER)}
    accumulated = [AccumulatedRow(n) for n in (1, 2, 4)]
    for turn in range(settings.rounds):
        for row in accumulated:
            n = row.micro_batches
            shorter = settings._replace(steps=max(2, settings.steps // n))
            for field, row_id in row_ids.items():
                progress(f"round {turn + 1}: {n} micro-batches, {row_id.name}")
                in_no_sync = field != "each_ms"
                getattr(row, field).append(on_rank_0(workers, time_accumulation, shorter, row_id, n, in_no_sync))
    return accumulated
