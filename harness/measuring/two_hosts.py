"""Measures rows of the bench on two hosts, made on one machine and joined by a link of limited rate.

--curve measures the rows of the curve at one rate after the other. At each, a short sweep tunes DDP's buckets first. A
rate whose rows are in the file already is left out, so a run that was interrupted goes on. `make report` draws the
picture when the file is published. Exit code: 0; that of the first rate that fails; 1 when a row is wrong; 2 for bad
input.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from harness.measuring import every_row, examine, links, timeline
from harness.measuring.examine import Settings
from harness.publishing import pictures, row_names, tables
from harness.publishing.results import Accumulation, Result, Sweep, from_json, merged, to_json
from harness.publishing.row_names import RowId, is_asked
from harness.ranks import command_line
from harness.ranks.command_line import COUNT, write
from harness.ranks.workers import WorkerError, Workers, on_rank_0
from harness.training import rows as catalogue
from harness.training.models import MODELS

fail = functools.partial(command_line.fail, "network")

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
ROWS = [*map(RowId, (
    row_names.COMPUTE_ONLY, row_names.REFERENCE, "ddp + stage 2", row_names.ZERO, row_names.FSDP2,
    row_names.REPLICATED, row_names.NAIVE_BROADCAST, row_names.ALL_GATHER, row_names.GRAD_BUFFER, "owner reduce")),
    RowId("owner reduce", 2), *map(RowId, row_names.HALF_OVERLAPS),
    *map(RowId, (row_names.OVERLAP, "compute only bf16", row_names.OVERLAP_BF16))]
# --rows curve: what --curve times at each rate.
CURVE = [*map(RowId, (row_names.COMPUTE_ONLY, row_names.REFERENCE, row_names.REPLICATED, row_names.ALL_GATHER,
                      row_names.GRAD_BUFFER, row_names.OVERLAP, row_names.FSDP2))]
# Steps per round: few on a slow link, where a step is long and the link alone decides how long.
CURVE_STEPS = {"200mbit": 2, "300mbit": 3, "600mbit": 3, "1gbit": 4, "2.5gbit": 4}
# Rows of which a step is recorded, to show which part of its communication is exposed.
RECORDED = {row_names.FSDP2, *row_names.LADDER, *row_names.HALF_OVERLAPS}
UNDRAWN = "variants", "muon", "hybrid"  # words of --rows: rows that they name get a time, and no picture
VARIANTS = [RowId(row.name) for row in catalogue.VARIANTS]  # where --rows asks for them


def parse(description):
    parser = command_line.Parser("network", description)
    add = parser.add_argument
    add("--curve", nargs="?", const=",".join(CURVE_STEPS), metavar="RATES",
        help="the curve, at these rates (default %(const)s), with --json measured/network.json")
    add("--rate", default="1gbit", help="of the line, as tc writes it: 300mbit, 1gbit (default 1gbit)")
    add("--model", choices=MODELS, default="tiny", help="(default tiny)")
    command_line.add_sizes(add, batch_size=8)
    add("--rounds", type=COUNT, default=4, help="in each, every row is timed once (default 4)")
    add("--steps", type=COUNT, default=6, help="timed in a round, one by one (default 6)")
    add("--ranks-per-host", type=COUNT, default=1, help="processes on each of the two hosts (default 1)")
    add("--rows", default="", metavar="TEXT", help="only rows whose name holds TEXT, or one of several with commas "
        "between them, ddp and compute only; or curve")
    add("--sweep", action="store_true", help="first time DDP and stage 4 with buckets of several sizes; the best are "
        "rows, now and in later runs at this rate with the same --json")
    add("--accumulation", action="store_true", help="also time 1 to 4 micro-batches a step: what communication "
        "takes of it, and both ways to accumulate in stage 4")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    add("--timeout", type=COUNT, default=120, help="seconds after which a waiting rank gives up (default 120)")
    args = parser.parse_args()
    for rate in args.curve.split(",") if args.curve else [args.rate]:
        bits_per_second(rate)
    names = [row_id.name for row_id in [*ROWS, *VARIANTS]]
    if args.rows != "curve" and not any(is_asked(args.rows, name) for name in names):
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(names)}")
    return args


def bits_per_second(rate):
    """Parse "300mbit" as 3e8."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits = float(match[1]) * UNITS[match[2]] if match else 0
    if not 1e3 <= bits <= 1e12:
        fail(f"--rate {rate}: write a number and kbit, mbit or gbit, like 300mbit; from 1kbit to 1000gbit")
    return bits


# ------------------------ Two network namespaces of Linux, joined by a link that is held to a rate, and gone afterwards


NETWORK = "10.99.0.0/24"  # inside namespaces: nobody else sees it
ADDRESSES = ["10.99.0.1", "10.99.0.2"]
TCP = "cubic"  # Linux's default, whatever this machine has set: how senders find the rate is part of a figure
CLONE_NEWNET = 0x40000000  # of <sched.h>


def stale_namespaces():
    """Return our namespaces whose process was killed before it could remove them."""
    namespaces = Path("/run/netns").iterdir() if Path("/run/netns").exists() else ()
    matches = [re.fullmatch(r"dopt-(\d+)-[ab]", path.name) for path in namespaces]
    return [match[0] for match in matches if match and not Path("/proc", match[1]).exists()]


class Hosts:
    """Makes two network namespaces and the link between them while it is entered. `names`: as `ip netns` knows them."""

    def __init__(self, rate, ranks_per_host=1):
        self.rate, self.ranks_per_host = rate, ranks_per_host
        self.names = [f"dopt-{os.getpid()}-{host}" for host in "ab"]
        self.links = [f"dopt{os.getpid()}{host}" for host in "ab"]  # at most 15 characters

    def __enter__(self):
        try:
            for name in stale_namespaces():
                with contextlib.suppress(OSError):  # another run may have removed it
                    run("ip", "netns", "delete", name)
            for name in self.names:
                run("ip", "netns", "add", name)
            run("ip", "link", "add", self.links[0], "netns", self.names[0], "type", "veth",
                "peer", "name", self.links[1], "netns", self.names[1])
            for name, link, address in zip(self.names, self.links, ADDRESSES):
                run("ip", "-n", name, "address", "add", f"{address}/24", "dev", link)
                run("ip", "-n", name, "link", "set", "lo", "up")
                run("ip", "-n", name, "link", "set", link, "up")
                run("ip", "-n", name, "route", "change", NETWORK, "dev", link, "congctl", TCP)
                # A megabyte may be sent at once; what would then wait longer than 50 ms is dropped.
                run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", "rate", self.rate,
                    "burst", "1mb", "latency", "50ms")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        """Remove the namespaces, and the link with them. A second Ctrl-C doesn't interrupt this."""
        numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
        try:
            for name in self.names:
                if Path("/run/netns", name).exists():
                    run("ip", "netns", "delete", name)
        finally:
            for number, handler in zip(numbers, handlers):
                signal.signal(number, handler)

    def enter(self, rank):
        """Put the process of this rank, which has no tensors yet, on its host, which has every second core."""
        host = rank // self.ranks_per_host
        with open(Path("/run/netns", self.names[host])) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.names[host]}")
        if cores := sorted(os.sched_getaffinity(0))[host::2]:
            os.sched_setaffinity(0, cores)
        os.environ.update(GLOO_SOCKET_IFNAME=self.links[host], CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


def run(*command):
    """Run one command of iproute2 and return what it prints. Raises OSError, in one line."""
    # In a session of its own, so that Ctrl-C doesn't reach it.
    process = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if process.returncode:
        raise OSError(f"{' '.join(command)}: {process.stderr.strip()}")
    return process.stdout


def missing_requirement():
    """Return a line about what this machine lacks, or None."""
    if tools := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(tools)} not found: install iproute2 (Linux only)"
    if os.geteuid() != 0:
        return "network namespaces need root: sudo make bench WHAT=network, or run it in a container as root"
    return None


# ------------------------------------------------------------------------------------------- What is measured on them


SWEEP_STEPS = 3  # at most, in one round: a sweep only finds a size. The row with that size is then measured as usual
ACCUMULATION_ROUNDS = 2  # at most
LIMIT_S = 3600  # of one row: on a slow link a step takes a minute


def measure_on_two_hosts(args):
    """Make two hosts, start ranks on them, and measure. Returns a Result. Raises WorkerError, OSError."""
    with Hosts(args.rate, args.ranks_per_host) as hosts, \
            Workers(2 * args.ranks_per_host, args.timeout, LIMIT_S, hosts.enter) as workers:
        return measure(args, workers)


def measure(args, workers):
    """Measure what `args` ask for, all rows in turn. Returns a Result."""
    settings = Settings(args.model, args.batch_size, args.sequence_length, args.rounds, args.steps)

    def progress(text):
        print(f"\r{text:60}", end="", file=sys.stderr, flush=True)
    is_curve = args.rows == "curve"
    sweep = None
    tuned_ids = args.tuned_ids
    if args.sweep:
        short = settings._replace(rounds=1, steps=min(args.steps, SWEEP_STEPS))
        row_ids = row_names.SWEPT_FOR_CURVE if is_curve else row_names.SWEPT
        sweep_result = every_row.measure_rows(workers, short, row_ids, progress)
        sweep = Sweep(sweep_result.conditions, sweep_result.rows)
        tuned_ids = row_names.tuned_row_ids(sweep.rows)
    result = every_row.measure_rows(workers, settings, rows_to_measure(args, tuned_ids), progress)
    result.sweep = sweep
    if not is_curve and not any(word in args.rows for word in UNDRAWN):
        timeline.record_rows(workers, settings, [row for row in result.rows if row.base in RECORDED], progress)
    if args.accumulation:
        time_accumulation(workers, settings, result, tuned_ids, progress)
    progress("")
    print(end="\r", file=sys.stderr)
    result.conditions = dataclasses.replace(
        result.conditions, rate=args.rate, bits_per_second=bits_per_second(args.rate), hosts=2, tcp=TCP,
        cores_per_host=on_rank_0(workers, count_cores))
    return result


ALWAYS_MEASURED = row_names.REFERENCE, row_names.COMPUTE_ONLY  # whatever --rows says
ROWS_OF_ACCUMULATION = *ALWAYS_MEASURED, row_names.GRAD_BUFFER, row_names.OVERLAP


def rows_to_measure(args, tuned_ids):
    """Return the RowIds that --rows asks for, with those of tuned bucket sizes behind the default ones."""
    if args.rows == "curve":
        return row_names.with_tuned(CURVE, [row_id for row_id in tuned_ids if row_id.base == row_names.REFERENCE])
    always = ROWS_OF_ACCUMULATION if args.accumulation else ALWAYS_MEASURED
    candidates = [*ROWS, *VARIANTS] if args.rows else ROWS
    row_ids = [row_id for row_id in candidates if is_asked(args.rows, row_id.name) or row_id.name in always]
    tuned_ids = [row_id for row_id in tuned_ids
                 if is_asked(args.rows, row_id.name) or row_id.base == row_names.REFERENCE]
    return row_names.with_tuned(row_ids, tuned_ids)


def count_cores(rank):
    return len(os.sched_getaffinity(0))


def time_accumulation(workers, settings, result, tuned_ids, progress):
    """Set the result's `accumulation`, unless one of its rows has failed: a wrong row gets no time."""
    rows = [row for row in result.rows if row.name in ROWS_OF_ACCUMULATION]
    if any(row.error for row in rows):
        return
    ddp_mb = next((row_id.bucket_mb for row_id in tuned_ids if row_id.base == row_names.REFERENCE), None)
    short = settings._replace(rounds=min(settings.rounds, ACCUMULATION_ROUNDS))

    def time_rows():
        accumulated_rows = examine.time_rows(workers, short, ddp_mb, progress)
        conditions = dataclasses.replace(result.conditions, rounds=short.rounds)
        result.accumulation = Accumulation(conditions, accumulated_rows, ddp_mb)
    every_row.attempt(rows[-1], time_rows)


def results_in_file(args):
    """Read a list of Results from the --json file, each of one rate. Fails where the file holds something else."""
    if args.json is None or not args.json.exists():
        return []
    if not args.json.is_file():
        fail(f"--json {args.json}: it is no file: results of other rates are saved in it")
    message = f"--json {args.json}: it holds something else than results of make bench WHAT=network, name another file"
    try:
        results = from_json(Result, args.json.read_text(encoding="utf-8")).at_all_rates()
    except (OSError, ValueError) as error:
        fail(f"{message}: {error}")
    if not all(result.conditions.rate for result in results):
        fail(message)
    return results


def add_to_file(args, result):
    """Put the result first in the file, before those of other rates, and draw the picture beside it.

    The file's accumulation or sweep at this rate stays if none was asked for now; if one was and has failed, there is
    none.
    """
    reused = [name for name in ("accumulation", "sweep") if not getattr(args, name)]
    result = merged(result, results_in_file(args), reused)
    write("--json", args.json, to_json(result), fail)
    if pictures.can_draw() and (picture := links.steps_picture(result.at_all_rates())):
        write("--json", args.json.with_suffix(".svg"), picture, fail)


def measure_curve(args):
    """Measure each rate in turn; then print the table of all of them."""
    def results_by_rate():
        return {result.conditions.rate: result for result in results_in_file(args)
                if all(result.timed(*row_id) for row_id in CURVE)}
    for rate in args.curve.split(","):
        if rate in results_by_rate():
            conditions = results_by_rate()[rate].conditions
            print(f"{rate}: in {args.json} already, of {conditions.machine}, commit {conditions.commit}")
            continue
        options = {"rate": rate, "rows": "curve", "sweep": True, "steps": CURVE_STEPS.get(rate, 4)}
        if measure_rate(argparse.Namespace(**{**vars(args), **options})):
            sys.exit(1)
    print(tables.sheet_text(links.curve_sheet(list(results_by_rate().values())), tables.WIDTH))


def main():
    args = parse(__doc__)
    args.json = args.json or (Path("measured/network.json") if args.curve else None)
    command_line.check_length(args.sequence_length, args.model, MODELS, fail)
    if args.json and args.json.suffix == ".svg":
        fail(f"--json {args.json}: the picture of that name is written beside it: choose another ending")
    for path in [args.json, args.json.with_suffix(".svg")] if args.json else []:
        command_line.check_writable("--json", path, fail)
    sys.exit(measure_curve(args) if args.curve else measure_rate(args))


def measure_rate(args):
    """Measure at one rate, print and save the result. Returns whether a row is wrong. Exits where a host fails."""
    earlier_results = results_in_file(args)  # fails before the measurement if the file holds something else
    sweeps = [result.sweep for result in earlier_results if result.conditions.rate == args.rate and result.sweep]
    args.tuned_ids = row_names.tuned_row_ids(sweeps[0].rows) if sweeps and not args.sweep else []
    if reason := missing_requirement():
        sys.exit(f"network: {reason}")
    exit_on_signals()
    try:
        result = measure_on_two_hosts(args)
    except (OSError, WorkerError) as error:
        sys.exit(f"network: {error}")
    steps, title = links.recorded_steps(result)
    steps_text = f"{title}\n{pictures.text(steps)}\n" if steps else ""  # before add_to_file: it drops most steps
    try:
        if args.json:
            add_to_file(args, result)
    finally:  # the disk may be full
        show(result)
    if args.json:
        picture = f" and {args.json.with_suffix('.svg')}" if pictures.can_draw() else ""
        print(f"{steps_text}written to {args.json}{picture}")
    return every_row.is_wrong(result)


def exit_on_signals():
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, so that what it has started and made is removed.

    A second one is ignored: it could come before `Hosts.__exit__` ignores it, and leave namespaces behind.
    """
    def leave(*_):
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        sys.exit(1)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def show(result):
    """Print all tables of two hosts."""
    time, *memory = every_row.sheets(result)
    tables.print_sheets([time, *links.sheets(result), *memory], tables.conditions_line(result.conditions))


if __name__ == "__main__":
    main()
