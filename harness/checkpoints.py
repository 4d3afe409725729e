"""Saves a training run every few steps and when it is told to stop, and goes on from its newest checkpoint."""

import shutil
import signal
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
from harness.meeting import beside, is_rank_0, leave, on_all_ranks
from harness.options import PREEMPTED

MISTAKES = OSError, ValueError, checkpoint.CheckpointError
SETTINGS = "seed", "text", "accumulate", "sequence_length", "lr", "weight_decay", "clip", "dtype"  # what decides a step


def checkpoints_in(folder):
    """Return the paths of a run's checkpoints, the newest first. Folders of other names are not the run's."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8), reverse=True)


class StopSignal:
    """Knows whether a rank was told to stop, as all ranks see it after the same step. The handler only takes a note."""

    def __init__(self, timeout_s):
        self.numbers = [0]
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup: the run goes on without its terminal
                signal.signal(number, lambda number, frame: self.numbers.append(number))
        self.group = beside(timeout_s)

    def agreed_name(self):
        """Return the name of a signal that some rank has had, the same on every rank, or None. Collective."""
        number = torch.tensor(max(self.numbers))  # () int64
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self.group)
        return signal.Signals(number.item()).name if number else None


class Checkpoints:
    """Saves every args.save_every steps, after the last and after a signal, if args.checkpoint names a folder."""

    def __init__(self, args, rank, model, optimizer, scheduler):
        self.args = args
        self.trained = model, optimizer
        self.first_step = 0  # so many steps were done when the checkpoint was saved that is loaded here
        self.damaged_paths = []
        if args.checkpoint:
            self.settings = {name: getattr(args, name) for name in SETTINGS}
            self.settings["ranks x batch_size"] = rank.world_size // args.tp * args.batch_size
            on_all_ranks(lambda: Path(args.checkpoint).mkdir(parents=True, exist_ok=True), MISTAKES)
            paths = [checkpoints_in(args.checkpoint)]
            dist.broadcast_object_list(paths, src=0)  # hosts may see a new folder at different moments
            on_all_ranks(lambda: self._resume(paths[0], scheduler), MISTAKES)
            self.stop_signal = StopSignal(args.timeout)

    def step_done(self, n_done):
        """Save if it is time to. After a signal the run ends here, saved. Collective."""
        if not self.args.checkpoint:
            return
        signal_name = self.stop_signal.agreed_name()
        if signal_name or n_done == self.args.steps or n_done % self.args.save_every == 0:
            on_all_ranks(lambda: self._save(n_done), MISTAKES)
        if signal_name:
            if is_rank_0():
                print(f"stopped by {signal_name} after step {n_done}, saved: the same command goes on", flush=True)
            leave(PREEMPTED)

    def _save(self, n_done):
        path = Path(self.args.checkpoint, f"step-{n_done:08}")
        if path in self.damaged_paths and is_rank_0():  # not before: the run has come as far again
            shutil.rmtree(path, ignore_errors=True)
        checkpoint.save(path, *self.trained, {"step": n_done, "settings": self.settings})
        if self.args.keep and is_rank_0():
            old_paths = [other for other in checkpoints_in(path.parent) if other <= path][self.args.keep :]
            for old in [*old_paths, *path.parent.glob("step-*.partial")]:  # the latter of saves that were killed
                shutil.rmtree(old, ignore_errors=True)

    def _resume(self, paths, scheduler):
        """Load the newest checkpoint that isn't damaged. Collective."""
        for path in paths:
            try:
                return self._go_on_from(path, checkpoint.load(path, *self.trained), scheduler)
            except checkpoint.DamagedCheckpoint as error:
                self.damaged_paths.append(path)
                if path == paths[-1]:  # to begin anew would be a surprise
                    raise
                if is_rank_0():
                    print(f"{error}: the one before is tried", flush=True)

    def _go_on_from(self, path, extra, scheduler):
        changes = [f"{name} is {value}, the run's is {extra['settings'].get(name)}"
                   for name, value in self.settings.items() if value != extra["settings"].get(name)]
        if changes and not self.args.force:
            raise ValueError(f"{path} is of another run: {'; '.join(changes)}: --force goes on nevertheless")
        self.first_step = scheduler.last_epoch = extra["step"]
        for group, factor in zip(self.trained[1].param_groups, scheduler.lr_lambdas):  # with --force the command's
            group.update(lr=self.args.lr * factor(extra["step"]), weight_decay=self.args.weight_decay)
        if is_rank_0():
            print(f"resumed from {path}", flush=True)
