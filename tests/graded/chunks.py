"""Right: every tensor is cut into d padded chunks, which travel as lists of tensors."""

import torch
import torch.distributed as dist


class DistributedOptimizer:
    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, **optimizer_kwargs):
        self.params, self.group = list(params), process_group
        self.rank, self.d = dist.get_rank(process_group), dist.get_world_size(process_group)
        for param in self.params:
            dist.broadcast(param.data, group=process_group, group_src=0)
        self.own = [torch.nn.Parameter(self.chunks(param.data)[self.rank].clone()) for param in self.params]
        self.optimizer = optimizer_cls(self.own, **optimizer_kwargs)

    def chunks(self, tensor):
        numel = -(-tensor.numel() // self.d)
        padded = torch.nn.functional.pad(tensor.reshape(-1), (0, numel * self.d - tensor.numel()))
        return list(padded.view(self.d, numel))

    @torch.no_grad()
    def step(self):
        for param, own in zip(self.params, self.own):
            own.grad = torch.empty_like(own)
            dist.reduce_scatter(own.grad, [chunk.contiguous() for chunk in self.chunks(param.grad)], group=self.group)
            own.grad /= self.d
        self.optimizer.step()
        for param, own in zip(self.params, self.own):
            parts = [torch.empty_like(own) for _ in range(self.d)]
            dist.all_gather(parts, own.data, group=self.group)
            param.copy_(torch.cat(parts)[: param.numel()].view(param.shape))

    def zero_grad(self):
        for param in self.params:
            param.grad = None
