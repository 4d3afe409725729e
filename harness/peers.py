"""The rows of the bench: ways to train the same model on the same data, each a small function that sets one of them up.

A new row is one function and one line in ROWS. What a row should cost is stated here too, for fp32 and AdamW, beside
where it comes from: the table in DESIGN of what each idea sends and holds, Ψ parameters (`numel`), d ranks.
"""

import importlib
from typing import Callable, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

BYTES = 4  # of a parameter and of a gradient, fp32; AdamW's two moments are as large each


class Training:
    """A model and an optimizer in the loop that every train.py runs, in two halves so that memory can be read between.

    `forward` is called with (tokens, targets) and returns the loss: the model, or what is wrapped around it.
    """

    def __init__(self, model, forward, optimizer):
        self.model, self.forward, self.optimizer = model, forward, optimizer

    def forward_backward(self, batch):
        tokens, targets = batch  # (B, T) int64, (B, T) int64
        self.forward(tokens, targets).backward()

    def update(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self, batch):
        self.forward_backward(batch)
        self.update()
        self.zero_grad()

    def finish(self):
        """Waits for all that the last step has left under way: parameters that still travel, kernels on the GPU."""
        if hasattr(self.optimizer, "finish_param_sync"):
            self.optimizer.finish_param_sync()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def full_params(self):
        """Every parameter, whole, as it is on this rank -> list of tensors."""
        self.finish()
        return [param.detach() for param in self.model.parameters()]


def compute_only(model, adamw):
    return Training(model, model, torch.optim.AdamW(model.parameters(), fused=True, **adamw))


def ddp(model, adamw):
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Training(model, wrapped, torch.optim.AdamW(model.parameters(), fused=True, **adamw))


def ddp_and_stage(package):
    """Stages 1 and 2 beneath DDP, which averages the gradients while backward runs, in buckets."""
    def build(model, adamw):
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = _optimizer_class(package)(model.parameters(), torch.optim.AdamW, average_gradients=False, **adamw)
        return Training(model, wrapped, optimizer)
    return build


def stage(package):
    def build(model, adamw):
        return Training(model, model, _optimizer_class(package)(model.parameters(), torch.optim.AdamW, **adamw))
    return build


def stage_with_prefetch(package):
    def build(model, adamw):
        training = stage(package)(model, adamw)
        training.optimizer.prefetch_params(model)
        return training
    return build


def _optimizer_class(package):
    return importlib.import_module(f"{package}.optimizer").DistributedOptimizer


class Row(NamedTuple):
    """`kind`: floor (no communication), reference (what all are compared with), stage (of this tutorial), or peer.

    `wire_bytes(numel, d)`: what a rank should send in a step. `bytes_per_param(numel, d, optimizer)`: what it should
    hold for a parameter after a step, its gradient included. `starts_apart`: the constructor broadcasts the weights
    from rank 0, which is tried by starting with other ones elsewhere.
    """
    name: str
    kind: str
    build: Callable
    wire_bytes: Callable
    bytes_per_param: Callable
    starts_apart: bool = True


def travels(times):
    """Parameter-sized exchanges (all-gather, reduce-scatter; an all-reduce is two) -> bytes a rank sends in a step."""
    return lambda numel, d: times * BYTES * numel * (d - 1) / d


def replicated(numel, d, optimizer):
    return 4 * BYTES  # parameter, gradient, two moments


def sharded_moments(numel, d, optimizer):
    return 2 * BYTES + 2 * BYTES / d


def sharded_gradients(numel, d, optimizer):
    """Parameters are whole, gradients and moments 1/d; plus the two buffers that buckets of gradients go through."""
    return BYTES + 3 * BYTES / d + optimizer.bucket_buffer_bytes / numel


# The shortest names that say what a row is: the table has to fit a terminal.
ROWS = [
    Row("compute only", "floor", compute_only, travels(0), replicated, starts_apart=False),
    Row("ddp", "reference", ddp, travels(2), replicated),
    Row("ddp + stage 1", "stage", ddp_and_stage("stage1_naive_broadcast"), travels(3), sharded_moments),
    Row("ddp + stage 2", "stage", ddp_and_stage("stage2_allgather"), travels(3), sharded_moments),
    Row("stage 1 naive broadcast", "stage", stage("stage1_naive_broadcast"), travels(3), sharded_moments),
    Row("stage 2 all-gather", "stage", stage("stage2_allgather"), travels(3), sharded_moments),
    Row("stage 3 grad buffer", "stage", stage("stage3_gradbuffer"), travels(2), sharded_moments),
    Row("stage 4 overlap", "stage", stage_with_prefetch("stage4_overlap"), travels(2), sharded_gradients),
]
REFERENCE = next(row.name for row in ROWS if row.kind == "reference")


def find(name):
    return next(row for row in ROWS if row.name == name)
