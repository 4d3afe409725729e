"""Ways to train that the stages are compared with. A stage is an optimizer of this repository, in a folder stage*/.

- Replicated: each rank has all gradients and updates all parameters, as with DDP, torch's DistributedDataParallel.
- In 16 bits: AdamW updates main parameters, which are fp32 copies of the 16-bit parameters.
- By owner: each gradient is sent to one rank only, which owns the parameter.

The *core* of a stage is its algorithm without checks of a program's mistakes: the class ShardedOptimizer in
optimizer.py. The code in guard/ adds the checks.
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
        for part in (self.forward, self.optimizer):
            if hasattr(part, "no_sync"):
                return part.no_sync()
        return contextlib.nullcontext()

    def step(self, batch):
        """Run a whole training step."""
        self.forward_backward(batch)
        self.update()
        self.zero_grad()

    def finish(self):
        """Wait for messages with parameters and for kernels on the GPU, which may still run after a step."""
        # A Chained (variants/muon_rows.py) is an optimizer that consists of two optimizers.
        optimizers = getattr(self.optimizer, "optimizers", [self.optimizer])
        for optimizer in optimizers:
            if hasattr(optimizer, "finish_param_sync"):
                optimizer.finish_param_sync()
        if next(self.model.parameters()).is_cuda:
            torch.cuda.synchronize()

    def full_params(self):
        """Return a list of the whole values of all parameters. Collective: all ranks call it.

        FSDP2's parameters are DTensors, of which a rank has parts. They are gathered here.
        """
        self.finish()
        return [param.full_tensor().detach() if hasattr(param, "full_tensor") else param.detach()
                for param in self.model.parameters()]


# ------------------------------------------------------------------------ Replicated training, also in 16 bits, and DDP


class ReplicatedOptimizer(ShardedOptimizer):
    """Is stage 1's core, but every rank owns every parameter, which means that it updates the parameter.

    In stage 1 one rank owns a parameter. The core makes `shards`: for each rank, the list of the parameters that it
    owns.
    """

    @torch.no_grad()
    def shard(self, groups):
        """Broadcast rank 0's parameters. Returns the parameter groups of the inner optimizer, such as AdamW.

        The core calls this in its constructor, and when a group of parameters is added.
        """
        for group in groups:
            for param in group["params"]:
                dist.broadcast(param, group=self.process_group, group_src=0)
            self.shards[self.rank] += group["params"]  # this rank owns them all
        return [{**hyperparameters(group), "params": group["params"]} for group in groups]

    def sync_params(self):
        """Do nothing. In stage 1, owners broadcast parameters here, but here every rank has updated all of them."""


class DistributedOptimizer(OfWholeParams, ReplicatedOptimizer):
    """Averages gradients over the ranks, and updates all parameters on each rank.

    OfWholeParams, from guard/, is stage 1's guard: it adds the constructor, with stage 1's arguments, and the checks.
    With the argument average_gradients=False, DDP has to average the gradients.
    """

    _stage = 0  # for repr(), which says the number of the stage


class MainParamsTraining(Training):
    """Trains a model on every rank: AdamW updates the main parameters, and each is rounded into its parameter.

    An fp32 parameter is its own main parameter.

    Args:
        world_size: how many ranks average their gradients; 1: this rank uses its own gradients.
        divided_in: the dtype in which a rank divides its gradient by world_size. None: the dtype of the parameters.
        summed_in: the dtype in which the quotients of all ranks are added. None: the dtype of the parameters.
        moments_in: the dtype that AdamW's moments are rounded to; None: they stay in fp32.
        ties_away: whether a main parameter exactly between two bf16 values is rounded to the value farther from zero,
            as in variants/remainder16.py. By default it is rounded as torch does: to the value whose last bit is 0.
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
        if self.ties_away:  # round the main parameters once more, by integers
            for param, main_param in zip(params, self.main_params):
                # A bf16 number has the upper 16 bits of an fp32 number. Add half a unit, and cut the lower bits off.
                param.view(torch.int16).copy_((main_param.view(torch.int32) + 2**15) >> 16)

    def averaged(self, grad):
        """Return the average of a gradient over the ranks. Each rank divides before the ranks add."""
        share = grad.to(self.divided_in or grad.dtype) / self.world_size
        share = share.to(self.summed_in or grad.dtype)
        return sum_in_rank_order(share, self.world_size) if self.world_size > 1 else share

    def round_moments(self):
        """Round the values of AdamW's moments to the dtype `moments_in`. The tensors stay fp32."""
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].to(self.moments_in).float()

    def zero_grad(self):
        """Drop the gradients of main parameters and of parameters."""
        self.optimizer.zero_grad()
        self.model.zero_grad()


def sum_in_rank_order(tensor, world_size):
    """Add a tensor up over the ranks, from rank 0 to the last. Returns the sum. Collective.

    On three ranks gloo's all-reduce adds in another order, and the last bits differ.
    """
    parts = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(parts, tensor)
    total, *others = parts
    for part in others:
        total += part
    return total


def in_16_bits(alone=False, **options):
    """Return a function build(model, adamw) -> MainParamsTraining, for rows.py, the list of ways to train.

    adamw: a dict of AdamW's arguments.
    alone: whether each rank trains on its own gradients. options: other arguments of MainParamsTraining.
    """
    def build(model, adamw, bucket_mb=None):  # bucket_mb is unused: rows.py passes it to every such function
        return MainParamsTraining(model, adamw, 1 if alone else dist.get_world_size(), **options)
    return build


def in_ddp(model, bucket_cap_mb=None, hook=None, **options):
    """Return DDP around a model.

    bucket_cap_mb: MiB of gradients that DDP sends in one message; None is DDP's default, 25.
    hook: a communication hook: DDP calls it to send a bucket of gradients. options: other arguments of DDP.
    """
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb, **options)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return wrapped


def bf16_sum(_, bucket):
    """Send and add gradients in bf16: a communication hook of DDP, which calls it with (None, bucket of gradients).

    torch's own bf16_compress_hook does the same, but refuses gloo, the backend for CPUs. Returns a Future. Its value is
    the bucket's buffer, which then has the averages.
    """
    sent = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    future = dist.all_reduce(sent, async_op=True).get_future()
    # The value of the all-reduce's Future is a list with the one tensor that was summed.
    return future.then(lambda done: bucket.buffer().copy_(done.value()[0]))


def ddp_16bit(model, adamw, bucket_mb=None):
    """Set up DDP, which averages 16-bit gradients while backward() runs, and AdamW on all main parameters."""
    training = MainParamsTraining(model, adamw, world_size=1)  # 1, because DDP has averaged the gradients
    training.forward = in_ddp(model, bucket_mb)
    return training


# ------------------------------------------------------------------------------------------------ Gradients by owner


class Message(NamedTuple):
    """Gradients on their way to the rank that owns their parameters."""
    work: dist.Work  # torch's object for a collective in flight, on which a rank waits
    flat_grads: torch.Tensor  # (numel of all params,), the gradients one after the other
    owner: int  # number of the rank
    params: list


class OwnerReduce(ShardedOptimizer):
    """Sends each gradient to the rank that owns the parameter as soon as the gradient is ready.

    The collective `reduce` adds up the gradients of all ranks. As in stage 1, the owner updates the parameter and
    broadcasts it. Every parameter must get a gradient in each step, from a single backward pass. The authors of
    Megatron-LLaMA's OverlappedDistributedOptimizer argue against this scheme, so it is measured, too.

    A *bucket* is a list of parameters of the same owner whose gradients travel in one message.

    Args:
        bucket_cap_mb: a bucket has about this many MiB of gradients, as in DeepSpeed's ZeRO-2; None: each bucket has a
            single parameter. Stage 1's core explains all other arguments.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, bucket_cap_mb=None, **kwargs):
        super().__init__(params, optimizer_cls, **kwargs)
        params = [param for group in self.param_groups for param in group["params"]]
        # The core has made `shards`: for each rank, the list of the parameters that the rank owns.
        owners = {param: rank for rank, shard in enumerate(self.shards) for param in shard}
        # [(owner, bucket), …]
        self.buckets = owner_buckets(params, owners, (bucket_cap_mb or 0) * 2**20)
        self.next_bucket = 0  # index of the first bucket that isn't sent yet in this step
        self.ready = set()  # parameters that have got a gradient in this step
        self.in_flight = deque()  # Messages, the oldest first
        for param in params:
            param.register_post_accumulate_grad_hook(self.on_grad_ready)  # backward() calls it with the parameter

    @torch.no_grad()
    def on_grad_ready(self, param):
        """Note that `param` has a gradient. Send the buckets that are complete, and receive messages that have arrived.

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
        flat_grads = grads[0].reshape(-1) if len(grads) == 1 else flatten(grads)  # a single gradient needs no copy
        flat_grads /= self.world_size
        for param in params:
            param.grad = None
        work = dist.reduce(flat_grads, group_dst=owner, group=self.process_group, async_op=True)
        self.in_flight.append(Message(work, flat_grads, owner, params))

    def receive_oldest(self):
        """Wait for the oldest message. If this rank owns the parameters, the averages become their gradients.

        Other ranks drop the tensor, in which gloo leaves partial sums.
        """
        message = self.in_flight.popleft()
        message.work.wait()
        if message.owner == self.rank:
            for param, grad in zip(message.params, cut_like(message.flat_grads, message.params)):
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

    Returns [(owner, bucket), …] in the order in which buckets are sent. The last parameter is the first to get into a
    bucket, because backward() makes gradients in about that order.
    """
    buckets = []
    unfilled = {}  # owner -> this owner's bucket that isn't full yet
    for param in reversed(params):
        owner = owners[param]
        bucket = unfilled.setdefault(owner, [])
        bucket.append(param)
        if sum(param.nbytes for param in bucket) >= cap_bytes:
            buckets.append((owner, unfilled.pop(owner)))
    return buckets + list(unfilled.items())  # last come the buckets that have not become full
