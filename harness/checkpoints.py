"""A run saves itself every few steps and when it is told to stop, and goes on from the newest complete checkpoint."""

import os
import re
import shutil
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
from checkpoint.folder import hold
from checkpoint.ranks import at_own_pace, errors_on_all
from harness.command_line import check_writable
from harness.meeting import beside, is_rank_0, leave, on_all_ranks
from harness.options import PREEMPTED

MANIFEST = "manifest.json"  # a checkpoint is complete when it has one


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


def set_aside(path):
    """Renames a checkpoint to step-….aside: the run goes on from one before, and will write a new one."""
    names = [f"{path.name}.aside", *(f"{path.name}.aside-{number}" for number in range(2, 1000))]
    path.rename(next(path.with_name(name) for name in names if not path.with_name(name).exists()))


SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


class StopSignal:
    """Whether a rank was told to stop, as all ranks see it after the same step. The handler only takes a note."""

    def __init__(self, timeout_s):
        self.received = [0]
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: the run goes on without its terminal
                signal.signal(number, lambda number, _: self.received.__setitem__(0, number))
        self.group = beside(timeout_s)

    def agreed(self):
        """-> the name of the signal that some rank has had, the same one on every rank, or None. Collective."""
        received = torch.tensor(self.received)  # (1,) int64
        dist.all_reduce(received, dist.ReduceOp.MAX, group=self.group)
        return signal.Signals(received.item()).name if received else None


MISTAKES = OSError, ValueError, checkpoint.CheckpointError
DATA_ORDER = ("--seed", "--data", "ranks x --batch-size", "--accumulate", "--sequence-length")  # else other text comes


def settings_of(args, world_size):
    """What a checkpoint says of its run: option -> value. Data are a place, a number of bytes, a checksum."""
    return {"--seed": args.seed, "--data": args.text, "ranks x --batch-size": world_size // args.tp * args.batch_size,
            "--accumulate": args.accumulate, "--sequence-length": args.sequence_length, "--steps": args.steps,
            "--clip": args.clip, "--dtype": args.dtype, "--lr": args.lr, "--weight-decay": args.weight_decay}


def changes(before, now):
    """-> {option: (before, now)} in words. Data are the same wherever they are."""
    def split(value):
        is_data = isinstance(value, (tuple, list))
        return list(value[1:]) if is_data else value, (
            "{} ({} bytes, checksum {:08x})".format(*value) if is_data else f"{value}")
    pairs = {option: (split(before[option]), split(value)) for option, value in now.items() if option in before}
    return {option: (old_text, text) for option, ((old, old_text), (new, text)) in pairs.items() if old != new}


class Checkpoints:
    """Saves a checkpoint every args.save_every steps and after the last, if args.checkpoint names a folder for them.

    And when a rank is told to stop, by SIGTERM, SIGHUP or SIGUSR1: all save after that step, and exit with PREEMPTED.

    `first_step`: how many steps were done when the newest complete one was saved, which is loaded; 0 if there is none.
    The position in the data is the number of the step. Random states go on where they were on the same number of ranks.
    """

    def __init__(self, args, rank, model, optimizer, scheduler):
        self.args, self.rank, self.model, self.optimizer, self.scheduler = args, rank, model, optimizer, scheduler
        self.first_step = self.steps_done = 0
        if args.checkpoint:
            # Now, and not at the first save.
            on_all_ranks(lambda: check_writable("--checkpoint", Path(args.checkpoint) / "step", refuse))
            on_all_ranks(self._resume, MISTAKES)
            self.stop_signal = StopSignal(args.timeout)

    def step_done(self):
        """Counts a step, and saves if it is time to; after a signal it doesn't return. Collective."""
        self.steps_done += 1
        if not self.args.checkpoint:
            return
        is_last = self.steps_done == self.args.steps
        signal_name = self.stop_signal.agreed()
        if signal_name or is_last or self.steps_done % self.args.save_every == 0:
            on_all_ranks(self._save, MISTAKES)
        if signal_name and not is_last:
            if is_rank_0():
                print(f"stopped by {signal_name} after step {self.steps_done}, which is saved: the same command goes "
                      f"on (exit code {PREEMPTED})", flush=True)
            leave(PREEMPTED)

    def _save(self):
        random = {"cpu": torch.get_rng_state()}
        if self.rank.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.rank.device)
        extra = {"step": self.steps_done, "scheduler": self.scheduler.state_dict(), "random": random,
                 "rank": self.rank.rank, "world_size": self.rank.world_size,
                 "settings": settings_of(self.args, self.rank.world_size)}
        checkpoint.save(path_of(self.args.checkpoint, self.steps_done), self.model, self.optimizer, extra)
        with at_own_pace(f"old checkpoints in {self.args.checkpoint}", None):  # the others wait for their removal
            if is_rank_0():
                remove_old(self.args.checkpoint, self.args.keep)

    def _resume(self):
        step, extra, damage = self._load()
        if step is None:
            return
        args, groups, scheduler = self.args, self.optimizer.param_groups, self.scheduler
        self.first_step = self.steps_done = step
        scheduler.load_state_dict(extra["scheduler"])
        before = extra["settings"] | {"--lr": scheduler.base_lrs[0], "--weight-decay": groups[0]["weight_decay"]}
        args.lr = args.lr if "lr" in args.given else before["--lr"]
        args.weight_decay = args.weight_decay if "weight_decay" in args.given else before["--weight-decay"]
        changed = changes(before, settings_of(args, self.rank.world_size))
        refused = [f"{option} is {changed[option][1]}, the run's is {changed[option][0]}"
                   for option in DATA_ORDER if option in changed]
        if refused and not args.force:
            raise ValueError(f"--checkpoint {args.checkpoint} is of a run with other data: {'; '.join(refused)}: "
                             "--force goes on nevertheless")
        scheduler.base_lrs = [args.lr] * len(groups)
        for group, factor in zip(groups, scheduler.lr_lambdas):  # from here on, whatever the checkpoint had
            group["initial_lr"], group["weight_decay"] = args.lr, args.weight_decay
            group["lr"] = args.lr * factor(scheduler.last_epoch)
        if (extra["rank"], extra["world_size"]) == self.rank[:2]:
            torch.set_rng_state(extra["random"]["cpu"])
            if "cuda" in extra["random"] and self.rank.device.type == "cuda":
                torch.cuda.set_rng_state(extra["random"]["cuda"], self.rank.device)
        if is_rank_0():
            path = path_of(args.checkpoint, step)
            if later := [path_of(args.checkpoint, other) for other in self.steps_found if other > step]:
                hold(path)  # no other run saves here from now on
            print(f"resumed from {path}{', and later ones set aside' if later else ''}{damage}", flush=True)
            if changed:
                print("changed since then: " + ", ".join(f"{option} {old} -> {now}" for option, (old, now)
                                                         in changed.items()), flush=True)
            if step >= args.steps:
                print(f"nothing is left to do: --steps {args.steps}", flush=True)
            for other in later:
                set_aside(other)

    def _load(self):
        """The newest complete checkpoint, or, where that is damaged, the one before -> its step or None, its `extra`,
        and what to say of damage."""
        folder, wanted, first_error = self.args.checkpoint, self.args.resume_from, None
        self.steps_found = steps_in(folder)  # what another run may save from here on is none of these
        everything = [complete(folder)]
        dist.broadcast_object_list(everything, src=0)
        steps = everything[0]
        if wanted and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # torchrun's restart goes on
            if wanted not in steps:
                raise ValueError(f"argument --resume-from: {folder} has no complete checkpoint of step {wanted}, but "
                                 f"of {', '.join(map(str, steps)) or 'none'}")
            steps = [wanted]
        for step in steps:
            try:
                path = path_of(folder, step)
                extra = checkpoint.load(path, self.model, self.optimizer)
                with errors_on_all(f"checkpoint {path} can't be loaded", None):
                    check(extra, step)
                return step, extra, f": {first_error}" if first_error else ""
            except checkpoint.CheckpointError as error:
                first_error = first_error or error
                if not isinstance(error, checkpoint.DamagedCheckpoint):
                    break
        if first_error:
            raise first_error
        return None, None, ""


def refuse(message):
    raise ValueError(message)


def check(extra, step):
    """Raises ForeignCheckpoint: a program of the user's own has saved it, or it was renamed."""
    needed = {"step", "scheduler", "random", "rank", "world_size", "settings"}
    if not isinstance(extra, dict) or not needed <= extra.keys():
        raise checkpoint.ForeignCheckpoint(f"it is none of train.py: its extra is {extra!r:.60}")
    if extra["step"] != step:
        raise checkpoint.ForeignCheckpoint(f"its name says step {step}, its extra {extra['step']}: was it renamed?")
