"""Runs a train.py whose rank 1 ends itself by SIGKILL, at a chosen moment of the first attempt.

    python tests/killed.py MOMENT stage4_overlap/train.py [arguments of train.py …]
"""

import itertools
import os
import runpy
import signal
import sys
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.nn.modules.module import register_module_forward_pre_hook, register_module_full_backward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checkpoint import ranks


def dies_at_call(last):
    """A hook that does nothing, `last` - 1 times."""
    calls = itertools.count(1)
    return lambda *_: os.kill(os.getpid(), signal.SIGKILL) if next(calls) == last else None


def in_step(last):
    """The same for the steps of ours: the optimizer inside it, and those that it was tried with, are torch's."""
    hook = dies_at_call(last)
    return lambda optimizer, *_: hook() if type(optimizer).__name__ == "DistributedOptimizer" else None


def while_saving():
    write, hook = dcp.FileSystemWriter.write_data, dies_at_call(2)
    dcp.FileSystemWriter.write_data = lambda *args: (write(*args), hook())[0]  # some of it is written


# A nano model calls 21 modules in forward; it is evaluated on 11 batches before the first step.
MOMENTS = {
    "backward": lambda: register_module_full_backward_hook(dies_at_call(21 * 15)),
    "step": lambda: register_optimizer_step_pre_hook(in_step(15)),
    "prefetch": lambda: register_module_forward_pre_hook(dies_at_call(21 * (11 + 15) + 9)),  # parameters travel
    "save": while_saving,
}

if __name__ == "__main__":
    ranks.SILENT_S = 5  # that the others wait for word of the one that was killed while it wrote
    moment, script, *arguments = sys.argv[1:]
    if os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        MOMENTS[moment]()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
