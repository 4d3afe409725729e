"""Plan before you rent: what a rank of 1024 holds, and how long a step takes, from the code that trains.

    python -m harness.plan --model 7b --world 1024 --dtype bf16     # or: make plan MODEL=7b WORLD=1024 DTYPE=bf16
    python -m harness.plan --advise     # also in words: which stage, which bucket, and when DDP
    python -m harness.plan --check      # also: modelled time beside runs that were measured, here and elsewhere

Memory is counted: a step runs on tensors without memory (harness/dryrun.py). Time is modelled: the events of that step,
one after the other, on stated hardware (harness/replay.py). Exit code: 0; 2 for bad input.
"""

import argparse
import functools
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from harness import cli, dryrun, llama, plan_check, tables, timeline
from harness.replay import Hardware, replay

fail = functools.partial(cli.fail, "plan")
DTYPES = {"fp32": dryrun.FP32, "bf16": dryrun.BF16}
RANKS = (1, 8, 64, 1024)
CAPS_MB = (25, 100, 400, 1600)  # buckets that --advise tries
# As makers state them: 16-bit FLOPs, bytes of memory, bytes to a neighbour in the node, bytes of a node to others.
DEVICES = {"h100": Hardware(989e12, 3.35e12, 450e9, 400e9), "a100": Hardware(312e12, 2.0e12, 300e9, 100e9)}


def gigabytes(text):
    return float(text.removesuffix("g"))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--model", default="7b", choices=llama.NAMED, help="(default 7b)")
    add("--layers", type=int, metavar="N", help="in place of --model: a LLaMA of so many layers, with --width")
    add("--width", type=int, metavar="N", help="of that LLaMA, a multiple of 128")
    add("--world", type=int, default=1024, help="data-parallel ranks (default 1024)")
    add("--dtype", choices=DTYPES, default="bf16", help="of the parameters (default bf16)")
    add("--device-memory", type=gigabytes, default=80.0, metavar="80g", help="of one device (default 80g: 10⁹ bytes)")
    add("--batch-size", type=int, default=1, help="sequences of a micro-batch (default 1)")
    add("--sequence-length", type=int, default=1024, help="tokens of a sequence (default 1024)")
    add("--accumulate", type=int, default=1, help="micro-batches a step, exchanged once (default 1)")
    add("--tensor-parallel", type=int, default=1, help="devices that share each layer of a LLaMA (default 1)")
    add("--bucket-cap-mb", type=int, help="of stage 4, DDP and the owner's reduce (default: each one's own)")
    add("--device", choices=DEVICES, default="h100", help="(default h100)")
    add("--efficiency", type=float, default=0.4, help="what computing reaches of the device's FLOPs (default 0.4)")
    add("--check", action="store_true", help="also compare modelled with measured runs, here and elsewhere")
    add("--advise", action="store_true", help="also say in words what to take")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    args = parser.parse_args()
    at_least_1 = ["world", "batch_size", "sequence_length", "accumulate", "tensor_parallel"]
    at_least_1 += [name for name in ("layers", "width", "bucket_cap_mb") if getattr(args, name) is not None]
    cli.check_at_least_1(args, at_least_1, fail)
    if (args.layers is None) != (args.width is None) or (args.width or 128) % 128:
        fail("--layers and --width: give both, and a width that is a multiple of 128")
    spec = spec_of(args)
    if args.tensor_parallel > 1 and any(n == 0 or n % args.tensor_parallel for n in (spec.n_heads, spec.n_kv_heads)):
        fail(f"--tensor-parallel {args.tensor_parallel}: the heads of {args.model} can't be shared out so")
    if not spec.n_kv_heads and args.sequence_length > spec.positions:
        fail(f"--sequence-length {args.sequence_length}: {args.model} takes at most {spec.positions}")
    if args.world > 4096:
        fail(f"--world {args.world}: it must be at most 4096")
    if not 0 < args.efficiency <= 1:
        fail(f"--efficiency {args.efficiency}: it must be more than 0, and at most 1")
    if args.json:
        cli.check_beside("--json", args.json, ".svg", fail)
    return args


def spec_of(args):
    if args.layers:
        heads = args.width // 128
        args.model = f"llama of {args.layers} x {args.width}"
        return llama.Spec(args.layers, heads, args.width, 32000, heads, -(-args.width * 8 // 3 // 256) * 256)
    return llama.NAMED[args.model]._replace(tensor_parallel=args.tensor_parallel)


def hardware_of(args):
    """fp32 is TF32 in matrix products: half as fast as 16 bits."""
    device = DEVICES[args.device]
    flops = device.flops * args.efficiency / (2 if args.dtype == "fp32" else 1)
    return device._replace(flops=flops, sharing=args.tensor_parallel)


class Planner:
    """Runs rows dry, in processes of their own: `workers` is a ProcessPoolExecutor."""

    def __init__(self, args, workers):
        self.args, self.workers = args, workers
        self.cost = workers.submit(dryrun.cost_of, spec_of(args), DTYPES[args.dtype], args.batch_size,
                                   args.sequence_length).result()

    def run(self, tasks):
        """[(name of a row, d, bucket_cap_mb), …] -> [dryrun.Recorded, …]"""
        found = [self.workers.submit(dryrun.record, dryrun.find(name), spec_of(self.args), d, self.cost, cap_mb)
                 for name, d, cap_mb in tasks]
        return [one.result() for one in found]

    def seconds(self, recorded, d, **accumulation):
        return replay(recorded.events, hardware_of(self.args), d, **accumulation)["seconds"]


def plan(planner):
    """-> {"conditions": {…}, "rows": [{…}, …]}: counts at several d, and the step at --world."""
    args, limit, rows = planner.args, planner.args.device_memory * 1e9, []
    names = [row.name for row in dryrun.ROWS if row.dtype == DTYPES[args.dtype]]
    ranks = sorted({d for d in RANKS if d < args.world} | {args.world})
    tasks = [(name, d, args.bucket_cap_mb) for name in names for d in ranks]
    found = {task[:2]: one for task, one in zip(tasks, planner.run(tasks))}
    for name in names:
        row, last = dryrun.find(name), found[name, args.world]
        counted = {d: found[name, d] for d in ranks}
        fits_from = next((d for d in ranks if counted[d].peak <= limit), None)
        less = [d for d in ranks if d < (fits_from or 0)][-1:]  # too few, and how many more are?
        powers = [d for d in (2**i for i in range(12)) if less and less[0] < d < fits_from]
        fits = [d for d, one in zip(powers, planner.run([(name, d, args.bucket_cap_mb) for d in powers]))
                if one.peak <= limit]
        step = replay(last.events, hardware_of(args), args.world, args.accumulate)
        rows.append({
            "name": name, "formula": row.formula, "held": last.held, "fits_from": min([*fits, fits_from or 0]),
            "peak": {str(d): one.peak for d, one in counted.items()},
            "bytes_per_param": {str(d): sum(one.held.values()) / one.numel for d, one in counted.items()},
            "bytes_per_param_theory": {str(d): row.whole + row.shared / d + one.held["buffers"] / one.numel
                                       for d, one in counted.items()},
            "step": step})
    conditions = {key: value for key, value in vars(args).items() if key not in ("json", "check", "advise")}
    return {"conditions": {**conditions, "parameters": last.numel, "activations": planner.cost.activations,
                           **hardware_of(args)._asdict()}, "rows": rows}


def advice(planner, result):
    """-> sentences. What is slower by less than a fiftieth counts as as fast."""
    args, rows = planner.args, {row["name"]: row for row in result["rows"]}
    world, limit = args.world, args.device_memory * 1e9
    stage4, owner, ddp = (next(name for name in rows if name.startswith(kind)) for kind in ("stage 4", "owner", "ddp"))
    sweep = dict(zip(CAPS_MB, planner.run([(stage4, world, cap) for cap in CAPS_MB])))
    ms = {cap: 1e3 * planner.seconds(one, world) for cap, one in sweep.items()}
    cap = next(cap for cap in CAPS_MB if ms[cap] <= 1.02 * min(ms.values()))
    fitting = {name: row["step"]["seconds"] for name, row in rows.items() if 0 < row["fits_from"] <= world}
    fitting.pop(stage4, None)
    if sweep[cap].peak <= limit:
        fitting[f"{stage4} with buckets of {cap} MiB"] = ms[cap] / 1e3
    fastest = sorted(fitting, key=fitting.get)
    said = ["Stage: of the rows that fit, " + ", ".join(f"{name} takes {fitting[name] * 1e3:,.0f} ms" for name in fastest)
            if fitting else f"Stage: none fits in {args.device_memory:g} GB on {world} ranks: let devices share layers "
            "(--tensor-parallel 8), or take FSDP2, which shards parameters too"]
    said.append(f"Bucket of stage 4: {cap} MiB. " + ", ".join(f"{size} MiB: {ms[size]:,.0f} ms" for size in CAPS_MB) +
                f". Its two buffers then hold {sweep[cap].held['buffers'] / 1e9:.1f} GB")
    once, each = (planner.seconds(sweep[cap], world, micro_batches=8, exchange_each=way) / 8 for way in (False, True))
    grads = sweep[cap].held["parameters"] / 1e9
    said.append(f"Accumulation: {'exchange each micro-batch' if each <= 1.02 * once else 'exchange once, in no_sync()'}. "
                f"Of 8 micro-batches one takes {once * 1e3:,.0f} ms with an exchange a step, and {each * 1e3:,.0f} with "
                f"an exchange each, which needs no {grads:.1f} GB for whole gradients")
    ranks = sorted({d for d in (8, 32, 128, 512) if d < world} | {world})
    times = {name: {d: planner.seconds(one, d) for d, one in
                    zip(ranks, planner.run([(name, d, size) for d in ranks]))}
             for name, size in ((stage4, cap), (owner, args.bucket_cap_mb), (ddp, args.bucket_cap_mb))}
    for name, title in ((owner, "Owner's reduce"), (ddp, "DDP")):
        ratios = {d: times[name][d] / times[stage4][d] for d in ranks}
        behind = next((d for d in ranks if all(ratios[other] > 1.02 for other in ranks if other >= d)), None)
        fits = rows[name]["fits_from"]
        said.append(f"{title}: {f'behind stage 4 from {behind} ranks on' if behind else 'not behind stage 4'}, of those "
                    "tried; over its time: " + ", ".join(f"{ratio:.2f} on {d}" for d, ratio in ratios.items()) +
                    f". It fits {f'from {fits} ranks on' if fits else 'on no number of ranks'}")
    return [f"{one}." for one in said]


def picture(result):
    """-> rows and title for timeline.svg and timeline.text."""
    c = result["conditions"]
    return ([(row["name"], row["step"]) for row in result["rows"]],
            f"One step on rank 0 of {c['world']}, modelled: {c['model']}, {c['batch_size']} x {c['sequence_length']}")


def sheets(result):
    return [memory_sheet(result), tables.state_sheet(result["rows"]), time_sheet(result),
            *(plan_check.sheets(result["check"]) if "check" in result else [])]


def memory_sheet(result):
    c, rows = result["conditions"], []
    for row in result["rows"]:
        figures = [*row["held"].values(), c["activations"], row["peak"][str(c["world"])]]
        rows.append([row["name"], *(f"{n_bytes / 1e9:.2f}" for n_bytes in figures), str(row["fits_from"] or "none")])
    names = ("params", "grads", "main", "moments", "padding", "buffers", "activ.", "peak", "fits\nfrom d")
    return tables.Sheet(
        f"What a rank of {c['world']} holds, in GB: {c['model']}, {c['parameters']:,} parameters a rank",
        [("", ""), *((name, "counted") for name in names)], rows,
        ["GB: 10⁹ bytes, after a step, on rank 0. main: fp32 copies of 16-bit parameters. buffers: those that buckets "
         f"travel in. activ.: of a micro-batch of {c['batch_size']} x {c['sequence_length']}. peak: the most at one "
         f"moment of a step. fits: in {c['device_memory']:g} GB, of d = 1, 2, 4, …; torch's allocator takes more."])


def time_sheet(result):
    c = result["conditions"]
    tokens = c["batch_size"] * c["sequence_length"] * c["accumulate"] / c["tensor_parallel"]
    return tables.Sheet(
        f"A step on {c['world'] * c['tensor_parallel']} x {c['device']}",
        [("", ""), ("ms a step", "modelled"), ("exposed ms", "modelled"), ("tokens/s\na device", "modelled")],
        [[row["name"], *(f"{1e3 * row['step'][key]:,.0f}" for key in ("seconds", "exposed_seconds")),
          f"{tokens / row['step']['seconds']:,.0f}"] for row in result["rows"]],
        [f"Assumed: {c['flops'] / 1e12:.0f} TFLOP/s, {c['efficiency']:.0%} of what the maker states, "
         f"{c['memory_rate'] / 1e12:.2f} TB/s of memory, rings of {c['in_node'] / 1e9:.0f} GB/s in a node and "
         f"{c['between'] / 1e9:.0f} GB/s between nodes of {c['per_node']}, {c['latency_in_node'] * 1e6:.0f} and "
         f"{c['latency_between'] * 1e6:.0f} µs a hop. Nobody is late, Python takes no time, tensor parallelism sends "
         f"nothing. {c['accumulate']} micro-batch(es) a step. exposed: the device waits for messages."])


def main():
    args = parse()
    with ProcessPoolExecutor(min(4, os.cpu_count()), multiprocessing.get_context("spawn")) as workers:
        planner = Planner(args, workers)
        result = plan(planner)
        if args.advise:
            result["advice"] = advice(planner, result)
        if args.check:
            result["check"] = plan_check.check(workers)
    for sheet in sheets(result):
        print(tables.sheet_text(sheet), end="\n\n")
    print(timeline.text(picture(result)[0]), *result.get("advice", []), sep="\n\n")
    if args.json:
        cli.write("--json", args.json, json.dumps(result), fail)
        cli.write("--json", args.json.with_suffix(".svg"), timeline.svg(*picture(result)), fail)
        print(f"written to {args.json} and {args.json.with_suffix('.svg')}")


if __name__ == "__main__":
    main()
