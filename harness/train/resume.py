"""What lets a run of train.py stop and go on: a signal that all ranks act upon in the same step, the checkpoints that a
folder keeps, and the settings that must not change between them.

Slurm sends SIGTERM some 30 seconds before SIGKILL, or SIGUSR1 as early as `--signal=USR1@120` says; torchrun passes
SIGTERM on to its ranks. A signal may reach one rank only, or ranks in different steps: so the ranks agree.
"""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from harness.run import launch

PREEMPTED = os.EX_TEMPFAIL  # 75, a rank's exit code: saved, start me again
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
MANIFEST = "manifest.json"  # a checkpoint is complete when it has one


class StopSignal:
    """Whether a rank was told to stop, as all ranks see it after the same step.

    The handler only takes a note. When optimizer.step() begins the ranks send each other their notes, beside what the
    step sends, and look at the answer when the step is over: nothing waits for it. What comes while step() runs is seen
    after the next one.
    """

    def __init__(self, optimizer, timeout_s):
        self.timeout_s, self.work = timeout_s, None
        self.received = received = [0]
        for number in SIGNALS:
            signal.signal(number, lambda number, _: received.__setitem__(0, number))
        if dist.get_world_size() > 1:
            launch.beside(timeout_s)  # made now, by all ranks
            optimizer.register_step_pre_hook(lambda *_: self._ask())

    def _ask(self):
        self.answer = torch.tensor(self.received)  # (1,) int64
        if dist.get_world_size() > 1:
            group = launch.beside(self.timeout_s)
            self.work = dist.all_reduce(self.answer, dist.ReduceOp.MAX, group=group, async_op=True)

    def agreed(self):
        """-> the name of the signal that some rank has had, the same one on every rank, or None. Collective."""
        if self.work is None:
            self._ask()
        if self.work is not None:
            self.work.wait()
            self.work = None
        number = self.answer.item()
        return signal.Signals(number).name if number else None


def path_of(folder, step):
    return Path(folder) / f"step-{step:08}"


def steps_in(folder):
    """-> the steps of which the run in `folder` has a checkpoint, complete or not, the newest first.

    Other names are not the run's: zzz-best, step-00000010.partial.
    """
    found = [re.fullmatch(r"step-(\d{8,})", path.name) for path in Path(folder).glob("step-*")]
    return sorted({int(match[1]) for match in found if match}, reverse=True)


def complete(folder):
    """-> the steps of complete checkpoints, the newest first."""
    return [step for step in steps_in(folder) if (path_of(folder, step) / MANIFEST).is_file()]


def remove_old(folder, keep):
    """Removes what is older than the `keep` newest complete checkpoints, if `keep` isn't 0. Links stay.

    The manifest goes first: a checkpoint that is half removed isn't complete. What can't be removed is one line.
    """
    kept = complete(folder)[:keep] if keep else []
    for path in [path_of(folder, step) for step in steps_in(folder) if kept and step < kept[-1]]:
        try:
            if not path.is_symlink():
                (path / MANIFEST).unlink(missing_ok=True)
                shutil.rmtree(path)
        except OSError as error:
            print(f"{Path(sys.argv[0]).name}: {path} can't be removed: {error.strerror}", file=sys.stderr)


def set_aside(folder, steps):
    """Renames these checkpoints to step-….aside: the run goes on from one before, and will write new ones."""
    for path in [path_of(folder, step) for step in steps]:
        names = [f"{path.name}.aside", *(f"{path.name}.aside-{number}" for number in range(2, 1000))]
        path.rename(next(path.with_name(name) for name in names if not path.with_name(name).exists()))


def settings_of(args, world_size):
    """What a checkpoint says of its run: option -> value. With other values of DATA_ORDER a step sees other text."""
    return {"--seed": args.seed, "--data": args.text, "ranks x --batch-size": world_size * args.batch_size,
            "--accumulate": args.accumulate, "--sequence-length": args.sequence_length,
            "--steps": args.steps, "--clip": args.clip, "--dtype": args.dtype,
            "--lr": args.lr, "--weight-decay": args.weight_decay}


DATA_ORDER = ("--seed", "--data", "ranks x --batch-size", "--accumulate", "--sequence-length")


def changes(before, now):
    """-> {option: (value before, value now)}, as text. A text is the same one wherever it is."""
    def text_of(value):
        return "{} ({} bytes, checksum {:08x})".format(*value) if isinstance(value, (tuple, list)) else f"{value}"

    def compared(value):
        return list(value[1:]) if isinstance(value, (tuple, list)) else value

    return {option: (text_of(before[option]), text_of(value)) for option, value in now.items()
            if option in before and compared(before[option]) != compared(value)}


def take_hyperparameters(args, optimizer, scheduler):
    """Learning rate, its schedule and weight decay are those of `args` from here on, whatever the checkpoint had."""
    scheduler.base_lrs = [args.lr] * len(optimizer.param_groups)
    for group, factor in zip(optimizer.param_groups, scheduler.lr_lambdas):
        group["initial_lr"], group["weight_decay"] = args.lr, args.weight_decay
        group["lr"] = args.lr * factor(scheduler.last_epoch)
