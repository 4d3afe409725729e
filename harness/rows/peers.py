"""The rows of the bench: ways to train the same model on the same data, each a small function that sets one of them up.

A new row is one function and one line in ROWS. What a row should cost with AdamW is stated here too, beside where it
comes from: what each idea sends and holds, as its chapter says, of Ψ parameters (`numel`) on d ranks.
"""

import contextlib
import functools
import importlib
import re
from typing import Callable, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import stage4_overlap
from harness.rows.owner_reduce import OwnerReduce

BYTES = 4  # of a parameter and of a gradient, fp32; AdamW's two moments are as large each
ONE_PARAMETER = 1e-6  # MiB: a bucket is closed by the first parameter in it
PIECE = 2**18  # elements of a message of `compute + bytes`: 1 MiB, as in stage 4


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

    def no_sync(self):
        """A context in which gradients add up, and don't travel."""
        owner = next((one for one in (self.forward, self.optimizer) if hasattr(one, "no_sync")), None)
        return owner.no_sync() if owner else contextlib.nullcontext()

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
    return Training(model, model, torch.optim.AdamW(model.parameters(), **adamw))


class ComputeAndBytes(Training):
    """Sends as many bytes as stage 4 while it computes, to the next rank; nothing waits for them before the step ends.

    They come out of one piece of memory and go into another: what a machine takes for moving bytes, and no more.
    """

    def __init__(self, model, adamw):
        super().__init__(model, self._send_and_compute, torch.optim.AdamW(model.parameters(), **adamw))
        numel, d = sum(param.numel() for param in model.parameters()), dist.get_world_size()
        n = round(travels(2)(numel, d) / BYTES)
        self.sizes = [min(PIECE, n - start) for start in range(0, n, PIECE)]
        self.sent, self.received = torch.zeros(2, PIECE, device=next(model.parameters()).device)
        self.to, self.by = (dist.get_rank() + 1) % d, (dist.get_rank() - 1) % d

    def _send_and_compute(self, tokens, targets):
        operations = []
        for size in self.sizes:
            operations.append(dist.P2POp(dist.isend, self.sent[:size], self.to))
            operations.append(dist.P2POp(dist.irecv, self.received[:size], self.by))
        self.works = dist.batch_isend_irecv(operations) if operations else []
        return self.model(tokens, targets)

    def update(self):
        super().update()
        for work in self.works:
            work.wait()


def beneath_ddp(package, bucket_cap_mb=None):
    """DDP averages the gradients while backward runs, in buckets; rung 0, or stage 1 or 2, steps what it steps.

    `bucket_cap_mb`: of DDP, in MiB; None is its default, 25.
    """
    def build(model, adamw):
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)
        optimizer = _optimizer_class(package)(model.parameters(), torch.optim.AdamW, average_gradients=False, **adamw)
        return Training(model, wrapped, optimizer)
    return build


ddp = beneath_ddp("harness.rows.replicated")


def replicated_16bit(model, adamw):
    """The reference of rows with 16-bit parameters: gradients summed in fp32, AdamW on fp32 copies, on every rank."""
    return MainParamsTraining(model, adamw, dist.get_world_size())


class MainParamsTraining(Training):
    """16-bit parameters whose fp32 copies, the main parameters, are stepped. `world_size` 1: without communication."""

    def __init__(self, model, adamw, world_size):
        self.main_params = [param.detach().float() for param in model.parameters()]
        super().__init__(model, model, torch.optim.AdamW(self.main_params, **adamw))
        self.world_size = world_size

    def update(self):
        params = list(self.model.parameters())
        for param, main_param in zip(params, self.main_params):
            main_param.grad = (param.grad / self.world_size).float()
            if self.world_size > 1:
                dist.all_reduce(main_param.grad)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, self.main_params)

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.model.zero_grad()


def compute_only_16bit(model, adamw):
    return MainParamsTraining(model, adamw, world_size=1)


def ddp_16bit(bucket_cap_mb=None):
    """DDP averages 16-bit gradients while backward runs, and AdamW steps fp32 copies on every rank."""
    def build(model, adamw):
        training = compute_only_16bit(model, adamw)
        training.forward = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)
        return training
    return build


def ddp_and_zero(bucket_cap_mb=None):
    """As in its documentation: DDP averages the gradients, then each rank broadcasts the parameters that it stepped.

    With a bucket size it is tuned: parameters are views of one tensor for each rank, too, and travel together.
    """
    def build(model, adamw):
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW,
                                            parameters_as_bucket_view=bucket_cap_mb is not None, **adamw)
        return Training(model, wrapped, optimizer)
    return build


def fsdp2(reshard_after_forward):
    """As in its documentation: each block is a unit, and the rest of the model is the last one."""
    def build(model, adamw):
        mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return ShardedTraining(model, model, torch.optim.AdamW(model.parameters(), **adamw))
    return build


class ShardedTraining(Training):
    """For parameters that are DTensors."""

    def full_params(self):
        return [param.full_tensor().detach() for param in self.model.parameters()]


def stage(package, **settings):
    def build(model, adamw):
        optimizer = _optimizer_class(package)(model.parameters(), torch.optim.AdamW, **settings, **adamw)
        return Training(model, model, optimizer)
    return build


def stage_with_prefetch(package, **settings):
    def build(model, adamw):
        training = stage(package, **settings)(model, adamw)
        training.optimizer.prefetch_params(model)
        return training
    return build


def owner_reduce(bucket_cap_mb=None):
    def build(model, adamw):
        return Training(model, model, OwnerReduce(model.parameters(), bucket_cap_mb=bucket_cap_mb, **adamw))
    return build


class LeavesLate(stage4_overlap.DistributedOptimizer):
    """Stage 4 whose buckets leave when the backward pass has ended, and none earlier."""

    pass_has_ended = False

    def send_full_buckets(self):
        if self.pass_has_ended:
            super().send_full_buckets()

    def _finish_round(self):
        self.pass_has_ended = True
        super()._finish_round()
        self.pass_has_ended = False


def leaves_late(prefetch, bucket_cap_mb=None):
    def build(model, adamw):
        optimizer = LeavesLate(model.parameters(), torch.optim.AdamW, bucket_cap_mb=bucket_cap_mb, **adamw)
        if prefetch:
            optimizer.prefetch_params(model)
        return Training(model, model, optimizer)
    return build


def _optimizer_class(package):
    return importlib.import_module(package).DistributedOptimizer


class Row(NamedTuple):
    """`kind`: floor (learns nothing of other ranks), reference (what all are compared with), stage (of this tutorial),
    peer, or noise (the reference once more: how far apart two timings of the same thing are).

    `wire_bytes(numel, d)`: what a rank should send in a step. `bytes_per_param(numel, d, optimizer)`: what it should
    hold for a parameter after a step, its gradient included. `starts_apart`: the constructor broadcasts the weights
    from rank 0, which is tried by starting with other ones elsewhere. `dtype`: of the parameters; `reference` builds
    what a row of this dtype must agree with.
    """
    name: str
    kind: str
    build: Callable
    wire_bytes: Callable
    bytes_per_param: Callable
    starts_apart: bool = True
    dtype: str = "float32"
    reference: Callable = ddp
    sized: Callable | None = None


def travels(times):
    """Parameter-sized exchanges (all-gather, reduce-scatter; an all-reduce is two) -> bytes a rank sends in a step."""
    return lambda numel, d: times * BYTES * numel * (d - 1) / d


def replicated(numel, d, optimizer):
    return 4 * BYTES  # parameter, gradient, two moments


def replicated_and_two_pieces(numel, d, optimizer):
    return 4 * BYTES + 2 * BYTES * PIECE / numel


def sharded_moments(numel, d, optimizer):
    return 2 * BYTES + 2 * BYTES / d


def sharded_all(numel, d, optimizer):
    return 4 * BYTES / d  # the whole parameters are there from the forward to the backward pass only


def sharded_by_owner(numel, d, optimizer):
    return BYTES + 3 * BYTES / d


def sharded_gradients(numel, d, optimizer):
    """Parameters are whole, gradients and moments 1/d; plus the two buffers that buckets of gradients go through."""
    return BYTES + 3 * BYTES / d + optimizer.bucket_buffer_bytes / numel


def replicated_main_params(numel, d, optimizer):
    return 2 + 2 + 4 * BYTES  # parameter and gradient, 16-bit; fp32: main parameter, its gradient, two moments


def sharded_main_params(numel, d, optimizer):
    return 2 + 4 * BYTES / d + optimizer.bucket_buffer_bytes / numel


STAGE_1, STAGE_2, STAGE_3, STAGE_4 = "stage1_naive_broadcast", "stage2_allgather", "stage3_gradbuffer", "stage4_overlap"


def row_of_stage_4(name, make):
    """`make(bucket_cap_mb=None)` -> build."""
    return Row(name, "stage", make(), travels(2), sharded_gradients, sized=lambda mb: make(bucket_cap_mb=mb))


# The shortest names that say what a row is: the table has to fit a terminal.
ROWS = [
    Row("compute only", "floor", compute_only, travels(0), replicated, starts_apart=False),
    Row("compute + bytes", "floor", ComputeAndBytes, travels(2), replicated_and_two_pieces, starts_apart=False),
    Row("ddp", "reference", ddp, travels(2), replicated,
        sized=functools.partial(beneath_ddp, "harness.rows.replicated")),
    Row("ddp + stage 1", "stage", beneath_ddp(STAGE_1), travels(3), sharded_moments,
        sized=functools.partial(beneath_ddp, STAGE_1)),
    Row("ddp + stage 2", "stage", beneath_ddp(STAGE_2), travels(3), sharded_moments,
        sized=functools.partial(beneath_ddp, STAGE_2)),
    Row("rung 0 replicated", "stage", stage("harness.rows.replicated"), travels(2), replicated),
    Row("stage 1 naive broadcast", "stage", stage(STAGE_1), travels(3), sharded_moments),
    Row("stage 2 all-gather", "stage", stage(STAGE_2), travels(3), sharded_moments),
    Row("stage 3 grad buffer", "stage", stage(STAGE_3), travels(2), sharded_moments),
    row_of_stage_4("stage 4 overlap", functools.partial(stage_with_prefetch, STAGE_4)),
    Row("ddp + torch ZeRO", "peer", ddp_and_zero(), travels(3), sharded_moments, sized=ddp_and_zero),
    Row("owner reduce", "peer", owner_reduce(), travels(2), sharded_by_owner, sized=owner_reduce),
    Row("fsdp2", "peer", fsdp2(reshard_after_forward=False), travels(2), sharded_all, starts_apart=False),
    Row("fsdp2 reshard", "peer", fsdp2(reshard_after_forward=True), travels(3), sharded_all, starts_apart=False),
    Row("ddp again", "noise", ddp, travels(2), replicated),
    Row("compute only bf16", "floor", compute_only_16bit, travels(0), replicated_main_params, starts_apart=False,
        dtype="bfloat16", reference=replicated_16bit),
    Row("stage 4 overlap bf16", "stage", stage_with_prefetch(STAGE_4, reduce_dtype=torch.float32), travels(1),
        sharded_main_params, dtype="bfloat16", reference=replicated_16bit),  # NCCL alone would sum in 16 bits
]
REFERENCE = next(row.name for row in ROWS if row.kind == "reference")
# The reference and the four stages by themselves: what one picture shows.
LADDER = [REFERENCE, *(row.name for row in ROWS if row.name.startswith("stage") and row.dtype == "float32")]
# What each half of stage 4's overlap buys: rows of make network.
APART = [
    row_of_stage_4("stage 4 neither", functools.partial(leaves_late, False)),
    row_of_stage_4("stage 4 only gradients", functools.partial(stage, STAGE_4)),
    row_of_stage_4("stage 4 only parameters", functools.partial(leaves_late, True)),
]


def planned(name, make, whole, shared, **settings):
    """A row of make plan: after a step a parameter takes `whole` + `shared` / d bytes, and its share of buffers."""
    return Row(name, "stage", make(**settings), travels(1), lambda numel, d, optimizer:
               whole + shared / d + optimizer.bucket_buffer_bytes / numel, dtype="bfloat16",
               sized=lambda cap_mb: make(bucket_cap_mb=cap_mb))


# With 16-bit parameters, for GPUs: nobody has measured these here.
PLANNED = [
    planned("ddp bf16", ddp_16bit, 20, 0),
    planned("owner reduce bf16", owner_reduce, 2, 6),
    planned("stage 1 bf16", functools.partial(stage, STAGE_1), 4, 4),
    planned("stage 2 bf16", functools.partial(stage, STAGE_2), 4, 4),
    planned("stage 3 bf16/fp32", functools.partial(stage, STAGE_3), 6, 12, grad_dtype=torch.float32),
    planned("stage 3 bf16/bf16", functools.partial(stage, STAGE_3), 4, 16),
    planned("stage 4 bf16", functools.partial(stage_with_prefetch, STAGE_4), 2, 16),
]


def find(name):
    """The row of that name. "ddp, 2 MB buckets", and "ddp, one-parameter buckets", are row "ddp" with such buckets."""
    for row in [*ROWS, *APART, *PLANNED]:
        if name == row.name:
            return row
        size = re.fullmatch(rf"{re.escape(row.name)}, (?:(one-parameter)|([\d.]+) MB) buckets", name)
        if size and row.sized:
            cap_mb = ONE_PARAMETER if size[1] else float(size[2])
            kind = "peer" if row.kind == "reference" else row.kind
            return row._replace(name=name, kind=kind, build=row.sized(cap_mb))
    raise LookupError(f"there is no row {name!r}")


def sized_name(name, cap_mb):
    """How the row `name` is called with buckets of `cap_mb` MiB: see `find`."""
    return f"{name}, {'one-parameter' if cap_mb == ONE_PARAMETER else f'{cap_mb:g} MB'} buckets"
