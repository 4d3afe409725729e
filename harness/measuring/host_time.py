"""Measures the host's time for launches, hooks and wrappers, with hardly any values to compute or send.

    python -m harness.measuring.host_time [--tensors 340,4000] [--ranks 1,8,64] [--steps 60]
    make bench WHAT=host

The model is a chain of many 16 x 16 matrices. One process plays rank 0 of d, and its messages go nowhere. Plain AdamW
of all tensors, DDP, ZeRO and FSDP2 are measured beside the stages. All rows take turns, step by step, in one run.
"""

import functools
import statistics
import time
from typing import NamedTuple

from harness.ranks import command_line


def numbers(text):
    """Parse "340,4000"."""
    return list(map(command_line.COUNT, text.split(",")))


def options():
    parser = command_line.Parser("host", __doc__)
    parser.add_argument("--tensors", type=numbers, default=[340], help="how many, separated by commas (default 340)")
    parser.add_argument("--ranks", type=numbers, default=[1, 8, 64], help="values of d (default 1,8,64)")
    parser.add_argument("--steps", type=command_line.COUNT, default=60, help="of each row (default 60)")
    return parser.parse_args()


if __name__ == "__main__":
    options()  # reports a mistake at once: the imports below load torch, which takes seconds

import torch

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.publishing.tables import column, name_column, sheet_of, sheet_text
from harness.ranks.meeting import rank_0_of
from harness.training import rows as catalogue

SIDE = 16  # rows and columns of each matrix
BLOCK = 20  # matrices in a block, which is a unit of FSDP2
WARMUP_STEPS = 5
ADAMW = {"lr": 1e-3, "fused": True}


BUILD = {
    "plain AdamW": catalogue.compute_only,
    catalogue.REFERENCE: catalogue.with_ddp(torch.optim.AdamW, is_alone=True),
    catalogue.ZERO: functools.partial(catalogue.ddp_and_zero, is_alone=True),
    catalogue.FSDP2: catalogue.fsdp2(reshard_after_forward=False),
    catalogue.NAIVE_BROADCAST: catalogue.stage(STAGE_1),
    catalogue.ALL_GATHER: catalogue.stage(STAGE_2),
    "stage 3 core": catalogue.stage(STAGE_3, "ShardedOptimizer"),
    catalogue.GRAD_BUFFER: catalogue.stage(STAGE_3),
    "stage 4 core": catalogue.stage(STAGE_4, "ShardedOptimizer", prefetch=True, bucket_cap_mb=0.02),
    catalogue.OVERLAP: catalogue.stage(STAGE_4, prefetch=True, bucket_cap_mb=0.02),
}


class Chain(torch.nn.Module):
    """A model of `n_tensors` matrices in blocks. Called with (x, None), as the bench calls its models; x: (1, SIDE)."""

    def __init__(self, n_tensors):
        super().__init__()
        sizes = [min(BLOCK, n_tensors - start) for start in range(0, n_tensors, BLOCK)]
        self.blocks = torch.nn.Sequential(*(
            torch.nn.Sequential(*(torch.nn.Linear(SIDE, SIDE, bias=False) for _ in range(size))) for size in sizes))

    def forward(self, x, targets):
        return self.blocks(x).sum()


class StepTimes(NamedTuple):
    """Seconds of the host by phase, and of the whole step."""
    forward: float
    backward: float
    step: float
    zero_grad: float
    whole: float


def timed_step(training, x):
    """Run a step. Returns StepTimes."""
    marks = [time.perf_counter()]
    loss = training.forward(x, None)
    marks.append(time.perf_counter())
    loss.backward()
    marks.append(time.perf_counter())
    del loss
    training.update()
    marks.append(time.perf_counter())
    training.zero_grad()
    marks.append(time.perf_counter())
    return StepTimes(*(end - start for start, end in zip(marks, marks[1:])), whole=marks[-1] - marks[0])


def measure_host(n_tensors, d, n_steps=60, device="cpu"):
    """Time all rows in turn, as rank 0 of d. Returns a Sheet."""
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    with rank_0_of(d):
        trainings = {name: build(Chain(n_tensors).to(device), ADAMW) for name, build in BUILD.items()}
        x = torch.ones(1, SIDE, device=device)
        times = {name: [] for name in trainings}
        for _ in range(WARMUP_STEPS + n_steps):
            for name, training in trainings.items():
                times[name].append(timed_step(training, x))
                wait()  # not timed, because it waits for the GPU and not for the host
        for training in trainings.values():
            training.finish()
        trainings.clear()
    return host_sheet({name: steps[WARMUP_STEPS:] for name, steps in times.items()}, n_tensors, d)


def host_sheet(times, n_tensors, d):
    """Make the table of `times`, {name: list of StepTimes}."""
    best = {name: StepTimes(*map(min, zip(*steps))) for name, steps in times.items()}
    median_whole = {name: statistics.median(step.whole for step in steps) for name, steps in times.items()}
    n_steps = len(times["plain AdamW"])

    def phase(field):
        return lambda name: 1e3 * getattr(best[name], field)
    return sheet_of(
        f"Best host time of a step, ms, measured: {n_tensors} tensors of {SIDE} x {SIDE}, rank 0 of {d}", times, {
            "name": name_column(str), "forward": column("forw.", phase("forward"), form=".2f"),
            "backward": column("backw.", phase("backward"), form=".2f"),
            "step": column("step", phase("step"), form=".2f"),
            "zero_grad": column("zero", phase("zero_grad"), form=".2f"),
            "whole": column("whole", phase("whole"), form=".2f"),
            "over_plain": column("x plain", lambda name: best[name].whole / best["plain AdamW"].whole, form=".2f"),
            "median": column("median", lambda name: 1e3 * median_whole[name], form=".2f"),
            "per_tensor": column("µs/tensor", lambda name: 1e6 * best[name].whole / n_tensors, form=".0f")},
        [f"Best of {n_steps} steps, all rows in turn; median and µs a tensor: of the whole step. "
         "Messages go nowhere; ddp is in a group of one, on gloo. Buckets of stage 4: 0.02 MiB."])


def main():
    args = options()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for n_tensors in args.tensors:
        for d in args.ranks:
            print(sheet_text(measure_host(n_tensors, d, args.steps, device)))


if __name__ == "__main__":
    main()
