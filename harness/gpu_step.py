"""What only a GPU can tell of stages 3 and 4: what a step costs beside plain AdamW, and how well it uses the memory.

    python -m harness.gpu_step [--json measured/cuda.json]        # or: make bench WHAT=cuda

One process plays rank 0 of d with torch's fake process group, and collectives return at once: what is measured is the
sharded update itself. The batch is one byte long, and backward() is outside the clock. Without a GPU: one line.
"""

import importlib
import statistics
from datetime import date
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from harness import STAGES, command_line, gpu_overlap, host_time, memory, results
from harness.alone import rank_0_of
from harness.examine import commit
from harness.gpt import GPT, MODELS
from harness.gpu_overlap import seconds_of
from harness.results import GpuConditions, GpuResult, GpuRow
from harness.tables import gpu_sheet, host_sheet, sheet_text
from harness.training import UPDATE_BYTES

WARMUP_STEPS = 2  # the first one makes the state


def n_allocations(device):
    """How often torch's allocator was asked for memory so far; 0 on a CPU, whose allocator doesn't count."""
    return torch.cuda.memory_stats(device)["allocation.all.allocated"] if device.type == "cuda" else 0


def copy_rate(device, n_bytes=2**30, repeats=10):
    """Bytes a second, read and written, of a copy from device memory to device memory: what no update can exceed."""
    source, target = (torch.zeros(n_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    times = [seconds_of(lambda: target.copy_(source), device) for _ in range(repeats)]
    return 2 * n_bytes / statistics.median(times)


def at_once(*_, async_op=False, **__):
    """In place of a collective. torch's fake all-gather copies this rank's part d times, more than a step moves."""
    return FakeWork() if async_op else None


@mock.patch.multiple(dist, all_gather_into_tensor=at_once, reduce_scatter_tensor=at_once)
def time_steps(model, optimizer, device, n_steps):
    """-> (median seconds of `optimizer.step()`, how many allocations the last one made)."""
    tokens, times = torch.zeros(1, 1, dtype=torch.int64, device=device), []
    for _ in range(WARMUP_STEPS + n_steps):
        model(tokens, tokens).backward()
        before = n_allocations(device)
        times.append(seconds_of(optimizer.step, device))
        made = n_allocations(device) - before
        optimizer.zero_grad()
    return statistics.median(times[WARMUP_STEPS:]), made


def facts(stage, model_name, d, device, n_steps=10):
    """-> GpuRow; `stage`: a package, or None for torch's fused AdamW of the whole model."""
    row = GpuRow(stage or "fused AdamW", model_name, d)
    try:
        with rank_0_of(d):
            if device.type == "cuda":
                memory.forget_peaks(device)  # those of the row before
            with device:  # made there: a CPU takes longer to make up a billion weights than all that is measured
                model = GPT(MODELS[model_name])
            numel = sum(param.numel() for param in model.parameters())
            optimizer_cls = importlib.import_module(stage).DistributedOptimizer if stage else torch.optim.AdamW
            optimizer = optimizer_cls(model.parameters(), lr=1e-4, fused=True)
            seconds, made = time_steps(model, optimizer, device, n_steps)
            row.step_ms, row.allocations = seconds * 1000, made
            row.bytes_per_s = UPDATE_BYTES * numel / d / seconds
            if device.type == "cuda":
                row.peak_bytes = torch.cuda.max_memory_allocated(device)
                row.reserved_bytes = torch.cuda.max_memory_reserved(device)
    except torch.OutOfMemoryError as error:
        row.error = str(error).splitlines()[0]
    return row


def measure_steps(device, models=("medium", "large"), ranks=(1, 8), n_steps=10, copied_bytes=2**30, host_steps=60):
    """-> GpuResult: plain AdamW, then both stages at each d, for each model."""
    on_gpu = device.type == "cuda"
    conditions = GpuConditions(
        machine=torch.cuda.get_device_name(device) if on_gpu else "CPU", torch=torch.__version__, dtype="float32",
        steps=n_steps, copy_bytes_per_s=copy_rate(device, copied_bytes), date=date.today().isoformat(), commit=commit())
    rows = [facts(stage, name, d, device, n_steps) for name in models
            for stage, d in [(None, 1), *((stage, d) for stage in STAGES[2:] for d in ranks)]]
    return GpuResult(conditions, rows, host_time.measure_ranks(device, n_steps=host_steps))


def main():
    parser = command_line.Parser("cuda", __doc__)
    command_line.add_json(parser, "measured/cuda.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        return print("cuda: there is no GPU here: nothing was measured")
    command_line.check_writable("--json", args.json, parser.error)
    device = torch.device("cuda", 0)
    result = measure_steps(device)
    result.steps = gpu_overlap.measure(device)
    sheets = [gpu_sheet(result), gpu_overlap.sheet(result.steps), *map(host_sheet, result.host)]
    command_line.write_and_show(args.json, results.to_json(result), parser.error,
                                lambda: print("\n".join(map(sheet_text, sheets))))


if __name__ == "__main__":
    main()
