"""Two settings of Linux and glibc without which ranks on one machine get in each other's way."""

import ctypes
import os
from pathlib import Path


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

    Linux prefers who wakes up, and gloo's threads do at each 64 kB that arrive: in the midst of a matrix product. (Here
    those of the default group; a group that is made later has threads of its own.)

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
