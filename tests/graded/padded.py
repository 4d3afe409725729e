"""Right: one all-gather of padded shards, as in stage 2."""

import torch
import torch.distributed as dist

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    @torch.no_grad()
    def step(self):
        for param in self.params:
            self.average(param.grad)
        self.optimizer.step()
        shards = [[param for param in self.params if self.owner[param] == rank] for rank in range(self.d)]
        longest = max(sum(param.numel() for param in shard) for shard in shards)
        own = torch.cat([torch.zeros(0), *(param.data.reshape(-1) for param in self.packed(shards))])
        gathered = torch.zeros(self.d * longest)
        padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        for rank, shard in enumerate(shards):
            start = self.start(rank, longest, shards)
            for param in shard:
                param.copy_(gathered[start : start + param.numel()].view(param.shape))
                start += param.numel()

    def packed(self, shards):
        return shards[self.rank]

    def start(self, rank, longest, shards):
        return rank * longest
