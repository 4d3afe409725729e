"""What a process asks of its system: an end with its parent, freed memory that is kept."""

import ctypes
import os
import signal
import sys
from pathlib import Path


def end_with_parent():
    """In a child: ask Linux for a SIGTERM when the parent dies, even of SIGKILL. torchrun then ends its ranks."""
    PR_SET_PDEATHSIG = 1
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def exit_on_signals():
    """SIGTERM and SIGHUP end this process as Ctrl-C does: what it has started and made is put away."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))


def keep_freed_memory():
    """Let glibc keep what is freed for the next tensor of that size, as torch's allocator for CUDA does.

    By default it gives large blocks back to Linux, which hands them out again page by page, each one zeroed: up to
    35,000 page faults a step were counted with the tiny model, and not in each run of the same program.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not on every libc
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**30)


def let_computing_go_first(threads):
    """Let `threads`, ids of this process, wait where one that computes has the core, instead of interrupting it.

    Linux prefers who wakes up, and gloo's threads do at each 64 kB that arrive: in the midst of a matrix product.
    GLOO_PRIORITY=normal in the environment leaves them as they are, for a machine with many more ranks than cores: they
    would get none while any rank computes, and the others wait for what they send.
    """
    if os.environ.get("GLOO_PRIORITY") == "normal":
        return
    for thread in threads:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)
        except OSError:
            continue  # it has ended, or may not be told


def own_threads():
    """-> set of the ids of this process's threads; empty where there is no /proc."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()
