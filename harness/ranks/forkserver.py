"""Starts the process that loads torch and forks ranks. This module loads no torch, so a program can call it first."""

import functools
import multiprocessing
import signal
from multiprocessing import forkserver

# torch.optim imports torch._dynamo in the first step: 1.5 seconds, which would pass in every worker. What checkpoints
# and rows import takes half a second more.
PRELOADED = "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.optim"


@functools.cache
def start_forkserver(modules=PRELOADED):
    """Start, once, the process that imports `modules` and forks workers on demand: one then costs milliseconds.

    The main thread must make the first call. The process and its children ignore Ctrl-C: the parent ends them.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, before)
