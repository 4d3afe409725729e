"""Starts the process that loads torch and forks ranks. It loads no torch, so a program can call it first."""

import functools
import multiprocessing
import signal
from multiprocessing import forkserver

# torch.optim imports torch._dynamo in its first step. That takes 1.5 seconds, once here and not in every worker. The
# other two modules, which checkpoints and rows of the bench import, take half a second more.
PRELOADED = "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.optim"


@functools.cache
def start_forkserver(modules=PRELOADED):
    """Start, once, the process that imports `modules` and forks workers on demand, each in milliseconds.

    The main thread must make the first call. The process and its children ignore Ctrl-C: the parent ends them.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the new process inherits SIG_IGN
    forkserver.ensure_running()
    signal.signal(signal.SIGINT, handler)
