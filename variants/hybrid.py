"""Shards within a group of ranks, replicas across groups: the all-gather stays on the fast links.

Situation: links within a node are fast and links between nodes are slow, or there are so many ranks that a message to
all of them is mostly latency.
Called elsewhere: num_distributed_optimizer_instances in Megatron-LM, HSDP in FSDP2 (a 2-D mesh), MiCS and hpZ in
DeepSpeed. modded-nanogpt trains on one node, and does not need it.
Wire, for r groups of s ranks, Ψ parameters, g and p bytes of a gradient and a parameter: (g+p)Ψ · (s-1)/s bytes within
a group, and across groups an all-reduce of the shard, 2 · 4Ψ/s · (r-1)/r, per backward pass. Memory: as on s ranks.
Costs: the state exists r times. The all-reduce of each backward pass overlaps with it, as FSDP2's does. With
`gradient_accumulation_steps=k`, the same on every rank, passes before the k-th since a step have none: fewer bytes.
`step` averages what no pass has averaged, and waits for it. FSDP2 calls this set_requires_all_reduce(is_last).
`reshard` is refused. Call `save` on the ranks of one group only. Groups must run equally many backward passes, as ranks
do in stage 4; with `gradient_accumulation_steps=math.inf` they may differ by group.
This file is about stage 4; `OnMesh` and `ReplicasOfStage3` do the same for stage 3, which sends once per step.

    mesh = torch.distributed.init_device_mesh("cpu", (r, s))
    DistributedOptimizer(model.parameters(), torch.optim.AdamW, mesh=mesh, lr=1e-3)
"""

import collections

import torch
import torch.distributed as dist

import stage4_overlap
from stage3_gradbuffer.buffer import Holds
from stage3_gradbuffer.optimizer import ShardedOptimizer as GradBufferOptimizer
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class OnMesh:
    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, mesh, gradient_accumulation_steps=1, **kwargs):
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.across = mesh.get_group(0)  # the ranks that have the same shards
        self.all_ranks = None
        if mesh.size() < dist.get_world_size():
            self.all_ranks = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
        super().__init__(params, optimizer_cls, process_group=mesh.get_group(1), **kwargs)

    @property
    def _agreement_group(self):
        """Return the group of the whole mesh; None: all ranks."""
        return self.all_ranks

    def move_to(self, process_group):
        raise ValueError("reshard() doesn't know the groups of a mesh: save, and load on another mesh")


class Replicas:
    def shard(self, groups):
        self.n_passes = collections.Counter()  # bucket -> how often it has arrived since the last step
        self.averages = {}  # bucket -> the work of its all-reduce in flight
        for param in [param for group in groups for param in group["params"]]:
            dist.broadcast(param.detach(), group=self.across, group_src=0)
        super().shard(groups)

    def start_average(self, shard):
        """Start to average `shard` over the groups, in place. Return the work to wait for."""
        shard /= dist.get_world_size(self.across)
        return dist.all_reduce(shard, group=self.across, async_op=True)


class ReplicasOfStage3(Replicas, GradBufferOptimizer):
    def sync_grads(self):
        """Average across the groups once, however often the guard calls this before a step."""
        full_buffers = [buffer for buffer in self.buffers if buffer.holds is not Holds.GRAD_SHARD]
        super().sync_grads()
        for work in [self.start_average(buffer.main_grad_shard) for buffer in full_buffers]:
            work.wait()


class ReplicasOfStage4(Replicas, OverlapOptimizer):
    def receive_oldest(self):
        """Average a bucket when it has arrived. What was averaged before is equal in all groups, so it stays."""
        bucket = self.travelling[0].bucket
        if bucket in self.averages:
            self.averages[bucket].wait()
        super().receive_oldest()
        self.n_passes[bucket] += 1
        if self.n_passes[bucket] >= self.gradient_accumulation_steps:
            self.averages[bucket] = self.start_average(bucket.gradient.shard)

    def sync_grads(self):
        super().sync_grads()
        for bucket in self.n_passes:  # in the same order on each rank
            if bucket not in self.averages:
                self.averages[bucket] = self.start_average(bucket.gradient.shard)
        for work in self.averages.values():
            work.wait()
        self.averages.clear()
        self.n_passes.clear()


class ShardedOptimizer(OnMesh, ReplicasOfStage4):
    """Stage 4's core, over the second dimension of `mesh`, with replicas over the first."""


class DistributedOptimizer(OnMesh, stage4_overlap.DistributedOptimizer, ReplicasOfStage4):
    """Stage 4 with its guard, over the same mesh."""
