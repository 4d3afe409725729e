"""Times steps of small models, with a clip, on ranks of this machine: DDP, stages 3 and 4. Which size is too small?

    python -m harness.measuring.small_models [--params 1000,10000] [--json PATH]         # or: make bench WHAT=small

A model is four square layers, and a step is that of a training loop with AdamW. A round times every method in turn.
"""

import functools
import importlib
import math
from pathlib import Path

from harness import STAGE_3, STAGE_4
from harness.ranks import command_line

SIZES = [1_000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000]
fail = functools.partial(command_line.fail, "small")


def numels(text):
    """Parse "1000,10000"."""
    return [command_line.number(int, 100, 10**8)(size) for size in text.split(",")]


def options():
    parser = command_line.Parser("small", __doc__)
    parser.add_argument("--params", type=numels, default=SIZES, help="sizes, with commas between (default: six)")
    parser.add_argument("--ranks", type=command_line.COUNT, default=2, help="processes on this machine (default 2)")
    parser.add_argument("--rounds", type=command_line.COUNT, default=5, help="(default 5)")
    parser.add_argument("--steps", type=command_line.COUNT, default=40, help="timed in a round (default 40)")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the result there as well")
    return parser.parse_args()


if __name__ == "__main__":
    options()  # reports a mistake at once: the imports below load torch, which takes seconds

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from harness.measuring.examine import time_warm_steps
from harness.publishing.tables import Report, column, made_here, name_column, save_and_show, sheet_of
from harness.ranks.workers import Workers

N_LAYERS = 4
BATCH_SIZE = 32
WARMUP_STEPS = 5
DDP = "DDP"
METHODS = {"stage 3": STAGE_3, "stage 4": STAGE_4}  # beside DDP


def time_method(rank, method, numel, n_steps):
    """Return the median time per step on the slowest rank, in ms."""
    width = math.isqrt(numel // N_LAYERS)
    torch.manual_seed(0)
    layers = []
    for _ in range(N_LAYERS):
        layers += [nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers).to(rank.device)
    params = list(model.parameters())
    if method == DDP:
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(params, fused=True)
    else:
        forward = model
        optimizer = importlib.import_module(METHODS[method]).DistributedOptimizer(params, fused=True)
        if hasattr(optimizer, "prefetch_params"):
            optimizer.prefetch_params(model)

    def step(x):
        forward(x).square().mean().backward()
        if method == DDP:
            nn.utils.clip_grad_norm_(params, 1.0)
        else:
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    finish = getattr(optimizer, "finish_param_sync", lambda: None)
    batches = torch.randn(WARMUP_STEPS + n_steps, BATCH_SIZE, width, device=rank.device)
    for x in batches[:WARMUP_STEPS]:
        step(x)
    return time_warm_steps(rank, step, batches[WARMUP_STEPS:], finish)[0]


def main():
    args = options()
    times = {}  # {numel: {method: ms by round}}
    with Workers(args.ranks, timeout_s=600) as workers:
        for numel in args.params:
            times[numel] = {method: [] for method in (DDP, *METHODS)}
            for _ in range(args.rounds):
                for method, rounds_ms in times[numel].items():
                    rounds_ms.append(workers.run(time_method, method, numel, args.steps)[0])

    def over_ddp(method):
        return lambda numel: [ms / ddp_ms for ms, ddp_ms in zip(times[numel][method], times[numel][DDP])]
    sheet = sheet_of("A step with a clip", args.params, {
        "model": name_column("{:,}".format, "parameters"),
        DDP: column("DDP, ms", lambda numel: times[numel][DDP], "measured", ".2f"),
        **{method: column(f"{method} ÷ DDP", over_ddp(method), "measured", ".2f", shows="both") for method in METHODS}})
    how = f"{args.ranks} ranks, {N_LAYERS} layers, batch {BATCH_SIZE}, {args.rounds} rounds of {args.steps} steps"
    save_and_show(args.json, Report(made_here(), {"small": sheet}, how), fail)


if __name__ == "__main__":
    main()
