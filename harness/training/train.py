"""Serves every train.py: its options, its model, and its run, with data, checkpoints, and what the reader is told."""

import argparse
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import checkpoint
from harness.ranks import meeting
from harness.ranks.meeting import disconnect as disconnect
from harness.ranks.meeting import is_rank_0, leave, on_all_ranks, side_group
from harness.training import corpus, models, options
from harness.training.options import INTERRUPTED, PREEMPTED, SECONDS, TIMEOUT_S

STEPS_PER_LINE = 10  # a line with a loss comes after so many steps, and after the first and the last step
CHECKPOINT_ERRORS = OSError, ValueError, checkpoint.CheckpointError  # the user reads them in one line


def connect():
    """Join the other ranks. Returns a Rank. If --timeout is wrong, parse_args will say so."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--timeout", type=SECONDS, default=TIMEOUT_S)
    try:
        known, _ = parser.parse_known_args()
    except argparse.ArgumentError:
        return meeting.connect(TIMEOUT_S)
    return meeting.connect(known.timeout)


class _Parser(argparse.ArgumentParser):
    """Prints on one rank what argparse would print on each."""

    def error(self, message):
        raise ValueError(f"{message} (--help shows all options)")

    def _print_message(self, message, file=None):
        if is_rank_0():
            super()._print_message(message, file)

    def exit(self, status=0, message=None):
        leave(status)


def parse_args(description):
    """Parse the command line. After a mistake rank 0 prints one line, and all ranks exit with 2."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    return on_all_ranks(lambda: options.parse(parser))


def build_model(args, rank):
    """Build the model of the command line on this rank's device, with the same weights on every rank and machine."""
    torch.manual_seed(args.seed)
    return models.GPT(models.MODELS[args.model]).to(rank.device, getattr(torch, args.dtype))


def warmup_then_cosine(steps):
    """Return the factor of the lr for LambdaLR: up to 1 in the first fifth (at most 100 steps), then down to 0.1."""
    warmup = max(1, min(steps // 5, 100))

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)  # 0 to 1
        return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
    return factor


class Line(NamedTuple):
    """The last line with a loss: after how many steps it came, and when."""
    n_done: int
    time: float


class Run:
    """Trains from the newest checkpoint on. Rank 0 prints conditions, losses and speed.

    Losses are means over the ranks, over the micro-batches, and over the steps since the last line with a loss.
    """

    def __init__(self, args, rank, model, optimizer, scheduler):
        self.args = args
        self.rank = rank
        self.model = model
        train_text, validation_text = on_all_ranks(
            lambda: corpus.load_parts(args.data, args.sequence_length), (OSError, ValueError))
        self.batches = corpus.Batches(train_text, args.batch_size, args.sequence_length, rank.number, rank.world_size,
                                      args.seed, rank.device)
        self.validation = corpus.validation_batches(validation_text, args.batch_size, args.sequence_length,
                                                    rank.number, rank.world_size, rank.device)
        self.checkpoints = Checkpoints(args, model, optimizer, scheduler)
        self.loss_sum = torch.zeros((), device=rank.device)  # of this rank, since the last line

    def batch(self, step, micro_batch):
        """Return (tokens, targets) of a micro-batch on this rank, each (B, T) int64."""
        return self.batches.batch(step * self.args.accumulate + micro_batch)

    def add_loss(self, loss):
        """Add one micro-batch's part of the step's loss, a scalar tensor. The CPU doesn't wait for the loss here."""
        self.loss_sum += loss.detach()

    def steps(self):
        """Yield the number of each step, for the caller to run the step. Print the loss, or save, when it is time."""
        self.say_conditions()
        self.say(f"validation loss before: {self.evaluate():.4f}")
        first_step = self.checkpoints.first_step
        last = Line(first_step, time.perf_counter())
        for step in range(first_step, self.args.steps):
            yield step
            n_done = step + 1
            is_first = step == first_step
            is_last = n_done == self.args.steps
            if is_first or is_last or n_done % STEPS_PER_LINE == 0:
                self.say_loss(n_done, last)
                last = Line(n_done, time.perf_counter())
            self.checkpoints.step_done(n_done)
        self.say(f"validation loss after: {self.evaluate():.4f}")

    def say_loss(self, n_done, last):
        """Print the loss and the speed of the steps since the line `last`. Collective."""
        args = self.args
        n_steps = n_done - last.n_done
        dist.all_reduce(self.loss_sum)
        loss = self.loss_sum.item() / n_steps / self.rank.world_size  # item() waits for the device
        self.loss_sum.zero_()
        seconds = (time.perf_counter() - last.time) / n_steps
        tokens = self.rank.world_size * args.accumulate * args.batch_size * args.sequence_length
        width = len(str(args.steps))
        self.say(f"step {n_done:>{width}}/{args.steps}  loss {loss:.4f}  {tokens / seconds:,.0f} tokens/s  "
                 f"{seconds * 1000:,.1f} ms/step")

    @torch.no_grad()
    def evaluate(self):
        """Return the mean loss over the validation sequences of all ranks, in nats per byte. Collective."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.rank.device)  # of losses, of sequences
        for tokens, targets in self.validation:
            loss = self.model(tokens, targets).double()
            sums += torch.stack([loss * len(tokens), loss.new_tensor(len(tokens))])
        dist.all_reduce(sums)
        self.model.train()
        loss_sum, n_sequences = sums.tolist()
        return loss_sum / n_sequences

    def say_conditions(self):
        args = self.args
        script = Path(sys.argv[0]).resolve()
        n_params = sum(param.numel() for param in self.model.parameters())
        self.say(f"{script.parent.name}/{script.name}: {self.rank.world_size} rank(s) with {self.rank.backend} on "
                 f"{self.rank.device.type}, model {args.model} with {n_params:,} parameters in {args.dtype}, "
                 f"{args.accumulate} x {args.batch_size} sequences of {args.sequence_length} bytes a rank and step")

    def say(self, line):
        if self.rank.number == 0:
            print(line, flush=True)  # torchrun reads it through a pipe


# ------------------------------------------------------------------------------------------------------ Its checkpoints


N_KEPT = 3  # of the newest checkpoints


def checkpoints_in(folder):
    """Return the paths of a run's checkpoints, the newest first. Folders of other names are not the run's."""
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8), reverse=True)


class StopSignal:
    """Knows whether a rank was told to stop, as all ranks see it after the same step. The handler only takes a note.

    After a Ctrl-C, another Ctrl-C ends the rank at once, and so does the SIGTERM of a launcher that has ended.
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
            sys.unraisablehook = end_by_late_signal
            for ends_now in (signal.SIGINT, signal.SIGTERM):
                signal.signal(ends_now, signal.SIG_DFL)

    def agreed_signal(self):
        """Return a signal that some rank has had, the same on every rank, or None. Collective."""
        largest = torch.tensor(max(self.numbers))  # () int64
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return signal.Signals(largest.item()) if largest else None


def end_by_late_signal(unraisable):
    """End this rank by a signal that came while its handler was being taken away: Python reports that as an OSError."""
    if "ignored due to race condition" in str(unraisable.exc_value):
        os.kill(os.getpid(), signal.SIGTERM)
    sys.__unraisablehook__(unraisable)


class Checkpoints:
    """Saves every args.save_every steps, after the last and after a signal, if args.checkpoint names a folder."""

    def __init__(self, args, model, optimizer, scheduler):
        self.args = args
        self.model = model
        self.optimizer = optimizer
        self.first_step = 0  # the number of steps that were done when the loaded checkpoint was saved
        if args.checkpoint:
            self.folder = Path(args.checkpoint)
            on_all_ranks(lambda: self.folder.mkdir(parents=True, exist_ok=True), CHECKPOINT_ERRORS)
            paths_of_rank_0 = [checkpoints_in(self.folder)]
            dist.broadcast_object_list(paths_of_rank_0, src=0)  # hosts may see a new folder at different moments
            if paths_of_rank_0[0]:
                self._resume(paths_of_rank_0[0][0], scheduler)
            self.stop_signal = StopSignal(args.timeout)

    def _resume(self, path, scheduler):
        """Load the checkpoint `path`, and go on by the command's settings. Collective."""
        extra = on_all_ranks(lambda: checkpoint.load(path, self.model, self.optimizer), CHECKPOINT_ERRORS)
        self.first_step = extra["step"]
        scheduler.last_epoch = self.first_step
        for group, factor in zip(self.optimizer.param_groups, scheduler.lr_lambdas):
            group["lr"] = self.args.lr * factor(self.first_step)
            group["weight_decay"] = self.args.weight_decay
        if is_rank_0():
            print(f"resumed from {path}", flush=True)

    def step_done(self, n_done):
        """Save if a save is due. After a signal save, and end the run. Collective."""
        if not self.args.checkpoint:
            return
        path = self.folder / f"step-{n_done:08}"
        stopped_by = self.stop_signal.agreed_signal()
        if stopped_by or n_done == self.args.steps or n_done % self.args.save_every == 0:
            on_all_ranks(lambda: self._save(path, n_done), CHECKPOINT_ERRORS)
        if stopped_by:
            if is_rank_0():
                print(f"stopped by {stopped_by.name} after step {n_done}, saved in {path}: the same command goes on",
                      flush=True)
            leave(INTERRUPTED if stopped_by == signal.SIGINT else PREEMPTED)

    def _save(self, path, n_done):
        checkpoint.save(path, self.model, self.optimizer, {"step": n_done})
        if is_rank_0():
            old_paths = checkpoints_in(self.folder)[N_KEPT:]
            unfinished_paths = self.folder.glob("step-*.partial")  # of saves that were killed
            for path_to_remove in [*old_paths, *unfinished_paths]:
                shutil.rmtree(path_to_remove, ignore_errors=True)
