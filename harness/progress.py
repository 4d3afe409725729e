"""What a run tells its reader: losses, speed, conditions."""

import platform
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

LINES = 20  # of losses in a run, and the first and the last


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
    """What a run tells its reader, on rank 0, in lines.

    Losses are means over the ranks, over the micro-batches, and over the steps since the line before.
    """

    def __init__(self, args, rank, model, first_step=0):
        self.args, self.rank, self.first_step = args, rank, first_step
        self.loss_sum = torch.zeros((), device=rank.device)  # of this rank, since the last line
        self.steps_done = self.steps_told = first_step
        self.line_every = max(10, args.steps // LINES // 10 * 10)
        self.n_sequences = [rank.world_size // args.tp, args.accumulate, args.batch_size]  # of a step
        self._say_conditions(model)

    def __enter__(self):
        self.started_at = self.told_at = time.perf_counter()
        return self

    def __exit__(self, *exception):
        pass

    def add_loss(self, loss):
        """One micro-batch's part of the step's loss, a scalar tensor. Nothing waits for it here."""
        self.loss_sum += loss.detach()

    def step_done(self):
        """Counts a step. After some of them averages the loss: the rank waits for the device, and for all ranks."""
        self.steps_done += 1
        is_last = self.steps_done == self.args.steps
        if not (is_last or self.steps_done == self.first_step + 1 or self.steps_done % self.line_every == 0):
            return
        dist.all_reduce(self.loss_sum)
        steps = self.steps_done - self.steps_told
        loss = self.loss_sum.item() / steps / self.rank.world_size  # waits for the device: the clock is right after it
        now = time.perf_counter()
        seconds = (now - self.told_at) / steps
        self.loss_sum.zero_()
        self.steps_told, self.told_at = self.steps_done, now
        ranks, micro_batches, sequences = self.n_sequences
        n_tokens = ranks * micro_batches * sequences * self.args.sequence_length
        self._say(f"step {self.steps_done:>{len(str(self.args.steps))}}/{self.args.steps}  loss {loss:.4f}  "
                  f"{n_tokens / seconds:,.0f} tokens/s  {seconds * 1000:,.1f} ms/step")
        if is_last:
            self._say(f"{self.args.steps - self.first_step} steps in {now - self.started_at:.1f} s")

    def validation(self, when, loss):
        """Prints a validation loss in nats a byte; `when` is "before" or "after"."""
        self._say(f"validation loss {when}: {loss:.4f}")

    def _say_conditions(self, model):
        args, (_, world_size, device, backend) = self.args, self.rank
        script, n_params = Path(sys.argv[0]).resolve(), sum(param.numel() for param in model.parameters())
        cpu = f"CPU with {torch.get_num_threads()} thread(s)"
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
        python = f"the source of the standard library of Python {platform.python_version()}"
        shared = f", {args.tp} of which share each layer" * (args.tp > 1)
        self._say(f"{script.parent.name}/{script.name}: {world_size} rank(s) with {backend}, each on {name}{shared}, "
                  f"torch {torch.__version__}")
        self._say(f"model {args.model}, {n_params:,} parameters, {args.dtype}; lr {args.lr:g}, weight decay "
                  f"{args.weight_decay:g}, clip {args.clip:g}, seed {args.seed}")
        batch = " x ".join(map(str, [*self.n_sequences, args.sequence_length]))
        self._say(f"batch {batch} (ranks x micro-batches x sequences x bytes) of {args.data or python}")

    def _say(self, line):
        if self.rank.rank == 0:
            print(line, flush=True)  # torchrun reads it through a pipe
