"""Two hosts on one machine, joined by a line of limited rate: the rows of the bench where there is something to hide.

    python -m harness.measure.network --rate 1gbit [--rounds 4] [--rows "stage 4"]

Each host is a network namespace of Linux; a veth pair joins them, whose two ends are held to `--rate` by a token bucket
(tc tbf). In each, torchrun starts one rank with gloo on the CPU, on half of the cores. Needs root and iproute2. Nothing
else on the machine is touched, and the namespaces are gone when it ends, also by Ctrl-C or SIGTERM. (After SIGKILL its
ranks are gone, and `ip netns delete` removes dopt-PID-a and dopt-PID-b.) Exit code: 0; 1 when a stage is wrong or
fails; 2 for bad input.
"""

import argparse
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.run import cli

fail = functools.partial(cli.fail, "network")

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
ROWS = ["compute only", "compute + bytes", "ddp", "ddp + stage 1", "ddp + stage 2", "ddp + torch ZeRO", "fsdp2",
        "rung 0 replicated", "stage 1 naive broadcast", "stage 2 all-gather", "stage 3 grad buffer", "owner reduce",
        "owner reduce, 2 MB buckets", "stage 4 neither", "stage 4 only gradients", "stage 4 only parameters",
        "stage 4 overlap", "compute only bf16", "stage 4 overlap bf16"]
NETWORK, ADDRESSES = "10.99.0.0/24", ["10.99.0.1", "10.99.0.2"]  # inside namespaces: nobody else sees them
PORT = 29500
SWEEP_ROUNDS, SWEEP_STEPS = 2, 5  # at most: it finds a size, and the row with that size is then measured as any other
TCP = "cubic"  # Linux's default, whatever this machine has set: how senders find the rate is part of a figure
INSIDE = "DISTRIBUTED_OPTIMIZER_HOST"  # set there, and not RANK, which another launcher may have set outside


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument
    add("--rate", default="1gbit", help="of the line, as tc writes it: 300mbit, 1gbit (default 1gbit)")
    add("--model", default="tiny", help="see bench.py (default tiny)")
    add("--batch-size", type=int, default=8, help="sequences per rank (default 8)")
    add("--sequence-length", type=int, default=128, help="bytes per sequence (default 128)")
    # The first step of a round finds its parameters there, the last one waits for its own: at 300 Mbit/s that is 0.4 s
    # a round in stage 4, which no step of a training run pays. 20 steps share it.
    add("--rounds", type=int, default=4, help="in each, every row is timed once (default 4)")
    add("--steps", type=int, default=20, help="timed in a round, end to end (default 20)")
    add("--rows", default="", metavar="TEXT", help="only rows whose name holds TEXT, ddp and compute only")
    add("--sweep", action="store_true", help="first find the best bucket size of each row that has buckets")
    add("--tuned", default=None, metavar="NAMES", help="rows with a bucket size of their own, like 'ddp, 2 MB buckets; "
        "ddp + stage 1, 4 MB buckets' (default: the best of the last --sweep at this rate, kept in --json)")
    add("--accumulation", action="store_true", help="also time 1 to 8 micro-batches a step: what communication "
        "takes of it, and both ways to accumulate in stage 4")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    add("--timeout", type=int, default=120, help="seconds after which a waiting rank gives up (default 120)")
    args = parser.parse_args()
    bits_per_second(args.rate)
    args.tuned = args.tuned if args.tuned is None else [name.strip() for name in args.tuned.split(";") if name.strip()]
    if not any(args.rows in name for name in ROWS):
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(ROWS)}")
    return args


def bits_per_second(rate):
    """"300mbit" -> 3e8."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if not match or not 1e3 <= float(match[1]) * UNITS[match[2]] <= 1e12:
        fail(f"--rate {rate}: write a number and kbit, mbit or gbit, like 300mbit; from 1kbit to 1000gbit")
    return float(match[1]) * UNITS[match[2]]


# ---------------------------------------------------------------------------------------------------------------------
# Outside: the hosts, the line between them, and their end


class Hosts:
    """Two network namespaces and the line between them, while it is entered. `names`: as `ip netns` knows them."""

    def __init__(self, rate):
        self.rate = rate
        self.names = [f"dopt-{os.getpid()}-{host}" for host in "ab"]
        self.links = [f"dopt{os.getpid()}{host}" for host in "ab"]  # at most 15 characters

    def __enter__(self):
        try:
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
        """End what still runs in the namespaces, by its process id, and remove them; the line goes with them.

        A second Ctrl-C doesn't interrupt that.
        """
        numbers = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
        handlers = [signal.signal(number, signal.SIG_IGN) for number in numbers]
        try:
            for name in self.names:
                if Path("/run/netns", name).exists():
                    for pid in run("ip", "netns", "pids", name).split():
                        end(int(pid))
                    run("ip", "netns", "delete", name)
        finally:
            for number, handler in zip(numbers, handlers):
                signal.signal(number, handler)

    def start(self, host, *command):
        """Start a command on host 0 or 1 -> Popen. It ends when this process does.

        Hosts have processors of their own: each gets every second core, where there are two.
        """
        cores = sorted(os.sched_getaffinity(0))[host::2]

        def prepare():
            cli.end_with_parent()
            if cores:
                os.sched_setaffinity(0, cores)

        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.links[host], "CUDA_VISIBLE_DEVICES": "",
                       "OMP_NUM_THREADS": "1", INSIDE: str(host)}
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], env=environment,
                                cwd=Path(__file__).resolve().parents[2], start_new_session=True,
                                preexec_fn=prepare)


def end(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has ended by itself


def run(*command):
    """Run one command of iproute2 -> what it prints. Its error is ours, in one line."""
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)  # Ctrl-C is not for it
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def missing():
    """What this machine lacks -> a line, or None."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"{' and '.join(tools)} not found: install iproute2 (Linux only)"
    if os.geteuid() != 0:
        return "network namespaces need root: sudo make network, or run it in a container as root"
    return None


def measure_on_two_hosts(args):
    """-> the result, or None when a host failed; what failed has been printed by then."""
    with tempfile.TemporaryDirectory() as folder, Hosts(args.rate) as hosts:
        path = Path(folder, "network.json")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                    "--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
        flags = [name for name in ("accumulation", "sweep") if getattr(args, name)]
        options = [*(f"--{name}" for name in flags), f"--tuned={';'.join(args.tuned)}",
                   *(f"--{name.replace('_', '-')}={value}" for name, value in vars(args).items()
                     if name not in ("json", "accumulation", "sweep", "tuned"))]
        processes = [hosts.start(host, *torchrun, "--node-rank", str(host), "-m", "harness.measure.network",
                                 *options, f"--json={path}") for host in (0, 1)]
        while None in (codes := [wait_a_moment(process) for process in processes]) and not any(codes):
            continue  # and no longer than until the first that fails: Hosts ends the other
        return json.loads(path.read_text()) if codes == [0, 0] else None


def wait_a_moment(process):
    """-> its exit code, or None when it still runs."""
    try:
        return process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Inside: what each rank runs


class Together:
    """What `launch.Workers` is to a process that starts ranks, for ranks that torchrun started: each calls `run`."""

    def __init__(self, rank):
        self.rank, self.world_size = rank, rank.world_size

    def run(self, function, *args):
        """-> [function(rank 0, *args), function(rank 1, *args)], on every rank. Raises WorkerError where one fails."""
        import torch.distributed as dist

        from harness.run.launch import WorkerError

        result, error = None, None
        try:
            result = function(self.rank, *args)
        except Exception as failure:
            error = f"rank {self.rank.rank}: {type(failure).__name__}: {failure}".splitlines()[0]
        answers = [None] * self.world_size
        dist.all_gather_object(answers, (result, error))
        errors = [error for _, error in answers if error is not None]
        if errors:
            raise WorkerError(errors[0])
        return [result for result, _ in answers]


def measure_here(args):
    """On every rank: the rows, interleaved; rank 0 writes the result."""
    from harness.measure import measure, timeline
    from harness.rows import buckets
    from harness.run import launch

    rank = launch.connect(args.timeout)
    settings = measure.Settings(args.model, args.batch_size, args.sequence_length, args.rounds, args.steps)
    always = ("ddp", "compute only") + ("stage 3 grad buffer", "stage 4 overlap") * args.accumulation

    def progress(text):
        if rank.rank == 0:
            print(f"\r{text:60}", end="", file=sys.stderr, flush=True)
    together, swept, tuned = Together(rank), {}, args.tuned or []
    if args.sweep:
        short = settings._replace(rounds=min(args.rounds, SWEEP_ROUNDS), steps=min(args.steps, SWEEP_STEPS))
        swept = {"sweep": measure.measure(together, short, buckets.names(args.rows), progress)}
        tuned = buckets.best(swept["sweep"]["rows"])
    names = buckets.beside([name for name in ROWS if args.rows in name or name in always],
                           [name for name in tuned if args.rows in name or name.startswith("ddp,")])
    result = {**measure.measure(together, settings, names, progress), **swept}
    timeline.record_rows(together, settings, result["rows"], progress)
    accumulating = [row for row in result["rows"] if row["name"] in always]
    if args.accumulation and not any("error" in row for row in accumulating):  # what is wrong gets no time
        ddp = next((name for name in tuned if name.startswith("ddp,")), "ddp")
        short = settings._replace(rounds=min(args.rounds, 2))
        measure.attempt(accumulating[-1], lambda: result.update(accumulation={
            "conditions": {**result["conditions"], "rounds": short.rounds}, "ddp": ddp,
            "rows": measure.accumulation(together, short, ddp, progress)}))
    if rank.rank == 0:
        print(f"\r{'':60}\r", end="", file=sys.stderr)
        result["conditions"].update(rate=args.rate, bits_per_second=bits_per_second(args.rate), hosts=2, tcp=TCP,
                                    cores_per_host=len(os.sched_getaffinity(0)))
        args.json.write_text(json.dumps(result))
    launch.disconnect()


def earlier(args):
    """What the file holds, if there is one -> the results at other rates, and of this rate what is kept of it.

    The table of accumulation and the sweep are kept, with the conditions that they were measured under, where they
    aren't measured again. Fails where tables and picture can't be made of what the file holds.
    """
    from harness.measure import timeline
    from harness.report import tables  # here: see main
    if args.json is None or not args.json.exists():
        return [], {}
    if not args.json.is_file():
        fail(f"--json {args.json}: it is no file: results of other rates are kept in it")
    try:
        before = json.loads(args.json.read_text())
        others, kept = [], {}
        for result in [before, *before.pop("other_rates")]:
            if result["conditions"]["rate"] != args.rate:
                others.append(result)
            else:
                kept = {name: result[name] for name in ("accumulation", "sweep")
                        if name in result and not getattr(args, name)}
            tables.sheets(result)
        timeline.picture(others)
        return others, kept
    except (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        fail(f"--json {args.json}: it holds something else than results of make network: name another file")


def write(args, result):
    """Puts the result first in the file, before those of other rates, and draws the picture beside it."""
    from harness.measure import timeline
    others, kept = earlier(args)
    results = [{**result, **kept}, *others]
    to_draw = timeline.to_draw(results)
    for other in results:
        if other is not to_draw:
            timeline.keep_exposed_only(other["rows"])
    cli.write("--json", args.json, json.dumps({**results[0], "other_rates": others}, indent=1) + "\n", fail)
    picture = timeline.picture(results)
    if picture:
        cli.write("--json", args.json.with_suffix(".svg"), picture, fail)


def main():
    args = parse()
    if INSIDE in os.environ:
        return measure_here(args)
    # Here: bad input is answered before torch is loaded.
    from harness.measure import measure, timeline
    from harness.report import tables
    from harness.rows import buckets, peers
    from harness.train import workload

    cli.check_workload(args, ("rounds", "steps", "timeout"), workload.MODELS, fail)
    if args.json:
        cli.check_beside("--json", args.json, ".svg", fail)
    _, kept = earlier(args)  # fails now if the file holds something else
    if args.tuned is None:
        args.tuned = buckets.best(kept["sweep"]["rows"]) if "sweep" in kept else []
    for name in args.tuned:
        try:
            peers.find(name)
        except LookupError as error:
            fail(f"--tuned: {error.args[0]}")
    reason = missing()
    if reason:
        sys.exit(f"network: {reason}")
    cli.exit_on_signals()
    try:
        result = measure_on_two_hosts(args)
    except OSError as error:
        sys.exit(f"network: {error}")
    if result is None:
        sys.exit("network: a host failed; see above")
    shown, title = timeline.on_two_hosts(result)
    steps = f"{title}\n{timeline.text(shown)}\n" if shown else ""  # now: of most results they aren't kept
    try:
        if args.json:
            write(args, result)
    finally:  # see bench.py
        tables.show(result)
    if args.json:
        print(f"{steps}written to {args.json} and {args.json.with_suffix('.svg')}")
    sys.exit(measure.is_wrong(result))


if __name__ == "__main__":
    main()
