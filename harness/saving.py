"""Measures how fast a checkpoint is written and read, beside torch.save of the same tensors and beside the disk.

    python -m harness.saving [--gigabytes 1]        # or: TMPDIR=/mnt/disk make bench WHAT=saving

Two ranks train with stage 4, whose parameters and moments have so many gigabytes on each. All rows run in each round,
on all ranks at the same time; what is written is flushed. Also: how long an asynchronous save holds up training.
"""

import collections
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
import stage4_overlap
from harness import command_line, results
from harness.examine import made_here
from harness.tables import METHODS, column, made_line, names, sheet_of, sheet_text
from harness.workers import Workers

RANKS, WIDTH, BYTES_PER_PARAMETER = 2, 1024, 12  # the last: fp32 parameters and two moments
DISK_OF = {"disk, write": None, "torch.save": "disk, write", "checkpoint.save": "disk, write",
           "disk, read": None, "torch.load": "disk, read", "checkpoint.load": "disk, read"}
CALL = "the call of an asynchronous save"
STEP = "a step"
STEP_BEHIND = "a step while it is written"


def write_flushed(path, write):
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def measure(rank, n_bytes, n_rounds, folder, seconds):
    """Return the bytes of a rank's tensors, and `seconds`: row -> by round, until all ranks are done."""
    n_layers = round(RANKS * n_bytes / BYTES_PER_PARAMETER / WIDTH**2)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n_layers)))
    optimizer = stage4_overlap.DistributedOptimizer(model.parameters(), torch.optim.AdamW, fused=True)
    raw_path, torch_path = folder / f"raw-{rank.rank}", folder / f"torch-{rank.rank}"

    def timed(name, function):
        dist.barrier()
        start = time.perf_counter()
        result = function()
        dist.barrier()
        seconds[name].append(time.perf_counter() - start)
        return result

    def step():
        sum(layer(torch.ones(64, WIDTH)).sum() for layer in model).backward()  # in a row they would make denormals
        optimizer.step()
        optimizer.zero_grad()

    step()
    tensors = [tensor.detach().clone() for param, state in optimizer.optimizer.state.items()  # views bring all along
               for tensor in (param, state["exp_avg"], state["exp_avg_sq"])]
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    content = os.urandom(2**20) * (n_bytes // 2**20)
    for number in range(n_rounds):
        path = folder / f"step-{number}"
        timed("disk, write", lambda: write_flushed(raw_path, lambda file: file.write(content)))
        timed("torch.save", lambda: write_flushed(torch_path, lambda file: torch.save(tensors, file)))
        timed("checkpoint.save", lambda: checkpoint.save(path, model, optimizer))
        timed(STEP, step)
        saving = timed(CALL, lambda: checkpoint.save(f"{path}-behind", model, optimizer, asynchronous=True))
        timed(STEP_BEHIND, step)
        saving.result()
        for file in [raw_path, torch_path, *path.iterdir()]:  # they shall come from the disk, not from memory
            with open(file, "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        timed("disk, read", raw_path.read_bytes)
        timed("torch.load", lambda: torch.load(torch_path))
        timed("checkpoint.load", lambda: checkpoint.load(path, model, optimizer))
        if rank.rank == 0:
            for folder_of_round in (path, Path(f"{path}-behind")):
                shutil.rmtree(folder_of_round)
    return n_bytes, seconds


def saving_sheet(n_bytes, seconds, made):
    ms = {name: 1e3 * statistics.median(rounds) for name, rounds in seconds.items()}

    def gb_per_s(name):
        return [n_bytes / 1e9 / round_s for round_s in seconds[name]]
    return sheet_of(
        f"Saving and loading {n_bytes / 1e9:.1f} GB on {RANKS} ranks", DISK_OF, {
            "name": names(str), "seconds": column("seconds", seconds.get, "measured", ".2f"),
            "rate": column("GB/s", gb_per_s, "measured", ".2f"),
            "range": column("from–to", gb_per_s, "measured", ".2f", shows="range"),
            "over_disk": column("of the\ndisk's rate", lambda name: DISK_OF[name] and ms[DISK_OF[name]] / ms[name],
                                "measured", ".2f")},
        [made_line(made, "stage 4, AdamW, fp32", f"{len(seconds[CALL])} rounds, all rows in turn, medians"), METHODS],
        [f"An asynchronous save holds up the step that calls it for {ms[CALL]:,.0f} ms, in which it copies. A step "
         f"takes {ms[STEP]:,.0f} ms, and {ms[STEP_BEHIND]:,.0f} ms while a checkpoint is written."])


def main():
    parser = command_line.Parser("saving", __doc__)
    parser.add_argument("--gigabytes", type=command_line.number(float, 0.01, 100), default=1.0, help="of each rank")
    parser.add_argument("--rounds", type=command_line.COUNT, default=4, help="(default 4)")
    command_line.add_json(parser, "measured/saving.json")
    args = parser.parse_args()
    command_line.check_writable("--json", args.json, parser.error)
    with tempfile.TemporaryDirectory() as folder, Workers(RANKS, timeout_s=3600) as workers:
        (n_bytes, seconds), (n_bytes_of_rank_1, _) = workers.run(
            measure, 1e9 * args.gigabytes, args.rounds, Path(folder), collections.defaultdict(list))
    sheet = saving_sheet(n_bytes + n_bytes_of_rank_1, seconds, made := made_here())
    command_line.write_and_show(args.json, results.to_json(results.Report(made, {"saving": sheet})), parser.error,
                                lambda: print(sheet_text(sheet), end="\n\n"))


if __name__ == "__main__":
    main()
