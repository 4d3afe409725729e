"""Trains on 1, 2, 4 and 8 ranks, and measures how far each run is from the run on one rank.

    python -m harness.same_bits [--steps 200] [--model nano] [--ranks 1,2,4,8] [--methods DDP,same_bits] [--json PATH]

DDP, stage 4 and variants/same_bits.py train a GPT on the source of Python's standard library. A step has 8
micro-batches, whichever rank computes them; DDP and stage 4 accumulate those of a rank in no_sync().
`--json results/same_bits.json` puts the result there, and `make report` draws it for docs/same_bits.md.
Exit code: 0; 1 if a bit of same_bits differs.
"""

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from checkpoint import full_state_dict
from harness import FOUR, command_line, corpus, pictures, results
from harness.examine import Settings, adamw, made_here, make_model
from harness.gpt import MODELS
from harness.ledger import Ledger
from harness.results import Report
from harness.rows import ddp, stage
from harness.tables import column, made_line, names, sheet_of, sheet_text
from harness.workers import Workers

LEAVES = 8
RANKS = "1,2,4,8"
MAX_NORM = 1.0
SAME_BITS = "same_bits"
METHODS = {"DDP": ddp, "stage 4": stage(FOUR), SAME_BITS: stage("variants.same_bits", leaves=LEAVES)}
COLOURS = {"DDP": "#4a90d9", "stage 4": "#3a9d5d", SAME_BITS: "#d06a2c"}
SETTINGS = Settings("nano", batch_size=2, sequence_length=32, steps=200)


class Run(NamedTuple):
    """How far a run is from the one on a single rank: the largest difference of any number, after each step or once."""
    method: str
    ranks: int
    params: list  # after each step
    norms: float
    losses: float
    moments: float
    sent: float  # bytes per parameter that a rank sends in a step

    name = property(lambda self: f"{self.method}, {self.ranks} ranks")


def train(rank, method, settings, folder):
    """Train with `method`; on one rank keep all numbers in `folder`, on more return the Run that compares with them."""
    model = make_model(settings, rank, "float32")
    training = METHODS[method](model, adamw(settings))
    text, _ = corpus.split(corpus.load_bytes())
    n_own = LEAVES // rank.world_size
    leaves = [corpus.Batches(text, settings.batch_size, settings.sequence_length, leaf, LEAVES, settings.seed)
              for leaf in range(rank.rank * n_own, (rank.rank + 1) * n_own)]
    differences = {"params": [], "norms": [], "losses": []}
    for step in range(settings.steps):
        with Ledger() if step == settings.steps - 1 else contextlib.nullcontext() as ledger:
            loss, norm = run_step(training, method, [leaf.batch(step) for leaf in leaves])
            params = torch.cat([param.flatten() for param in training.full_params()])
        numbers = {"params": params, "norms": norm, "losses": loss}
        for what, difference in compared(rank, numbers, Path(folder, f"{method} {step}.pt")).items():
            differences[what].append(difference)
    numbers = {"moments": moments(training)}
    differences |= compared(rank, numbers, Path(folder, f"{method} moments.pt"))
    if rank.world_size == 1:
        return None
    return Run(method, rank.world_size, differences["params"], max(differences["norms"]), max(differences["losses"]),
               differences["moments"], ledger.wire_bytes / params.numel())


def run_step(training, method, batches):
    """Run this rank's micro-batches and update. Returns the mean loss of all ranks, and the norm of the gradients."""
    losses = []
    for number, (tokens, targets) in enumerate(batches, start=1):
        with training.no_sync() if number < len(batches) else contextlib.nullcontext():
            loss = training.forward(tokens, targets)
            (loss if method == SAME_BITS else loss / len(batches)).backward()
        losses.append(loss.detach())
    if method == SAME_BITS:
        loss = training.optimizer.mean_over_leaves(losses)
    else:
        loss = torch.stack(losses).mean() / dist.get_world_size()
        dist.all_reduce(loss)
    clips = getattr(training.optimizer, "clip_grad_norm_", None)
    norm = clips(MAX_NORM) if clips else torch.nn.utils.clip_grad_norm_(training.model.parameters(), MAX_NORM)
    training.update()
    training.zero_grad()
    return loss, norm


def moments(training):
    """Return all moments, (n,), on every rank."""
    optimizer = training.optimizer
    whole = full_state_dict(optimizer, to_all=True) if hasattr(optimizer, "pieces") else optimizer.state_dict()
    states = whole["state"].values()
    return torch.cat([state[name].flatten() for state in states for name in ("exp_avg", "exp_avg_sq")])


def compared(rank, numbers, path):
    """Save `numbers`, {what: tensor}, if this is the only rank; else return {what: largest difference from those}."""
    if rank.world_size == 1:
        torch.save(numbers, path)
        return {}
    alone = torch.load(path)
    return {what: (value.double() - alone[what].double()).abs().max().item() for what, value in numbers.items()}


def measure(settings, methods, ranks):
    """Train with all methods on all numbers of ranks, of which the first is 1. Returns [Run]."""
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for n_ranks in ranks:
            with Workers(n_ranks, timeout_s=600, limit_s=3600) as workers:
                for method in methods:
                    print(f"{method} on {n_ranks} rank(s)", file=sys.stderr, flush=True)
                    runs.append(workers.run(train, method, settings, folder)[0])
    return [run for run in runs if run]


def sheets(runs, conditions):
    """Make the table of the largest differences, and that of the differences after each step, for the picture."""
    last = {
        "name": names(),
        "params": column("parameters", lambda run: run.params[-1], "measured", "small"),
        "moments": column("moments", "moments", "measured", "small"),
        "norms": column("norms", "norms", "measured", "small"),
        "losses": column("losses", "losses", "measured", "small"),
        "sent": column("bytes sent\na parameter", "sent", "counted", ".2f")}
    by_step = {"name": names(), "params": column("parameters", "params", "measured", "small")}
    title = f"The largest difference from one rank after {len(runs[0].params)} steps"
    return {"last": sheet_of(title, runs, last, [conditions]), "by_step": sheet_of("After each step", runs, by_step)}


def picture(report):
    """Draw how far the parameters are from those on one rank, by step."""
    figure, (axis,) = pictures.panels(1, 1, (7.6, 3.6))
    curves = report.sheets["by_step"].numbers("params")
    differences = [difference for curve in curves.values() for difference in curve if difference]
    least = min(differences) / 10
    for name, curve in curves.items():
        method, ranks = name.split(", ")
        axis.plot(range(1, len(curve) + 1), [max(difference, least) for difference in curve], color=COLOURS[method],
                  label=name, linestyle={"2 ranks": "-", "4 ranks": "--", "8 ranks": ":"}[ranks])
    axis.set(yscale="log", title="Largest difference of a parameter from the run on one rank", xlabel="step")
    powers = [10.0**power for power in range(-9, 1) if 2 * least < 10.0**power < 2 * max(differences)]
    axis.set_yticks([least, *powers], ["0", *(f"{power:.0e}" for power in powers)])
    axis.minorticks_off()
    axis.grid(True)
    figure.legend(loc="outside right upper")
    return pictures.drawn(figure)


def main():
    parser = command_line.Parser("same_bits", __doc__)
    parser.add_argument("--steps", type=command_line.COUNT, default=SETTINGS.steps, help="(default %(default)s)")
    parser.add_argument("--model", choices=MODELS, default=SETTINGS.model, help="(default %(default)s)")
    parser.add_argument("--ranks", default=RANKS, help="numbers of ranks, of which 1 is first (default %(default)s)")
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas between them (default %(default)s)")
    command_line.add_json(parser, "measured/same_bits.json")
    args = parser.parse_args()
    command_line.check_writable("--json", args.json, parser.error)
    methods = args.methods.split(",")
    if not set(methods) <= METHODS.keys():
        parser.error(f"--methods {args.methods}: there are {', '.join(METHODS)}")
    if args.ranks not in ("1,2", "1,4", "1,8", "1,2,4", RANKS):
        parser.error(f"--ranks {args.ranks}: it must begin as {RANKS} does, or be 1 and one more")
    settings = SETTINGS._replace(model=args.model, steps=args.steps)
    runs = measure(settings, methods, map(int, args.ranks.split(",")))
    conditions = made_line(made_here(), f"gloo, {LEAVES} micro-batches of {settings.batch_size} x "
                           f"{settings.sequence_length} bytes per step", f"{settings.model}, AdamW",
                           f"gradients clipped at {MAX_NORM:g}")
    report = Report(made_here(), sheets(runs, conditions))
    command_line.write_and_show(args.json, results.to_json(report), parser.error,
                                lambda: print(sheet_text(report.sheets["last"])))
    same = [run for run in runs if run.method == SAME_BITS]
    sys.exit(any(max(*run.params, run.norms, run.losses, run.moments) > 0 for run in same))


if __name__ == "__main__":
    main()
