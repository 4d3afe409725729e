"""Serves every train.py: its options, its model, and its run, with data, checkpoints, and what the reader is told."""

import argparse
import math
import platform
import shutil
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
from harness.ranks import meeting
from harness.ranks.meeting import disconnect as disconnect
from harness.ranks.meeting import is_rank_0, leave, on_all_ranks, side_group
from harness.training import models, options
from harness.training.corpus import load_data
from harness.training.options import INTERRUPTED, PREEMPTED, SECONDS, TIMEOUT_S

LOSS_LINES = 20  # about as many in a long run, and one after its first step
LINE_S = 8  # at the most between two of them, if steps stay as long as they were
MISTAKES = OSError, ValueError, checkpoint.CheckpointError
SETTINGS = "seed", "text", "accumulate", "sequence_length", "lr", "weight_decay", "clip", "dtype"  # what decides a step


def connect():
    """Join the other ranks. Returns a Rank. That takes --timeout; if it is wrong, parse_args will say so."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--timeout", type=SECONDS, default=TIMEOUT_S)
    try:
        return meeting.connect(parser.parse_known_args()[0].timeout)
    except argparse.ArgumentError:
        return meeting.connect(TIMEOUT_S)


class _Parser(argparse.ArgumentParser):
    """Prints on one rank what argparse would print on each."""

    def error(self, message):
        raise ValueError(f"{message} (--help shows all options)")

    def _print_message(self, message, file=None):
        if is_rank_0():
            super()._print_message(message, file)

    def exit(self, status=0, message=None):
        leave(status)


def parse_args(description, arguments=None):
    """Parse the command line, or the list `arguments`. A mistake is one line, and exit code 2 on all ranks."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    n_ranks = dist.get_world_size() if dist.is_initialized() else 1
    return on_all_ranks(lambda: options.parse(parser, n_ranks, Path(sys.argv[0]), arguments))


def warmup_then_cosine(steps):
    """Return the factor of the lr for LambdaLR: up to 1 in the first fifth (at most 100 steps), then down to 0.1."""
    warmup = max(1, min(steps // 5, 100))

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)  # 0 to 1
        return 0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2
    return factor


def build_model(args, rank):
    """Return the model. The data are loaded first, so that a wrong --data is refused before anything large is made."""
    args.loaded = load_data(args, rank)
    return models.build_model(args, rank)


class Run:
    """Trains from the newest checkpoint on. Rank 0 prints conditions, losses and speed.

    Losses are means over the ranks, over the micro-batches, and over the steps since the last line with a loss.
    """

    def __init__(self, args, rank, model, optimizer, scheduler):
        self.args, self.rank, self.model = args, rank, model
        self.batches, self.validation = args.loaded
        self.checkpoints = Checkpoints(args, rank, model, optimizer, scheduler)
        self.loss_sum = torch.zeros((), device=rank.device)  # of this rank, since the last line
        self.sizes = [rank.world_size // args.tp, args.accumulate, args.batch_size, args.sequence_length]  # of a step

    def batch(self, step, micro_batch):
        """Return (tokens, targets) of a micro-batch on this rank, each (B, T) int64."""
        return self.batches.batch(step * self.args.accumulate + micro_batch)

    def add_loss(self, loss):
        """Add one micro-batch's part of the step's loss, a scalar tensor. Nothing waits for it here."""
        self.loss_sum += loss.detach()

    def steps(self):
        """Yield the number of each step, for the caller to run it. Then print the loss or save, if it is time."""
        self.say_conditions()
        self.say(f"validation loss before: {self.evaluate():.4f}")
        first = n_at_line = self.checkpoints.first_step
        n = self.args.steps
        steps_per_line = max(10, n // LOSS_LINES // 10 * 10)  # a multiple of 10
        next_line = first + 1
        started_at = line_at = time.perf_counter()
        for step in range(first, n):
            yield step
            n_done = step + 1
            if n_done in (next_line, n):
                loss, seconds = self.means_per_step(n_done - n_at_line, line_at)
                n_at_line, line_at = n_done, time.perf_counter()
                next_multiple = n_done + steps_per_line - n_done % steps_per_line
                next_line = min(next_multiple, n_done + max(1, int(LINE_S / seconds)))
                speed = math.prod(self.sizes) / seconds
                left = timedelta(seconds=round(seconds * (n - n_done)))
                self.say(f"step {n_done:>{len(str(n))}}/{n}  loss {loss:.4f}  {speed:,.0f} tokens/s  "
                         f"{seconds * 1000:,.1f} ms/step  {left} left")
                if n_done == n:
                    self.say(f"{n - first} steps in {line_at - started_at:.1f} s")
            self.checkpoints.step_done(n_done)
        self.say(f"validation loss after: {self.evaluate():.4f}")

    def means_per_step(self, n_steps, line_at):
        """Return the loss, and seconds, per step since `line_at`, the same on every rank. Collective."""
        loss = self.loss_sum.item()  # waits for the device
        sums = self.loss_sum.new_tensor([loss, time.perf_counter() - line_at])  # over the steps
        dist.all_reduce(sums)
        self.loss_sum.zero_()
        return [total / n_steps / self.rank.world_size for total in sums.tolist()]

    @torch.no_grad()
    def evaluate(self):
        """Return the mean loss over the validation sequences of all ranks, in nats per byte. Collective."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.rank.device)  # sum of losses, sequences
        for tokens, targets in self.validation:
            total += torch.stack([self.model(tokens, targets).double(), total.new_ones(())]) * len(tokens)
        dist.all_reduce(total)
        self.model.train()
        return (total[0] / total[1]).item()

    def say_conditions(self):
        args, (_, world_size, device, backend) = self.args, self.rank
        script = Path(sys.argv[0]).resolve()
        n_params = sum(param.numel() for param in self.model.parameters())
        cpu = f"CPU with {torch.get_num_threads()} thread(s)"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        stdlib = f"the source of the standard library of Python {platform.python_version()}"
        shared = f", {args.tp} of which share each layer" if args.tp > 1 else ""
        self.say(f"{script.parent.name}/{script.name}: {world_size} rank(s) with {backend}, each on {name}{shared}, "
                 f"torch {torch.__version__}")
        self.say(f"model {args.model}, {n_params:,} parameters, {args.dtype}; lr {args.lr:g}, weight decay "
                 f"{args.weight_decay:g}, clip {args.clip:g}, seed {args.seed}")
        self.say(f"batch {' x '.join(map(str, self.sizes))} (ranks x micro-batches x sequences x bytes) of "
                 f"{args.data or stdlib}")

    def say(self, line):
        if self.rank.number == 0:
            print(line, flush=True)  # torchrun reads it through a pipe


# ------------------------------------------------------------------------------------------------------ Its checkpoints


def checkpoints_in(folder):
    """Return the paths of a run's checkpoints, the newest first. Folders of other names are not the run's."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8), reverse=True)


class StopSignal:
    """Knows whether a rank was told to stop, as all ranks see it after the same step. The handler only takes a note.

    After a Ctrl-C another one ends the rank at once, and so does the SIGTERM of a launcher that has ended.
    """

    def __init__(self, timeout_s):
        self.numbers = [0]  # of the signals that have arrived; 0 is none
        for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
            if signal.getsignal(signal_number) is not signal.SIG_IGN:  # as under nohup: the terminal may go
                signal.signal(signal_number, self._take_note)
        self.group = side_group(timeout_s)

    def _take_note(self, signal_number, frame):
        self.numbers.append(signal_number)
        if signal_number == signal.SIGINT:
            for ends_now in (signal.SIGINT, signal.SIGTERM):
                signal.signal(ends_now, signal.SIG_DFL)

    def agreed_signal(self):
        """Return a signal that some rank has had, the same on every rank, or None. Collective."""
        largest = torch.tensor(max(self.numbers))  # () int64
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return signal.Signals(largest.item()) if largest else None


class Checkpoints:
    """Saves every args.save_every steps, after the last and after a signal, if args.checkpoint names a folder."""

    def __init__(self, args, rank, model, optimizer, scheduler):
        self.args = args
        self.trained = model, optimizer
        self.first_step = 0  # the number of steps that were done when the loaded checkpoint was saved
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
        """Save if a save is due. After a signal save, and end the run. Collective."""
        if not self.args.checkpoint:
            return
        stopped_by = self.stop_signal.agreed_signal()
        if stopped_by or n_done == self.args.steps or n_done % self.args.save_every == 0:
            on_all_ranks(lambda: self._save(n_done), MISTAKES)
        if stopped_by:
            if is_rank_0():
                print(f"stopped by {stopped_by.name} after step {n_done}, saved in {self._path(n_done)}: "
                      "the same command goes on", flush=True)
            leave(INTERRUPTED if stopped_by == signal.SIGINT else PREEMPTED)

    def _path(self, n_done):
        return Path(self.args.checkpoint, f"step-{n_done:08}")

    def _save(self, n_done):
        path = self._path(n_done)
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
