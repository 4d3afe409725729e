"""What every train.py calls: options, a model, and the run: its data, its checkpoints, and what it tells its reader."""

import math
import platform
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from harness import gpt
from harness.checkpoints import Checkpoints
from harness.corpus import load_data
from harness.meeting import disconnect as disconnect
from harness.options import connect as connect
from harness.options import parse_args as parse_args
from harness.options import warmup_then_cosine as warmup_then_cosine

LINES = 20  # of losses in a run, and the first and the last


def build_model(args, rank):
    """After the data, so that a wrong --data is refused before anything large is made."""
    args.loaded = load_data(args, rank)
    return gpt.build_model(args, rank)


class Run:
    """Training from the newest checkpoint on. Rank 0 prints conditions, losses and speed.

    Losses are means over the ranks, over the micro-batches, and over the steps since the line before.
    """

    def __init__(self, args, rank, model, optimizer, scheduler):
        self.args, self.rank, self.model = args, rank, model
        self.batches, self.validation = args.loaded
        self.checkpoints = Checkpoints(args, rank, model, optimizer, scheduler)
        self.loss_sum = torch.zeros((), device=rank.device)  # of this rank, since the last line
        self.sizes = [rank.world_size // args.tp, args.accumulate, args.batch_size, args.sequence_length]  # of a step

    def batch(self, step, micro):
        """-> (tokens, targets) of a micro-batch on this rank, each (B, T) int64."""
        return self.batches.batch(step * self.args.accumulate + micro)

    def add_loss(self, loss):
        """One micro-batch's part of the step's loss, a scalar tensor. Nothing waits for it here."""
        self.loss_sum += loss.detach()

    def steps(self):
        """-> the number of each step. What the caller does with it is the step, which is then counted, and saved if it
        is time to; of some the loss is printed, for which the rank waits for the device, and for all ranks."""
        self.say_conditions()
        self.say(f"validation loss before: {self.evaluate():.4f}")
        first = last_line = self.checkpoints.first_step
        n, line_every = self.args.steps, max(10, self.args.steps // LINES // 10 * 10)
        started_at = line_at = time.perf_counter()
        for step in range(first, n):
            yield step
            done = step + 1
            if done in (first + 1, n) or done % line_every == 0:
                dist.all_reduce(self.loss_sum)
                loss = self.loss_sum.item() / (done - last_line) / self.rank.world_size
                done_at = time.perf_counter()  # behind item(), which waits for the device
                seconds = (done_at - line_at) / (done - last_line)
                last_line, line_at = done, done_at
                self.loss_sum.zero_()
                speed = math.prod(self.sizes) / seconds
                self.say(f"step {done:>{len(str(n))}}/{n}  loss {loss:.4f}  {speed:,.0f} tokens/s  "
                         f"{seconds * 1000:,.1f} ms/step")
                if done == n:
                    self.say(f"{n - first} steps in {done_at - started_at:.1f} s")
            self.checkpoints.step_done(done)
        self.say(f"validation loss after: {self.evaluate():.4f}")

    @torch.no_grad()
    def evaluate(self):
        """-> mean loss over the validation sequences of all ranks, in nats a byte, the same on every rank."""
        self.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=self.rank.device)  # sum of losses, sequences
        for tokens, targets in self.validation:
            total += torch.stack([self.model(tokens, targets).double(), total.new_ones(())]) * len(tokens)
        dist.all_reduce(total)
        self.model.train()
        return (total[0] / total[1]).item()

    def say_conditions(self):
        args, (_, world_size, device, backend) = self.args, self.rank
        script, n_params = Path(sys.argv[0]).resolve(), sum(param.numel() for param in self.model.parameters())
        cpu = f"CPU with {torch.get_num_threads()} thread(s)"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        python = f"the source of the standard library of Python {platform.python_version()}"
        shared = f", {args.tp} of which share each layer" * (args.tp > 1)
        self.say(f"{script.parent.name}/{script.name}: {world_size} rank(s) with {backend}, each on {name}{shared}, "
                 f"torch {torch.__version__}")
        self.say(f"model {args.model}, {n_params:,} parameters, {args.dtype}; lr {args.lr:g}, weight decay "
                 f"{args.weight_decay:g}, clip {args.clip:g}, seed {args.seed}")
        self.say(f"batch {' x '.join(map(str, self.sizes))} (ranks x micro-batches x sequences x bytes) of "
                 f"{args.data or python}")

    def say(self, line):
        if self.rank.rank == 0:
            print(line, flush=True)  # torchrun reads it through a pipe
