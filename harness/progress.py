"""What a run tells its reader: losses, speed, conditions."""

import platform
import sys
import time
from pathlib import Path

import rich.console
import rich.progress
import torch
import torch.distributed as dist

BAR_WIDTH = 72  # columns that a progress bar with its numbers takes, at least
REPORT_EVERY = 10  # steps between two looks at the loss: each look waits for the device, and for all ranks


@torch.no_grad()
def evaluate(model, validation):
    """Mean loss over the validation sequences of all ranks, in nats a byte: a float, the same on every rank."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)  # sum of losses, sequences
    for tokens, targets in validation:
        total += torch.stack([model(tokens, targets).double(), total.new_ones(())]) * len(tokens)
    dist.all_reduce(total)
    model.train()
    return (total[0] / total[1]).item()


class Report:
    """What a run tells its reader, on rank 0: a progress bar, or, where no terminal has room for that, lines.

    Losses are means over the ranks, over the micro-batches, and over the steps since the last look at them.
    """

    def __init__(self, args, rank, model, first_step=0):
        self.args, self.rank, self.first_step = args, rank, first_step
        self.console = rich.console.Console(highlight=False, soft_wrap=True, quiet=rank.rank != 0)
        self.loss_sum = torch.zeros((), device=rank.device)  # of this rank, since the last look
        self.steps_done = self.steps_seen = first_step
        self.line_every = max(REPORT_EVERY, args.steps // 20 // REPORT_EVERY * REPORT_EVERY)
        takes_bar = self.console.is_terminal and not self.console.is_dumb_terminal and self.console.width >= BAR_WIDTH
        self.bar = rich.progress.Progress(
            rich.progress.TextColumn("step"), rich.progress.MofNCompleteColumn(), rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.fields[speed]}"), rich.progress.TimeRemainingColumn(),
            console=self.console, disable=self.console.quiet or not takes_bar)
        self._print_conditions(model)

    def __enter__(self):
        self.bar.start()
        self.task = self.bar.add_task("", total=self.args.steps, completed=self.first_step, speed="")
        self.started_at = self.seen_at = time.perf_counter()
        return self

    def __exit__(self, *exception):
        self.bar.stop()

    def add_loss(self, loss):
        """One micro-batch's part of the step's loss, a scalar tensor. Nothing waits for it here."""
        self.loss_sum += loss.detach()

    def step_done(self):
        """Counts a step. After the first, the last and every REPORT_EVERYth, averages the loss. Collective."""
        self.steps_done += 1
        self.bar.advance(self.task)
        if self.steps_done in (self.first_step + 1, self.args.steps) or self.steps_done % REPORT_EVERY == 0:
            self._look()

    def validation(self, when, loss):
        """Prints a validation loss in nats a byte; `when` is "before" or "after"."""
        self._print(f"validation loss {when}: {loss:.4f}")

    def _look(self):
        dist.all_reduce(self.loss_sum)
        steps = self.steps_done - self.steps_seen
        loss = self.loss_sum.item() / steps / self.rank.world_size  # waits for the device: the clock is right after it
        now = time.perf_counter()
        seconds = (now - self.seen_at) / steps
        self.loss_sum.zero_()
        self.steps_seen, self.seen_at = self.steps_done, now
        args = self.args
        n_tokens = self.rank.world_size // args.tp * args.accumulate * args.batch_size * args.sequence_length
        speed = f"loss {loss:.4f}  {n_tokens / seconds:,.0f} tokens/s  {seconds * 1000:,.1f} ms/step"
        self.bar.update(self.task, speed=speed)
        is_first, is_last = self.steps_done == self.first_step + 1, self.steps_done == args.steps
        if is_last:
            self.bar.stop()
        if is_last or self.bar.disable and (is_first or self.steps_done % self.line_every == 0):
            self._print(f"step {self.steps_done:>{len(str(args.steps))}}/{args.steps}  {speed}")
        if is_last:
            self._print(f"{args.steps - self.first_step} steps in {now - self.started_at:.1f} s")

    def _print_conditions(self, model):
        args, (_, world_size, device, backend) = self.args, self.rank
        script, n_params = Path(sys.argv[0]).resolve(), sum(param.numel() for param in model.parameters())
        cpu = f"CPU with {torch.get_num_threads()} thread(s)"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        python = f"the source of the standard library of Python {platform.python_version()}"
        shared = f", {args.tp} of which share each layer" * (args.tp > 1)
        self._print(f"{script.parent.name}/{script.name}: {world_size} rank(s) with {backend}, each on {name}{shared}, "
                    f"torch {torch.__version__}")
        self._print(f"model {args.model}, {n_params:,} parameters, {args.dtype}; lr {args.lr:g}, weight decay "
                    f"{args.weight_decay:g}, clip {args.clip:g}, seed {args.seed}")
        batch = f"{world_size // args.tp} x {args.accumulate} x {args.batch_size} x {args.sequence_length}"
        self._print(f"batch {batch} (ranks x micro-batches x sequences x bytes) of {args.data or python}")

    def _print(self, line):
        self.console.print(line, markup=False)
        self.console.file.flush()  # torchrun reads it through a pipe
