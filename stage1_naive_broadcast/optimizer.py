"""Stage 1, naive broadcast: every parameter has one owner, which updates it and broadcasts the result.

Unlike replicated training (DDP with AdamW): the optimizer's state exists once, not once per rank.
Source of the idea: ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054), in the form of fairscale's OSS.
"""

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as cut_like


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that averages gradients over d ranks, and whose state is spread over them, 1/d on average.

    Args:
        params: dense tensors of one dtype on one device, or parameter groups. Rank 0's values are broadcast.
        optimizer_cls: a torch optimizer class that updates each tensor by itself, as AdamW does.
        process_group: the d ranks; None is all of them.
        optimizer_kwargs: lr, weight_decay and so on, for `optimizer_cls`.

    Left to guard/: parameters that a rank doesn't use, sparse gradients, clipping, loss scaling, groups added later,
    saving, and errors that say what is wrong.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, **optimizer_kwargs):
        self.process_group = process_group
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.shards = [[] for _ in range(self.world_size)]  # shards[r]: the parameters that rank r owns
        defaults = optimizer_cls([{"params": []}], **optimizer_kwargs).defaults  # lr and so on
        super().__init__(params, defaults)
        self.optimizer = optimizer_cls(self.shard(self.param_groups), **optimizer_kwargs)  # updates what this rank owns

    @torch.no_grad()
    def shard(self, groups):
        """Give each parameter an owner, the largest first: the rank that owns least. Every rank computes the same.

        Returns what this rank owns, a group for each of `groups`: the inner optimizer's, which updates it.
        """
        own_groups = []
        numels = [sum(param.numel() for param in shard) for shard in self.shards]
        for group in groups:
            for param in sorted(group["params"], key=torch.Tensor.numel, reverse=True):
                dist.broadcast(param, group=self.process_group, group_src=0)
                owner = numels.index(min(numels))
                self.shards[owner].append(param)
                numels[owner] += param.numel()
            mine = set(self.shards[self.rank])
            owned = [param for param in group["params"] if param in mine]
            own_groups.append({**hyperparameters(group), "params": owned})
        return own_groups

    def sync_grads(self):
        """Replace every gradient by its average over the ranks."""
        params = [param for group in self.param_groups for param in group["params"]]
        self.average([param.grad for param in params if param.grad is not None])

    def step_own(self):
        """Update the owned parameters with the current hyperparameters: schedulers write into our groups."""
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            own.update(hyperparameters(group))
        self.optimizer.step()

    def sync_params(self):
        """One rank after the other broadcasts what it owns: flatten, broadcast, copy back."""
        for rank, shard in enumerate(self.shards):
            if shard:
                flat = flatten(shard)  # (numel of the shard,), a copy
                dist.broadcast(flat, group=self.process_group, group_src=rank)
                copy_all(shard, cut_like(flat, shard))

    @torch.no_grad()
    def step(self):
        """Collective: every rank calls it."""
        self.sync_grads()
        self.step_own()
        self.sync_params()

    def average(self, tensors):
        """Flatten, all-reduce, copy back. Each rank divides by d before the sum, which may be too large for 16 bits."""
        flat = flatten(tensors)  # (numel of all,)
        flat /= self.world_size
        dist.all_reduce(flat, group=self.process_group)
        copy_all(tensors, cut_like(flat, tensors))


def copy_all(targets, sources):
    if targets:  # a rank may own nothing
        torch._foreach_copy_(targets, sources)


def hyperparameters(group):
    """What a parameter group holds beside its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
