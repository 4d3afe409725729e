"""Trains in ways that stages are compared with, and that torch lacks: replicated, in 16 bits, and by owner.

`Training` is the loop of every train.py, cut in two halves, so that memory can be measured between them.
"""

import contextlib
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as cut_like
from torch.nn.parallel import DistributedDataParallel

from guard.groups import hyperparameters
from guard.whole_params import OfWholeParams
from stage1_naive_broadcast.optimizer import ShardedOptimizer


class Training:
    """Runs a model and an optimizer in the loop of every train.py, in two halves so that memory can be read between.

    `forward` is called with (tokens, targets) and returns the loss: the model, or what is wrapped around it.
    """

    def __init__(self, model, forward, optimizer):
        self.model = model
        self.forward = forward
        self.optimizer = optimizer

    def forward_backward(self, batch):
        tokens, targets = batch  # (B, T) int64, (B, T) int64
        self.forward(tokens, targets).backward()

    def update(self):
        self.optimizer.step()

    def zero_grad(self):
        self.optimizer.zero_grad()

    def no_sync(self):
        """Return a context in which gradients add up and aren't sent."""
        for owner in (self.forward, self.optimizer):
            if hasattr(owner, "no_sync"):
                return owner.no_sync()
        return contextlib.nullcontext()

    def step(self, batch):
        self.forward_backward(batch)
        self.update()
        self.zero_grad()

    def finish(self):
        """Wait for what the last step has left in flight: parameters, and kernels on the GPU."""
        optimizers = getattr(self.optimizer, "optimizers", [self.optimizer])  # a Chained has two: variants/muon_rows.py
        for optimizer in optimizers:
            if hasattr(optimizer, "finish_param_sync"):
                optimizer.finish_param_sync()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def full_params(self):
        """Return the list of parameters, whole, as they are on this rank. Collective if they are DTensors."""
        self.finish()
        return [param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()
                for param in self.model.parameters()]


# --------------------------------------------------------------------------- Replicated training, of any dtype, and DDP


class ReplicatedOptimizer(ShardedOptimizer):
    """Is the core of stage 1, except that every rank owns, and updates, every parameter."""

    @torch.no_grad()
    def shard(self, groups):
        """Broadcast the parameters. Returns a group of the inner optimizer for each of `groups`."""
        for group in groups:
            for param in group["params"]:
                dist.broadcast(param, group=self.process_group, group_src=0)
            self.shards[self.rank] += group["params"]
        return [{**hyperparameters(group), "params": group["params"]} for group in groups]

    def sync_params(self):
        """Do nothing: every rank has updated all parameters."""


class DistributedOptimizer(OfWholeParams, ReplicatedOptimizer):
    """Averages gradients over the ranks, unless DDP has, and updates all parameters. It takes stage 1's arguments."""

    _stage = 0


class MainParamsTraining(Training):
    """Steps fp32 copies of the parameters, the main parameters; fp32 parameters are stepped themselves.

    Args:
        world_size: 1 is without communication.
        divided_in, summed_in: the dtypes in which gradients are averaged; None is that of the parameters.
        moments_in: the dtype that AdamW's moments are rounded to; None: they stay in fp32.
        ties_away: a parameter is its main parameter rounded, at ties away from zero, as in variants/remainder16.py.
    """

    def __init__(self, model, adamw, world_size, divided_in=None, summed_in=torch.float32, moments_in=None,
                 ties_away=False):
        self.main_params = [param.detach().float() for param in model.parameters()]
        super().__init__(model, model, torch.optim.AdamW(self.main_params, **adamw))
        self.world_size = world_size
        self.divided_in = divided_in
        self.summed_in = summed_in
        self.moments_in = moments_in
        self.ties_away = ties_away

    @torch.no_grad()
    def update(self):
        params = list(self.model.parameters())
        for param, main_param in zip(params, self.main_params):
            main_param.grad = self.averaged(param.grad).float()
        self.optimizer.step()
        if self.moments_in is not None:
            self.round_moments()
        torch._foreach_copy_(params, self.main_params)
        if self.ties_away:
            for param, main_param in zip(params, self.main_params):
                param.view(torch.int16).copy_((main_param.view(torch.int32) + 2**15) >> 16)

    def averaged(self, grad):
        """Return the average of a gradient over the ranks, divided in one dtype and summed in another."""
        share = grad.to(self.divided_in or grad.dtype) / self.world_size
        share = share.to(self.summed_in or grad.dtype)
        return sum_in_rank_order(share, self.world_size) if self.world_size > 1 else share

    def round_moments(self):
        """Round AdamW's moments to the dtype `moments_in`; they stay fp32 tensors."""
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(self.moments_in).float()

    def zero_grad(self):
        self.optimizer.zero_grad()
        self.model.zero_grad()


def sum_in_rank_order(tensor, world_size):
    """Return the sum over the ranks, in the order of ranks; gloo's all-reduce of three ranks adds in another order."""
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor)
    total, *others = parts
    for part in others:
        total += part
    return total


def in_16_bits(alone=False, **options):
    """Step fp32 copies by AdamW on every rank. `alone`: gradients stay there. `options`: see MainParamsTraining."""
    def build(model, adamw, bucket_mb=None):
        return MainParamsTraining(model, adamw, 1 if alone else dist.get_world_size(), **options)
    return build


def in_ddp(model, bucket_cap_mb=None, hook=None, **options):
    """Wrap a model in DDP. `bucket_cap_mb`: in MiB; None is DDP's default, 25. `hook`: a communication hook of DDP."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def bf16_sum(_, bucket):
    """Sum gradients in bf16: a communication hook of DDP, as torch's bf16_compress_hook, which refuses gloo."""
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def ddp_16bit(model, adamw, bucket_mb=None):
    """Let DDP average 16-bit gradients while backward runs, and AdamW step fp32 copies on every rank."""
    training = MainParamsTraining(model, adamw, world_size=1)
    training.forward = in_ddp(model, bucket_mb)
    return training


# ------------------------------------------------------------------------------------------------------ ZeRO-2 by owner


class Message(NamedTuple):
    """Gradients under way to the rank that owns their parameters."""
    work: dist.Work
    bucket: torch.Tensor  # (numel of all params,)
    owner: int
    params: list


class OwnerReduce(ShardedOptimizer):
    """Sends each gradient to the rank that owns the parameter, by a `reduce`, as soon as the gradient is ready.

    Megatron-LLaMA's OverlappedDistributedOptimizer argues against this scheme; the bench has it as a row. As in stage 1
    a rank owns whole parameters, and broadcasts them. Every parameter must get a gradient in each step, from a single
    backward pass.

    Args:
        bucket_cap_mb: MiB of gradients of one owner that one message gathers, as DeepSpeed's ZeRO-2 does; None: each
            gradient is a message. All other arguments are those of stage 1's core.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, bucket_cap_mb=None, **kwargs):
        super().__init__(params, optimizer_cls, **kwargs)
        params = [param for group in self.param_groups for param in group["params"]]
        owners = {param: rank for rank, shard in enumerate(self.shards) for param in shard}
        self.buckets = owner_buckets(params, owners, (bucket_cap_mb or 0) * 2**20)
        self.next_bucket = 0  # index of the first bucket that isn't sent yet
        self.ready = set()  # parameters that have a gradient
        self.in_flight = deque()  # Messages
        for param in params:
            param.register_post_accumulate_grad_hook(self.on_grad_ready)

    @torch.no_grad()
    def on_grad_ready(self, param):
        """Send full buckets in their order, the same on every rank: a bucket waits for the buckets before it."""
        self.ready.add(param)
        for owner, params in self.buckets[self.next_bucket:]:
            if not self.ready.issuperset(params):
                break
            self.send(owner, params)
            self.next_bucket += 1
        while self.in_flight and self.in_flight[0].work.is_completed():
            self.receive_oldest()

    def send(self, owner, params):
        grads = [param.grad for param in params]
        bucket = grads[0].reshape(-1) if len(grads) == 1 else flatten(grads)  # a single gradient needs no copy
        bucket /= self.world_size
        for param in params:
            param.grad = None
        work = dist.reduce(bucket, group_dst=owner, group=self.process_group, async_op=True)
        self.in_flight.append(Message(work, bucket, owner, params))

    def receive_oldest(self):
        """Keep the averages if this rank owns the parameters. Drop other gradients: gloo leaves partial sums."""
        message = self.in_flight.popleft()
        message.work.wait()
        if message.owner == self.rank:
            for param, grad in zip(message.params, cut_like(message.bucket, message.params)):
                param.grad = grad

    @torch.no_grad()
    def sync_grads(self):
        while self.in_flight:
            self.receive_oldest()
        self.next_bucket = 0
        self.ready.clear()


def owner_buckets(params, owners, cap_bytes):
    """Fill buckets up to `cap_bytes`, from the last parameter to the first: gradients become ready in that order.

    owners: {param: rank}. Returns [(owner, params), …], in the order of sending.
    """
    buckets = []
    unfilled = {}  # owner -> params
    for param in reversed(params):
        owner = owners[param]
        bucket = unfilled.setdefault(owner, [])
        bucket.append(param)
        if sum(param.nbytes for param in bucket) >= cap_bytes:
            buckets.append((owner, unfilled.pop(owner)))
    return buckets + list(unfilled.items())
