"""A sharded optimizer in 25 lines: level 1's interface, and no more. Parameters have an owner each, as in stage 1."""

import torch
import torch.distributed as dist


class DistributedOptimizer:
    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, **optimizer_kwargs):
        self.params, self.group = list(params), process_group
        self.rank, self.d = dist.get_rank(process_group), dist.get_world_size(process_group)
        for param in self.params:
            dist.broadcast(param.data, group=self.group, group_src=0)
        numels, self.owner = [0] * self.d, {}  # the largest parameter first, to the rank that has least
        for param in sorted(self.params, key=torch.Tensor.numel, reverse=True):
            self.owner[param] = numels.index(min(numels))
            numels[self.owner[param]] += param.numel()
        self.optimizer = optimizer_cls([{"params": self.owned()}], **optimizer_kwargs)  # which may be none

    def owned(self):
        return [param for param in self.params if self.owner[param] == self.rank]

    @torch.no_grad()
    def step(self):
        for param in self.params:
            self.average(param.grad)
        self.optimizer.step()
        for param in self.params:
            self.send(param, self.owner[param])

    def average(self, grad):
        dist.all_reduce(grad, group=self.group)
        grad /= self.d

    def send(self, param, owner):
        dist.broadcast(param, group=self.group, group_src=owner)

    def zero_grad(self):
        for param in self.params:
            param.grad = None
