"""The curve: a few rows on two hosts, at one rate of the line after the other.

    python -m harness.curve [--rates 300mbit,1gbit] [--rounds 3] [--json measured/network.json]

Each rate is a run of harness.two_hosts with the rows of the curve; DDP's buckets are tuned first, by a short sweep. A
rate whose rows are in the file already is left out: what was interrupted goes on. `make report` draws the picture
when the file is published. Exit code: 0; that of the first rate that fails; 2 for bad input.
"""

import argparse
import functools
import subprocess
import sys
from pathlib import Path

from harness import command_line, processes, tables
from harness import results as saved
from harness.results import Result
from harness.two_hosts import CURVE, bits_per_second

fail = functools.partial(command_line.fail, "curve")
# Steps of a round: on a slow line each is long, and the line alone decides how long.
STEPS = {"100mbit": 3, "200mbit": 3, "300mbit": 4, "600mbit": 5, "1gbit": 6, "2.5gbit": 6}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("--rates", default=",".join(STEPS), help="of the line (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="in each, every row is timed once (default 3)")
    parser.add_argument("--model", default="tiny", help="see bench.py (default tiny)")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes per sequence (default 128)")
    parser.add_argument("--json", type=Path, default=Path("measured/network.json"), metavar="PATH")
    args = parser.parse_args()
    args.rates = args.rates.split(",")
    for rate in args.rates:
        bits_per_second(rate)
    command_line.check_at_least_1(args, ("rounds",), fail)
    return args


def measured(path):
    """-> list of Results, of the rates that have all rows of the curve. Fails where the file holds something else."""
    if not path.exists():
        return []
    try:
        results = saved.from_json(Result, path.read_text(encoding="utf-8")).at_all_rates()
    except (OSError, ValueError) as error:
        fail(f"--json {path}: it holds something else than results of WHAT=network, name another file: {error}")
    return [result for result in results if all(result.timed(*choice) for choice in CURVE)]


def main():
    args = parse()
    processes.exit_on_signals()
    done = {result.conditions.rate: result.conditions for result in measured(args.json)}
    for rate in args.rates:
        if rate in done:
            print(f"{rate}: in {args.json} already, of {done[rate].machine}, commit {done[rate].commit}")
            continue
        command = [sys.executable, "-m", "harness.two_hosts", "--rate", rate, "--rows", "curve", "--sweep",
                   "--model", args.model, "--sequence-length", str(args.sequence_length),
                   "--rounds", str(args.rounds), "--steps", str(STEPS.get(rate, 4)), "--json", str(args.json)]
        process = subprocess.Popen(command)
        try:
            code = process.wait()
        finally:  # Ctrl-C, SIGTERM: the hosts are put away
            process.terminate()
            process.wait()
        if code:
            sys.exit(code)
    tables.print_sheets([tables.curve_sheet(measured(args.json))])


if __name__ == "__main__":
    main()
