"""Starts a process that loads torch once, and then forks a rank, a process of a training run, whenever one is needed.

This module doesn't load torch itself. So a program can call it first, and the forkserver loads torch meanwhile.
"""

import functools
import multiprocessing
import signal
from multiprocessing import forkserver

# These modules are imported once, before the ranks are forked, and not in every rank. torch.optim imports torch._dynamo
# in an optimizer's first step, which takes 1.5 seconds. Checkpoints import the second module, bench.py the third.
PRELOADED = "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.optim"


@functools.cache
def start_forkserver(modules=PRELOADED):
    """Start the process that imports `modules` and then forks each rank within milliseconds. Later calls do nothing.

    The main thread must make the first call, because no other thread may change a signal's handler. The new process and
    the ranks ignore Ctrl-C: the process that called this function gets it, too, and ends them.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the new process inherits SIG_IGN
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)
