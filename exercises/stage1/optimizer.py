"""Stage 1, naive broadcast: every parameter has one owner, which steps it and broadcasts the result.

Unlike replicated training (DDP with AdamW): the optimizer's state exists once, not once a rank.
Source of the idea: ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054), in the form of fairscale's OSS.

Exercise: fill in 5 bodies, see docs/exercise.md. The solution is stage1_naive_broadcast/optimizer.py.
"""

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as cut_like


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that averages gradients over d ranks, and whose state is spread over them, 1/d on average.

    Args:
        params: dense tensors of one dtype on one device, or parameter groups. Rank 0's values are broadcast.
        optimizer_cls: a torch optimizer class that steps each tensor by itself, as AdamW does.
        process_group: the d ranks; None is all of them.
        optimizer_kwargs: lr, weight_decay and so on, for `optimizer_cls`.

    Without: parameters that a rank doesn't use, sparse gradients, clipping, loss scaling, groups added later, saving,
    errors that say what is wrong: see guard/.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, **optimizer_kwargs):
        self.process_group = process_group
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.shards = [[] for _ in range(self.world_size)]  # shards[r]: the parameters that rank r owns
        self.optimizer = optimizer_cls([{"params": []}], **optimizer_kwargs)  # steps what this rank owns
        self.optimizer.param_groups.clear()  # torch wants a group; `shard` adds the real ones
        super().__init__(params, self.optimizer.defaults)
        self.shard(self.param_groups)

    @torch.no_grad()
    def shard(self, groups):
        """Share out: the largest parameter first, to the rank that owns least. Every rank computes the same."""
        raise RuntimeError("fill in shard: broadcast from rank 0, choose owners, hand on what this rank owns")

    @torch.no_grad()
    def sync_grads(self):
        """Replace every gradient by its average over the ranks."""
        raise RuntimeError("fill in sync_grads: average every gradient")

    def step_own(self):
        """Step the owned parameters, with the hyperparameters of this moment: schedulers write into our groups."""
        raise RuntimeError("fill in step_own: hand on lr and the like, then step the inner optimizer")

    def sync_params(self):
        """One rank after the other broadcasts what it owns: flatten, broadcast, copy back."""
        raise RuntimeError("fill in sync_params: for each rank flatten its shard, broadcast, copy back")

    @torch.no_grad()
    def step(self):
        """Collective: every rank calls it."""
        self.sync_grads()
        self.step_own()
        self.sync_params()

    def average(self, tensors):
        """Flatten, all-reduce, copy back. Each rank divides by d before the sum, which may be too large for 16 bits."""
        raise RuntimeError("fill in average: flatten, divide by d, all-reduce, copy back")


def copy_all(targets, sources):
    if targets:  # a rank may own nothing
        torch._foreach_copy_(targets, sources)


def hyperparameters(group):
    """What a parameter group holds beside its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
