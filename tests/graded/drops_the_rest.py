"""Cuts the flat parameters into d parts, and drops what is left over."""

import torch
import torch.distributed as dist

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def owned(self):
        flat = torch.cat([param.data.reshape(-1) for param in self.params])
        self.numel = flat.numel() // self.d
        self.own = torch.nn.Parameter(self.cut(flat))
        return [self.own]

    def cut(self, flat):
        return flat[self.rank * self.numel : (self.rank + 1) * self.numel].clone()

    @torch.no_grad()
    def step(self):
        for param in self.params:
            self.average(param.grad)
        self.own.grad = self.cut(torch.cat([param.grad.reshape(-1) for param in self.params]))
        self.optimizer.step()
        flat = torch.cat([param.reshape(-1) for param in self.params])
        dist.all_gather_into_tensor(flat[: self.numel * self.d], self.own.data, group=self.group)
        for param, values in zip(self.params, flat.split([param.numel() for param in self.params])):
            param.copy_(values.view(param.shape))
