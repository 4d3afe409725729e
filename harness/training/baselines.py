"""Trains in ways that torch lacks, and with which the stages are compared. A stage is an optimizer of this repository.

- Replicated: each rank has all gradients and updates all parameters, as with DDP, torch's DistributedDataParallel.
- In 16 bits: each rank also has fp32 copies of the 16-bit parameters, the main parameters, which AdamW updates.
- By owner: each gradient is sent to one rank only, which owns the parameter.

`Training` is the loop of every stage's train.py, cut into parts, so that memory can be measured between them.
"""

import contextlib
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten  # tensors -> one tensor with all their elements
from torch._utils import _unflatten_dense_tensors as cut_like  # the reverse: (that tensor, tensors) -> its parts
from torch.nn.parallel import DistributedDataParallel

from guard.groups import hyperparameters
from guard.whole_params import OfWholeParams
from stage1_naive_broadcast.optimizer import ShardedOptimizer


class Training:
    """Holds a model and an optimizer, and runs the parts of a training step, between which memory can be measured.

    `forward` is called with (tokens, targets) and returns the loss. It is the model itself, or DDP around the model.
    """

    def __init__(self, model, forward, optimizer):
        self.model = model
        self.forward = forward
        self.optimizer = optimizer

    def forward_backward(self, batch):
        """Run the forward and the backward pass on a batch, (tokens, targets)."""
        tokens, targets = batch  # (B, T) int64, (B, T) int64
        self.forward(tokens, targets).backward()

    def update(self):
        """Let the optimizer update the parameters."""
        self.optimizer.step()

    def zero_grad(self):
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def no_sync(self):
        """Return a context in which gradients add up on each rank and aren't sent.

        DDP has such a context, and stages have one. A way to train that sends nothing needs none.
        """
        for owner in (self.forward, self.optimizer):
            if hasattr(owner, "no_sync"):
                return owner.no_sync()
        return contextlib.nullcontext()

    def step(self, batch):
        """Run a whole training step."""
        self.forward_backward(batch)
        self.update()
        self.zero_grad()

    def finish(self):
        """Wait for what may still run after a step: messages with parameters, and kernels on the GPU."""
        # A Chained (variants/muon_rows.py) is an optimizer that consists of two optimizers.
        optimizers = getattr(self.optimizer, "optimizers", [self.optimizer])
        for optimizer in optimizers:
            if hasattr(optimizer, "finish_param_sync"):
                optimizer.finish_param_sync()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def full_params(self):
        """Return the values of all parameters on this rank, whole, in a list.

        FSDP2's parameters are DTensors, each of which is gathered here. Then this is collective: all ranks call it.
        """
        self.finish()
        return [param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()
                for param in self.model.parameters()]


# ------------------------------------------------------------------------ Replicated training, also in 16 bits, and DDP


class ReplicatedOptimizer(ShardedOptimizer):
    """Is the core of stage 1, the optimizer itself, except that every rank owns, and updates, every parameter.

    In stage 1 a parameter is owned by one rank. `shards`, which the core makes, is a list of parameters for each rank.
    """

    @torch.no_grad()
    def shard(self, groups):
        """Broadcast rank 0's parameters. Returns parameter groups for the inner optimizer, which updates parameters.

        The core calls this in its constructor, and when a group of parameters is added.
        """
        for group in groups:
            for param in group["params"]:
                dist.broadcast(param, group=self.process_group, group_src=0)
            self.shards[self.rank] += group["params"]  # this rank owns them all
        return [{**hyperparameters(group), "params": group["params"]} for group in groups]

    def sync_params(self):
        """Do nothing, because every rank has updated all parameters. In stage 1, owners broadcast parameters here."""


class DistributedOptimizer(OfWholeParams, ReplicatedOptimizer):
    """Averages gradients over the ranks, and updates all parameters on each. It takes the arguments of stage 1.

    With average_gradients=False it relies on DDP to have averaged the gradients. OfWholeParams adds stage 1's checks.
    """

    _stage = 0  # for repr(), which says the number of the stage


class MainParamsTraining(Training):
    """Trains a model on every rank by AdamW, which updates the main parameters: fp32 copies of 16-bit parameters.

    After AdamW's step each parameter becomes its main parameter, rounded. An fp32 parameter is updated itself.

    Args:
        world_size: how many ranks average their gradients; 1: this rank uses its own gradients.
        divided_in, summed_in: each rank divides its gradient by world_size in the one dtype, and the ranks add in the
            other. None: the dtype of the parameters.
        moments_in: the dtype that AdamW's moments are rounded to; None: they stay in fp32.
        ties_away: a main parameter exactly between two bf16 values is rounded to the one farther from zero, as in
            variants/remainder16.py. By default it is rounded as torch does: to the one whose last bit is 0.
    """

    def __init__(self, model, adamw, world_size, divided_in=None, summed_in=torch.float32, moments_in=None,
                 ties_away=False):
        # float() makes a copy of a 16-bit parameter. An fp32 parameter shares its memory with its main parameter.
        self.main_params = [param.detach().float() for param in model.parameters()]
        super().__init__(model, model, torch.optim.AdamW(self.main_params, **adamw))
        self.world_size = world_size
        self.divided_in = divided_in
        self.summed_in = summed_in
        self.moments_in = moments_in
        self.ties_away = ties_away

    @torch.no_grad()
    def update(self):
        """Average the gradients over the ranks, and update main parameters and parameters. Collective."""
        params = list(self.model.parameters())
        for param, main_param in zip(params, self.main_params):
            main_param.grad = self.averaged(param.grad).float()
        self.optimizer.step()
        if self.moments_in is not None:
            self.round_moments()
        torch._foreach_copy_(params, self.main_params)  # rounds
        if self.ties_away:  # rounds once more, in the other way
            for param, main_param in zip(params, self.main_params):
                # A bf16 number has the upper 16 bits of an fp32 number. Add half a unit, and cut the lower bits off.
                param.view(torch.int16).copy_((main_param.view(torch.int32) + 2**15) >> 16)

    def averaged(self, grad):
        """Return the average over the ranks of a gradient, which is divided before it is added up."""
        share = grad.to(self.divided_in or grad.dtype) / self.world_size
        share = share.to(self.summed_in or grad.dtype)
        return sum_in_rank_order(share, self.world_size) if self.world_size > 1 else share

    def round_moments(self):
        """Round the values of AdamW's moments to the dtype `moments_in`. The tensors stay fp32."""
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(self.moments_in).float()

    def zero_grad(self):
        """Drop the gradients of the main parameters and those of the parameters."""
        self.optimizer.zero_grad()
        self.model.zero_grad()


def sum_in_rank_order(tensor, world_size):
    """Return the sum of a tensor over the ranks, added in the order of ranks, from rank 0 on. Collective.

    An all-reduce would not do, because with three ranks gloo adds in another order, and the last bits differ.
    """
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor)
    total, *others = parts
    for part in others:
        total += part
    return total


def in_16_bits(alone=False, **options):
    """Return a function build(model, adamw) -> MainParamsTraining, for rows.py, the list of ways to train.

    alone: each rank trains on its own gradients. options: other arguments of MainParamsTraining.
    """
    def build(model, adamw, bucket_mb=None):
        return MainParamsTraining(model, adamw, 1 if alone else dist.get_world_size(), **options)
    return build


def in_ddp(model, bucket_cap_mb=None, hook=None, **options):
    """Return DDP around a model.

    bucket_cap_mb: MiB of gradients that DDP sends in one message; None is DDP's default, 25.
    hook: a communication hook of DDP, which sends gradients in another way. options: other arguments of DDP.
    """
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def bf16_sum(_, bucket):
    """Send and add gradients in bf16. It is a communication hook of DDP, which calls it for each bucket of gradients.

    torch's own bf16_compress_hook does the same, but refuses gloo, the backend for CPUs. Returns a Future, whose value
    is the bucket's buffer with the averages.
    """
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    # The value of the all-reduce's Future is a list with the one tensor that was summed.
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def ddp_16bit(model, adamw, bucket_mb=None):
    """Set up DDP, which averages 16-bit gradients while backward() runs, and AdamW on all main parameters."""
    training = MainParamsTraining(model, adamw, world_size=1)  # 1, because it gets gradients that are averaged already
    training.forward = in_ddp(model, bucket_mb)
    return training


# ------------------------------------------------------------------------------------------------ Gradients by owner


class Message(NamedTuple):
    """Gradients on their way to the rank that owns their parameters."""
    work: dist.Work  # done when the message has arrived
    bucket: torch.Tensor  # (numel of all params,), the gradients one behind the other
    owner: int  # number of the rank
    params: list


class OwnerReduce(ShardedOptimizer):
    """Sends each gradient to the rank that owns the parameter, by a `reduce`, as soon as the gradient is ready.

    The reduce adds up the gradients of all ranks. As in stage 1, whose core this class extends, each parameter is owned
    by one rank, which updates the parameter and broadcasts it. Every parameter must get a gradient in each step, from a
    single backward pass. The authors of Megatron-LLaMA's OverlappedDistributedOptimizer argue against this scheme, so
    it is measured, too.

    Args:
        bucket_cap_mb: a message has so many MiB of gradients of one owner, as in DeepSpeed's ZeRO-2; None: each message
            has a single gradient. All other arguments are those of stage 1's core.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, bucket_cap_mb=None, **kwargs):
        super().__init__(params, optimizer_cls, **kwargs)
        params = [param for group in self.param_groups for param in group["params"]]
        # The core has made `shards`: for each rank, the list of the parameters that the rank owns.
        owners = {param: rank for rank, shard in enumerate(self.shards) for param in shard}
        # [(owner, params), …]: the parameters of a bucket get their gradients sent in one message to their owner.
        self.buckets = owner_buckets(params, owners, (bucket_cap_mb or 0) * 2**20)
        self.next_bucket = 0  # index of the first bucket that isn't sent yet in this step
        self.ready = set()  # parameters that have got a gradient in this step
        self.in_flight = deque()  # Messages, the oldest first
        for param in params:
            param.register_post_accumulate_grad_hook(self.on_grad_ready)  # backward() calls it with the parameter

    @torch.no_grad()
    def on_grad_ready(self, param):
        """Send the buckets in which every parameter has a gradient. Then receive what has arrived meanwhile.

        Buckets are sent in the same order on every rank, so a bucket waits for all buckets before it.
        """
        self.ready.add(param)
        for owner, params in self.buckets[self.next_bucket:]:
            if not self.ready.issuperset(params):
                break
            self.send(owner, params)
            self.next_bucket += 1
        while self.in_flight and self.in_flight[0].work.is_completed():
            self.receive_oldest()

    def send(self, owner, params):
        """Start a message with the gradients of `params`, divided by the number of ranks, and drop these gradients."""
        grads = [param.grad for param in params]
        bucket = grads[0].reshape(-1) if len(grads) == 1 else flatten(grads)  # a single gradient needs no copy
        bucket /= self.world_size
        for param in params:
            param.grad = None
        work = dist.reduce(bucket, group_dst=owner, group=self.process_group, async_op=True)
        self.in_flight.append(Message(work, bucket, owner, params))

    def receive_oldest(self):
        """Wait for the oldest message. If this rank owns the parameters, take what has arrived as their gradients.

        On any other rank the bucket is dropped, because gloo leaves partial sums in it.
        """
        message = self.in_flight.popleft()
        message.work.wait()
        if message.owner == self.rank:
            for param, grad in zip(message.params, cut_like(message.bucket, message.params)):
                param.grad = grad

    @torch.no_grad()
    def sync_grads(self):
        """Wait for all gradients. The core calls this at the beginning of step(); stage 1 averages gradients here."""
        while self.in_flight:
            self.receive_oldest()
        self.next_bucket = 0
        self.ready.clear()


def owner_buckets(params, owners, cap_bytes):
    """Group parameters of the same owner into buckets of about `cap_bytes`. owners: {param: rank}.

    Returns [(owner, params), …] in the order in which buckets are sent. Buckets are filled from the last parameter to
    the first, because backward() makes gradients in about that order.
    """
    buckets = []
    unfilled = {}  # owner -> params of this owner's bucket that isn't full yet
    for param in reversed(params):
        owner = owners[param]
        bucket = unfilled.setdefault(owner, [])
        bucket.append(param)
        if sum(param.nbytes for param in bucket) >= cap_bytes:
            buckets.append((owner, unfilled.pop(owner)))
    return buckets + list(unfilled.items())  # last come the buckets that have not become full
