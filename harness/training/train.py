"""Does what every train.py needs besides an optimizer: options, the model, the data, printed lines, and checkpoints.

A stage is one of the four optimizers of this repository. Each has a train.py with the training loop, which calls
functions of this module and methods of its Run. A rank is one of the processes that train together. A function whose
docstring says "Collective" must be called on every rank, because ranks wait for each other in it.
"""

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
from harness.ranks.meeting import disconnect as disconnect  # every train.py calls it from here
from harness.ranks.meeting import is_rank_0, leave, on_all_ranks, side_group
from harness.training import corpus, models, options
from harness.training.options import INTERRUPTED, PREEMPTED, SECONDS, TIMEOUT_S

STEPS_PER_LINE = 10  # how often a line with the loss is printed; it is also printed after the first and the last step
CHECKPOINT_ERRORS = OSError, ValueError, checkpoint.CheckpointError  # on_all_ranks shows them to a user in one line


def connect():
    """Join the other ranks, and return a Rank: number, world_size, device, backend. Collective.

    Only the option --timeout is parsed here, because the ranks need it to join. If it is wrong, they join with its
    default. `parse_args` parses all options later, when rank 0 alone can print what is wrong with them.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--timeout", type=SECONDS, default=TIMEOUT_S)
    try:
        known, _ = parser.parse_known_args()
    except argparse.ArgumentError:
        return meeting.connect(TIMEOUT_S)
    return meeting.connect(known.timeout)


class _Parser(argparse.ArgumentParser):
    """Parses options on every rank, and prints on rank 0 only. argparse calls these three methods."""

    def error(self, message):
        raise ValueError(f"{message} (--help shows all options)")  # on_all_ranks prints it

    def _print_message(self, message, file=None):
        if is_rank_0():
            super()._print_message(message, file)

    def exit(self, status=0, message=None):  # after --help
        leave(status)  # ends this process, after it has left the process group


def parse_args(description):
    """Return the options of the command line. `description`: what --help prints. Collective.

    If an option is wrong, rank 0 prints one line, and all ranks end with exit code 2.
    """
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    return on_all_ranks(lambda: options.parse(parser))


def build_model(args, rank):
    """Return the model that the options name, on the rank's device, with the same weights on every rank and machine."""
    torch.manual_seed(args.seed)
    return models.GPT(models.MODELS[args.model]).to(rank.device, getattr(torch, args.dtype))


def warmup_then_cosine(steps):
    """Return a function for torch's LambdaLR: it gets the number of a step, and returns a factor of the learning rate.

    The factor grows to 1 during the first fifth of `steps`, or the first 100, and then falls to 0.1 as a cosine does.
    """
    warmup = max(1, min(steps // 5, 100))

    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)  # 0 to 1
        return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
    return factor


class Line(NamedTuple):
    """Notes of the last printed line with a loss. The next line measures the speed from them."""
    n_done: int  # how many steps were done then
    time: float  # when the line was printed, in seconds of time.perf_counter()


class Run:
    """Counts the steps of a training run, from the newest checkpoint on, and saves. Rank 0 prints losses and speed.

    The loop of a train.py calls `steps`, `batch` and `add_loss`, and trains the model itself. In a step a rank may run
    several micro-batches, whose gradients add up. A printed loss is a mean over the ranks, over the micro-batches, and
    over the steps since the last line with a loss. The constructor is collective.
    """

    def __init__(self, args, rank, model, optimizer, scheduler):
        self.args = args  # the options of the command line
        self.rank = rank  # a Rank
        self.model = model
        train_text, validation_text = on_all_ranks(
            lambda: corpus.load_parts(args.data, args.sequence_length), (OSError, ValueError))
        self.batches = corpus.Batches(train_text, args.batch_size, args.sequence_length, rank.number, rank.world_size,
                                      args.seed, rank.device)
        self.validation = corpus.validation_batches(validation_text, args.batch_size, args.sequence_length,
                                                    rank.number, rank.world_size, rank.device)
        self.checkpoints = Checkpoints(args, model, optimizer, scheduler)
        self.loss_sum = torch.zeros((), device=rank.device)  # sum of this rank's losses since the last printed line

    def batch(self, step, micro_batch):
        """Return (tokens, targets) of a micro-batch on this rank, each (sequences, bytes of a sequence) int64."""
        return self.batches.batch(step * self.args.accumulate + micro_batch)

    def add_loss(self, loss):
        """Add a micro-batch's part of the loss of a step, a scalar tensor, to the loss that is printed next.

        The sum stays on the GPU, so that the CPU doesn't wait here until the loss is known.
        """
        self.loss_sum += loss.detach()

    def steps(self):
        """Yield the number of each step. The caller runs the step. Then this function prints or saves, if it is time.

        Collective, as each step is.
        """
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
        """Print the mean loss and the speed of the steps since the line `last`, a Line. Collective."""
        args = self.args
        n_steps = n_done - last.n_done
        dist.all_reduce(self.loss_sum)
        # item() waits until the device has done all steps, so the time is read after it.
        loss = self.loss_sum.item() / n_steps / self.rank.world_size
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
        sums = torch.zeros(2, dtype=torch.float64, device=self.rank.device)  # sum of losses, and number of sequences
        for tokens, targets in self.validation:
            loss = self.model(tokens, targets).double()
            sums += torch.stack([loss * len(tokens), loss.new_tensor(len(tokens))])
        dist.all_reduce(sums)
        self.model.train()
        loss_sum, n_sequences = sums.tolist()
        return loss_sum / n_sequences

    def say_conditions(self):
        """Print what is trained, on how many ranks, and on how much data per step."""
        args = self.args
        script = Path(sys.argv[0]).resolve()
        n_params = sum(param.numel() for param in self.model.parameters())
        self.say(f"{script.parent.name}/{script.name}: {self.rank.world_size} rank(s) with {self.rank.backend} on "
                 f"{self.rank.device.type}, model {args.model} with {n_params:,} parameters in {args.dtype}, "
                 f"{args.accumulate} x {args.batch_size} sequences of {args.sequence_length} bytes a rank and step")

    def say(self, line):
        """Print a line, on rank 0 only."""
        if self.rank.number == 0:
            # Flushed, because under torchrun a rank prints into a pipe, where Python would hold lines back.
            print(line, flush=True)


# ------------------------------------------------------------------------------------------ Checkpoints of a Run


N_KEPT = 3  # how many checkpoints, the newest, stay in the folder; older checkpoints are removed


def checkpoints_in(folder):
    """Return the paths of all checkpoints in a folder, the newest first. Each is a folder such as step-00000100.

    Anything in the folder that has another form of name was not written by a Run, and is left alone.
    """
    return sorted(Path(folder).glob("step-" + "[0-9]" * 8), reverse=True)


class StopSignal:
    """Handles signals that tell a rank to stop, so that all ranks save and stop after the same step.

    A signal may come at any moment, and only to some of the ranks. So the handler only takes a note of it, and after
    each step the ranks ask each other by `agreed_signal`. After a Ctrl-C, another Ctrl-C ends the rank at once, and so
    does a SIGTERM, which torchrun sends to its ranks when it ends.
    """

    def __init__(self, timeout_s):
        self.numbers = [0]  # numbers of the signals that have arrived; 0 stands for no signal
        for signal_number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
            # An ignored signal stays ignored: under nohup a program ignores SIGHUP, which a terminal sends when closed.
            if signal.getsignal(signal_number) is not signal.SIG_IGN:
                signal.signal(signal_number, self._take_note)
        self.group = side_group(timeout_s)  # a process group of gloo for small messages

    def _take_note(self, signal_number, frame):  # Python calls it when a signal has arrived
        self.numbers.append(signal_number)
        if signal_number == signal.SIGINT:
            # From now on both signals do what they do by default: they end the process.
            sys.unraisablehook = end_by_late_signal
            for ends_now in (signal.SIGINT, signal.SIGTERM):
                signal.signal(ends_now, signal.SIG_DFL)

    def agreed_signal(self):
        """Return a signal that some rank has got, or None. All ranks return the same. Collective."""
        largest = torch.tensor(max(self.numbers))  # () int64
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return signal.Signals(largest.item()) if largest else None


def end_by_late_signal(unraisable):
    """End this rank if Python has dropped a signal. It is a sys.unraisablehook, for errors that nobody can catch.

    Python drops a signal, and reports an OSError here, if the signal comes just while `_take_note` takes its handler
    away.
    """
    if "ignored due to race condition" in str(unraisable.exc_value):
        os.kill(os.getpid(), signal.SIGTERM)
    sys.__unraisablehook__(unraisable)


class Checkpoints:
    """Loads the newest checkpoint, and saves checkpoints, if the option --checkpoint names a folder. Collective.

    It saves every args.save_every steps, after the last step, and after a signal.
    """

    def __init__(self, args, model, optimizer, scheduler):
        self.args = args  # the options of the command line
        self.model = model
        self.optimizer = optimizer
        self.first_step = 0  # the number of steps in the loaded checkpoint, so the number of the next step
        if args.checkpoint:
            self.folder = Path(args.checkpoint)
            # on_all_ranks calls the function on every rank, and ends all ranks if it raises one of these errors on any.
            on_all_ranks(lambda: self.folder.mkdir(parents=True, exist_ok=True), CHECKPOINT_ERRORS)
            # Rank 0 sends its list of paths to all ranks, because other hosts may not see a new folder yet.
            paths_of_rank_0 = [checkpoints_in(self.folder)]  # a list with one object, which the broadcast replaces
            dist.broadcast_object_list(paths_of_rank_0, src=0)
            if paths_of_rank_0[0]:
                self._resume(paths_of_rank_0[0][0], scheduler)
            self.stop_signal = StopSignal(args.timeout)

    def _resume(self, path, scheduler):
        """Load the checkpoint `path`, but take the learning rate and weight decay from the options. Collective."""
        extra = on_all_ranks(lambda: checkpoint.load(path, self.model, self.optimizer), CHECKPOINT_ERRORS)
        self.first_step = extra["step"]
        scheduler.last_epoch = self.first_step  # LambdaLR then goes on from this step
        for group, factor in zip(self.optimizer.param_groups, scheduler.lr_lambdas):
            group["lr"] = self.args.lr * factor(self.first_step)
            group["weight_decay"] = self.args.weight_decay
        if is_rank_0():
            print(f"resumed from {path}", flush=True)

    def step_done(self, n_done):
        """Save if it is time, when `n_done` steps are done. After a signal save, and end this process. Collective."""
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
        """Save a checkpoint into the new folder `path`, and remove old ones. Collective."""
        checkpoint.save(path, self.model, self.optimizer, {"step": n_done})
        if is_rank_0():
            old_paths = checkpoints_in(self.folder)[N_KEPT:]
            unfinished_paths = self.folder.glob("step-*.partial")  # left by saves whose processes were killed
            for path_to_remove in [*old_paths, *unfinished_paths]:
                shutil.rmtree(path_to_remove, ignore_errors=True)
