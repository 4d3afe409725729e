"""Is ZeRO-2 by owner: a gradient goes to the rank that owns its parameter, in a `reduce` of its own, when it is ready.

OverlappedDistributedOptimizer argues against this scheme; the bench has it as a row. Parameters are owned whole, as in
stage 1, and each rank broadcasts its own, as there. `bucket_cap_mb` gathers gradients of one owner into one message, as
DeepSpeed's ZeRO-2 does.
"""

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as cut_like

from stage1_naive_broadcast.optimizer import ShardedOptimizer


def owner_buckets(params, owners, cap_bytes):
    """Fill buckets up to `cap_bytes`, the last parameter first. Returns [(owner, params), …], in order of sending."""
    buckets = []
    unfilled = {}  # owner -> params
    for param in reversed(params):
        owner = owners[param]
        bucket = unfilled.setdefault(owner, [])
        bucket.append(param)
        if sum(param.nbytes for param in bucket) >= cap_bytes:
            buckets.append((owner, unfilled.pop(owner)))
    return buckets + list(unfilled.items())


class Message(NamedTuple):
    work: dist.Work
    flat: torch.Tensor  # (numel of all params,)
    owner: int
    params: list


class OwnerReduce(ShardedOptimizer):
    """Takes the arguments of stage 1's core, and `bucket_cap_mb`, in MiB; None: each gradient is a message.

    Every parameter must get a gradient in each step, from one backward pass.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, bucket_cap_mb=None, **kwargs):
        super().__init__(params, optimizer_cls, **kwargs)
        params = [param for group in self.param_groups for param in group["params"]]
        owners = {param: rank for rank, shard in enumerate(self.shards) for param in shard}
        self.buckets = owner_buckets(params, owners, (bucket_cap_mb or 0) * 2**20)
        self.next_bucket = 0
        self.ready = set()  # parameters that have a gradient
        self.in_flight = deque()  # Messages
        for param in params:
            param.register_post_accumulate_grad_hook(self.on_grad_ready)

    @torch.no_grad()
    def on_grad_ready(self, param):
        """Send full buckets in their order, the same on every rank: a bucket waits for those before it."""
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
        flat = grads[0].reshape(-1) if len(grads) == 1 else flatten(grads)  # one gradient needs no copy
        flat /= self.world_size
        for param in params:
            param.grad = None
        work = dist.reduce(flat, group_dst=owner, group=self.process_group, async_op=True)
        self.in_flight.append(Message(work, flat, owner, params))

    def receive_oldest(self):
        """Keep the averages of what this rank owns. Drop the others: gloo may have left partial sums in them."""
        work, flat, owner, params = self.in_flight.popleft()
        work.wait()
        if owner == self.rank:
            for param, grad in zip(params, cut_like(flat, params)):
                param.grad = grad

    @torch.no_grad()
    def sync_grads(self):
        while self.in_flight:
            self.receive_oldest()
        self.next_bucket = 0
        self.ready.clear()
