"""Two hosts on one machine, joined by a link of limited rate: the rows of the bench, with something to hide.

--curve measures the rows of the curve at one rate after the other, DDP's buckets tuned first by a short sweep. A rate
whose rows are in the file already is left out: what was interrupted goes on. `make report` draws the picture when the
file is published. Exit code: 0; that of the first rate that fails; 1 when a row is wrong; 2 for bad input.
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

from harness import command_line, every_row, examine, pictures, tables, timeline
from harness import processes as signals
from harness import results as saved
from harness import rows as catalogue
from harness.command_line import COUNT, write
from harness.examine import Settings
from harness.gpt import MODELS
from harness.results import Accumulation, Result, Sweep
from harness.rows import RowId, is_asked
from harness.workers import WorkerError, Workers, on_rank_0

fail = functools.partial(command_line.fail, "network")

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
ROWS = [*map(RowId, ("compute only", "compute + bytes", "ddp", "ddp + stage 2", "ddp + torch ZeRO", "fsdp2",
                     "rung 0 replicated", *catalogue.LADDER[1:4], "owner reduce")), RowId("owner reduce", 2),
        *map(RowId, ("stage 4 neither", "stage 4 only gradients", "stage 4 only parameters", "stage 4 overlap",
                     "compute only bf16", "stage 4 overlap bf16", "stage 4, whole messages"))]
# --rows curve: what --curve times at each rate.
CURVE = [RowId(name) for name in ("compute only", "ddp", "rung 0 replicated", *catalogue.LADDER[2:], "fsdp2")]
# Steps of a round: on a slow line each is long, and the line alone decides how long.
CURVE_STEPS = {"200mbit": 2, "300mbit": 3, "600mbit": 3, "1gbit": 4, "2.5gbit": 4}
# Of these one step is recorded too: which part of its communication is exposed.
RECORDED = {"compute + bytes", "fsdp2", *catalogue.LADDER, *(row.name for row in catalogue.APART)}
UNDRAWN = "variants", "muon", "hybrid"  # of these a time is shown, and no picture
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
    names = [one.name for one in [*ROWS, *VARIANTS]]
    if args.rows != "curve" and not any(is_asked(args.rows, name) for name in names):
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(names)}")
    return args


def bits_per_second(rate):
    """"300mbit" -> 3e8."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not match or not 1e3 <= float(match[1]) * UNITS[match[2]] <= 1e12:
        fail(f"--rate {rate}: write a number and kbit, mbit or gbit, like 300mbit; from 1kbit to 1000gbit")
    return float(match[1]) * UNITS[match[2]]


# ------------------------ Two network namespaces of Linux, joined by a line that is held to a rate, and gone afterwards


NETWORK, ADDRESSES = "10.99.0.0/24", ["10.99.0.1", "10.99.0.2"]  # inside namespaces: nobody else sees them
TCP = "cubic"  # Linux's default, whatever this machine has set: how senders find the rate is part of a figure
CLONE_NEWNET = 0x40000000  # of <sched.h>


def left_behind():
    """-> namespaces of ours whose process has ended without removing them, by SIGKILL."""
    there = Path("/run/netns").iterdir() if Path("/run/netns").exists() else ()
    return [path.name for path in there if (ours := re.fullmatch(r"dopt-(\d+)-[ab]", path.name))
            and not Path("/proc", ours[1]).exists()]


class Hosts:
    """Two network namespaces and the line between them, while it is entered. `names`: as `ip netns` knows them."""

    def __init__(self, rate, ranks_per_host=1):
        self.rate, self.ranks_per_host = rate, ranks_per_host
        self.names = [f"dopt-{os.getpid()}-{host}" for host in "ab"]
        self.links = [f"dopt{os.getpid()}{host}" for host in "ab"]  # at most 15 characters

    def __enter__(self):
        try:
            for name in left_behind():
                with contextlib.suppress(OSError):  # another run has been quicker
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
                run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", "rate", self.rate,
                    "burst", "1mb", "latency", "50ms")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        """Removes the namespaces, and the line with them. A second Ctrl-C doesn't interrupt that."""
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
        """Puts the process of this rank, which has no tensors yet, on its host.

        Hosts have processors of their own: each gets every second core, where there are two.
        """
        host = rank // self.ranks_per_host
        with open(Path("/run/netns", self.names[host])) as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.names[host]}")
        if cores := sorted(os.sched_getaffinity(0))[host::2]:
            os.sched_setaffinity(0, cores)
        os.environ.update(GLOO_SOCKET_IFNAME=self.links[host], CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


def run(*command):
    """Run one command of iproute2 -> what it prints. Its error is ours, in one line."""
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)  # Ctrl-C is not for it
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def missing():
    """What this machine lacks -> a line, or None."""
    if tools := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(tools)} not found: install iproute2 (Linux only)"
    if os.geteuid() != 0:
        return "network namespaces need root: sudo make bench WHAT=network, or run it in a container as root"
    return None


# ------------------------------------------------------------------------------------------- What is measured on them


SWEEP_STEPS = 3  # at most, in one round: it finds a size, and the row with that size is then measured as any other
LIMIT_S = 3600  # of one row: on a slow line a step takes a minute


def measure_on_two_hosts(args):
    """-> the result of ranks on two hosts, which are here meanwhile. Raises WorkerError, OSError."""
    with Hosts(args.rate, args.ranks_per_host) as hosts, \
            Workers(2 * args.ranks_per_host, args.timeout, LIMIT_S, hosts.enter) as workers:
        return measure_here(args, workers)


def measure_here(args, workers):
    """-> the result: the rows, interleaved."""
    settings = Settings(args.model, args.batch_size, args.sequence_length, args.rounds, args.steps)
    always = ("ddp", "compute only") + ("stage 3 grad buffer", "stage 4 overlap") * args.accumulation

    def progress(text):
        print(f"\r{text:60}", end="", file=sys.stderr, flush=True)
    sweep, tuned, is_curve = None, args.tuned, args.rows == "curve"
    if args.sweep:
        short = settings._replace(rounds=1, steps=min(args.steps, SWEEP_STEPS))
        sizes = catalogue.SWEPT_FOR_CURVE if is_curve else catalogue.SWEPT
        found = every_row.measure_rows(workers, short, sizes, progress)
        sweep, tuned = Sweep(found.conditions, found.rows), catalogue.best(found.rows)
    named = CURVE if is_curve else [*ROWS, *VARIANTS] if args.rows else ROWS
    chosen = [row_id for row_id in named if is_curve or is_asked(args.rows, row_id.name) or row_id.name in always]
    sized = [row_id for row_id in tuned if not is_curve and is_asked(args.rows, row_id.name) or row_id.base == "ddp"]
    result = every_row.measure_rows(workers, settings, catalogue.beside(chosen, sized), progress)
    result.sweep = sweep
    if not is_curve and not any(word in args.rows for word in UNDRAWN):
        timeline.record_rows(workers, settings, [row for row in result.rows if row.base in RECORDED], progress)
    if args.accumulation:
        time_accumulation(workers, settings, result, always, tuned, progress)
    progress("")
    print(end="\r", file=sys.stderr)
    result.conditions = dataclasses.replace(
        result.conditions, rate=args.rate, bits_per_second=bits_per_second(args.rate), hosts=2, tcp=TCP,
        cores_per_host=on_rank_0(workers, cores_of))
    return result


def cores_of(rank):
    return len(os.sched_getaffinity(0))


def time_accumulation(workers, settings, result, bases, tuned, progress):
    """The result's `accumulation`, if all the rows of `bases` are right: what is wrong gets no time."""
    rows = [row for row in result.rows if row.name in bases]
    if any(row.error for row in rows):
        return
    ddp_mb = next((row_id.bucket_mb for row_id in tuned if row_id.base == "ddp"), None)
    short = settings._replace(rounds=min(settings.rounds, 2))

    def time_rows():
        found = examine.time_rows(workers, short, ddp_mb, progress)
        conditions = dataclasses.replace(result.conditions, rounds=short.rounds)
        result.accumulation = Accumulation(conditions, found, ddp_mb)
    every_row.attempt(rows[-1], time_rows)


def earlier(args):
    """What the file holds -> list of Results, each of one rate. Fails where it holds something else."""
    if args.json is None or not args.json.exists():
        return []
    if not args.json.is_file():
        fail(f"--json {args.json}: it is no file: results of other rates are kept in it")
    other = f"--json {args.json}: it holds something else than results of make bench WHAT=network, name another file"
    try:
        results = saved.from_json(Result, args.json.read_text(encoding="utf-8")).at_all_rates()
    except (OSError, ValueError) as error:
        fail(f"{other}: {error}")
    return results if all(result.conditions.rate for result in results) else fail(other)


def add_to_file(args, result):
    """Puts the result first in the file, before those of other rates, and draws the picture beside it.

    What was asked for and has failed isn't taken over from the run before.
    """
    kept = [name for name in ("accumulation", "sweep") if not getattr(args, name)]
    result = saved.merged(result, earlier(args), kept)
    write("--json", args.json, saved.to_json(result), fail)
    if pictures.can_draw() and (picture := pictures.two_hosts_picture(result.at_all_rates())):
        write("--json", args.json.with_suffix(".svg"), picture, fail)


def measure_curve(args):
    """Each rate in turn; then the table of all of them."""
    def measured():
        return {result.conditions.rate: result for result in earlier(args)
                if all(result.timed(*row_id) for row_id in CURVE)}
    for rate in args.curve.split(","):
        if rate in measured():
            c = measured()[rate].conditions
            print(f"{rate}: in {args.json} already, of {c.machine}, commit {c.commit}")
        elif measure(argparse.Namespace(**{**vars(args), "rate": rate, "rows": "curve", "sweep": True,
                                           "steps": CURVE_STEPS.get(rate, 4)})):
            sys.exit(1)
    print(tables.sheet_text(tables.curve_sheet(list(measured().values())), tables.WIDTH))


def main():
    args = parse(__doc__)
    args.json = args.json or (Path("measured/network.json") if args.curve else None)
    command_line.check_length(args.sequence_length, args.model, MODELS, fail)
    if args.json and args.json.suffix == ".svg":
        fail(f"--json {args.json}: the picture of that name is written beside it: choose another ending")
    for path in [args.json, args.json.with_suffix(".svg")] if args.json else []:
        command_line.check_writable("--json", path, fail)
    sys.exit(measure_curve(args) if args.curve else measure(args))


def measure(args):
    """-> whether a row is wrong. Ends this program where a host fails."""
    before = earlier(args)  # fails now if the file holds something else
    sweeps = [result.sweep for result in before if result.conditions.rate == args.rate and result.sweep]
    args.tuned = catalogue.best(sweeps[0].rows) if sweeps and not args.sweep else []
    if reason := missing():
        sys.exit(f"network: {reason}")
    signals.exit_on_signals()
    try:
        result = measure_on_two_hosts(args)
    except (OSError, WorkerError) as error:
        sys.exit(f"network: {error}")
    shown, title = pictures.on_two_hosts(result)
    steps = f"{title}\n{pictures.text(shown)}\n" if shown else ""  # now: of most results they aren't kept
    try:
        if args.json:
            add_to_file(args, result)
    finally:  # the disk may be full
        tables.show(result)
    if args.json:
        picture = f" and {args.json.with_suffix('.svg')}" if pictures.can_draw() else ""
        print(f"{steps}written to {args.json}{picture}")
    return every_row.is_wrong(result)


if __name__ == "__main__":
    main()
