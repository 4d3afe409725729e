"""Asks the system for what a process needs: to end with its parent, to keep freed memory, to let computing go first."""

import ctypes
import os
import signal
import sys
from pathlib import Path


def end_with_parent():
    """Ask Linux, in a child, for a SIGTERM when the parent dies, even of SIGKILL. torchrun then ends its ranks."""
    PR_SET_PDEATHSIG = 1
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def exit_on_signals():
    """Let SIGTERM and SIGHUP end this process as Ctrl-C does: what it has started and made is removed."""
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

    Linux prefers a thread that wakes up, and gloo's threads wake up at each 64 kB that arrive, amid a matrix product.
    GLOO_PRIORITY=normal in the environment leaves them as they are, for a machine with many more ranks than cores:
    there they would get no core while any rank computes, and other ranks wait for what they send.
    """
    if os.environ.get("GLOO_PRIORITY") == "normal":
        return
    for thread in threads:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)
        except OSError:
            continue  # it has ended, or this isn't allowed


def own_threads():
    """Return the set of ids of this process's threads; empty where there is no /proc."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()
