"""Two network namespaces of Linux, joined by a line that is held to a rate, and gone afterwards."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

from harness.run import signals

NETWORK, ADDRESSES = "10.99.0.0/24", ["10.99.0.1", "10.99.0.2"]  # inside namespaces: nobody else sees them
TCP = "cubic"  # Linux's default, whatever this machine has set: how senders find the rate is part of a figure
INSIDE = "DISTRIBUTED_OPTIMIZER_HOST"  # set there, and not RANK, which another launcher may have set outside


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
            signals.end_with_parent()
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
