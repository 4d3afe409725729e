"""Plan before you rent: what a rank of 1024 holds, and how long a step takes, from the code that trains.

    python -m harness.plan --model 7b --world 1024 --dtype bf16     # or: make plan MODEL=7b WORLD=1024 DTYPE=bf16
    python -m harness.plan --advise     # also in words: which stage, which bucket, and when DDP
    python -m harness.plan --check      # also: modelled time beside runs that were measured, here and elsewhere

Memory is counted: a step runs on tensors without memory (dryrun.py). Time is modelled: the events of that step, one
after the other, on stated hardware (replay.py). Exit code: 0; 2 for bad input.
"""

import argparse
import functools
import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from harness.plan import check, models
from harness.plan.advice import advice
from harness.plan.planner import DEVICES, DTYPES, Planner, plan
from harness.report import step_picture
from harness.report.plan_tables import plan_sheets
from harness.report.sheet import sheet_text
from harness.report.step_picture import planned_steps
from harness.rows import saved
from harness.run import command_line
from harness.run.files import write

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
            result.check = check.check(workers)
    for sheet in plan_sheets(result):
        print(sheet_text(sheet), end="\n\n")
    print(step_picture.text(planned_steps(result)[0]), *result.advice, sep="\n\n")
    for option, path, text in (("--json", args.json, saved.to_json(result)),
                               ("--svg", args.svg, step_picture.svg(*planned_steps(result)))):
        if path:
            write(option, path, text, fail)
            print(f"\nwritten to {path}")
