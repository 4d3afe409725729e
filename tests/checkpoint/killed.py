"""Runs a train.py whose rank 1 ends itself by SIGKILL, at a chosen moment of the first attempt.

    python tests/checkpoint/killed.py MOMENT[:SIGNAL] stage4_overlap/train.py [arguments of train.py …]

With a signal it sends itself that one. After SIGSTOP, which only SIGKILL and SIGCONT get through, it is killed some
seconds later.
"""

import itertools
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from torch.nn.modules.module import register_module_forward_pre_hook, register_module_full_backward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from checkpoint import files, ranks

STOPPED_S = 20


def dies_at_call(last):
    """A hook that does nothing but at the call of that number."""
    calls = itertools.count(1)

    def hook(*_):
        if next(calls) == last:
            if number == signal.SIGSTOP:
                subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), number)
    return hook


def in_step(last):
    """The same for the steps of ours: the optimizer inside it, and those that it was tried with, are torch's."""
    hook = dies_at_call(last)
    return lambda optimizer, *_: hook() if type(optimizer).__name__ == "DistributedOptimizer" else None


def while_saving():
    write, hook = files.write_rank_file, dies_at_call(2)
    files.write_rank_file = lambda *args: (write(*args), hook())[0]  # some of it is written


# A nano model calls 21 modules in forward; it is evaluated on 11 batches before the first step.
MOMENTS = {
    "backward": lambda: register_module_full_backward_hook(dies_at_call(21 * 15)),
    "step": lambda: register_optimizer_step_pre_hook(in_step(15)),
    "after step": lambda: register_optimizer_step_post_hook(in_step(15)),
    "prefetch": lambda: register_module_forward_pre_hook(dies_at_call(21 * (11 + 15) + 9)),  # parameters travel
    "save": while_saving,
}

if __name__ == "__main__":
    ranks.SILENT_S = 5  # that the others wait for word of the one that was killed while it wrote
    moment, script, *arguments = sys.argv[1:]
    moment, _, name = moment.partition(":")
    number = signal.Signals[name or "SIGKILL"]  # that rank 1 sends itself
    if os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        MOMENTS[moment]()
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
