"""Plan before you rent: what a rank of 1024 holds, and how long a step takes, from the code that trains.

    python -m harness.plan.plan --model 7b --world 1024 --dtype bf16     # or: make plan MODEL=7b WORLD=1024 DTYPE=bf16
    python -m harness.plan.plan --advise     # also in words: which stage, which bucket, and when DDP
    python -m harness.plan.plan --check      # also: modelled time beside runs that were measured, here and elsewhere

Memory is counted: a step runs on tensors without memory (dryrun.py). Time is modelled: the events of that step, one
after the other, on stated hardware (replay.py). Exit code: 0; 2 for bad input.
"""

import argparse
import functools
import gc
import json
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

from harness.measure import timeline
from harness.plan import dryrun, llama, plan_check
from harness.plan.replay import Hardware, replay
from harness.report import tables
from harness.rows import buckets, peers
from harness.run import cli

fail = functools.partial(cli.fail, "plan")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ROWS = {"fp32": [*peers.LADDER, "owner reduce"], "bf16": [row.name for row in peers.PLANNED]}
RANKS, MORE_RANKS = (1, 8, 64, 1024), (8, 32, 128, 512)  # that all rows are counted at; that --advise compares at
CAPS_MB = (100, 400, 1600, 6400)  # buckets that are tried beside the default
AS_FAST = 1.02  # times that differ by less are equal: the model is no better than that
EFFICIENCY = 0.4  # what computing reaches of the device's FLOPs
# As makers state them: 16-bit FLOPs, bytes of memory, bytes to a neighbour in the node, bytes of a node to others.
DEVICES = {"h100": Hardware(989e12, 3.35e12, 450e9, 400e9), "a100": plan_check.A100}


def gigabytes(text):
    return float(text.removesuffix("g"))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--model", default="7b", choices=llama.NAMED, help="(default 7b)")
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
    add("--check", action="store_true", help="also compare modelled with measured runs, here and elsewhere")
    add("--advise", action="store_true", help="also say in words what to take")
    add("--json", type=Path, metavar="PATH", help="write the result there as well, and the picture as .svg")
    args = parser.parse_args()
    cli.check_at_least_1(args, ("world", "batch_size", "sequence_length", "accumulate", "tensor_parallel"), fail)
    if args.layers < 0 or args.width < 0 or args.width % 128 or (args.layers > 0) != (args.width > 0):
        fail("--layers and --width: give both, and a width that is a multiple of 128")
    args.spec = spec = llama.of_size(args.layers, args.width) if args.layers else llama.NAMED[args.model]
    if args.tensor_parallel > 1 and any(n == 0 or n % args.tensor_parallel for n in (spec.n_heads, spec.n_kv_heads)):
        fail(f"--tensor-parallel {args.tensor_parallel}: the heads of {args.model} can't be shared out so")
    if not spec.n_kv_heads and args.sequence_length > spec.positions:
        fail(f"--sequence-length {args.sequence_length}: {args.model} takes at most {spec.positions}")
    if args.world > 4096 or (args.bucket_cap_mb is not None and args.bucket_cap_mb <= 0):
        fail("--world must be at most 4096, and --bucket-cap-mb more than 0")
    if args.json:
        cli.check_beside("--json", args.json, ".svg", fail)
    args.model = f"a LLaMA of {args.layers} x {args.width}" if args.layers else args.model
    return args


class Planner:
    """Runs rows dry, in processes of their own, and replays them: `workers` is a ProcessPoolExecutor.

    `recorded`: (name of a row, d) -> dryrun.Recorded, of all that were run.
    """

    def __init__(self, args, workers):
        self.args, self.workers, self.recorded, device = args, workers, {}, DEVICES[args.device]
        self.spec, self.room = args.spec._replace(tensor_parallel=args.tensor_parallel), args.device_memory * 1e9
        flops = device.flops * EFFICIENCY / (2 if args.dtype == "fp32" else 1)  # TF32 is half as fast as 16 bits
        self.hardware = device._replace(flops=flops, sharing=args.tensor_parallel)
        self.cost = workers.submit(dryrun.cost_of, self.spec, DTYPES[args.dtype], args.batch_size,
                                   args.sequence_length).result()

    def run(self, names, ranks):
        """Each row on each number of ranks."""
        found = {(name, d): self.workers.submit(dryrun.record, name, self.spec, d, self.cost)
                 for name in names for d in ranks if (name, d) not in self.recorded}
        self.recorded.update((task, one.result()) for task, one in found.items())

    def fits(self, name, d):
        return self.recorded[name, d].peak <= self.room

    def ms(self, name, d, micro_batches=None, exchange_each=False):
        """Of a micro-batch, of which a step has `micro_batches`, or else --accumulate."""
        k = micro_batches or self.args.accumulate
        return 1e3 * replay(self.recorded[name, d].events, self.hardware, d, k, exchange_each)["seconds"] / k

    def sizes(self, base):
        """A row -> {its name with a size of bucket: ms a micro-batch}, the default first; few rows have buckets."""
        caps_mb = [self.args.bucket_cap_mb] if self.args.bucket_cap_mb else [None, *CAPS_MB]
        names = [peers.sized_name(base, cap_mb) if cap_mb else base
                 for cap_mb in (caps_mb if base.startswith(("stage 4", "ddp")) else [None])]
        self.run(names, [self.args.world])
        return {name: self.ms(name, self.args.world) for name in names}

    def tuned(self, base):
        """-> the smallest size with which it is as fast as with any, of those with which it fits."""
        ms = self.sizes(base)
        fitting = [name for name in ms if self.fits(name, self.args.world)] or list(ms)
        return next(name for name in fitting if ms[name] <= AS_FAST * min(ms[one] for one in fitting))


def plan(planner):
    """-> {"conditions": {…}, "rows": [{…}, …]}: counts at several d, and the step at --world."""
    args, rows = planner.args, []
    ranks = sorted({d for d in RANKS if d < args.world} | {args.world})
    planner.run(ROWS[args.dtype], [args.world])  # all at once
    names = {planner.tuned(base): base for base in ROWS[args.dtype]}
    planner.run(names, ranks)
    for name, base in names.items():
        counted = {d: planner.recorded[name, d] for d in ranks}
        last, formula = counted[args.world], functools.partial(peers.find(name).bytes_per_param, 1)
        whole, all_of_it = (formula(d, SimpleNamespace(bucket_buffer_bytes=0)) for d in (math.inf, 1))
        shared = f" + {all_of_it - whole:g}/d" if all_of_it > whole else ""
        rows.append({
            "name": name, "formula": f"{whole:g}{shared}{' + b' if base.startswith('stage 4') else ''}",
            "held": last.held, "padding": sum(last.held.values()) - last.theory, "peak": last.peak,
            "fits_from": next((d for d in ranks if all(planner.fits(name, more) for more in ranks if more >= d)), 0),
            "bytes_per_param": {str(d): sum(one.held.values()) / one.numel for d, one in counted.items()},
            "bytes_per_param_theory": {str(d): one.theory / one.numel for d, one in counted.items()},
            "step": replay(last.events, planner.hardware, args.world, args.accumulate)})
    conditions = {key: value for key, value in vars(args).items() if key not in ("json", "check", "advise", "spec")}
    return {"conditions": {**conditions, "parameters": last.numel, "activations": planner.cost.activations,
                           "efficiency": EFFICIENCY, **planner.hardware._asdict()}, "rows": rows}


def advice(planner, result):
    """-> sentences."""
    args, world, rows = planner.args, planner.args.world, {row["name"]: row for row in result["rows"]}
    ours, owner, ddp = (next(name for name in rows if name.startswith(kind)) for kind in ("stage 4", "owner", "ddp"))
    fitting = {name: planner.ms(name, world) for name, row in rows.items() if row["fits_from"]}
    room, stage4 = f"{args.device_memory:g} GB", planner.recorded[ours, world]
    fastest = "; ".join(f"{name}, {fitting[name]:,.0f} ms" for name in sorted(fitting, key=fitting.get)[:3])
    sizes = planner.sizes(buckets.base_of(ours))
    by_size = ", ".join(f"{ms:,.0f} ms with {buckets.size_of(name)}" for name, ms in sizes.items())
    once, each = (planner.ms(ours, world, 8, exchange_each) for exchange_each in (False, True))
    said = [f"Stage: {len(fitting)} rows fit in {room}; fastest are {fastest} a micro-batch." if fitting else
            f"Stage: none fits in {room}. Let devices share layers (--tensor-parallel 8), or take FSDP2.",
            f"Bucket of stage 4: {buckets.size_of(ours)}, in two buffers of {stage4.held['buffers'] / 2e9:.1f} GB. A "
            f"micro-batch takes {by_size}.",
            f"Accumulation: {'an exchange each' if each <= AS_FAST * once else 'an exchange a step: no_sync()'}. Of 8 "
            f"micro-batches one takes {each:,.0f} ms with an exchange each, and {once:,.0f} ms with one a step, which "
            f"keeps whole gradients of {stage4.held['parameters'] / 1e9:.1f} GB."]
    ranks = sorted({d for d in MORE_RANKS if d < world} | {world})
    planner.run([ours, owner, ddp], ranks)
    for title, name in (("Owner's reduce", owner), ("DDP", ddp)):
        over = {d: planner.ms(name, d) / planner.ms(ours, d) for d in ranks}
        slower = next((d for d in ranks if all(over[more] > AS_FAST for more in ranks if more >= d)), 0)
        behind = f"behind stage 4 from {slower} ranks on" if slower else "as fast as stage 4 or faster"
        said.append(f"{title}: {behind}, of whose time it takes {', '.join(f'{over[d]:.2f} on {d}' for d in ranks)}. "
                    f"It {'fits' if rows[name]['fits_from'] else 'does not fit'} in {room}.")
    return said


def picture(result):
    """-> rows and title for timeline.svg and timeline.text: those that don't take four times as long as the fastest."""
    c, steps = result["conditions"], {row["name"]: row["step"] for row in result["rows"]}
    longest = 4 * min(step["seconds"] for step in steps.values())
    return [(name, step) for name, step in steps.items() if step["seconds"] <= longest], (
        f"One step on rank 0 of {c['world']}, modelled: {c['model']}, {c['batch_size']} x {c['sequence_length']}")


def main():
    args = parse()
    with ProcessPoolExecutor(min(4, os.cpu_count()), multiprocessing.get_context("spawn"), gc.disable) as workers:
        planner = Planner(args, workers)
        result = plan(planner)
        if args.advise:
            result["advice"] = advice(planner, result)
        if args.check:
            result["check"] = plan_check.check(workers)
    for sheet in tables.plan_sheets(result):
        print(tables.sheet_text(sheet), end="\n\n")
    print(timeline.text(picture(result)[0]), *result.get("advice", []), sep="\n\n")
    if args.json:
        cli.write("--json", args.json, json.dumps(result), fail)
        cli.write("--json", args.json.with_suffix(".svg"), timeline.svg(*picture(result)), fail)
        print(f"\nwritten to {args.json} and {args.json.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
