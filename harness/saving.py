"""Measures how fast a checkpoint is written and read, beside torch.save of the same tensors and beside the disk.

    python -m harness.saving [--gigabytes 1]        # or: make bench WHAT=saving ARGS="--folder /mnt/disk"

Two ranks train with stage 4. What each of them owns has so many gigabytes: parameters and AdamW's moments. All rows run
in each round, one after the other, and all ranks at the same time. Also: how long an asynchronous save holds up a step.
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import checkpoint
import stage4_overlap
from harness import command_line, results
from harness.examine import made_here
from harness.results import Report
from harness.tables import METHODS, column, made_line, names, sheet_of, sheet_text
from harness.workers import Workers

RANKS, WIDTH, N_STEPS = 2, 1024, 5
CHUNK = 2**20  # bytes that the rows of the disk alone write or read at once
BYTES_A_PARAMETER = 12  # of a checkpoint: fp32 parameters and two moments
# Row -> the row whose rate is the disk's for it; "": it is the disk.
DISK_OF = {"disk, write": "", "torch.save": "disk, write", "checkpoint.save": "disk, write",
           "checkpoint.save, asynchronous": "disk, write", "disk, read": "", "torch.load": "disk, read",
           "checkpoint.load": "disk, read"}


def seconds_of(function):
    """Time a function until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    function()
    dist.barrier()
    return time.perf_counter() - start


def write(path, write_into):
    with open(path, "wb") as file:
        write_into(file)
        file.flush()
        os.fsync(file.fileno())


def forget(folder):
    """Ask the system to drop these files from memory, so that they come from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class StepCosts(NamedTuple):
    """What an asynchronous save costs steps, in one round."""
    held_up_ms: float  # how long it holds up the step that calls it
    step_ms: float  # a step without a save, the median
    behind_ms: float  # what the steps while it was written took more than as many without
    n_behind: int  # those steps


class Round:
    """Is one rank's model and optimizer, with the tensors that it owns; measures rounds."""

    def __init__(self, n_bytes):
        n_layers = round(RANKS * n_bytes / BYTES_A_PARAMETER / WIDTH**2)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n_layers)))
        self.optimizer = stage4_overlap.DistributedOptimizer(self.model.parameters(), torch.optim.AdamW, fused=True)
        self.x = torch.randn(64, WIDTH)
        self.step()
        inner = self.optimizer.optimizer
        self.tensors = [tensor for param, state in inner.state.items()  # a view would be saved with all that it is of
                        for tensor in (param.detach().clone(), state["exp_avg"], state["exp_avg_sq"])]
        self.n_bytes = sum(tensor.nbytes for tensor in self.tensors)

    def step(self):
        self.model(self.x).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def steps(self, is_over):
        """Train until `is_over(number of steps)` on all ranks. Returns ms of each step."""
        times, everywhere = [], torch.zeros(1)
        while not everywhere:
            times.append(1e3 * seconds_of(self.step))
            everywhere = torch.tensor([float(is_over(len(times)))])
            dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        return times

    def save_behind(self, path):
        """Begin an asynchronous save. Returns its future, and ms for which the call holds up training."""
        saving, args = [], (path, self.model, self.optimizer)
        held_up = seconds_of(lambda: saving.append(checkpoint.save(*args, asynchronous=True)))
        return saving[0], 1e3 * held_up

    def measure(self, folder, rank, number):
        """Return {row: seconds}, and StepCosts.

        In each round another row writes first: a disk may be slower after some gigabytes.
        """
        content = memoryview(bytearray(os.urandom(CHUNK)) * (self.n_bytes // CHUNK))
        pieces = [content[start : start + CHUNK] for start in range(0, len(content), CHUNK)]
        mine, torch_path, saved, held_up = folder / f"mine-{rank}", folder / f"torch-{rank}", folder / "saved", []

        def save_all_behind():
            saving, call_ms = self.save_behind(folder / "behind")
            saving.result()
            held_up.append(call_ms)

        def read_raw():
            """Read into memory that exists: no load can be faster."""
            with open(mine, "rb", buffering=0) as file:
                for piece in pieces:
                    file.readinto(piece)

        writers = [("disk, write", lambda: write(mine, lambda file: file.writelines(pieces))),
                   ("torch.save", lambda: write(torch_path, lambda file: torch.save(self.tensors, file))),
                   ("checkpoint.save", lambda: checkpoint.save(saved, self.model, self.optimizer)),
                   ("checkpoint.save, asynchronous", save_all_behind)]
        first = number % len(writers)
        seconds = {name: seconds_of(writer) for name, writer in writers[first:] + writers[:first]}
        alone = statistics.median(self.steps(lambda n: n == N_STEPS))
        forget(folder)
        readers = {"disk, read": read_raw, "torch.load": lambda: torch.load(torch_path),
                   "checkpoint.load": lambda: checkpoint.load(saved, self.model, self.optimizer)}
        seconds.update({name: seconds_of(reader) for name, reader in readers.items()})
        again, _ = self.save_behind(folder / "again")
        behind = self.steps(lambda n: again.done())
        again.result()
        return seconds, StepCosts(held_up[0], alone, sum(behind) - alone * len(behind), len(behind))


def measure(rank, n_bytes, folder, rounds):
    model = Round(n_bytes)
    rounds_of_rank = []
    for number in range(rounds):
        place = Path(folder) / str(number)
        place.mkdir(exist_ok=True)
        dist.barrier()
        rounds_of_rank.append(model.measure(place, rank.rank, number))
        dist.barrier()
        if rank.rank == 0:
            shutil.rmtree(place)
    return model.n_bytes, rounds_of_rank


def saving_sheet(seconds, costs, n_bytes, made):
    """Make the table. `seconds`: {row: by round, of the slowest rank}; `costs`: by round; `n_bytes`: of all ranks."""
    medians = {name: statistics.median(rounds) for name, rounds in seconds.items()}

    def gb_per_s(name):
        return [n_bytes / 1e9 / round_s for round_s in seconds[name]]

    def over_disk(name):
        return medians[DISK_OF[name]] / medians[name] if DISK_OF[name] else None
    held_up_ms, step_ms, behind_ms, n_behind = map(statistics.median, zip(*costs))
    return sheet_of(
        f"Saving and loading {n_bytes / 1e9:.1f} GB on {RANKS} ranks", DISK_OF, {
            "name": names(str), "seconds": column("seconds", seconds.get, "measured", ".2f"),
            "rate": column("GB/s", gb_per_s, "measured", ".2f"),
            "range": column("from–to", gb_per_s, "measured", ".2f", shows="range"),
            "over_disk": column("of the\ndisk's rate", over_disk, "measured", ".2f")},
        [f"An asynchronous save holds up the step that calls it for {held_up_ms:,.0f} ms, in which it copies; a step "
         f"without one takes {step_ms:,.0f} ms. Steps that ran while it was written, {n_behind:.0f} a round, took "
         f"{behind_ms:,.0f} ms more than as many without. {METHODS}",
         made_line(made, "stage 4, AdamW, fp32", f"{len(costs)} rounds, all rows in turn, medians")])


def main():
    parser = command_line.Parser("saving", __doc__)
    size = command_line.number(float, 0.01, 100)
    parser.add_argument("--gigabytes", type=size, default=1.0, help="of each rank (default 1)")
    parser.add_argument("--rounds", type=command_line.COUNT, default=4, help="(default 4)")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (default: for temporary files)")
    command_line.add_json(parser, "measured/saving.json")
    args = parser.parse_args()
    command_line.check_writable("--json", args.json, parser.error)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, Workers(RANKS, timeout_s=3600) as workers:
        answers = workers.run(measure, args.gigabytes * 1e9, folder, args.rounds)
    _, rounds_of_rank_0 = answers[0]
    seconds_by_round, costs = zip(*rounds_of_rank_0)
    seconds = {name: [by_name[name] for by_name in seconds_by_round] for name in DISK_OF}
    sheet = saving_sheet(seconds, costs, sum(n_bytes for n_bytes, _ in answers), made_here())
    report = Report(made_here(), {"saving": sheet})
    command_line.write_and_show(args.json, results.to_json(report), parser.error,
                                lambda: print(sheet_text(sheet), end="\n\n"))


if __name__ == "__main__":
    main()
