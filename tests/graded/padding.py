"""Cuts the gathered shards as if there were no padding between them."""

from tests.graded import padded


class DistributedOptimizer(padded.DistributedOptimizer):
    def start(self, rank, longest, shards):
        return sum(param.numel() for shard in shards[:rank] for param in shard)
