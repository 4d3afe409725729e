"""Runs a train.py of which one rank sends itself a signal, at a chosen moment of the first attempt.

    python tests/harness/killed.py RANK MOMENT SIGNAL stage4_overlap/train.py [arguments of train.py …]

MOMENT: "backward" or "prefetch" in step 15, "save 3" before the third file operation of the save of step 20.
After SIGSTOP, which only SIGKILL and SIGCONT get through, the rank is killed some seconds later.
"""

import itertools
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from torch.nn.modules.module import register_module_forward_pre_hook, register_module_full_backward_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import checkpoint

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def at_call(last, number):
    """Return a hook that sends this process the signal `number` in its call number `last`."""
    calls = itertools.count(1)

    def hook(*_):
        if next(calls) == last:
            if number == signal.SIGSTOP:
                subprocess.Popen(["sh", "-c", f"sleep 20; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), number)
    return hook


def at_file_operation_of_save(operation, number):
    """Send the signal before a file operation of the save of step 20, or of the removal of old saves behind it."""
    save = checkpoint.save
    hook = at_call(operation, number)
    saved_names = [""]

    def hear(event, arguments):
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if saved_names[-1] == "step-00000020" and (event in CHANGES or is_write):
            hook()

    def watched_save(path, *args):
        saved_names.append(path.name)
        save(path, *args)
    checkpoint.save = watched_save
    sys.addaudithook(hear)


N_MODULES = 21  # that a nano model calls in a forward pass
N_VALIDATED = 11  # batches on which it is evaluated before the first step


def at_moment(moment, number):
    name, _, operation = moment.partition(" ")
    if name == "save":
        at_file_operation_of_save(int(operation), number)
    elif name == "backward":
        register_module_full_backward_hook(at_call(N_MODULES * 15, number))
    else:  # parameters are being sent
        register_module_forward_pre_hook(at_call(N_MODULES * (N_VALIDATED + 15) + 9, number))


if __name__ == "__main__":
    rank, moment, signal_name, script, *arguments = sys.argv[1:]
    if os.environ["RANK"] == rank and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        at_moment(moment, signal.Signals[signal_name])
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
