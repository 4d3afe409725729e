"""Runs a train.py whose rank 1 ends itself by SIGKILL, at a chosen moment of the first attempt.

    python tests/harness/killed.py MOMENT[:SIGNAL] stage4_overlap/train.py [arguments of train.py …]

With a signal the rank sends itself that one. After SIGSTOP, which only SIGKILL and SIGCONT get through, the rank is
killed some seconds later.
"""

import itertools
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from torch.nn.modules.module import register_module_forward_pre_hook, register_module_full_backward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import checkpoint

CHANGING = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
STOPPED_S = 20


def at_call(last, number=signal.SIGKILL):
    """Return a hook that does nothing but at the call number `last`: then this process gets the signal `number`."""
    calls = itertools.count(1)

    def hook(*_):
        if next(calls) == last:
            if number == signal.SIGSTOP:
                subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -9 {os.getpid()}"])
            os.kill(os.getpid(), number)
    return hook


def at_file_operation(last, number=signal.SIGKILL):
    """Send this process a signal before the file operation number `last` that it does from now on."""
    hook = at_call(last, number)

    def hear(event, arguments):
        is_write = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if event in CHANGING or is_write:
            hook()

    def fsync_after_hook(descriptor, fsync=os.fsync):  # Python tells no audit hook of it
        hook()
        fsync(descriptor)

    os.fsync = fsync_after_hook
    sys.addaudithook(hear)


def in_second_save(number):
    save, is_second = checkpoint.save, itertools.count().__next__

    def save_and_die(*args):
        if is_second() == 1:
            at_file_operation(2, number)  # the rank's file is open, and some of it is written
        save(*args)
    checkpoint.save = save_and_die


def in_step_15(number):
    """A step of the stage, not of the torch optimizer inside it, nor of those that it was tried with."""
    hook = at_call(15, number)
    register_optimizer_step_pre_hook(
        lambda optimizer, *_: hook() if type(optimizer).__name__ == "DistributedOptimizer" else None)


# A nano model calls 21 modules in a forward pass; it is evaluated on 11 batches before the first step.
MOMENTS = {
    "backward": lambda number: register_module_full_backward_hook(at_call(21 * 15, number)),
    "prefetch": lambda number: register_module_forward_pre_hook(at_call(21 * (11 + 15) + 9, number)),
    "step": in_step_15,
    "save": in_second_save,
}

if __name__ == "__main__":
    moment, script, *arguments = sys.argv[1:]
    moment, _, name = moment.partition(":")
    if os.environ["RANK"] == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        MOMENTS[moment](signal.Signals[name or "SIGKILL"])
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
