"""Forgets to gather the last parameter of a shard: it stays as it was wherever it is not owned."""

from stage2_allgather import DistributedOptimizer as Stage2


class DistributedOptimizer(Stage2):
    def sync_params(self):
        stale = [(shard[-1], shard[-1].clone()) for r, shard in enumerate(self.shards) if r != self.rank and shard]
        super().sync_params()
        for param, before in stale:
            param.copy_(before)
