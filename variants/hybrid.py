"""Shards within a group of ranks, and keeps replicas across groups: the all-gather stays on the fast links.

Situation: links within a node are fast and links between nodes are slow, or there are so many ranks that a message to
all of them is mostly latency.
Called elsewhere: num_distributed_optimizer_instances in Megatron-LM, HSDP in FSDP2 (a 2-D mesh), MiCS and hpZ in
DeepSpeed. modded-nanogpt trains on one node, and does not need it.
Wire, for r groups of s ranks, Ψ parameters, g and p bytes of a gradient and a parameter: (g+p)Ψ · (s-1)/s bytes within
a group, and across groups an all-reduce of the shard, 2 · 4Ψ/s · (r-1)/r, per backward pass. Memory: as on s ranks.
Costs: the state exists r times. Each backward pass averages its shards across the groups while it computes, as FSDP2
does. With `gradient_accumulation_steps=k`, the same on every rank, the first k - 1 passes after a step leave this
average out, as FSDP2's set_requires_all_reduce(False) does. `step` averages shards that no pass has averaged. All
groups must run equally many backward passes, or an all-reduce waits for ever. With
`gradient_accumulation_steps=math.inf` only `step` averages, and the groups may run different numbers of passes.
`reshard` is refused. Call `save` on the ranks of one group only.

    mesh = torch.distributed.init_device_mesh("cpu", (r, s))
    DistributedOptimizer(model.parameters(), torch.optim.AdamW, mesh=mesh, lr=1e-3)
"""

import collections

import torch
import torch.distributed as dist

import stage4_overlap
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class OnMesh:
    """Takes the process group from `mesh`, which has the shape (r, s): s ranks share a state, and r ranks a shard."""

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, mesh, gradient_accumulation_steps=1, **kwargs):
        self.gradient_accumulation_steps = gradient_accumulation_steps
        # mesh[i, j] is rank j of group i.
        self.across = mesh.get_group(0)  # the r ranks that have the same shard
        self.all_ranks = None  # torch's default group
        if mesh.size() < dist.get_world_size():
            self.all_ranks = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
        super().__init__(params, optimizer_cls, process_group=mesh.get_group(1), **kwargs)

    @property
    def _agreement_group(self):
        """Return the process group of the whole mesh: all its ranks train the model."""
        return self.all_ranks

    def move_to(self, process_group):
        raise ValueError("reshard() doesn't know the groups of a mesh: save, and load on another mesh")


class Replicas(OverlapOptimizer):
    """Averages shards of gradients also over the ranks of `across`."""

    def shard(self, groups):
        """Shard as the core does, from equal parameters in all groups of ranks."""
        self.n_passes = collections.Counter()  # bucket -> number of its reduce-scatters since the last step
        self.averages = {}  # bucket -> its last all-reduce over `across`, a dist.Work to wait for
        for param in [param for group in groups for param in group["params"]]:
            dist.broadcast(param.detach(), group=self.across, group_src=0)
        return super().shard(groups)

    def receive_oldest(self):
        """Add the sum of the oldest bucket to its shard, and begin to average the shard across the groups.

        The shard may already have an average of an earlier pass. All groups have the same average, so averaging it once
        more changes nothing.
        """
        bucket = self.travelling[0].bucket  # the bucket whose gradients were sent first, of those that travel
        if bucket in self.averages:
            self.averages[bucket].wait()
        super().receive_oldest()
        self.n_passes[bucket] += 1
        if self.n_passes[bucket] >= self.gradient_accumulation_steps:
            self.start_average(bucket)

    def start_average(self, bucket):
        """Begin to average the bucket's shard across the groups, in place."""
        shard = bucket.gradient.shard
        shard /= dist.get_world_size(self.across)
        self.averages[bucket] = dist.all_reduce(shard, group=self.across, async_op=True)

    def sync_grads(self):
        """Receive all gradients, and average over `across` the shards that no backward pass has averaged."""
        super().sync_grads()
        for bucket in self.n_passes:  # in the same order on each rank
            if bucket not in self.averages:
                self.start_average(bucket)
        self.finish_averages()

    def finish_averages(self):
        for work in self.averages.values():
            work.wait()
        self.averages.clear()
        self.n_passes.clear()

    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        self.finish_averages()


class ShardedOptimizer(OnMesh, Replicas):
    """Stage 4's core, over the second dimension of `mesh`, with replicas over the first."""


class DistributedOptimizer(OnMesh, stage4_overlap.DistributedOptimizer, Replicas):
    """Stage 4's DistributedOptimizer, over the same mesh."""
