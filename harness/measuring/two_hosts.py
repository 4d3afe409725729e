"""Times several ways of training on two hosts, which one machine plays, with a link of limited rate between them.

    python -m harness.measuring.two_hosts [--rate 300mbit] [--rows TEXT] [--json PATH]     # or: make bench WHAT=network

Exit code: 0; 1 when a row is wrong or fails, or a host can't be made; 2 for bad input.
"""
# The words of this file:
#   row      a way to train; the catalogue, harness/training/rows.py, lists all rows
#   RowId    a row and a size of bucket: `base` is the row's name, `name` also says the size if it isn't the default
#   stage    an optimizer of this project, in a folder stage*/
#   variant  a changed stage, in variants/
#   bucket   the unit in which DDP and stage 4 send gradients
#   sweep    a short measurement of DDP and stage 4 with buckets of several sizes
#   tuned    with the size of bucket that was DDP's best in a sweep
#   curve    a picture of the time of a step on links of several rates
#   ladder   the table of DDP and the stages in README.md
#   host     a network namespace of Linux, in which processes see a network of their own, as on another machine
#   rank     the number of a process that trains

import ctypes
import functools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from harness.ranks import command_line
from harness.ranks.command_line import COUNT
from harness.training.options import MODELS

fail = functools.partial(command_line.fail, "network")  # ends the program, with a message and exit code 2


def options():
    parser = command_line.Parser("network", __doc__)
    add = parser.add_argument
    add("--rate", default="1gbit", help="of the link, as tc writes it: 300mbit, 1gbit (default 1gbit)")
    add("--model", choices=MODELS, default="tiny", help="(default tiny)")
    command_line.add_sizes(add, batch_size=8)  # adds --batch-size and --sequence-length
    add("--rounds", type=COUNT, default=4, help="in each, every row is timed once (default 4)")
    add("--steps", type=COUNT, default=6, help="timed in a round, one by one (default 6)")
    add("--ranks-per-host", type=COUNT, default=1, help="processes on each of the two hosts (default 1)")
    add("--rows", default="", metavar="TEXT", help="rows whose name contains TEXT, or one of several texts with "
        "commas between them ('ddp' and 'compute only' are always measured); curve: the rows of the curve")
    add("--sweep", action="store_true", help="first time DDP and stage 4 with buckets of several sizes; DDP is then "
        "also measured with its best size")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    return parser.parse_args()


if __name__ == "__main__":
    options()  # a mistake is told before torch is loaded, which takes seconds

from harness.measuring import every_row, links
from harness.measuring.examine import Settings
from harness.measuring.links import Link
from harness.publishing.tables import Report, save_and_show
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
# Rows of other projects and of the first stages. "owner reduce" sends each gradient only to the rank that updates it.
FIRST_ROWS = [RowId(name) for name in (COMPUTE_ONLY, REFERENCE, "ddp + stage 2", ZERO, FSDP2, FSDP2_RESHARD, REPLICATED,
                                       NAIVE_BROADCAST, ALL_GATHER, GRAD_BUFFER, "owner reduce")]
# Stage 4. In HALF_OVERLAPS only gradients, or only parameters, or neither travel while a rank computes.
LAST_ROWS = [RowId(name) for name in (*HALF_OVERLAPS, OVERLAP, "compute only bf16", OVERLAP_BF16)]
# Measured if --rows doesn't say otherwise. "owner reduce" is there twice: with default buckets, and with 2 MiB.
ROWS = [*FIRST_ROWS, RowId("owner reduce", 2), *LAST_ROWS]
# The rows of results/curve.svg, which --rows curve measures.
CURVE = [RowId(name) for name in (COMPUTE_ONLY, REFERENCE, REPLICATED, ALL_GATHER, GRAD_BUFFER, OVERLAP, FSDP2)]
# Rows of which a step is recorded, to show in how much of its time a rank communicates and doesn't compute.
RECORDED = {FSDP2, *LADDER, *HALF_OVERLAPS}
VARIANTS = [RowId(row.name) for row in catalogue.VARIANTS]  # measured only if --rows asks for them
ALWAYS_MEASURED = REFERENCE, COMPUTE_ONLY  # whatever --rows says
# The rows of a sweep. Sizes are in MiB; None: the default size. For the curve only DDP is swept, with fewer sizes.
SWEPT = [RowId(REFERENCE, size) for size in (None, 0.25, 1, 2, 4, 8)] + [RowId(OVERLAP, size) for size in SIZES]
SWEPT_FOR_CURVE = [RowId(REFERENCE, size) for size in (None, 0.25, 1, 4)]
TUNED = [REFERENCE, ZERO]  # after a sweep these rows are also measured tuned


def parse():
    """Return the options, after a check. Wrong options end the program."""
    args = options()
    link_of(args.rate)  # ends the program if the rate is wrong
    names = [row_id.name for row_id in [*ROWS, *VARIANTS]]
    if args.rows != "curve" and not any(is_asked(args.rows, name) for name in names):
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(names)}")
    command_line.check_length(args.sequence_length, args.model, MODELS, fail)
    return args


def link_of(rate):
    """Parse a rate such as "300mbit". Returns a Link. A wrong rate ends the program."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits_per_second = float(match[1]) * UNITS[match[2]] if match else 0  # 0: no rate, which is refused
    if not 1e3 <= bits_per_second <= 1e12:
        fail(f"--rate {rate}: write a number and kbit, mbit or gbit, like 300mbit; from 1kbit to 1000gbit")
    return Link(rate, bits_per_second)


# --------------------------------------------------------------------------------------- Two hosts, and their link


NETWORK = "10.99.0.0/24"  # inside the namespaces: no other program sees these addresses
ADDRESSES = ["10.99.0.1", "10.99.0.2"]
TCP = "cubic"  # Linux's default, whatever this machine has set: times depend on how senders find the link's rate
CLONE_NEWNET = 0x40000000  # of <sched.h>


class Hosts:
    """Makes two hosts and a link between them at the start of a `with` block, and removes them at its end.

    The link is a pair of virtual network devices, one on each host. If this process gets SIGKILL, the namespaces stay
    until `ip netns delete` removes them.
    """

    def __init__(self, rate, ranks_per_host=1):
        self.rate = rate  # as tc writes it
        self.ranks_per_host = ranks_per_host
        self.names = [f"dopt-{os.getpid()}-{host}" for host in "ab"]  # of the namespaces, for `ip netns`
        # Names of the two devices, the ends of the link. Linux allows at most 15 characters.
        self.links = [f"dopt{os.getpid()}{host}" for host in "ab"]

    def __enter__(self):
        try:
            for name in self.names:
                run("ip", "netns", "add", name)
            run("ip", "link", "add", self.links[0], "netns", self.names[0], "type", "veth",
                "peer", "name", self.links[1], "netns", self.names[1])
            for name, device, address in zip(self.names, self.links, ADDRESSES):
                run("ip", "-n", name, "address", "add", f"{address}/24", "dev", device)
                run("ip", "-n", name, "link", "set", "lo", "up")
                run("ip", "-n", name, "link", "set", device, "up")
                run("ip", "-n", name, "route", "change", NETWORK, "dev", device, "congctl", TCP)
                # A token bucket filter (tbf) limits the rate at which this end sends. A megabyte may be sent at once. A
                # packet that would wait longer than 50 ms is dropped.
                run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", "rate", self.rate,
                    "burst", "1mb", "latency", "50ms")
        except BaseException:  # also Ctrl-C
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception):
        """Remove the namespaces, and so the link. A second Ctrl-C doesn't interrupt the removal."""
        signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        handlers = [signal.signal(number, signal.SIG_IGN) for number in signals]
        try:
            for name in self.names:
                if Path("/run/netns", name).exists():
                    run("ip", "netns", "delete", name)
        finally:
            for number, handler in zip(signals, handlers):
                signal.signal(number, handler)

    def enter(self, rank):
        """Move this process, which is rank `rank`, into the network namespace of its host.

        Each new process of Workers calls this method. A host has every second core of the machine.
        """
        host = rank // self.ranks_per_host
        with open(Path("/run/netns", self.names[host])) as namespace:
            # C's setns(), because Python has it only from 3.12 on. It returns 0, or -1 on an error.
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.names[host]}")
        cores = sorted(os.sched_getaffinity(0))[host::2]
        if cores:  # the second host has no core on a machine with one
            os.sched_setaffinity(0, cores)
        os.environ.update(GLOO_SOCKET_IFNAME=self.links[host], CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")


def run(*command):
    """Run a command of iproute2. Returns what the command prints. If the command fails, raises OSError, in one line."""
    # The command runs in a new session, which Ctrl-C doesn't reach.
    process = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if process.returncode:
        raise OSError(f"{' '.join(command)}: {process.stderr.strip()}")
    return process.stdout


# ---------------------------------------------------------------------------------------- What is measured on two hosts


SWEEP_STEPS = 3  # the most steps of a sweep, in one round: it only chooses a size
TIMEOUT_S = 600  # limit for one collective: on a slow link a step takes a minute
LIMIT_S = 3600  # limit for one call of a function on all ranks, which measures one row


def measure(args):
    """Make two hosts, start ranks on them, and measure all rows in turn.

    Returns (Rows, Report): all measurements, and the tables that are saved and shown. Raises WorkerError if a rank
    fails outside of a row, OSError if a host can't be made.
    """
    settings = Settings(args.model, args.batch_size, args.sequence_length, args.rounds, args.steps)
    link = link_of(args.rate)
    is_curve = args.rows == "curve"
    sweep = None  # Rows, the measurements of a sweep
    tuned_ids = []  # the RowIds of tuned rows
    # Each process that Workers starts calls hosts.enter with its rank.
    with Hosts(args.rate, args.ranks_per_host) as hosts, \
            Workers(2 * args.ranks_per_host, TIMEOUT_S, LIMIT_S, hosts.enter) as workers:
        if args.sweep:
            short_settings = settings._replace(rounds=1, steps=min(args.steps, SWEEP_STEPS))
            sweep = every_row.measure_rows(workers, short_settings, SWEPT_FOR_CURVE if is_curve else SWEPT)
            tuned_ids = tuned_row_ids(sweep)
        row_ids = rows_to_measure(args, tuned_ids)
        # With --rows no step is recorded.
        measured = every_row.measure_rows(workers, settings, row_ids, recorded=() if args.rows else RECORDED)
        n_cores = on_rank_0(workers, count_cores)  # of one host
    return measured, report_of(measured, link, sweep, n_cores)


def count_cores(rank):
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def tuned_row_ids(sweep):
    """Return the RowIds of tuned rows; [] if DDP was fastest with its default size, or has no times."""
    ddp_rows = [row for row in sweep.rows if row.row_id.base == REFERENCE]
    fastest = min(ddp_rows, key=lambda row: row.median_ms)  # a row that has failed has no times: its median is inf
    size = fastest.row_id.bucket_mb
    if size is None or not fastest.rounds_ms:
        return []
    return [RowId(base, size) for base in TUNED]


def rows_to_measure(args, tuned_ids):
    """Return the RowIds that --rows asks for. Each is followed by the tuned RowId of the same row, if there is one."""
    if args.rows == "curve":
        asked = CURVE
    elif args.rows:
        asked = [row_id for row_id in [*ROWS, *VARIANTS]
                 if row_id.name in ALWAYS_MEASURED or is_asked(args.rows, row_id.name)]
    else:
        asked = ROWS
    with_tuned = []
    for row_id in asked:
        with_tuned.append(row_id)
        with_tuned += [tuned_id for tuned_id in tuned_ids if tuned_id.base == row_id.name]
    return with_tuned


def report_of(measured, link, sweep, n_cores):
    """Make a Report of the measurements: tables, the conditions in words, and what pictures need.

    `measured.find` returns the Row of a name; `measured.timed` returns it only if it has times. Else they return None.
    """
    sheets = {"rows": every_row.rows_sheet(measured), "link": links.link_sheet(measured, link)}
    if sweep:
        sheets["buckets"] = links.buckets_sheet(sweep, link)
    if every_row.has_variants(measured):
        sheets["times"] = every_row.times_sheet(measured)
    tuned = links.tuned_ddp(measured, sweep)  # the faster Row of DDP's two, default and tuned; None without a sweep
    stage4 = measured.timed(OVERLAP)
    if links.has_curve(measured):
        sheets["curve"] = links.curve_sheet(measured, link, tuned)
    if all(measured.find(name) for name in LADDER):
        sheets["ladder"] = links.ladder_sheet(measured, tuned)
    # Stage 4's time divided by tuned DDP's, for a sentence on a page.
    figures = {"over_tuned": f"{stage4.over(tuned):.2f}"} if stage4 and tuned else {}
    words = measured.words(f" on 2 hosts of {n_cores} core(s), TCP {TCP}")
    # `made` is a Made: the machine, the release of torch, the commit and the date.
    return Report(measured.conditions.made, sheets, words, figures, links.to_draw(measured, link, sweep, tuned))


# -------------------------------------------------------------------------------------------------------- The program


def exit_on_signals():
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does, after its ranks have ended and its hosts are removed.

    A second signal is ignored, because it could come before `Hosts.__exit__` ignores signals, and leave namespaces.
    """
    def leave(*_):
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        sys.exit(1)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)


def main():
    args = parse()
    if args.json:
        command_line.check_writable("--json", args.json, fail)
    exit_on_signals()
    try:
        measured, report = measure(args)
    except OSError as error:
        sys.exit(f"network: {error}: two hosts need Linux, iproute2, and root: sudo make bench WHAT=network")
    except WorkerError as error:
        sys.exit(f"network: {error}")
    save_and_show(args.json, report, fail)
    sys.exit(measured.exit_code())


if __name__ == "__main__":
    main()
