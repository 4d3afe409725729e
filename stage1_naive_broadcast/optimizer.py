"""Stage 1, naive broadcast: every parameter has one owner, a rank that updates it and broadcasts the result.

The shard of a rank is the list of the parameters that this rank owns. The inner optimizer is a usual torch optimizer,
which has only this rank's shard, and updates it.
Unlike replicated training (DDP with AdamW): the optimizer's state exists once, not once per rank.
Source of the idea: ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054), in the form of fairscale's OSS.
"""

import torch
import torch.distributed as dist

# flatten(tensors) copies all tensors into one flat tensor. cut_like(flat, tensors) cuts it into views of their shapes.
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as cut_like


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that averages gradients over d ranks, and whose state is spread over them, 1/d on average.

    Args:
        params: dense tensors of one dtype on one device, or parameter groups. Rank 0's values are broadcast.
        optimizer_cls: a torch optimizer class that updates each tensor by itself, as AdamW does.
        process_group: the d ranks that share the work; None means all ranks.
        optimizer_kwargs: lr, weight_decay and so on, for `optimizer_cls`.

    distributed.py adds, from guard/, what is missing here: parameters that a rank doesn't use, sparse gradients,
    clipping, loss scaling, groups added later, saving, and errors that say what is wrong.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, **optimizer_kwargs):
        self.process_group = process_group
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.shards = [[] for _ in range(self.world_size)]  # shards[r]: the parameters that rank r owns
        # This optimizer has no parameters: it is made only to learn which defaults `optimizer_cls` adds.
        defaults = optimizer_cls([{"params": []}], **optimizer_kwargs).defaults  # lr and so on
        super().__init__(params, defaults)
        self.optimizer = optimizer_cls(self.shard(self.param_groups), **optimizer_kwargs)  # updates what this rank owns

    @torch.no_grad()
    def shard(self, groups):
        """Broadcast rank 0's parameters, and give each parameter an owner. Every rank computes the same owners.

        The largest parameter is the first to get an owner. Each goes to the rank that owns the fewest elements so far.
        `shards` notes the owners.
        Returns the parameter groups of the inner optimizer: each of `groups`, with this rank's parameters only.
        """
        own_groups = []
        # The number of elements that each rank owns: not 0 if this method is called again, for a group added later.
        numels = [sum(param.numel() for param in shard) for shard in self.shards]
        for group in groups:
            for param in sorted(group["params"], key=torch.Tensor.numel, reverse=True):
                dist.broadcast(param, group=self.process_group, group_src=0)
                owner = numels.index(min(numels))
                self.shards[owner].append(param)
                numels[owner] += param.numel()
            mine = set(self.shards[self.rank])  # also parameters of the groups before this one
            owned = [param for param in group["params"] if param in mine]
            own_groups.append({**hyperparameters(group), "params": owned})
        return own_groups

    def sync_grads(self):
        """Replace every gradient by its average over the ranks."""
        params = [param for group in self.param_groups for param in group["params"]]
        self.average([param.grad for param in params if param.grad is not None])

    def step_own(self):
        """Update the owned parameters, with the lr and so on that schedulers have written into our groups."""
        for group, own in zip(self.param_groups, self.optimizer.param_groups):  # own: of the inner optimizer
            own.update(hyperparameters(group))
        self.optimizer.step()

    def sync_params(self):
        """One rank after the other broadcasts the parameters that it owns: flatten, broadcast, copy back."""
        for rank, shard in enumerate(self.shards):
            if shard:
                flat = flatten(shard)  # (numel of the shard,): a copy; only the owner's copy has updated values
                dist.broadcast(flat, group=self.process_group, group_src=rank)
                copy_all(shard, cut_like(flat, shard))

    @torch.no_grad()
    def step(self):
        """Average the gradients, and update all parameters. Collective: every rank must call this method."""
        self.sync_grads()
        self.step_own()
        self.sync_params()

    def average(self, tensors):
        """Replace `tensors` by their averages: flatten, divide, all-reduce, copy back.

        Each rank divides by d before the all-reduce, because a sum may be too large for 16 bits.
        """
        flat = flatten(tensors)  # (numel of all,)
        flat /= self.world_size
        dist.all_reduce(flat, group=self.process_group)
        copy_all(tensors, cut_like(flat, tensors))


def copy_all(targets, sources):
    """Copy each tensor of `sources` into the tensor of `targets` at the same place."""
    if targets:  # a rank may own nothing, and torch refuses an empty list
        torch._foreach_copy_(targets, sources)


def hyperparameters(group):
    """Return the entries of a parameter group other than its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
