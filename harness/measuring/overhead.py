"""Measures what a wrapped optimizer costs beside computing and sending: in small models, and in the host's time.

    python -m harness.measuring.overhead [--params 1000 10000] [--json PATH]         # or: make bench WHAT=small

The program times steps that clip gradients, on ranks of this machine, by DDP and by stages 3 and 4 (the optimizers in
stage3_gradbuffer/ and stage4_overlap/): at which size is a model too small for them?

`measure_host` makes the table "host" of `make bench` and `make bench WHAT=cuda`. One process plays rank 0 of 8. Its
messages go nowhere, and the model's tensors are tiny, so what takes time is Python.
"""
# The words of this file:
#   row       a way to train; the catalogue, harness/training/rows.py, lists all rows
#   method    one of the three rows of the first half of this file, which is about small models
#   build     a function of a model and AdamW's arguments, which returns a Training
#   Training  an object with a model, an optimizer, and the parts of a step as methods
#   rank      a Rank (harness/ranks/meeting.py): the number of this process, its device, the number of all ranks
#   column    describes a column of a table: a title, a function of a row, where the numbers come from, and their format

import functools
import math
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.ranks import command_line

SIZES = [1_000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000]
fail = functools.partial(command_line.fail, "small")  # ends the program, with a message and exit code 2


def options():
    parser = command_line.Parser("small", __doc__)
    parser.add_argument("--params", type=command_line.number(int, 100, 10**8), nargs="+", default=SIZES,
                        help="sizes of models (default: six)")
    parser.add_argument("--ranks", type=command_line.COUNT, default=2, help="processes on this machine (default 2)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there as well")
    return parser.parse_args()


if __name__ == "__main__":
    options()  # reports a mistake at once: the imports below load torch, which takes seconds

import torch
from torch import nn

from harness.measuring.examine import clip, time_warm_steps
from harness.publishing.tables import Report, column, made_here, name_column, save_and_show, sheet_of
from harness.ranks.meeting import rank_0_of
from harness.ranks.workers import Workers, on_rank_0
from harness.training import rows as catalogue

WARMUP_STEPS = 5  # of each method and each row, before the steps that are timed

# -------------------------------------------------------------------------------------------------------- Small models


N_LAYERS = 4
BATCH_SIZE = 32
ROUNDS = 5  # in each round every method is timed once
STEPS = 40  # of each method that are timed in a round
DDP = "DDP"
# Name -> build. With `prefetch`, stage 4's gathered parameters arrive during the next forward pass.
METHODS = {DDP: catalogue.ddp, "stage 3": catalogue.stage(STAGE_3), "stage 4": catalogue.stage(STAGE_4, prefetch=True)}


def time_method(rank, method, numel):
    """Time steps of METHODS[method] with a model of about `numel` parameters, on every rank.

    Returns the median time of a step on the slowest rank, in ms.
    """
    width = math.isqrt(numel // N_LAYERS)  # a layer has width² weights
    torch.manual_seed(0)
    layers = []
    for _ in range(N_LAYERS):
        layers += [nn.Linear(width, width), nn.Tanh()]
    training = METHODS[method](nn.Sequential(*layers).to(rank.device), {"fused": True})

    def step(x):
        """Train a step. The mean of squared outputs stands for a loss."""
        training.forward(x).square().mean().backward()
        clip(training, 1.0)
        training.update()
        training.zero_grad()

    batches = torch.randn(WARMUP_STEPS + STEPS, BATCH_SIZE, width, device=rank.device)
    for x in batches[:WARMUP_STEPS]:
        step(x)
    # The second value is the time to wait for what the last step has sent.
    step_ms, _ = time_warm_steps(rank, step, batches[WARMUP_STEPS:], training.finish)
    return step_ms


def measure_small(workers, sizes):
    """Time every method in turn, for each size. Returns {name of the method: {numel: [ms of each round]}}."""
    ms_of = {method: {numel: [] for numel in sizes} for method in METHODS}
    for numel in sizes:
        for _ in range(ROUNDS):
            for method in METHODS:
                ms_of[method][numel].append(on_rank_0(workers, time_method, method, numel))
    return ms_of


def small_sheet(ms_of):
    """Make the table of small models, with a line for each size. `ms_of`: what `measure_small` returns."""
    ddp_ms = ms_of[DDP]
    columns = {"model": name_column("{:,}".format, "parameters"),
               DDP: column("DDP, ms", ddp_ms.get, "measured", ".2f")}

    def over_ddp(method):
        """Return a function of a size: for each round the method's time divided by DDP's."""
        return lambda numel: [ms / ms_of_ddp for ms, ms_of_ddp in zip(ms_of[method][numel], ddp_ms[numel])]
    for method in METHODS:
        if method != DDP:
            columns[method] = column(f"{method} ÷ DDP", over_ddp(method), "measured", ".2f", shows="both")
    return sheet_of("A step with a clip", ddp_ms, columns)


# ------------------------------------------------------------------------------------------------------ The host's time


N_TENSORS = 340
SIDE = 16  # each matrix is SIDE x SIDE
BLOCK = 20  # matrices in a block; FSDP2 gathers and frees the parameters of a block together
N_PLAYED_RANKS = 8
HOST_STEPS = 60  # of each row that are timed
PLAIN = "plain AdamW"
ADAMW = {"lr": 1e-3, "fused": True}
# Name -> build.
#   is_alone: DDP gets a gloo group with only this process, because DDP can't work with messages that go nowhere
#   "core": a stage without its guard, the code that refuses wrong use
#   bucket_cap_mb: MiB of a bucket, the unit in which stage 4 sends gradients
ROWS = {
    PLAIN: catalogue.compute_only,
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


class Chain(nn.Module):
    """A model of N_TENSORS matrices, one after the other, in blocks. Its input is (1, SIDE).

    FSDP2's row in the catalogue treats each of `model.blocks` as a unit. `forward` returns a loss. A Training passes
    targets, which are unused here.
    """

    def __init__(self):
        super().__init__()
        matrices = [nn.Linear(SIDE, SIDE, bias=False) for _ in range(N_TENSORS)]
        starts = range(0, N_TENSORS, BLOCK)
        blocks = [nn.Sequential(*matrices[start : start + BLOCK]) for start in starts]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x, targets):
        return self.blocks(x).sum()


class StepTimes(NamedTuple):
    """Seconds that the host, the CPU side of a rank, spends in each phase of a step."""
    forward: float
    backward: float
    step: float
    zero_grad: float

    @property
    def whole(self):
        """Return the seconds of the whole step."""
        return sum(self)


def timed_step(training, x):
    """Train a step on the input `x`. Returns StepTimes."""
    start = time.perf_counter()
    loss = training.forward(x, None)
    after_forward = time.perf_counter()
    loss.backward()
    after_backward = time.perf_counter()
    del loss  # drops the graph of the backward pass
    training.update()
    after_step = time.perf_counter()
    training.zero_grad()
    end = time.perf_counter()
    return StepTimes(after_forward - start, after_backward - after_forward, after_step - after_backward,
                     end - after_step)


def measure_host(device):
    """Time all rows in turn, a step of each, as rank 0 of N_PLAYED_RANKS. Returns a Sheet, which is a table."""
    with rank_0_of(N_PLAYED_RANKS):
        training_of = {name: build(Chain().to(device), ADAMW) for name, build in ROWS.items()}
        x = torch.ones(1, SIDE, device=device)
        steps_of = {name: [] for name in ROWS}
        for _ in range(WARMUP_STEPS + HOST_STEPS):
            for name, training in training_of.items():
                steps_of[name].append(timed_step(training, x))
                if x.is_cuda:
                    torch.cuda.synchronize()  # not timed, because the host waits for the GPU
        for training in training_of.values():
            training.finish()
        training_of.clear()  # the trainings go before the process group ends, which some of them use
    return host_sheet({name: steps[WARMUP_STEPS:] for name, steps in steps_of.items()})


def host_sheet(steps_of):
    """Make the table of host times. `steps_of`: {name of a row: [StepTimes of each step]}."""
    def best(name, phase):
        """Return the shortest time of a row's phase in seconds; the phase "whole" is the step."""
        return min(getattr(step, phase) for step in steps_of[name])

    def best_ms(phase):
        """Return a function of a row's name: the shortest time of this phase, in ms."""
        return lambda name: 1e3 * best(name, phase)

    def median_ms(name):
        return 1e3 * statistics.median(step.whole for step in steps_of[name])

    def over_plain(name):
        return best(name, "whole") / best(PLAIN, "whole")

    def us_per_tensor(name):
        return 1e6 * best(name, "whole") / N_TENSORS

    titles = {"forward": "forw.", "backward": "backw.", "step": "step", "zero_grad": "zero", "whole": "whole"}
    columns = {"name": name_column(str)}
    for phase, title in titles.items():
        columns[phase] = column(title, best_ms(phase), form=".2f")
    columns["over_plain"] = column("x plain", over_plain, form=".2f")
    columns["median"] = column("median", median_ms, form=".2f")
    columns["per_tensor"] = column("µs/tensor", us_per_tensor, form=".0f")
    return sheet_of(
        f"Best host time of a step, ms, measured: {N_TENSORS} tensors of {SIDE} x {SIDE}, rank 0 of {N_PLAYED_RANKS}",
        steps_of, columns,
        [f"Best of {HOST_STEPS} steps, all rows in turn; median and µs a tensor: of the whole step. "
         "Messages go nowhere; ddp is in a group of one, on gloo. Buckets of stage 4: 0.02 MiB."])


def main():
    args = options()
    with Workers(args.ranks, timeout_s=600) as workers:
        ms_of = measure_small(workers, args.params)
    conditions = f"{args.ranks} ranks, {N_LAYERS} layers, batch {BATCH_SIZE}, {ROUNDS} rounds of {STEPS} steps"
    save_and_show(args.json, Report(made_here(), {"small": small_sheet(ms_of)}, conditions), fail)


if __name__ == "__main__":
    main()
