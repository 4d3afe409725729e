"""Plan before you rent: what a rank of 1024 holds, how long a step takes, and how far that model is from runs."""

import argparse
import functools
import gc
import math
import multiprocessing
import os
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from harness import command_line, dry_run, models, pictures
from harness import results as saved
from harness import rows as catalogue
from harness.command_line import write
from harness.dry_run import (
    AS_FAST,
    COMPARED,
    DEVICES,
    DTYPES,
    HYBRID,
    Hardware,
    Planner,
    calibrated,
    plan,
    published,
    replay,
)
from harness.pictures import CURVES, TUNED, planned_steps
from harness.results import Check, Conditions, CurveLine, ModelledRun, Result
from harness.rows import Choice
from harness.tables import plan_sheets, sheet_text

# -------------------------------------------------------------------------------------------------------- two_host_runs
# Modelled beside measured: this project's runs on two hosts.


ROOT = Path(__file__).resolve().parents[1]
# Two hosts on one machine: bytes of memory a second for one core, seconds a message, TCP's payload in a full packet.
HOST_MEMORY_RATE, HOST_LATENCY, PAYLOAD = 5e9, 2e-4, 1448 / 1514

WAYS = {"no_sync_ms": ("stage 4 overlap", False), "each_ms": ("stage 4 overlap", True),
        "compute_ms": ("compute only", False), "ddp_ms": ("ddp", False), "stage3_ms": ("stage 3 grad buffer", False)}
ALONE = Choice("compute only")


class Part(NamedTuple):
    """The times of one table. `ms`: (Choice, micro-batches a step or None, whether each is exchanged) -> median."""
    conditions: Conditions
    ms: dict


def two_hosts():
    """-> list of ModelledRuns."""
    found = []
    for result in load():
        c = result.conditions
        parts = [Part(c, of_rows(result.rows))]
        parts += [Part(result.sweep.conditions, of_rows(result.sweep.rows))] if result.sweep else []
        parts += [Part(result.accumulation.conditions, of_accumulation(result.accumulation))
                  ] if result.accumulation else []
        for part in parts:
            found += modelled(c.rate, part, c.bits_per_second, parts[0].ms[ALONE, None, False])
    return found


def load():
    """-> list of Results of make network, a rate each."""
    path = ROOT / "results" / "network.json"
    return saved.from_json(Result, path.read_text(encoding="utf-8")).at_all_rates()


def line_of(bits_per_second, backend="exchange"):
    """-> Hardware. `backend`: "gloo" where its own reduce-scatter travels, which is an all-reduce."""
    return Hardware(1.0, HOST_MEMORY_RATE, math.inf, PAYLOAD * bits_per_second / 8, per_node=1,
                    latency_between=HOST_LATENCY, backend=backend)


def of_rows(rows):
    return {(row.choice, None, False): row.median_ms for row in rows if row.rounds_ms}


def of_accumulation(accumulation):
    """The rows that a step of one micro-batch stands for are named as in WAYS, DDP with its bucket size."""
    return {(Choice(base, accumulation.ddp_mb if base == "ddp" else None), row.micro_batches, exchange_each):
            statistics.median(getattr(row, field)) for row in accumulation.rows
            for field, (base, exchange_each) in WAYS.items() if getattr(row, field)}


def modelled(where, part, bits_per_second, alone_ms):
    """-> ModelledRuns of one table. `alone_ms`: of *compute only*, for where this table has no such row."""
    c, times = part.conditions, dict(part.ms)
    spec = models.NAMED[c.model]
    cost = dry_run.cost_of(spec, "float32", c.batch_size, c.sequence_length)
    hosts = line_of(bits_per_second)
    events = dry_run.record(ALONE, spec, 1, cost).events
    measured = next((times.pop((ALONE, k, False)) for k in (None, 1) if (ALONE, k, False) in times), alone_ms)
    hosts = calibrated("flops", lambda one: replay(events, one, 1).seconds, hosts, measured / 1e3)
    found = []
    for (choice, k, exchange_each), ms in times.items():
        if choice.base in (*catalogue.LADDER, "owner reduce"):
            events = dry_run.record(choice, spec, c.ranks, cost, gloo=True).events
            seconds = replay(events, hosts, c.ranks, k or 1, exchange_each).seconds / (k or 1)
            found.append(ModelledRun(where, *choice, ms, seconds * 1e3, k, exchange_each))
    return sorted(found, key=lambda run: run.label)


# ---------------------------------------------------------------------------------------------------------------- check
# Modelled time beside runs: of this project on two hosts, and what Megatron-LLaMA and a user of it have published.


def check(workers):
    """`workers`: a ProcessPoolExecutor."""
    here, elsewhere, lines = workers.submit(two_hosts), workers.submit(published), workers.submit(curve_lines)
    return Check(here.result(), *elsewhere.result(), lines.result())


# --------------------------------------------------------------------------------------------------------------- advice
# A plan in words: which stage, which bucket, and when DDP.


MORE_RANKS = (8, 32, 128, 512)  # that --advise compares at


def advice(planner, result):
    """-> sentences."""
    args, world, rows = planner.args, planner.args.world, {row.base: row for row in result.rows}
    ours, owner, ddp = (rows[base].choice for base in COMPARED[args.dtype])
    fitting = {row.choice: planner.ms(row.choice, world) for row in result.rows if row.fits_from}
    room, stage4 = f"{args.device_memory:g} GB", planner.recorded[ours, world]
    sizes = [f"{base} {'|'.join(planner.tuned(base, trees=trees).size for trees in (False, True))}"
             for base in [ours.base, HYBRID] if base in rows]
    fastest = "; ".join(f"{choice.name}, {fitting[choice]:,.0f} ms" for choice in sorted(fitting, key=fitting.get)[:3])
    once, each = (planner.ms(ours, world, 8, exchange_each) for exchange_each in (False, True))
    said = [f"Stage: {len(fitting)} rows fit in {room}; fastest are {fastest} a micro-batch." if fitting else
            f"Stage: none fits in {room}. Let devices share layers (--tensor-parallel 8), or take FSDP2.",
            f"Bucket in rings|trees: {'; '.join(sizes)}.",
            f"Accumulation: {'an exchange each' if each <= AS_FAST * once else 'an exchange a step: no_sync()'}. Of 8 "
            f"micro-batches one takes {each:,.0f} ms with an exchange each, and {once:,.0f} ms with one a step, which "
            f"keeps whole gradients of {stage4.held['parameters'] / 1e9:.1f} GB."]
    ranks = sorted({d for d in MORE_RANKS if d < world} | {world})
    planner.run([ours, owner, ddp], ranks)
    for title, choice in (("Owner's reduce", owner), ("DDP", ddp)):
        over = {d: planner.ms(choice, d) / planner.ms(ours, d) for d in ranks}
        slower = next((d for d in ranks if all(over[more] > AS_FAST for more in ranks if more >= d)), 0)
        behind = f"behind stage 4 from {slower} ranks on" if slower else "as fast as stage 4 or faster"
        said.append(f"{title}: {behind}, of whose time it takes {', '.join(f'{over[d]:.2f} on {d}' for d in ranks)}. "
                    f"It {'fits' if rows[choice.base].fits_from else 'does not fit'} in {room}.")
    return said


# ---------------------------------------------------------------------------------------------------------- curve_lines
# The curve between its points: rows run dry, and replayed on two hosts with a line of any rate.


N_POINTS = 25  # of a line, at equal ratios of rates
NOT_RUN_DRY = ("fsdp2",)  # it needs tensors with values


def curve_lines():
    """-> list of CurveLines. Computing is calibrated on *compute only* of the run at the slowest line."""
    results = sorted(load(), key=lambda result: result.conditions.bits_per_second)
    c, rates = results[0].conditions, [result.conditions.bits_per_second for result in results]
    spec = models.NAMED[c.model]
    cost = dry_run.cost_of(spec, "float32", c.batch_size, c.sequence_length)
    alone = dry_run.record(ALONE, spec, 1, cost).events
    hosts = calibrated("flops", lambda one: replay(alone, one, 1).seconds, line_of(rates[0]),
                       results[0].timed(ALONE.base).median_ms / 1e3)
    computing = replay(alone, hosts, 1).seconds
    grid = [rates[0] * (rates[-1] / rates[0]) ** (i / (N_POINTS - 1)) for i in range(N_POINTS)]

    def line(base, step):
        return CurveLine(base, [(rate, step(rate) / computing) for rate in grid])

    def replayed(choice):
        events = dry_run.record(choice, spec, c.ranks, cost, gloo=True).events
        return lambda rate: replay(events, hosts._replace(between=line_of(rate).between), c.ranks).seconds
    tuned = [one for result in results if (one := catalogue.tuned(result, "ddp"))]
    sizes = [replayed(row.choice) for row in {row.choice: row for row in tuned}.values()] or [replayed(Choice("ddp"))]
    n_bytes = results[0].find(catalogue.OVERLAP).wire_bytes_theory
    found = [line("floor", lambda rate: max(computing, n_bytes * 8 / rate)),
             line(TUNED, lambda rate: min(step(rate) for step in sizes))]
    return found + [line(base, replayed(Choice(base))) for _, base, *_ in CURVES
                    if base not in (TUNED, "floor", *NOT_RUN_DRY)]


# -------------------------------------------------------------------------------------------------------------- command
# Plan before you rent: what a rank of 1024 holds, and how long a step takes, from the code that trains.


fail = functools.partial(command_line.fail, "plan")
BOUNDS = {"world": (1, 4096), "layers": (0, 1000), "width": (0, 2**17), "device_memory": (0.001, 10**6),
          "bucket_cap_mb": (0.001, 10**6)}


def gigabytes(text):
    return float(text.removesuffix("g"))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--model", default="7b", choices=models.NAMED, help="(default 7b)")
    add("--layers", type=int, default=0, metavar="N", help="in place of --model: a LLaMA of so many layers")
    add("--width", type=int, default=0, metavar="N", help="of that LLaMA, a multiple of 128")
    add("--world", type=int, default=1024, help="data-parallel ranks (default 1024)")
    add("--dtype", choices=DTYPES, default="bf16", help="of the parameters (default bf16)")
    add("--device", choices=DEVICES, default="h100", help="(default h100)")
    add("--device-memory", type=gigabytes, default=80.0, metavar="80g", help="of one device (default 80g: 10⁹ bytes)")
    add("--batch-size", type=int, default=1, help="sequences of a micro-batch (default 1)")
    add("--sequence-length", type=int, default=1024, help="tokens of a sequence (default 1024)")
    add("--accumulate", type=int, default=1, help="micro-batches a step, exchanged once (default 1)")
    add("--tensor-parallel", type=int, default=1, help="devices that share each layer of a LLaMA (default 1)")
    add("--bucket-cap-mb", type=float, help="of stage 4 and DDP (default: the best of a few sizes)")
    add("--trees", action="store_true", help="size buckets for NCCL's PAT: reduce-scatters and all-gathers in trees")
    add("--check", action="store_true", help="also compare modelled with measured runs, here and elsewhere")
    add("--advise", action="store_true", help="also say in words what to take")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    add("--svg", type=Path, metavar="PATH", help="write the picture there")
    args = parser.parse_args()
    command_line.check_at_least_1(args, ("batch_size", "sequence_length", "accumulate", "tensor_parallel"), fail)
    if args.layers < 0 or args.width < 0 or args.width % 128 or (args.layers > 0) != (args.width > 0):
        fail("--layers and --width: give both, and a width that is a multiple of 128")
    command_line.check_bounds(args, BOUNDS, fail)
    args.spec = spec = models.of_size(args.layers, args.width) if args.layers else models.NAMED[args.model]
    if args.tensor_parallel > 1 and any(n == 0 or n % args.tensor_parallel for n in (spec.n_heads, spec.n_kv_heads)):
        fail(f"--tensor-parallel {args.tensor_parallel}: the heads of {args.model} can't be shared out so")
    if not spec.n_kv_heads and args.sequence_length > spec.positions:
        fail(f"--sequence-length {args.sequence_length}: {args.model} takes at most {spec.positions}")
    for option, path in (("--json", args.json), ("--svg", args.svg)):
        if path:
            command_line.check_writable(option, path, fail)
    args.model = f"a LLaMA of {args.layers} x {args.width}" if args.layers else args.model
    return args


def main():
    args = parse()
    with ProcessPoolExecutor(min(4, os.cpu_count()), multiprocessing.get_context("spawn"), gc.disable) as workers:
        planner = Planner(args, workers)
        result = plan(planner)
        if args.advise:
            result.advice = advice(planner, result)
        if args.check:
            result.check = check(workers)
    for sheet in plan_sheets(result):
        print(sheet_text(sheet), end="\n\n")
    print(pictures.text(planned_steps(result)[0]), *result.advice, sep="\n\n")
    for option, path, text in (("--json", args.json, saved.to_json(result)),
                               ("--svg", args.svg, pictures.svg(*planned_steps(result)))):
        if path:
            write(option, path, text, fail)
            print(f"\nwritten to {path}")


if __name__ == "__main__":
    from harness.plan import main  # ranks are handed functions of that name

    main()
