"""Replicated training, as with DDP: every rank averages all gradients, and updates all parameters."""

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as cut_like


class ShardedOptimizer(torch.optim.Optimizer):
    """Shards nothing. Its name and its methods are those of the optimizers in stage*/, which shard."""

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, **optimizer_kwargs):
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.optimizer = optimizer_cls(params, **optimizer_kwargs)
        super().__init__(self.optimizer.param_groups, self.optimizer.defaults)
        for param in self.params():
            dist.broadcast(param.detach(), group=process_group, group_src=0)

    def params(self):
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    @torch.no_grad()
    def sync_grads(self):
        """Replace every gradient by its average over the ranks."""
        grads = [param.grad for param in self.params()]
        flat = flatten(grads)  # all gradients end to end, a copy
        flat /= self.world_size
        dist.all_reduce(flat, group=self.process_group)
        torch._foreach_copy_(grads, cut_like(flat, grads))

    def step_own(self):
        """Step all parameters, not only own ones: every rank does the same work, and holds the same state."""
        self.optimizer.step()

    def sync_params(self):
        """Do nothing: every rank has stepped all parameters. Where they are sharded, each rank sends its own here."""

    @torch.no_grad()
    def step(self):
        """Sync gradients, and step. Collective: every rank calls it."""
        self.sync_grads()
        self.step_own()
        self.sync_params()
