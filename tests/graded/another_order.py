"""Packs a shard with the smallest parameter first, and cuts it in the model's order."""

import torch

from tests.graded import padded


class DistributedOptimizer(padded.DistributedOptimizer):
    def packed(self, shards):
        return sorted(shards[self.rank], key=torch.Tensor.numel, reverse=True)
