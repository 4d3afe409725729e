"""Is a row right, what does it send and hold, how long does a step take: on every rank, with the conditions."""

import contextlib
import functools
import gc
import os
import platform
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from harness import corpus, rows
from harness.gpt import GPT, MODELS
from harness.ledger import Ledger
from harness.memory import KINDS, Memory, mark_grads, mark_state
from harness.results import AccumulatedRow, Conditions, Made, Row
from harness.rows import RowId
from harness.workers import on_rank_0

WARMUP_STEPS = 2  # DDP rebuilds its buckets in the second; everything is allocated after it
CHECKED_STEPS = 3  # the second is the first that reads parameters which were exchanged, and moments which are not zero


class Settings(NamedTuple):
    """`batch_size`: sequences a rank; `steps`: of which one round takes the time; `data`: a path, or None."""
    model: str = "tiny"
    batch_size: int = 4
    sequence_length: int = 128
    rounds: int = 3
    steps: int = 3
    data: str | None = None
    seed: int = 0


def adamw(settings):
    """AdamW's settings, the same in every row: torch's fused kernels too. Why not its eps of 1e-8: see `tolerance`."""
    return dict(lr=MODELS[settings.model].lr, weight_decay=0.1, eps=1e-6, fused=True)


def make_model(settings, rank, dtype, starts_apart=False):
    """The same weights on every rank; `starts_apart`: other ones on every rank but 0."""
    torch.manual_seed(settings.seed + starts_apart * rank.rank)
    return GPT(MODELS[settings.model]).to(rank.device, getattr(torch, dtype))


@functools.lru_cache(maxsize=1)
def make_batches(settings, rank):
    """As many batches as any measurement takes, made in advance: making them is nobody's step time."""
    train, _ = corpus.split(corpus.load_bytes(settings.data))
    batches = corpus.Batches(train, settings.batch_size, settings.sequence_length, rank.rank, rank.world_size,
                               settings.seed, rank.device)
    return [batches.batch(step) for step in range(max(CHECKED_STEPS, WARMUP_STEPS + settings.steps))]


def describe(rank, settings):
    """-> the Conditions under which the figures hold, of one host."""
    numel = sum(param.numel() for param in make_model(settings, rank, "float32").parameters())
    make_batches(settings, rank)
    on_gpu = rank.device.type == "cuda"
    return Conditions(
        machine=torch.cuda.get_device_name(rank.device) if on_gpu else _cpu_name(), torch=torch.__version__,
        python=platform.python_version(), backend=rank.backend, device=rank.device.type,
        gpus=torch.cuda.device_count() if on_gpu else 0, ranks=rank.world_size,
        threads_per_rank=torch.get_num_threads(), **settings._asdict(), parameters=numel, warmup_steps=WARMUP_STEPS,
        tolerance=tolerance(rank.world_size), commit=commit(), date=date.today().isoformat())


def commit(folder=Path(__file__).parents[1]):
    """Of which code a figure is -> "abc1234"; with a + where the code has changed since; outside of git "unknown"."""
    def git(*command):
        return subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True).stdout
    try:
        code = "--", "*.py", "Makefile"  # results and pages may be in the making
        changed = git("status", "--porcelain", "--untracked-files=no", *code)
        return git("rev-parse", "--short", "HEAD").strip() + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def made_here():
    """-> Made: this machine, this code, today."""
    return Made(_cpu_name(), torch.__version__, commit(), date.today().isoformat())


def device_type(rank):
    return rank.device.type


def default_model(rank):
    """Return the name of a model whose step takes long enough to show something on this rank's device."""
    return "medium" if rank.device.type == "cuda" else "tiny"


def _cpu_name():
    """The processor's name, as Linux knows it, or else the little that Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


# ----------------------------------------------------------------- Is a row right, what does it send, what does it hold


def tolerance(world_size):
    """The largest difference from ddp that a right row may show in a parameter, after CHECKED_STEPS steps in fp32.

    One or two ranks: every order of summation gives the same bits. More: sums differ in the last bits, and AdamW
    divides a gradient by its own size, so that one which is rounding error and nothing else (of the bias of the keys in
    attention, which softmax cancels) would become a step of up to lr. With eps = 1e-6 such noise is a ten-thousandth of
    it: 2e-7 at d = 3 and 4 (4e-6 with 1e-8). What a stage does wrong shows as differences like lr: 1e-4 to 1e-3.
    """
    return 0.0 if world_size <= 2 else 1e-5


@functools.lru_cache(maxsize=2)
def reference_params(settings, rank, build, dtype):
    """The parameters before and after CHECKED_STEPS plain steps of the reference; rank 0's, on every rank."""
    model = make_model(settings, rank, dtype)
    before = [param.detach().clone() for param in model.parameters()]
    training = build(model, adamw(settings))
    for batch in make_batches(settings, rank)[:CHECKED_STEPS]:
        training.step(batch)
    after = training.full_params()
    for param in after:
        dist.broadcast(param, src=0)
    return before, after


@rows.in_its_context
def examine(rank, settings, base, bucket_mb=None):
    """Three steps: two under the memory counter, one under the ledger; then the parameters, beside the reference's.

    -> (Row, movement). The Row is as this rank sees it; but `max_abs_diff` and movement, the largest difference of any
    parameter from the reference's and from the start, are of all ranks. `memory_bytes`, after each phase, is of step 1,
    which makes the state; `peak_bytes`, within each, of step 2, which finds one there; `held_bytes`, by kind, is what
    lives on after that.
    """
    # On CUDA some sums are made in any order, which is faster: not here, where two runs must agree to the bit.
    torch.use_deterministic_algorithms(rank.device.type == "cuda", warn_only=True)
    configuration, batches = rows.find(base, bucket_mb), make_batches(settings, rank)
    before, reference = reference_params(settings, rank, configuration.reference, configuration.dtype)
    gc.collect()
    with Memory(rank.device) as memory:
        model = make_model(settings, rank, configuration.dtype, configuration.starts_apart)
        phases = {"model": memory.live}
        training = configuration.build(model, adamw(settings))
        phases["optimizer"] = memory.settled()
        build = {"build": memory.peak}
        first_peaks, after, _ = memory_of_step(memory, training, batches[0])
        training.zero_grad()
        peaks, _, activations = memory_of_step(memory, training, batches[1])
        held = {kind: memory.by_kind().get(kind, 0) for kind in KINDS}
        training.zero_grad()
        phases.update(backward=after["backward"], step=after["step"],
                      peak=max([*build.values(), *first_peaks.values(), *peaks.values()]))
        if rank.device.type == "cuda":  # what tensors don't use of it belongs to torch's allocator, and to nobody else
            phases["reserved"] = memory.reserved
    dist.barrier()
    before_step = bytes_on_the_line()
    with Ledger() as ledger:
        training.step(batches[2])
        training.finish()
    dist.barrier()
    line_bytes = None if before_step is None else bytes_on_the_line() - before_step
    params = training.full_params()
    torch.use_deterministic_algorithms(False)
    numel = sum(param.numel() for param in model.parameters())
    return Row(
        base, bucket_mb, configuration.kind, configuration.dtype, max_abs_diff=largest_difference(params, reference),
        collectives=ledger.collectives, message_bytes=ledger.message_bytes, wire_bytes=ledger.wire_bytes,
        line_bytes=line_bytes, wire_bytes_theory=round(configuration.wire_bytes(numel, rank.world_size)),
        memory_bytes=phases, peak_bytes=build | peaks, activation_bytes=activations, held_bytes=held,
        bytes_per_param=sum(held.values()) / numel,
        bytes_per_param_theory=configuration.bytes_per_param(numel, rank.world_size, training.optimizer)
    ), largest_difference(params, before)


def memory_of_step(memory, training, batch):
    """One step, without the zeroing -> (peak within each phase, bytes after each phase, bytes of activations).

    Activations: what is alive when the forward pass ends and was not before, but no parameters: FSDP2 gathers those.
    Afterwards `memory.by_kind()` tells parameters, gradients and state from the rest.
    """
    peaks, after = {}, {}

    def without_params():
        memory.mark("parameters", training.model.parameters())
        return memory.live - memory.by_kind().get("parameters", 0)

    def end(phase):
        after[phase], peaks[phase] = memory.settled(), memory.peak
        memory.reset_peak()
    memory.settled()
    memory.reset_peak()
    before = without_params()
    loss = training.forward(*batch)
    end("forward")
    activations = without_params() - before
    loss.backward()
    del loss
    end("backward")
    mark_grads(memory, training.model.parameters())
    training.update()
    training.finish()
    end("step")
    mark_state(memory, training.optimizer)
    return peaks, after, activations


def bytes_on_the_line():
    """All that the interface which gloo was told to use has sent, with headers; None: it was told none."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    lines = Path("/proc/net/dev").read_text().splitlines() if interface else []  # of this process's network
    return next((int(line.split()[9]) for line in lines if line.split()[0] == f"{interface}:"), None)


def largest_difference(ones, others):
    """Of all ranks; what is not a number counts as the largest float. Collective."""
    differences = torch.stack([(one - other).abs().max().float() for one, other in zip(ones, others, strict=True)])
    largest = differences.max().nan_to_num(nan=torch.finfo(torch.float32).max)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


@rows.in_its_context
def time_steps(rank, settings, base, bucket_mb=None):
    """-> milliseconds of a steady step, and of the drain after the last, each on the slowest rank: see `steady`."""
    training, batches = make_training(rank, settings, rows.find(base, bucket_mb)), make_batches(settings, rank)
    for batch in batches[:WARMUP_STEPS]:
        training.step(batch)
    return steady(rank, training.step, batches[WARMUP_STEPS:WARMUP_STEPS + settings.steps], training.finish)


def make_training(rank, settings, configuration):
    gc.collect()
    return configuration.build(make_model(settings, rank, configuration.dtype), adamw(settings))


def steady(rank, step, batches, finish):
    """-> milliseconds of a step of a run that has begun and goes on, and of what is under way when it ends.

    A step's time is from one point of the loop to the same point of the next: the median of `batches` steps. So it has
    the waits for parameters that the step before has sent; and nothing waits at the end for those that the last one
    sends, which a run pays once: the drain. No barrier between the steps: it would wait for what travels.
    """
    marks = [mark(rank.device)]
    for batch in batches:
        step(batch)
        marks.append(mark(rank.device))
    finish()
    drain = milliseconds(marks[-1], mark(rank.device))
    step_ms = statistics.median(map(milliseconds, marks, marks[1:]))
    slowest = torch.tensor([step_ms, drain], device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def mark(device):
    """A moment: on a GPU, when its queue gets there."""
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


def time_accumulation(rank, settings, row_id, micro_batches, in_no_sync):
    """Milliseconds a micro-batch of a steady step: one exchange a step (`in_no_sync`), or one for each micro-batch."""
    configuration, batches = rows.find(*row_id), make_batches(settings, rank)
    training = make_training(rank, settings, configuration)

    def step(_):
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with training.no_sync() if in_no_sync and not is_last else contextlib.nullcontext():
                training.forward_backward(batches[micro % len(batches)])
        training.update()
        training.zero_grad()
    with configuration.inside():
        for number in range(WARMUP_STEPS):
            step(number)
        step_ms, _ = steady(rank, step, range(max(2, settings.steps // 2 // micro_batches)), training.finish)
    return step_ms / micro_batches


def time_rows(workers, settings, ddp_mb=None, progress=lambda text: None):
    """One exchange a step in several rows, and in stage 4 also one for each micro-batch, interleaved.

    `ddp_mb`: the bucket size of DDP's row -> list of AccumulatedRows, one for each number of micro-batches. The more of
    them a step has, the fewer steps a round has, and 2 at least.
    """
    timed = {"no_sync_ms": (RowId("stage 4 overlap"), True), "each_ms": (RowId("stage 4 overlap"), False),
             "compute_ms": (RowId("compute only"), True), "ddp_ms": (RowId(rows.REFERENCE, ddp_mb), True),
             "stage3_ms": (RowId("stage 3 grad buffer"), True)}
    found = [AccumulatedRow(k) for k in (1, 2, 4)]
    for turn in range(settings.rounds):
        for row in found:
            for field, (row_id, in_no_sync) in timed.items():
                k, how = row.micro_batches, "" if in_no_sync else ", reduced one by one"
                progress(f"round {turn + 1}: {k} micro-batches, {row_id.name}{how}")
                fewer = settings._replace(steps=max(2, settings.steps // k))
                getattr(row, field).append(on_rank_0(workers, time_accumulation, fewer, row_id, k, in_no_sync))
    return found
