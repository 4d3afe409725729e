"""Right: one flat tensor, padded to a multiple of 64 elements a rank; shards ignore parameters."""

import torch
import torch.distributed as dist


class DistributedOptimizer:
    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, **optimizer_kwargs):
        self.params, self.group = list(params), process_group
        rank, self.d = dist.get_rank(process_group), dist.get_world_size(process_group)
        numel = sum(param.numel() for param in self.params)
        self.numel = -(-numel // (64 * self.d)) * 64  # of a shard
        self.flat, start = torch.zeros(self.numel * self.d), 0
        for param in self.params:
            view = self.flat[start : start + param.numel()].view(param.shape)
            param.data = view.copy_(param.data)
            start += param.numel()
        dist.broadcast(self.flat, group=process_group, group_src=0)
        self.shard = torch.nn.Parameter(self.flat.view(self.d, -1)[rank])
        self.optimizer = optimizer_cls([self.shard], **optimizer_kwargs)

    @torch.no_grad()
    def step(self):
        grads = torch.cat([param.grad.reshape(-1) for param in self.params])
        padded = torch.nn.functional.pad(grads / self.d, (0, self.flat.numel() - grads.numel()))
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_tensor(self.shard.grad, padded, group=self.group)
        self.optimizer.step()
        dist.all_gather_into_tensor(self.flat, self.shard.data.clone(), group=self.group)

    def zero_grad(self):
        for param in self.params:
            param.grad = None
