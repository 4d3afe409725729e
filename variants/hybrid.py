"""Shards within a group of ranks, replicas across groups: the all-gather stays on the fast links.

Situation: links within a node are fast and links between nodes are slow, or there are so many ranks that a message to
all of them is mostly latency.
Called elsewhere: num_distributed_optimizer_instances in Megatron-LM, HSDP in FSDP2 (a 2-D mesh), MiCS and hpZ in
DeepSpeed. modded-nanogpt trains on one node, and does not need it.
Wire, for r groups of s ranks: (g+p)Ψ · (s-1)/s bytes within a group, and across groups an all-reduce of the shard
alone, 2 · 4Ψ/s · (r-1)/r. Memory: as on s ranks, not as on r · s.
Costs: the state exists r times. The guard's checks agree within a group only. If one group alone sees an error (a
missing gradient, another lr), its ranks raise it and the other groups wait. The loss of a closure is the group's mean,
and only the ranks of one group call `save`.
This file is about stage 4; `OnMesh` and `ReplicasOfStage3` do the same for stage 3.

    mesh = torch.distributed.init_device_mesh("cpu", (r, s))
    DistributedOptimizer(model.parameters(), torch.optim.AdamW, mesh=mesh, lr=1e-3)
"""

import torch
import torch.distributed as dist

import stage4_overlap
from stage3_gradbuffer.optimizer import ShardedOptimizer as GradBufferOptimizer
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class OnMesh:
    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, mesh, **kwargs):
        self.across = mesh.get_group(0)  # the ranks that have the same shards
        super().__init__(params, optimizer_cls, process_group=mesh.get_group(1), **kwargs)


class Replicas:
    def shard(self, groups):
        for param in [param for group in groups for param in group["params"]]:
            dist.broadcast(param.detach(), group=self.across, group_src=0)
        super().shard(groups)

    def average(self, shard):
        shard /= dist.get_world_size(self.across)
        dist.all_reduce(shard, group=self.across)


class ReplicasOfStage3(Replicas, GradBufferOptimizer):
    def sync_grads(self):
        super().sync_grads()
        for buffer in self.buffers:
            self.average(buffer.main_grad_shard)


class ReplicasOfStage4(Replicas, OverlapOptimizer):
    def receive_oldest(self):
        """Also across the groups, each time that a bucket has arrived; what it held before is the same everywhere."""
        shard = self.travelling[0].bucket.gradient.shard
        super().receive_oldest()
        self.average(shard)


class ShardedOptimizer(OnMesh, ReplicasOfStage4):
    """Stage 4's core, over the second dimension of `mesh`, with replicas over the first."""


class DistributedOptimizer(OnMesh, stage4_overlap.DistributedOptimizer, ReplicasOfStage4):
    """The same with the guard."""
