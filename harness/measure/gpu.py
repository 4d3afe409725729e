"""What only a GPU can tell of stages 3 and 4: what a step costs beside plain AdamW, and how well it uses the memory.

    python -m harness.measure.gpu [--json results/cuda.json]        # or: make cuda

One process plays rank 0 of d with torch's fake process group, and collectives return at once: what is measured is the
sharded update itself. The batch is one byte long, and backward() is outside the clock. Without a GPU: one line.
"""

import argparse
import functools
import importlib
import json
import statistics
import time
from datetime import date
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork

from harness.measure import host, memory
from harness.measure.measure import commit, rank_0_of
from harness.report import tables
from harness.run import cli
from harness.train import workload

STAGES = ["stage3_gradbuffer", "stage4_overlap"]
UPDATE_BYTES = 7 * 4  # of a parameter in AdamW, fp32: read p, g, m, v, write p, m, v
WARMUP_STEPS = 2  # the first one makes the state


def seconds_of(function, device):
    """Of one call, until the device has done what it launched."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    function()
    wait()
    return time.perf_counter() - start


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
    """-> dict of one row; `stage`: a package, or None for torch's fused AdamW of the whole model.

    "peak_bytes", "reserved_bytes": what torch's allocator handed out, and what it took for that; None on a CPU, which
    has none. An out-of-memory is a result as well: "error".
    """
    row = {"stage": stage or "fused AdamW", "model": model_name, "d": d, "peak_bytes": None, "reserved_bytes": None}
    try:
        with rank_0_of(d):
            if device.type == "cuda":
                memory.forget_peaks(device)  # those of the row before
            with device:  # made there: a CPU takes longer to make up a billion weights than all that is measured
                model = workload.GPT(workload.MODELS[model_name])
            numel = sum(param.numel() for param in model.parameters())
            optimizer_cls = importlib.import_module(stage).DistributedOptimizer if stage else torch.optim.AdamW
            optimizer = optimizer_cls(model.parameters(), lr=1e-4, fused=True)
            seconds, made = time_steps(model, optimizer, device, n_steps)
            row.update(step_ms=seconds * 1000, bytes_per_s=UPDATE_BYTES * numel / d / seconds, allocations=made)
            if device.type == "cuda":
                row.update(peak_bytes=torch.cuda.max_memory_allocated(device),
                           reserved_bytes=torch.cuda.max_memory_reserved(device))
    except torch.OutOfMemoryError as error:
        row["error"] = str(error).splitlines()[0]
    return row


def measure(device, models=("medium", "large"), ranks=(1, 8), n_steps=10, copied_bytes=2**30, host_steps=60):
    """-> {"conditions": …, "rows": […]}: plain AdamW, then both stages at each d, for each model."""
    on_gpu = device.type == "cuda"
    conditions = {"machine": torch.cuda.get_device_name(device) if on_gpu else "CPU", "torch": torch.__version__,
                  "dtype": "float32", "steps": n_steps, "copy_bytes_per_s": copy_rate(device, copied_bytes),
                  "commit": commit(), "date": date.today().isoformat()}
    rows = [facts(stage, name, d, device, n_steps) for name in models
            for stage, d in [(None, 1), *((stage, d) for stage in STAGES for d in ranks)]]
    return {"conditions": conditions, "rows": rows, "host": host.measure_ranks(device, n_steps=host_steps)}


def sheet(result):
    """The table of a result."""
    plain = {row["model"]: row.get("step_ms") for row in result["rows"] if row["stage"] == "fused AdamW"}
    rate, rows = result["conditions"]["copy_bytes_per_s"], []
    for row in result["rows"]:
        name = [f"{row['model']}: {row['stage']}", str(row["d"])]
        if "error" in row:
            rows.append([*name, "out of memory", *[tables.NONE] * 6])
            continue
        base = plain[row["model"]]
        beside = f"{row['step_ms'] / base:.2f}" if base and row["d"] == 1 else tables.NONE
        rows.append([*name, f"{row['step_ms']:.2f}", beside, f"{row['bytes_per_s'] / 1e9:.0f}",
                     f"{row['bytes_per_s'] / rate:.2f}", str(row["allocations"]),
                     *(tables.NONE if row[key] is None else f"{row[key] / 1e6:.0f}"
                       for key in ("peak_bytes", "reserved_bytes"))])
    c = result["conditions"]
    return tables.Sheet(
        "The sharded update on a GPU",
        [("", ""), ("d", ""), ("step\nms", "measured"), ("x AdamW", "measured"), ("GB/s", "measured"),
         ("x copy", "measured"), ("new", "counted"), ("peak", "counted"), ("reserved", "counted")], rows,
        [f"GB/s: {UPDATE_BYTES} bytes for each parameter that this rank owns, over the whole step; a copy on the "
         f"device moves {rate / 1e9:.0f}. new: allocations in one step. Peak and reserved in MB. "
         "What a stage does in the backward pass is not in these times.",
         f"{c['machine']} · torch {c['torch']} · {c['dtype']} · median of {c['steps']} steps, no communication · "
         f"{c['date']}{tables.commit_of(c)}"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail = functools.partial(cli.fail, "cuda")
    parser.add_argument("--json", type=Path, default=Path("results/cuda.json"), help="where the result is written")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        return print("cuda: there is no GPU here: nothing was measured")
    cli.check_writable("--json", args.json, fail)
    result = measure(torch.device("cuda", 0))
    try:
        cli.write("--json", args.json, json.dumps(result, indent=1) + "\n", fail)
    finally:  # see bench.py
        for one in [sheet(result), *map(tables.host_sheet, result["host"])]:
            print(tables.sheet_text(one))
    print(f"written to {args.json}")


if __name__ == "__main__":
    main()
