"""Measures rows of the bench on two hosts, made on one machine and joined by a link of limited rate.

--curve measures the rows of the curve at one rate after the other. At each, a short sweep tunes DDP's buckets first. A
rate whose file is there already is left out, so a run that was interrupted goes on.

Exit code: 0; 1 when a row is wrong or a host fails; 2 for bad input.
"""

import argparse
import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from harness.ranks import command_line
from harness.ranks.command_line import COUNT
from harness.training.options import MODELS

fail = functools.partial(command_line.fail, "network")
# Steps per round: few on a slow link, where a step is long and the link alone decides how long.
CURVE_STEPS = {"200mbit": 2, "300mbit": 3, "600mbit": 3, "1gbit": 4, "2.5gbit": 4}


def options():
    parser = command_line.Parser("network", __doc__)
    add = parser.add_argument
    add("--curve", nargs="?", const=",".join(CURVE_STEPS), metavar="RATES",
        help="the curve, at these rates (default %(const)s), each in measured/network_RATE.json")
    add("--rate", default="1gbit", help="of the link, as tc writes it: 300mbit, 1gbit (default 1gbit)")
    add("--model", choices=MODELS, default="tiny", help="(default tiny)")
    command_line.add_sizes(add, batch_size=8)
    add("--rounds", type=COUNT, default=4, help="in each, every row is timed once (default 4)")
    add("--steps", type=COUNT, default=6, help="timed in a round, one by one (default 6)")
    add("--ranks-per-host", type=COUNT, default=1, help="processes on each of the two hosts (default 1)")
    add("--rows", default="", metavar="TEXT", help="rows whose name contains TEXT, or one of several with commas "
        "between them (ddp and compute only are always measured); or curve")
    add("--sweep", action="store_true", help="first time DDP and stage 4 with buckets of several sizes: the best of "
        "DDP are rows, too")
    add("--accumulation", action="store_true", help="also time 1 to 4 micro-batches a step: what communication "
        "takes of it, and both ways to accumulate in stage 4")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    add("--timeout", type=COUNT, default=120, help="seconds after which a waiting rank gives up (default 120)")
    return parser.parse_args()


if __name__ == "__main__":
    options()  # a mistake is told before torch is loaded, which takes seconds

from harness.measuring import every_row, examine, links, timeline
from harness.measuring.examine import Settings
from harness.measuring.links import Link
from harness.publishing.tables import TERMINAL_WIDTH, Report, beside, from_json, save_and_show, sheet_text
from harness.ranks.workers import WorkerError, Workers, on_rank_0
from harness.training import rows as catalogue
from harness.training.rows import (
    ALL_GATHER,
    COMPUTE_ONLY,
    FSDP2,
    FSDP2_RESHARD,
    GRAD_BUFFER,
    HALF_OVERLAPS,
    LADDER,
    NAIVE_BROADCAST,
    OVERLAP,
    OVERLAP_BF16,
    REFERENCE,
    REPLICATED,
    SIZES,
    ZERO,
    RowId,
    is_asked,
)

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
NAMES = [COMPUTE_ONLY, REFERENCE, "ddp + stage 2", ZERO, FSDP2, FSDP2_RESHARD, REPLICATED, NAIVE_BROADCAST, ALL_GATHER,
         GRAD_BUFFER, "owner reduce", *HALF_OVERLAPS, OVERLAP, "compute only bf16", OVERLAP_BF16]
ROWS = [RowId(name) for name in NAMES]
ROWS.insert(NAMES.index("owner reduce") + 1, RowId("owner reduce", 2))
# --rows curve: what --curve times at each rate.
CURVE = [RowId(name) for name in (COMPUTE_ONLY, REFERENCE, REPLICATED, ALL_GATHER, GRAD_BUFFER, OVERLAP, FSDP2)]
# A step of these rows is recorded, to show which part of its communication is exposed.
RECORDED = {FSDP2, *LADDER, *HALF_OVERLAPS}
VARIANTS = [RowId(row.name) for row in catalogue.VARIANTS]  # measured where --rows asks for them
ALWAYS_MEASURED = REFERENCE, COMPUTE_ONLY  # whatever --rows says
# The rows of a sweep; of the curve's sweep at each rate DDP alone, with fewer sizes.
SWEPT = [*(RowId(REFERENCE, size) for size in (None, 0.25, 1, 2, 4, 8)), *(RowId(OVERLAP, size) for size in SIZES)]
SWEPT_FOR_CURVE = [RowId(REFERENCE, size) for size in (None, 0.25, 1, 4)]
TUNED = [REFERENCE, ZERO]  # these rows are also measured with the bucket size that is DDP's best


def parse():
    args = options()
    for rate in args.curve.split(",") if args.curve else [args.rate]:
        link_of(rate)  # refuses a wrong rate
    names = [row_id.name for row_id in [*ROWS, *VARIANTS]]
    if args.rows != "curve" and not any(is_asked(args.rows, name) for name in names):
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(names)}")
    command_line.check_length(args.sequence_length, args.model, MODELS, fail)
    return args


def link_of(rate):
    """Parse "300mbit". Returns a Link."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits_per_second = float(match[1]) * UNITS[match[2]] if match else 0
    if not 1e3 <= bits_per_second <= 1e12:
        fail(f"--rate {rate}: write a number and kbit, mbit or gbit, like 300mbit; from 1kbit to 1000gbit")
    return Link(rate, bits_per_second)


# ------------------------ Two network namespaces of Linux, joined by a link that is held to a rate, and gone afterwards


NETWORK = "10.99.0.0/24"  # inside namespaces: nobody else sees it
ADDRESSES = ["10.99.0.1", "10.99.0.2"]
TCP = "cubic"  # Linux's default, whatever this machine has set: times depend on how senders find the link's rate
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
        """Move the process of this rank to its host. Each of the two hosts has every second core of the machine."""
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
    """Make two hosts, start ranks on them, and measure. Returns (Rows, Report). Raises WorkerError, OSError."""
    with Hosts(args.rate, args.ranks_per_host) as hosts, \
            Workers(2 * args.ranks_per_host, args.timeout, LIMIT_S, hosts.enter) as workers:
        return measure(args, workers)


def measure(args, workers):
    """Measure what `args` ask for, all rows in turn. Returns (Rows, Report)."""
    settings = Settings(args.model, args.batch_size, args.sequence_length, args.rounds, args.steps)
    link = link_of(args.rate)
    is_curve = args.rows == "curve"
    sweep = None
    tuned = []
    if args.sweep:
        short = settings._replace(rounds=1, steps=min(args.steps, SWEEP_STEPS))
        sweep = every_row.measure_rows(workers, short, SWEPT_FOR_CURVE if is_curve else SWEPT, say)
        tuned = tuned_row_ids(sweep)
    measured = every_row.measure_rows(workers, settings, rows_to_measure(args, tuned), say)
    if not is_curve and not args.rows:
        timeline.record_rows(workers, settings, [row for row in measured.rows if row.row_id.base in RECORDED], say)
    accumulation = accumulation_sheets(workers, measured, tuned, link) if args.accumulation else {}
    print("\r" + " " * 60, end="\r", file=sys.stderr)
    n_cores = on_rank_0(workers, count_cores)
    return measured, report_of(measured, link, sweep, accumulation, n_cores)


def say(text):
    print(f"\r{text:60}", end="", file=sys.stderr, flush=True)


def count_cores(rank):
    return len(os.sched_getaffinity(0))


def tuned_row_ids(sweep):
    """Return the rows of TUNED with the bucket size that was DDP's fastest in a sweep; [] where that is its default."""
    fastest = min((row for row in sweep.rows if row.row_id.base == REFERENCE), key=lambda row: row.median_ms)
    size = fastest.row_id.bucket_mb
    return [RowId(base, size) for base in TUNED] if size is not None and fastest.rounds_ms else []


def rows_to_measure(args, tuned):
    """Return the RowIds that --rows asks for, each with those of the `tuned` bucket size behind it."""
    if args.rows == "curve":
        asked = CURVE
    else:
        always = [*ALWAYS_MEASURED, GRAD_BUFFER, OVERLAP] if args.accumulation else ALWAYS_MEASURED
        candidates = [*ROWS, *VARIANTS] if args.rows else ROWS
        asked = [row_id for row_id in candidates if is_asked(args.rows, row_id.name) or row_id.name in always]
    listed = []
    for row_id in asked:
        listed += [row_id, *(other for other in tuned if other.base == row_id.name)]
    return listed


def accumulation_sheets(workers, measured, tuned, link):
    """Time several micro-batches per step, all rows in turn. Returns tables; none where one of the rows has failed."""
    ddp = next((row_id for row_id in tuned if row_id.base == REFERENCE), RowId(REFERENCE))
    timed = [  # field of links.Accumulated, row, whether each micro-batch exchanges gradients
        ("no_sync_ms", RowId(OVERLAP), False), ("each_ms", RowId(OVERLAP), True),
        ("compute_ms", RowId(COMPUTE_ONLY), False), ("ddp_ms", ddp, False), ("stage3_ms", RowId(GRAD_BUFFER), False)]
    if not all(measured.timed(*row_id) for _, row_id, _ in timed):
        return {}
    settings = measured.settings
    rows = [links.Accumulated(n, *([] for _ in timed)) for n in (1, 2, 4)]
    for turn in range(min(settings.rounds, ACCUMULATION_ROUNDS)):
        for row in rows:
            n = row.micro_batches
            shorter = settings._replace(steps=max(2, settings.steps // n))
            for field, row_id, exchanges_each in timed:
                say(f"round {turn + 1}: {n} micro-batches, {row_id.name}")
                getattr(row, field).append(
                    on_rank_0(workers, examine.time_accumulation, shorter, row_id, n, exchanges_each))
    return links.accumulation_sheets(rows, ddp, link)


def report_of(measured, link, sweep, accumulation, n_cores):
    """Make the tables of what was measured."""
    sheets = {"rows": every_row.rows_sheet(measured), "link": links.link_sheet(measured, link)}
    if sweep:
        sheets["buckets"] = links.buckets_sheet(sweep, link)
    if every_row.has_variants(measured):
        sheets["times"] = every_row.times_sheet(measured)
    sheets |= accumulation
    figures = {}
    if all(map(measured.timed, (COMPUTE_ONLY, OVERLAP, ALL_GATHER))):
        sheets["curve"] = links.curve_sheet(measured, link, sweep)
    if all(map(measured.find, LADDER)):
        sheets["ladder"] = links.ladder_sheet(measured, link, sweep)
    tuned = links.tuned_ddp(measured, sweep)
    if tuned and measured.timed(OVERLAP):
        figures["over_tuned"] = f"{measured.timed(OVERLAP).over(tuned):.2f}"
    words = measured.words(f" on 2 hosts of {n_cores} core(s), TCP {TCP}")
    return Report(measured.conditions.made, sheets, words, figures, links.to_draw(measured, link, sweep))


# -------------------------------------------------------------------------------------------------------- The program


def curve_of(path):
    """Return the table of the curve in a file of an earlier run, or None."""
    try:
        return from_json(path.read_text(encoding="utf-8")).sheets.get("curve")
    except (OSError, ValueError):
        return None


def measure_curve(args):
    """Measure each rate in turn; then print the table of all of them. Returns whether a row is wrong."""
    paths = {rate: Path(f"measured/network_{rate}.json") for rate in args.curve.split(",")}
    for rate, path in paths.items():
        if curve_of(path):
            print(f"{rate}: in {path} already")
            continue
        options = {"rate": rate, "rows": "curve", "sweep": True, "steps": CURVE_STEPS.get(rate, 4), "json": path}
        is_wrong = measure_rate(argparse.Namespace(**{**vars(args), **options}))
        if is_wrong:
            return True
    print(sheet_text(beside("Time per step over computing alone", *map(curve_of, paths.values())), TERMINAL_WIDTH))
    return False


def measure_rate(args):
    """Measure at one rate, print and save the result. Returns whether a row is wrong. Exits where a host fails."""
    if args.json:
        command_line.check_writable("--json", args.json, fail)
    if reason := missing_requirement():
        sys.exit(f"network: {reason}")
    exit_on_signals()
    try:
        measured, report = measure_on_two_hosts(args)
    except (OSError, WorkerError) as error:
        sys.exit(f"network: {error}")
    save_and_show(args.json, report, fail)
    return measured.is_wrong()


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


def main():
    args = parse()
    is_wrong = measure_curve(args) if args.curve else measure_rate(args)
    sys.exit(1 if is_wrong else 0)


if __name__ == "__main__":
    main()
