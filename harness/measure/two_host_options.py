"""The command line of make network: read outside and on each host. It loads no torch: bad input is answered at once."""

import argparse
import functools
import re
from pathlib import Path

from harness.rows.choice import Choice, is_asked
from harness.run import command_line

fail = functools.partial(command_line.fail, "network")

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
ROWS = [*map(Choice, ("compute only", "compute + bytes", "ddp", "ddp + stage 2", "ddp + torch ZeRO",
                      "fsdp2", "rung 0 replicated", "stage 1 naive broadcast", "stage 2 all-gather",
                      "stage 3 grad buffer", "owner reduce")), Choice("owner reduce", 2),
        *map(Choice, ("stage 4 neither", "stage 4 only gradients", "stage 4 only parameters", "stage 4 overlap",
                      "compute only bf16", "stage 4 overlap bf16", "stage 4, whole messages",
                      "stage 2, gloo's own", "stage 3, gloo's own", "fsdp2, gloo's own"))]
# --rows curve: what make curve times at each rate.
CURVE = [*map(Choice, ("compute only", "ddp", "rung 0 replicated", "stage 2 all-gather", "stage 3 grad buffer",
                       "stage 4 overlap", "fsdp2"))]
# Where --rows asks for them.
VARIANTS = [Choice(f"variants {name}") for name in ("per_parameter", "whole_matrices", "hybrid", "wire16", "moments16",
                                                    "finite", "blocks", "offload", "remainder16")]
VARIANTS += [Choice("ddp summed in bf16")]


def parse(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--rate", default="1gbit", help="of the line, as tc writes it: 300mbit, 1gbit (default 1gbit)")
    add("--model", default="tiny", help="see bench.py (default tiny)")
    add("--batch-size", type=int, default=8, help="sequences per rank (default 8)")
    add("--sequence-length", type=int, default=128, help="bytes per sequence (default 128)")
    add("--rounds", type=int, default=4, help="in each, every row is timed once (default 4)")
    add("--steps", type=int, default=6, help="timed in a round, one by one (default 6)")
    add("--rows", default="", metavar="TEXT", help="only rows whose name holds TEXT, ddp and compute only; or curve")
    add("--sweep", action="store_true", help="first find the best bucket size of each row that has buckets")
    add("--tuned", default=None, metavar="SIZES", help="rows with a bucket size of their own in MiB, like 'ddp=2; "
        "ddp + stage 1=4' (default: the best of the last --sweep at this rate, kept in --json)")
    add("--accumulation", action="store_true", help="also time 1 to 8 micro-batches a step: what communication "
        "takes of it, and both ways to accumulate in stage 4")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    add("--timeout", type=int, default=120, help="seconds after which a waiting rank gives up (default 120)")
    args = parser.parse_args()
    bits_per_second(args.rate)
    args.tuned = args.tuned if args.tuned is None else [choice(one) for one in args.tuned.split(";") if one.strip()]
    names = [one.name for one in [*ROWS, *VARIANTS]]
    if args.rows != "curve" and not any(is_asked(args.rows, name) for name in names):
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(names)}")
    return args


def choice(text):
    """"ddp=2" -> Choice("ddp", 2.0)."""
    base, _, size = (part.strip() for part in text.partition("="))
    if not re.fullmatch(r"\d+(\.\d+)?", size):
        fail(f"--tuned {text.strip()!r}: write the name of a row, =, and MiB, like ddp=2")
    return Choice(base, float(size))


def bits_per_second(rate):
    """"300mbit" -> 3e8."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not match or not 1e3 <= float(match[1]) * UNITS[match[2]] <= 1e12:
        fail(f"--rate {rate}: write a number and kbit, mbit or gbit, like 300mbit; from 1kbit to 1000gbit")
    return float(match[1]) * UNITS[match[2]]
