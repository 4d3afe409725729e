"""One step of a row, as rank x time: what computes when, and what travels when.

    python -m harness.measure.timeline [--rows "stage 4"] [--ranks 2] [--model tiny]        # or: make timeline STAGE=4
    python -m harness.measure.timeline --rows all    # ddp and the four stages on one axis, or: make timeline STAGE=all

prints it, and writes a picture, and a trace for https://ui.perfetto.dev and chrome://tracing.
"""

import argparse
import functools
import json
import sys
from pathlib import Path

from harness.measure.recorder import record
from harness.measure.setup import Settings
from harness.report.step_picture import svg, text
from harness.report.step_trace import trace
from harness.rows import catalogue
from harness.run import command_line
from harness.run.files import write
from harness.run.workers import WorkerError, Workers
from harness.train.gpt import MODELS

fail = functools.partial(command_line.fail, "timeline")


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--rows", default="", metavar="TEXT", help="only rows whose name holds TEXT, and ddp; all: ddp and the four "
        "stages, on rank 0")
    add("--ranks", type=int, default=2, help="processes on this machine (default 2)")
    add("--model", default="tiny", help="see bench.py (default tiny)")
    add("--batch-size", type=int, default=8, help="sequences per rank (default 8)")
    add("--sequence-length", type=int, default=128, help="bytes per sequence (default 128)")
    add("--out", type=Path, default=Path("measured/timeline.svg"), help="of the picture; the trace is beside it")
    args = parser.parse_args()
    command_line.check_workload(args, ("ranks",), MODELS, fail)
    command_line.check_beside("--out", args.out, ".json", fail)
    if args.out.suffix != ".svg":
        fail(f"--out {args.out}: the picture is an SVG: let its name end in .svg")
    every = [row.name for row in catalogue.ROWS if row.dtype == "float32"]
    names = [name for name in every if args.rows in name or name == catalogue.REFERENCE]
    if args.rows == "all":
        return args, catalogue.LADDER
    if not any(args.rows in name for name in names):
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(every)}")
    return args, names


def main():
    args, names = parse()
    settings = Settings(args.model, args.batch_size, args.sequence_length, steps=3)
    n_drawn = 1 if args.rows == "all" else args.ranks
    with Workers(args.ranks) as workers:
        rows = [(f"{name}, rank {rank}", step) for name in names
                for rank, step in enumerate(workers.run(record, settings, name)[:n_drawn])]
    title = f"One step, {args.ranks} ranks on one machine: {args.model}, {args.batch_size} x {args.sequence_length}"
    try:
        write("--out", args.out, svg(rows, title), fail)
        write("--out", args.out.with_suffix(".json"), json.dumps(trace(rows)), fail)
    finally:  # see bench.py
        print(text(rows))
    print(f"written to {args.out} and {args.out.with_suffix('.json')}")


if __name__ == "__main__":
    try:
        main()
    except WorkerError as error:
        sys.exit(f"timeline: {error}")
