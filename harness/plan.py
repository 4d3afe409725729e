"""Plan before you rent: what a rank of 1024 holds, and how long a step takes, from the code that trains.

    python -m harness.plan --model 7b --world 1024 --dtype bf16     # or: make plan MODEL=7b WORLD=1024 DTYPE=bf16
    python -m harness.plan --check      # also: modelled time beside runs that were measured, here and elsewhere

Memory is counted: a step runs on tensors without memory (harness/dryrun.py). Time is modelled: the events of that step,
one after the other, on stated hardware (harness/replay.py). Exit code: 0; 2 for bad input.
"""

import argparse
import functools
import json
import math
from pathlib import Path

from harness import cli, dryrun, llama, peers, tables
from harness.replay import Hardware, replay

fail = functools.partial(cli.fail, "plan")
DTYPES = {"fp32": dryrun.FP32, "bf16": dryrun.BF16}
# As makers state them: 16-bit FLOPs, bytes of memory, bytes to a neighbour in the node, bytes of a node to others.
DEVICES = {"h100": Hardware(989e12, 3.35e12, 450e9, 400e9), "a100": Hardware(312e12, 2.0e12, 300e9, 100e9)}


# Two hosts on one machine: bytes of memory a second for one core, seconds a message, TCP's payload in a full packet.
HOST_MEMORY_RATE, HOST_LATENCY, PAYLOAD = 5e9, 2e-4, 1448 / 1514
# LLaMA-13B on A100 or A800, 8 in a node with 4 x 200 Gbit/s: row, GPUs, sequences a step and a micro-batch, tokens/s
# a GPU. From Megatron-LLaMA's README; with 128 GPUs from a user, in its issue 22. The rate of computing is calibrated
# on the first one. Neither source states tensor parallelism, and the README no size of a step: both are assumed.
PUBLISHED = [("stage 4 bf16", 256, 2048, 4, 1890), ("stage 3 bf16/fp32", 256, 2048, 4, 1630),
             ("stage 4 bf16", 512, 2048, 4, 1845), ("stage 3 bf16/fp32", 512, 2048, 4, 1430),
             ("stage 4 bf16", 128, 1024, 2, 1126.3), ("stage 3 bf16/fp32", 128, 1024, 2, 1885.8)]
ROOT = Path(__file__).resolve().parents[1]


def gigabytes(text):
    return float(text.removesuffix("g"))


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--model", default="7b", choices=llama.NAMED, help="(default 7b)")
    add("--world", type=int, default=1024, help="data-parallel ranks (default 1024)")
    add("--dtype", choices=DTYPES, default="bf16", help="of the parameters (default bf16)")
    add("--device-memory", type=gigabytes, default=80.0, metavar="80g", help="of one device (default 80g: 10⁹ bytes)")
    add("--batch-size", type=int, default=1, help="sequences of a micro-batch (default 1)")
    add("--sequence-length", type=int, default=1024, help="tokens of a sequence (default 1024)")
    add("--accumulate", type=int, default=1, help="micro-batches a step, exchanged once (default 1)")
    add("--tensor-parallel", type=int, default=1, help="devices that share each layer of a LLaMA (default 1)")
    add("--bucket-cap-mb", type=int, default=25, help="of stage 4 (default 25)")
    add("--device", choices=DEVICES, default="h100", help="(default h100)")
    add("--efficiency", type=float, default=0.4, help="what computing reaches of the device's FLOPs (default 0.4)")
    add("--check", action="store_true", help="also compare modelled with measured runs, here and elsewhere")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    args = parser.parse_args()
    cli.check_at_least_1(args, ("world", "batch_size", "sequence_length", "accumulate", "bucket_cap_mb"), fail)
    spec = llama.NAMED[args.model]
    if args.tensor_parallel not in (1, 2, 4, 8)[:4 if spec.n_kv_heads else 1] or spec.n_heads % args.tensor_parallel:
        fail(f"--tensor-parallel {args.tensor_parallel}: {args.model} can't be cut so; a LLaMA can, in 2, 4 or 8")
    if not spec.n_kv_heads and args.sequence_length > spec.positions:
        fail(f"--sequence-length {args.sequence_length}: {args.model} takes at most {spec.positions}")
    if args.world > 4096:
        fail(f"--world {args.world}: it must be at most 4096")
    if not 0 < args.efficiency <= 1:
        fail(f"--efficiency {args.efficiency}: it must be more than 0, and at most 1")
    if args.json:
        cli.check_writable("--json", args.json, fail)
    return args


def hardware_of(args):
    """fp32 is TF32 in matrix products: half as fast as 16 bits."""
    device = DEVICES[args.device]
    return device._replace(flops=device.flops * args.efficiency / (2 if args.dtype == "fp32" else 1),
                           sharing=args.tensor_parallel)


def plan(args):
    """-> {"conditions": {…}, "rows": [{…}, …]}: counts at several d, and the step at --world."""
    spec, dtype = llama.NAMED[args.model]._replace(tensor_parallel=args.tensor_parallel), DTYPES[args.dtype]
    cost, rows = dryrun.cost_of(spec, dtype, args.batch_size, args.sequence_length), []
    for row in dryrun.ROWS:
        if row.dtype == dtype and row.name != "compute only":
            found = {d: dryrun.record(row, spec, d, cost, args.bucket_cap_mb)
                     for d in sorted({d for d in (1, 8, 64, 1024) if d < args.world} | {args.world})}
            one = found[args.world]
            step = replay(one.events, hardware_of(args), args.world, args.accumulate)
            rows.append({
                "name": row.name, "formula": row.text, "held": one.held,
                "peak": {str(d): each.peak for d, each in found.items()},
                "bytes_per_param": {str(d): sum(each.held.values()) / each.numel for d, each in found.items()},
                "bytes_per_param_theory": {str(d): row.formula(d) + each.held["buffers"] / each.numel
                                           for d, each in found.items()},
                "seconds": step["seconds"], "exposed_seconds": step["exposed_seconds"]})
    conditions = {key: value for key, value in vars(args).items() if key not in ("json", "check")}
    return {"conditions": {**conditions, "parameters": one.numel, "activations": cost.activations,
                           **hardware_of(args)._asdict()}, "rows": rows}


def check_on_two_hosts():
    """-> [(rate, row, measured, modelled), …] in seconds: results/network*.json, where `compute only` tells how fast
    this machine computes. The optimizer exchanges parts there, which sends the bytes of NCCL's collectives."""
    found = []
    for path in sorted((ROOT / "results").glob("network*.json")):
        latest = json.loads(path.read_text(encoding="utf-8"))
        for result in (latest, *latest["other_rates"]):
            c = result["conditions"]
            spec, times = llama.NAMED[c["model"]], {row["name"]: row["step_ms"] for row in result["rows"]}
            cost = dryrun.cost_of(spec, dryrun.FP32, c["batch_size"], c["sequence_length"])
            hosts = Hardware(1.0, HOST_MEMORY_RATE, math.inf, PAYLOAD * c["bits_per_second"] / 8, per_node=1,
                             latency_between=HOST_LATENCY, backend="gloo")
            computes = dryrun.record(dryrun.find("compute only"), spec, 1, cost).events
            left = times["compute only"]["median"] / 1e3 - sum(event.n_bytes for event in computes) / HOST_MEMORY_RATE
            hosts = hosts._replace(flops=sum(event.flops for event in computes) / left)
            for name in peers.LADDER:
                if times.get(name):
                    events = dryrun.record(dryrun.find(name[:7]), spec, c["ranks"], cost, bucket_cap_mb=2).events
                    found.append((f"{path.stem} {c['rate']}", name, times[name]["median"] / 1e3,
                                  replay(events, hosts, c["ranks"])["seconds"]))
    return found


def check_on_published():
    """-> [(row, GPUs, sequences, published, modelled), …] in tokens a second and GPU. Stage 4 stands for the overlapped
    optimizer, with an exchange for each micro-batch; stage 3 for Megatron's DistributedOptimizer."""
    spec, length, found = llama.NAMED["13b"]._replace(tensor_parallel=2), 2048, []
    hardware = DEVICES["a100"]._replace(sharing=2, flops=DEVICES["a100"].flops / 2)
    for name, gpus, sequences, batch, published in PUBLISHED:
        d = gpus // spec.tensor_parallel
        events = dryrun.record(dryrun.find(name), spec, d, dryrun.cost_of(spec, dryrun.BF16, batch, length), 400).events

        def modelled():
            step = replay(events, hardware, d, sequences // d // batch, exchange_each=name.startswith("stage 4"))
            return sequences * length / gpus / step["seconds"]
        for _ in range(0 if found else 20):  # the first: until it is met
            hardware = hardware._replace(flops=hardware.flops * published / modelled())
        found.append((name, gpus, sequences, published, modelled()))
    return found


def check_sheets(check):
    return [
        tables.Sheet("Two hosts, a step",
                     [("", ""), ("", ""), ("ms", "measured"), ("ms", "modelled"), ("error", "modelled")],
                     [[where, name, f"{seconds * 1e3:,.0f}", f"{modelled * 1e3:,.0f}", f"{modelled / seconds - 1:+.0%}"]
                      for where, name, seconds, modelled in check["two_hosts"]],
                     [f"Calibrated on compute only. Assumed: {HOST_MEMORY_RATE / 1e9:g} GB/s of memory, "
                      f"{HOST_LATENCY * 1e6:g} µs a message, {PAYLOAD:.1%} of the line carry data, sending takes "
                      "no time of the one core that computes."]),
        tables.Sheet("LLaMA-13B on A100: tokens/s a GPU",
                     [("", ""), ("GPUs", ""), ("sequences", ""), ("", "published"), ("", "modelled"),
                      ("error", "modelled")],
                     [[name, str(gpus), str(sequences), f"{published:,.0f}", f"{modelled:,.0f}",
                       f"{modelled / published - 1:+.0%}"] for name, gpus, sequences, published, modelled
                      in check["published"]],
                     ["Published: by Megatron-LLaMA; with 128 GPUs by a user of it. Calibrated on the first row. "
                      "Assumed: tensor parallel 2, sequences of 2048, links at full rate. Stage 4 exchanges after each "
                      "micro-batch, in buckets of 400 MiB."])]


def sheets(result):
    return [memory_sheet(result), tables.state_sheet(result["rows"]), time_sheet(result),
            *(check_sheets(result["check"]) if "check" in result else [])]


def memory_sheet(result):
    c, rows = result["conditions"], []
    for row in result["rows"]:
        fits = [d for d, peak in row["peak"].items() if peak <= c["device_memory"] * 1e9]
        figures = [*row["held"].values(), c["activations"], row["peak"][str(c["world"])]]
        rows.append([row["name"], *(f"{n_bytes / 1e9:.2f}" for n_bytes in figures), fits[0] if fits else "none"])
    names = ("params", "grads", "main", "moments", "padding", "buffers", "activ.", "peak", "fits\nfrom d")
    return tables.Sheet(
        f"What a rank of {c['world']} holds, in GB: {c['model']}, {c['parameters']:,} parameters a rank",
        [("", ""), *((name, "counted") for name in names)], rows,
        ["GB: 10⁹ bytes, after a step, on rank 0. main: fp32 copies of 16-bit parameters. buffers: those that buckets "
         f"travel in. activ.: of a micro-batch of {c['batch_size']} x {c['sequence_length']}. peak: the most at one "
         f"moment of a step. fits: {c['device_memory']:g} GB, of the d below; torch's allocator takes more."])


def time_sheet(result):
    c, rows = result["conditions"], []
    tokens = c["batch_size"] * c["sequence_length"] * c["accumulate"] / c["tensor_parallel"]
    for row in result["rows"]:
        rows.append([row["name"], f"{row['seconds'] * 1e3:,.0f}", f"{row['exposed_seconds'] * 1e3:,.0f}",
                     f"{tokens / row['seconds']:,.0f}"])
    return tables.Sheet(
        f"A step on {c['world'] * c['tensor_parallel']} x {c['device']}",
        [("", ""), ("ms a step", "modelled"), ("exposed ms", "modelled"), ("tokens/s\na device", "modelled")], rows,
        [f"Assumed: {c['flops'] / 1e12:.0f} TFLOP/s, {c['efficiency']:.0%} of what the maker states, "
         f"{c['memory_rate'] / 1e12:.2f} TB/s of memory, rings of {c['in_node'] / 1e9:.0f} GB/s in a node and "
         f"{c['between'] / 1e9:.0f} GB/s between nodes of {c['per_node']}, {c['latency_in_node'] * 1e6:.0f} and "
         f"{c['latency_between'] * 1e6:.0f} µs a hop. Nobody is late, Python takes no time, tensor parallelism sends "
         f"nothing. {c['accumulate']} micro-batch(es) a step. exposed: the device waits for messages."])


def main():
    args = parse()
    result = plan(args)
    if args.check:
        result["check"] = {"two_hosts": check_on_two_hosts(), "published": check_on_published()}
    for sheet in sheets(result):
        print(tables.sheet_text(sheet), end="\n\n")
    if args.json:
        cli.write("--json", args.json, json.dumps(result, indent=1), fail)
        print(f"written to {args.json}")


if __name__ == "__main__":
    main()
