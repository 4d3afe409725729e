"""Two hosts on one machine, joined by a line of limited rate: the rows of the bench where there is something to hide.

    python -m harness.measure.two_hosts --rate 1gbit [--rounds 4] [--rows "stage 4"]

Each host is a network namespace of Linux; a veth pair joins them, whose two ends are held to `--rate` by a token bucket
(tc tbf). In each, torchrun starts one rank with gloo on the CPU, on half of the cores. Needs root and iproute2. Nothing
else on the machine is touched, and the namespaces are gone when it ends, also by Ctrl-C or SIGTERM. (After SIGKILL its
ranks are gone, and `ip netns delete` removes dopt-PID-a and dopt-PID-b.) Exit code: 0; 1 when a stage is wrong or
fails; 2 for bad input.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.measure.namespaces import ADDRESSES, INSIDE, Hosts, missing
from harness.measure.two_host_options import fail, parse
from harness.rows import rates, saved
from harness.rows.results import Result
from harness.run import command_line, signals
from harness.run.files import write

PORT = 29500


def measure_on_two_hosts(args):
    """-> the result, or None when a host failed; what failed has been printed by then."""
    with tempfile.TemporaryDirectory() as folder, Hosts(args.rate) as hosts:
        path = Path(folder, "network.json")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                    "--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
        flags = [name for name in ("accumulation", "sweep") if getattr(args, name)]
        tuned = ";".join(f"{choice.base}={choice.bucket_mb:g}" for choice in args.tuned)
        options = [*(f"--{name}" for name in flags), f"--tuned={tuned}",
                   *(f"--{name.replace('_', '-')}={value}" for name, value in vars(args).items()
                     if name not in ("json", "accumulation", "sweep", "tuned"))]
        processes = [hosts.start(host, *torchrun, "--node-rank", str(host), "-m", "harness.measure.two_hosts",
                                 *options, f"--json={path}") for host in (0, 1)]
        while None in (codes := [wait_a_moment(process) for process in processes]) and not any(codes):
            continue  # and no longer than until the first that fails: Hosts ends the other
        return saved.from_json(Result, path.read_text()) if codes == [0, 0] else None


def wait_a_moment(process):
    """-> its exit code, or None when it still runs."""
    try:
        return process.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        return None


def earlier(args):
    """What the file holds -> list of Results, each of one rate. Fails where it holds something else."""
    if args.json is None or not args.json.exists():
        return []
    if not args.json.is_file():
        fail(f"--json {args.json}: it is no file: results of other rates are kept in it")
    try:
        results = saved.from_json(Result, args.json.read_text(encoding="utf-8")).at_all_rates()
    except (OSError, ValueError) as error:
        fail(f"--json {args.json}: it holds something else than results of make network, name another file: {error}")
    if not all(result.conditions.rate for result in results):
        fail(f"--json {args.json}: it holds something else than results of make network, name another file")
    return results


def add_to_file(args, result):
    """Puts the result first in the file, before those of other rates, and draws the picture beside it.

    What was asked for and has failed isn't taken over from the run before.
    """
    from harness.report import step_picture
    kept = [name for name in ("accumulation", "sweep") if not getattr(args, name)]
    result = rates.merged(result, earlier(args), kept)
    write("--json", args.json, saved.to_json(result), fail)
    picture = step_picture.two_hosts_picture(result.at_all_rates())
    if picture:
        write("--json", args.json.with_suffix(".svg"), picture, fail)


def main():
    args = parse(__doc__)
    # Here: bad input is answered before torch is loaded.
    if INSIDE in os.environ:
        from harness.measure import on_each_host
        on_each_host.measure_here(args)
        os._exit(0)  # Python ends threads of gloo that ask for its lock while it ends: 1 host of 150 aborted
    from harness.measure import every_row
    from harness.report import step_picture, terminal
    from harness.rows import bucket_sizes, catalogue
    from harness.train.gpt import MODELS

    command_line.check_workload(args, ("rounds", "steps", "timeout"), MODELS, fail)
    if args.json:
        command_line.check_beside("--json", args.json, ".svg", fail)
    before = earlier(args)  # fails now if the file holds something else
    if args.tuned is None:
        sweeps = [result.sweep for result in before if result.conditions.rate == args.rate and result.sweep]
        args.tuned = bucket_sizes.best(sweeps[0].rows) if sweeps and not args.sweep else []
    for choice in args.tuned:
        try:
            catalogue.find(*choice)
        except LookupError as error:
            fail(f"--tuned: {error.args[0]}")
    reason = missing()
    if reason:
        sys.exit(f"network: {reason}")
    signals.exit_on_signals()
    try:
        result = measure_on_two_hosts(args)
    except OSError as error:
        sys.exit(f"network: {error}")
    if result is None:
        sys.exit("network: a host failed; see above")
    shown, title = step_picture.on_two_hosts(result)
    steps = f"{title}\n{step_picture.text(shown)}\n" if shown else ""  # now: of most results they aren't kept
    try:
        if args.json:
            add_to_file(args, result)
    finally:  # see bench.py
        terminal.show(result)
    if args.json:
        print(f"{steps}written to {args.json} and {args.json.with_suffix('.svg')}")
    sys.exit(every_row.is_wrong(result))


if __name__ == "__main__":
    main()
