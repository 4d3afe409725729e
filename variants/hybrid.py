"""Shards within a group of ranks, and keeps replicas across groups: the all-gather stays on the fast links.

Stage 4 (stage4_overlap/) shards gradients and state over all ranks. It sends gradients in buckets, lists of parameters,
during the backward pass, by a reduce-scatter, and updated parameters by an all-gather. Here that happens within each
group of ranks, and each group has the whole state.
Situation: links within a node are fast and links between nodes are slow, or there are so many ranks that a message to
all of them is mostly latency.
Called elsewhere: `num_distributed_optimizer_instances` in Megatron-LM, HSDP in FSDP2 (a 2-D mesh), MiCS and hpZ in
DeepSpeed. modded-nanogpt trains on one node, so it does not need this.
Wire (what a rank sends), for r groups of s ranks, Ψ parameters, g and p bytes of a gradient and a parameter:
(g+p)Ψ · (s-1)/s bytes within a group, and across groups an all-reduce of the shard, 2 · 4Ψ/s · (r-1)/r bytes, per
backward pass. Memory: as stage 4 on s ranks.
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
    """Takes the process group from `mesh`, which has the shape (r, s), for r groups of s ranks.

    The s ranks of a group share a state, 1/s each. r ranks, one of each group, have the same shard.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, mesh, gradient_accumulation_steps=1, **kwargs):
        self.gradient_accumulation_steps = gradient_accumulation_steps
        # mesh[i, j] is rank j of group i.
        self.across = mesh.get_group(0)  # the r ranks that have the same shard
        self.all_ranks = None  # the process group of the mesh; None means torch's default group
        if mesh.size() < dist.get_world_size():
            self.all_ranks = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
        super().__init__(params, optimizer_cls, process_group=mesh.get_group(1), **kwargs)

    @property
    def _agreement_group(self):
        """Return the process group of the whole mesh, because all its ranks train the model. The guard reads it."""
        return self.all_ranks

    def move_to(self, process_group):
        """Refuse `reshard`, which calls this method."""
        raise ValueError("reshard() doesn't know the groups of a mesh: save, and load on another mesh")


class Replicas(OverlapOptimizer):
    """Stage 4's core, which averages shards of gradients also over the ranks of `across`, see OnMesh."""

    def shard(self, groups):
        """Give all groups of ranks the parameters of the first group, and shard them as the core does."""
        self.n_passes = collections.Counter()  # bucket -> number of its reduce-scatters since the last step
        self.averages = {}  # bucket -> its last all-reduce over `across`, a dist.Work to wait for
        for param in [param for group in groups for param in group["params"]]:
            dist.broadcast(param.detach(), group=self.across, group_src=0)
        return super().shard(groups)

    def receive_oldest(self):
        """Wait for the oldest bucket, add its sum to its shard, and begin to average the shard across the groups.

        The core calls this method. The shard may already have an average of an earlier pass. All groups have the same
        average, so averaging it once more changes nothing.
        """
        bucket = self.travelling[0].bucket  # `travelling` has the buffers in flight, the oldest first
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
        """Wait for the averages across groups, and count backward passes anew."""
        for work in self.averages.values():
            work.wait()
        self.averages.clear()
        self.n_passes.clear()

    def zero_grad(self, set_to_none=True):
        """Drop the gradients, and wait for the averages that are under way."""
        super().zero_grad(set_to_none)
        self.finish_averages()


class ShardedOptimizer(OnMesh, Replicas):
    """Stage 4's core, over the second dimension of `mesh`, with replicas over the first."""


class DistributedOptimizer(OnMesh, stage4_overlap.DistributedOptimizer, Replicas):
    """Stage 4's DistributedOptimizer, over the same mesh."""
