"""Is ZeRO-2 by owner: a gradient goes to the rank that owns its parameter, in a `reduce` of its own, when it is ready.

The scheme that OverlappedDistributedOptimizer argues against, and a row of the bench. Parameters are owned whole, as in
stage 1, and come back as there, in a broadcast of each rank. `bucket_cap_mb` gathers gradients of one owner into one
message, as DeepSpeed's ZeRO-2 does.
"""

from collections import deque

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as cut_like

from stage1_naive_broadcast.optimizer import ShardedOptimizer


def owner_buckets(params, owners, cap_bytes):
    """Return [(owner, params), …] in the order in which they leave: that in which they are closed, at `cap_bytes` each.

    Every rank computes the same. The model's last parameters come first, whose gradients do too.
    """
    buckets, filling = [], {}
    for param in reversed(params):
        owner = owners[param]
        bucket = filling.setdefault(owner, [])
        bucket.append(param)
        if sum(param.nbytes for param in bucket) >= cap_bytes:
            buckets.append((owner, filling.pop(owner)))
    return buckets + list(filling.items())


class OwnerReduce(ShardedOptimizer):
    """Takes the arguments of stage 1's core, and `bucket_cap_mb`, in MiB; None: each gradient is a message.

    Every parameter must get a gradient in each step, from one backward pass.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, bucket_cap_mb=None, **kwargs):
        super().__init__(params, optimizer_cls, **kwargs)
        params = [param for group in self.param_groups for param in group["params"]]
        owners = {param: rank for rank, shard in enumerate(self.shards) for param in shard}
        self.buckets = owner_buckets(params, owners, (bucket_cap_mb or 0) * 2**20)
        self.next_bucket, self.ready, self.travelling = 0, set(), deque()
        for param in params:
            param.register_post_accumulate_grad_hook(self.on_grad_ready)

    @torch.no_grad()
    def on_grad_ready(self, param):
        """Send in the same order on every rank: what is ready early waits for the buckets before it."""
        self.ready.add(param)
        while self.next_bucket < len(self.buckets) and self.ready.issuperset(self.buckets[self.next_bucket][1]):
            self.send(*self.buckets[self.next_bucket])
            self.next_bucket += 1
        while self.travelling and self.travelling[0][0].is_completed():
            self.receive_oldest()

    def send(self, owner, params):
        grads = [param.grad for param in params]
        flat = grads[0].reshape(-1) if len(grads) == 1 else flatten(grads)  # (numel of all,); of one no copy
        flat /= self.world_size
        for param in params:
            param.grad = None
        work = dist.reduce(flat, group_dst=owner, group=self.process_group, async_op=True)
        self.travelling.append((work, flat, owner, params))

    def receive_oldest(self):
        """Write this rank's gradients; those of another owner are dropped: gloo has added to them."""
        work, flat, owner, params = self.travelling.popleft()
        work.wait()
        if owner == self.rank:
            for param, grad in zip(params, cut_like(flat, params)):
                param.grad = grad

    @torch.no_grad()
    def sync_grads(self):
        while self.travelling:
            self.receive_oldest()
        self.next_bucket = 0
        self.ready.clear()
