"""The host's time: what launching, hooks and wrappers cost, where there is next to nothing to compute or to send.

    python -m harness.host_time [--tensors 340,4000] [--ranks 1,8,64] [--steps 60]        # or: make bench WHAT=host

A model of many 16 x 16 matrices, one after the other, and one process that plays rank 0 of d: messages go nowhere.
Beside plain AdamW of all tensors stand DDP, ZeRO and FSDP2. All variants take turns, step by step, in one run.
"""

import statistics
import time

import torch

from harness import FOUR, ONE, THREE, TWO, command_line
from harness import rows as catalogue
from harness.alone import rank_0_of
from harness.results import HostRow
from harness.tables import host_sheet, sheet_text

SIDE = 16  # of each matrix; tables.host_sheet names it
BLOCK = 20  # matrices in a block, which is a unit of FSDP2
WARMUP_STEPS = 5
PHASES = ("forward", "backward", "step", "zero_grad", "whole")
ADAMW = {"lr": 1e-3, "fused": True}


BUILD = {
    "plain AdamW": catalogue.compute_only,
    "ddp": catalogue.ddp_of_one(torch.optim.AdamW),
    "ddp + torch ZeRO": catalogue.ddp_of_one(catalogue.zero),
    "fsdp2": catalogue.fsdp2(reshard_after_forward=False),
    "stage 1 naive broadcast": catalogue.stage(ONE),
    "stage 2 all-gather": catalogue.stage(TWO),
    "stage 3 core": catalogue.stage(THREE, "ShardedOptimizer"),
    "stage 3 grad buffer": catalogue.stage(THREE),
    "stage 4 core": catalogue.stage_with_prefetch(FOUR, "ShardedOptimizer", bucket_cap_mb=0.02),
    "stage 4 overlap": catalogue.stage_with_prefetch(FOUR, bucket_cap_mb=0.02),
}


class Chain(torch.nn.Module):
    """`n_tensors` matrices in blocks; called with (x, None), like the bench's model, where x is (1, SIDE)."""

    def __init__(self, n_tensors):
        super().__init__()
        sizes = [min(BLOCK, n_tensors - start) for start in range(0, n_tensors, BLOCK)]
        self.blocks = torch.nn.Sequential(*(
            torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(size))) for size in sizes))

    def forward(self, x, _):
        return self.blocks(x).sum()


def timed_step(training, x):
    """-> seconds of each of PHASES, and of the whole step."""
    loss, marks = [], [time.perf_counter()]
    for phase in (lambda: loss.append(training.forward(x, None)), lambda: loss.pop().backward(), training.update,
                  training.zero_grad):
        phase()
        marks.append(time.perf_counter())
    return [*(end - start for start, end in zip(marks, marks[1:])), marks[-1] - marks[0]]


def measure_host(n_tensors, d, n_steps=60, device="cpu"):
    """-> list of HostRows."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    with rank_0_of(d):
        trainings = {name: build(Chain(n_tensors).to(device), ADAMW) for name, build in BUILD.items()}
        x, times = torch.ones(1, SIDE, device=device), {name: [] for name in trainings}
        for _ in range(WARMUP_STEPS + n_steps):
            for name, training in trainings.items():
                times[name].append(timed_step(training, x))
                wait()  # outside the clock: what is timed is the host
        for training in trainings.values():
            training.finish()
        trainings.clear()

    def of_phases(found, figure):
        return {phase: 1e3 * figure(column) for phase, column in zip(PHASES, zip(*found[WARMUP_STEPS:]))}
    return [HostRow(name, n_tensors, d, n_steps, of_phases(found, min), of_phases(found, statistics.median))
            for name, found in times.items()]


def measure_ranks(device="cpu", n_tensors=340, ranks=(1, 8, 64), n_steps=60, progress=lambda text: None):
    """-> list of what `measure_host` returns, for each of `ranks`."""
    found = []
    for d in ranks:
        progress(f"host time as rank 0 of {d}")
        found.append(measure_host(n_tensors, d, n_steps, device))
    return found


def numbers(text):
    return list(map(command_line.COUNT, text.split(",")))


def main():
    parser = command_line.Parser("host", __doc__)
    parser.add_argument("--tensors", type=numbers, default=[340], help="how many, separated by commas (default 340)")
    parser.add_argument("--ranks", type=numbers, default=[1, 8, 64], help="values of d (default 1,8,64)")
    parser.add_argument("--steps", type=command_line.COUNT, default=60, help="of each row (default 60)")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for n_tensors in args.tensors:
        for rows in measure_ranks(device, n_tensors, args.ranks, args.steps):
            print(sheet_text(host_sheet(rows)))


if __name__ == "__main__":
    main()
