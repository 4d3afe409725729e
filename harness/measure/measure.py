"""What is measured of a row, in this order: is it right, what does it send, what does it hold, how long does it take.

The first half runs on every rank, the second in the process that started them. Each row's check and each of its timings
is a run of its own: a row that fails, dies or hangs becomes a row with the reason in it, and the others go on.
"""

import contextlib
import functools
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from torch._subclasses.fake_tensor import FakeTensorMode

import stage2_allgather
import stage3_gradbuffer
import stage4_overlap
from harness.measure.ledger import Ledger
from harness.measure.memory import KINDS, Memory, mark_grads, mark_state
from harness.rows import peers
from harness.run.launch import WorkerError
from harness.train import workload

WARMUP_STEPS = 2  # DDP rebuilds its buckets in the second; everything is allocated after it
MICRO_BATCHES = (1, 2, 4, 8)  # a step
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
    return dict(lr=workload.MODELS[settings.model].lr, weight_decay=0.1, eps=1e-6, fused=True)


def tolerance(world_size):
    """The largest difference from ddp that a right row may show in a parameter, after CHECKED_STEPS steps in fp32.

    One or two ranks: a + b = b + a, every order of summation gives the same bits, and the difference is 0.
    More ranks: (a + b) + c and a + (b + c) differ in the last bits, and who adds what first depends on the layout.
    AdamW divides a gradient by its own size: one that is rounding error and nothing else (of the bias of the keys in
    attention, which softmax cancels) would become a step of up to lr. With eps = 1e-6 such noise, about 1e-10, is a
    ten-thousandth of lr at most; with 1e-8 it is a hundredth. Measured at d = 3 and 4: 2e-7 (4e-6 with 1e-8).
    The tolerance leaves room for larger models. What a stage does wrong shows as differences like lr: 1e-4 to 1e-3.
    """
    return 0.0 if world_size <= 2 else 1e-5


# ---------------------------------------------------------------------------------------------------------------------
# On every rank


def make_model(settings, rank, dtype, starts_apart=False):
    """The same weights on every rank; `starts_apart`: other ones on every rank but 0."""
    torch.manual_seed(settings.seed + starts_apart * rank.rank)
    return workload.GPT(workload.MODELS[settings.model]).to(rank.device, getattr(torch, dtype))


@functools.lru_cache(maxsize=1)
def make_batches(settings, rank):
    """As many batches as any measurement takes, made in advance: making them is nobody's step time."""
    train, _ = workload.split(workload.load_bytes(settings.data))
    batches = workload.Batches(train, settings.batch_size, settings.sequence_length, rank.rank, rank.world_size,
                               settings.seed, rank.device)
    return [batches.batch(step) for step in range(max(CHECKED_STEPS, WARMUP_STEPS + settings.steps))]


@functools.lru_cache(maxsize=2)  # one a dtype
def _reference_params(settings, rank, build, dtype):
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


def examine(rank, settings, name):
    """Three steps: two under the memory counter, one under the ledger; then the parameters, beside the reference's.

    -> dict, of this rank; but "max_abs_diff" and "movement", the largest difference of any parameter from the
    reference's and from the start, of all ranks. "memory_bytes", after each phase, is of step 1, which makes the state;
    "peak_bytes", within each, of step 2, which finds one there; "held_bytes", by kind, is what lives on after that.
    """
    # On CUDA some sums are made in any order, which is faster: not here, where two runs must agree to the bit.
    torch.use_deterministic_algorithms(rank.device.type == "cuda", warn_only=True)
    row, batches = peers.find(name), make_batches(settings, rank)
    before, reference = _reference_params(settings, rank, row.reference, row.dtype)
    gc.collect()
    with Memory(rank.device) as memory:
        model = make_model(settings, rank, row.dtype, row.starts_apart)
        phases = {"model": memory.live}
        training = row.build(model, adamw(settings))
        phases["optimizer"] = memory.settled()
        build_peak = memory.peak
        first_peaks, after, _ = memory_of_step(memory, training, batches[0])
        phases.update({phase: after[phase] for phase in ("backward", "step")})
        training.zero_grad()
        peaks, _, activations = memory_of_step(memory, training, batches[1])
        kinds = {kind: memory.by_kind().get(kind, 0) for kind in KINDS}
        training.zero_grad()
        phases["peak"] = max(build_peak, *first_peaks.values(), *peaks.values())
        peaks = {"build": build_peak, **{phase: peaks[phase] for phase in ("forward", "backward", "step")}}
        if rank.device.type == "cuda":  # what tensors don't use of it belongs to torch's allocator, and to nobody else
            phases["reserved"] = memory.reserved
    dist.barrier()
    before_step = bytes_on_the_line()
    with Ledger() as ledger:
        training.step(batches[2])
        training.finish()
    dist.barrier()
    line = {} if before_step is None else {"line_bytes": bytes_on_the_line() - before_step}
    params = training.full_params()
    torch.use_deterministic_algorithms(False)
    largest = torch.stack([_largest_difference(params, reference), _largest_difference(params, before)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    difference, movement = largest.tolist()
    numel = sum(param.numel() for param in model.parameters())
    return {"collectives": ledger.collectives, "wire_bytes": ledger.wire_bytes, **line,
            "message_bytes": ledger.message_bytes,
            "wire_bytes_theory": round(row.wire_bytes(numel, rank.world_size)),
            "memory_bytes": phases, "peak_bytes": peaks, "activation_bytes": activations, "held_bytes": kinds,
            "bytes_per_param": sum(kinds.values()) / numel,
            "bytes_per_param_theory": row.bytes_per_param(numel, rank.world_size, training.optimizer),
            "max_abs_diff": difference, "movement": movement}


def memory_of_step(memory, training, batch):
    """One step, without the zeroing -> (peak within each phase, bytes after each phase, bytes of activations).

    Activations: what is alive when the forward pass ends and was not before, but no parameters: FSDP2 gathers those.
    Afterwards `memory.by_kind()` tells parameters, gradients and state from the rest.
    """
    def without_params():
        memory.mark("parameters", training.model.parameters())
        return memory.live - memory.by_kind().get("parameters", 0)

    def end(phase):
        after[phase], peaks[phase] = memory.settled(), memory.peak
        memory.reset_peak()
    after, peaks = {}, {}
    end("before")
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
    counter = Path("/sys/class/net", interface or "none", "statistics", "tx_bytes")
    return int(counter.read_text()) if interface and counter.exists() else None


def _largest_difference(ones, others):
    """As a tensor (); what is not a number counts as the largest float."""
    differences = torch.stack([(one - other).abs().max().float() for one, other in zip(ones, others, strict=True)])
    return differences.max().nan_to_num(nan=torch.finfo(torch.float32).max)


def time_steps(rank, settings, name):
    """Milliseconds a step, from `steps` of them end to end, on the slowest rank.

    No barrier between the steps: it would wait for what travels, and overlap would look like speed. For the same reason
    the clock stops only when everything that the last step has started is finished.
    """
    row, batches = peers.find(name), make_batches(settings, rank)
    gc.collect()
    training = row.build(make_model(settings, rank, row.dtype), adamw(settings))
    for batch in batches[:WARMUP_STEPS]:
        training.step(batch)
    training.finish()
    dist.barrier()
    start = time.perf_counter()
    for batch in batches[WARMUP_STEPS:WARMUP_STEPS + settings.steps]:
        training.step(batch)
    training.finish()
    slowest = torch.tensor((time.perf_counter() - start) / settings.steps * 1000, device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def time_accumulation(rank, settings, name, micro_batches, in_no_sync):
    """Milliseconds a micro-batch: one exchange a step (`in_no_sync`), or one for each micro-batch."""
    row, batches = peers.find(name), make_batches(settings, rank)
    gc.collect()
    training = row.build(make_model(settings, rank, row.dtype), adamw(settings))

    def step():
        for micro in range(micro_batches):
            is_last = micro == micro_batches - 1
            with training.no_sync() if in_no_sync and not is_last else contextlib.nullcontext():
                training.forward_backward(batches[micro % len(batches)])
        training.update()
        training.zero_grad()
    step()
    training.finish()
    dist.barrier()
    n_steps = max(2, settings.steps // 2 // micro_batches)
    start = time.perf_counter()
    for _ in range(n_steps):
        step()
    training.finish()
    slowest = torch.tensor((time.perf_counter() - start) / n_steps / micro_batches * 1000, device=rank.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


def describe(rank, settings):
    """-> the conditions under which the figures hold."""
    numel = sum(param.numel() for param in make_model(settings, rank, "float32").parameters())
    make_batches(settings, rank)
    on_gpu = rank.device.type == "cuda"
    machine = torch.cuda.get_device_name(rank.device) if on_gpu else _cpu_name()
    return {"machine": machine, "torch": torch.__version__, "python": platform.python_version(),
            "backend": rank.backend, "device": rank.device.type, "gpus": torch.cuda.device_count() if on_gpu else 0,
            "ranks": rank.world_size,
            "threads_per_rank": torch.get_num_threads(), **settings._asdict(), "parameters": numel,
            "warmup_steps": WARMUP_STEPS, "tolerance": tolerance(rank.world_size), "commit": commit(),
            "date": date.today().isoformat()}


def commit(folder=Path(__file__).parents[2]):
    """Of which code a figure is -> "abc1234"; with a + where the code has changed since; outside of git "unknown"."""
    def git(*command):
        return subprocess.run(["git", "-C", str(folder), *command], capture_output=True, text=True, check=True).stdout
    try:
        code = "--", "*.py", "Makefile"  # results and pages may be in the making
        changed = git("status", "--porcelain", "--untracked-files=no", *code)
        return git("rev-parse", "--short", "HEAD").strip() + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device_type(rank):
    return rank.device.type


def default_model(workers):
    """The one whose step takes long enough to show something there."""
    return "medium" if _on_rank_0(workers, device_type) == "cuda" else "tiny"


def _cpu_name():
    """The processor's name, as Linux knows it, or else the little that Python knows."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


# ---------------------------------------------------------------------------------------------------------------------
# In the process that started the ranks


STATE_RANKS = (1, 2, 4, 8, 64, 1024)
STATE_ROWS = [  # stage, dtype of parameters and of gradients, formula; that as a function of d and of b, see the notes
    (stage3_gradbuffer, "bfloat16", "bfloat16", "4 + 16/d", lambda d, b: 4 + 16 / d),
    (stage3_gradbuffer, "bfloat16", "float32", "6 + 12/d", lambda d, b: 6 + 12 / d),
    (stage3_gradbuffer, "float32", "float32", "8 + 8/d", lambda d, b: 8 + 8 / d),
    (stage4_overlap, "bfloat16", "float32", "2 + 16/d + b", lambda d, b: 2 + 16 / d + b),
    (stage4_overlap, "float32", "float32", "4 + 12/d + b", lambda d, b: 4 + 12 / d + b),
]


def model_state(settings):
    """Bytes a parameter that stages 3 and 4 hold after a step, at any number of ranks -> list of dicts, for bench.py.

    Counted in this process, as rank 0 of d, which runs the real code. The batch is one byte long, since only what
    outlives a step counts. b: stage 4's two bucket buffers.
    """
    rows = []
    for package, dtype, grad_dtype, formula, theory in STATE_ROWS:
        counts = {d: _state_bytes(settings, d, package, dtype, grad_dtype) for d in STATE_RANKS}
        stage = package.__name__[5]
        rows.append({"name": f"stage {stage} {dtype}/{grad_dtype}", "formula": formula,
                     "bytes_per_param": {d: counted for d, (counted, _) in counts.items()},
                     "bytes_per_param_theory": {d: theory(d, b) for d, (_, b) in counts.items()}})
    return rows


@contextlib.contextmanager
def rank_0_of(d):
    """While it is entered this process plays rank 0 of d: torch's fake process group sends nothing."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=d)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # which init_process_group wraps, each time once more


def _state_bytes(settings, d, package, dtype, grad_dtype):
    """-> bytes a parameter, and how many of them are bucket buffers."""
    # Stage 4 keeps sums in fp32 whatever the parameters are; reduce_dtype: exchanges as it does on gloo.
    choice = "reduce_dtype" if package is stage4_overlap else "grad_dtype"
    with rank_0_of(d), Memory("cpu") as memory:
        model = workload.GPT(workload.MODELS[settings.model]).to(getattr(torch, dtype))
        optimizer = package.DistributedOptimizer(model.parameters(), **adamw(settings),
                                                 **{choice: getattr(torch, grad_dtype)})
        tokens = torch.zeros(1, 1, dtype=torch.int64)
        model(tokens, tokens).backward()
        optimizer.step()
        numel = sum(param.numel() for param in model.parameters())
        return memory.live / numel, getattr(optimizer, "bucket_buffer_bytes", 0) / numel


GATHERED = {  # stage -> how many elements its all-gathers bring together in a step, padding included
    stage2_allgather: lambda optimizer: optimizer.world_size * max(
        sum(param.numel() for param in shard) for shard in optimizer.shards),
    stage3_gradbuffer: lambda optimizer: sum(buffer.flat_params.numel() for buffer in optimizer.buffers),
    stage4_overlap: lambda optimizer: sum(bucket.flat_params.numel() for bucket in optimizer.buckets),
}


def gathered(settings):
    """Elements that a step gathers, over those that the model has, at any number of ranks -> list of dicts.

    As the optimizers have shared them out; this process plays rank 0 of d, and nothing is stepped.
    """
    rows = [{"name": f"stage {package.__name__[5]}", "over_numel": {}} for package in GATHERED]
    for d in STATE_RANKS:
        with rank_0_of(d):
            for row, (package, n_gathered) in zip(rows, GATHERED.items()):
                params = list(workload.GPT(workload.MODELS[settings.model]).parameters())
                optimizer = package.DistributedOptimizer(params)
                row["over_numel"][d] = n_gathered(optimizer) / sum(param.numel() for param in params)
    return rows


def caps(d=2):
    """Stage 4's default bucket and what its two buffers hold, models nano … large -> list of dicts.

    Tensors are without memory: the largest model has 4.8 GB of parameters.
    """
    rows = []
    for name, config in workload.MODELS.items():
        with rank_0_of(d), FakeTensorMode():
            params = list(workload.GPT(config).parameters())
            native, exchanged = (stage4_overlap.optimizer.ShardedOptimizer(params, reduce_dtype=dtype)
                                 for dtype in (None, torch.float32))
            numel = sum(param.numel() for param in params)
            b_native, b_exchanged = (
                sum(flat.nbytes for buffer in optimizer.idle for flat in {buffer.sent, buffer.received}) / numel
                for optimizer in (native, exchanged))
            rows.append({"model": name, "ranks": d, "model_bytes": 4 * numel, "buckets": len(native.buckets),
                         "median_bytes": statistics.median(bucket.flat_params.nbytes for bucket in native.buckets),
                         "largest_bytes": max(bucket.flat_params.nbytes for bucket in native.buckets),
                         "b_native": b_native, "b_exchanged": b_exchanged,
                         "bytes_per_param": 4 + 12 / d + b_native})
    return rows


def measure(workers, settings, names, progress=lambda text: None):
    """Measures the rows `names` of peers.ROWS -> {"conditions": {…}, "rows": [{…}, …]}; bench.py adds the rest.

    `progress(text)` is called before each of `n_runs(settings, names)` runs. A row that fails, that differs from ddp by
    more than the tolerance, or whose weights never moved, has an "error" that says so, and no step time.
    """
    conditions = _on_rank_0(workers, describe, settings)
    conditions["dtype"] = " and ".join(dict.fromkeys(peers.find(name).dtype for name in names))
    rows = [_examine(workers, settings, name, progress) for name in names]
    times = {name: [] for name in names}  # row -> milliseconds a step, by round
    for turn in range(settings.rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:  # nobody always comes first
            row = rows[names.index(name)]
            progress(f"round {turn + 1}: {name}")
            if "error" not in row:
                attempt(row, lambda: times[name].append(_on_rank_0(workers, time_steps, settings, name)))
    for row in rows:
        if "error" not in row:
            _add_times(row, times[row["name"]], times[peers.REFERENCE])
            if row["kind"] == "noise":
                conditions["noise"] = [one / other for one, other in zip(times[row["name"]], times[peers.REFERENCE])]
    return {"conditions": conditions, "rows": rows}


def accumulation(workers, settings, ddp=peers.REFERENCE, progress=lambda text: None):
    """One exchange a step in several rows, and in stage 4 also one for each micro-batch, interleaved.

    `ddp`: the row that stands for DDP -> list of dicts, one for each number of micro-batches. The more of them a step
    has, the fewer steps a round has, and 2 at least.
    """
    ways = {"no_sync_ms": ("stage 4 overlap", True), "each_ms": ("stage 4 overlap", False),
            "compute_ms": ("compute only", True), "ddp_ms": (ddp, True), "stage3_ms": ("stage 3 grad buffer", True)}
    found = [{"micro_batches": k, **{key: [] for key in ways}} for k in MICRO_BATCHES]
    for turn in range(settings.rounds):
        for one in found:
            for key, (name, in_no_sync) in ways.items():
                k = one["micro_batches"]
                progress(f"round {turn + 1}: {k} micro-batches, {name}{'' if in_no_sync else ', reduced one by one'}")
                fewer = settings._replace(steps=max(2, settings.steps // k))
                one[key].append(_on_rank_0(workers, time_accumulation, fewer, name, k, in_no_sync))
    return found


def is_wrong(result):
    """Whether a stage has failed, or whatever row computes something else than it should: exit code 1."""
    return any("error" in row and (row["kind"] != "peer" or row["error"].startswith("wrong")) for row in result["rows"])


def n_runs(settings, names):
    return len(names) * (1 + settings.rounds)


def _examine(workers, settings, name, progress):
    """Checks and counts a row -> its part of the result."""
    row = {"name": name, "kind": peers.find(name).kind, "dtype": peers.find(name).dtype, "step_ms": None,
           "vs_reference": None, "max_abs_diff": None}
    progress(f"check: {name}")
    if attempt(row, lambda: row.update(_over_ranks(workers.run(examine, settings, name)))):
        movement, allowed = row.pop("movement"), tolerance(workers.world_size)
        if row["kind"] == "floor":  # sees its own rank's data and nothing else: nobody could agree with it
            row["max_abs_diff"] = None
        elif row["max_abs_diff"] > allowed:
            whose = "ddp" if row["dtype"] == "float32" else "replicated training with fp32 copies"
            _fail(row, f"wrong: a parameter differs from {whose}'s by {row['max_abs_diff']:.1e}, allowed {allowed:g}")
        if movement == 0:
            _fail(row, "wrong: its weights did not move")
    return row


def _fail(row, reason):
    row.update(error=reason, step_ms=None)


def attempt(row, run):
    """-> True, or, when a rank fails, False, with the reason in the row."""
    try:
        run()
        return True
    except WorkerError as error:
        _fail(row, str(error))
        return False


def _on_rank_0(workers, function, *args):
    return workers.run(function, *args)[0]


def _over_ranks(parts):
    """Bytes in memory: of the rank that holds most, in each phase; by kind: of the one that holds most after a step.

    Bytes on the wire and bytes a parameter: the mean over ranks. Collectives: of rank 0.
    """
    def most(key):
        return {phase: max(part[key][phase] for part in parts) for phase in parts[0][key]}
    return {**parts[0], "memory_bytes": most("memory_bytes"), "peak_bytes": most("peak_bytes"),
            "held_bytes": max((part["held_bytes"] for part in parts), key=lambda kinds: sum(kinds.values())),
            "activation_bytes": max(part["activation_bytes"] for part in parts),
            **{key: round(statistics.mean(part[key] for part in parts))
               for key in ("wire_bytes", "line_bytes") if key in parts[0]},
            "bytes_per_param": statistics.mean(part["bytes_per_param"] for part in parts)}


def _add_times(row, times, reference):
    row["step_ms"] = {"median": statistics.median(times), "min": min(times), "max": max(times), "rounds": times}
    if len(reference) == len(times):  # round by round: both ran within seconds of each other
        row["vs_reference"] = statistics.median(one / other for one, other in zip(times, reference))
