"""Shards within a group of ranks, and keeps replicas across groups: the all-gather stays on the fast links.

Stage 4 (stage4_overlap/) spreads its state over all ranks. It sends gradients in buckets, lists of parameters. Each
rank owns a part of each bucket, its shard. A reduce-scatter brings it the gradients of its shard during the backward
pass, and an all-gather sends the updated parameters. Here both happen within a group of ranks, and each group has the
whole state.

Situation: links within a node are fast, and links between nodes are slow. Or there are so many ranks that a message to
all of them is mostly latency.

Names in other libraries: `num_distributed_optimizer_instances` (Megatron-LM), HSDP (FSDP2), MiCS and hpZ (DeepSpeed).

Wire (what a rank sends), in bytes per backward pass, for r groups of s ranks, Ψ parameters of p bytes, and gradients of
g bytes: (g+p)Ψ · (s-1)/s within its group, and 2 · 4Ψ/s · (r-1)/r across groups, for an all-reduce of fp32 shards.

Memory: as in stage 4 on s ranks.

Costs: the state exists r times. All groups must run equally many backward passes, or an all-reduce waits for ever.
`reshard` is refused. Call `save` on the ranks of one group only.

Accumulation: every backward pass averages its shards across groups. With `gradient_accumulation_steps=k`, the same on
every rank, the first k - 1 passes after a step don't. With `gradient_accumulation_steps=math.inf` no pass does, and
groups may run different numbers of passes. `step` averages the shards that no pass has averaged.

    mesh = torch.distributed.init_device_mesh("cpu", (r, s))
    DistributedOptimizer(model.parameters(), torch.optim.AdamW, mesh=mesh, lr=1e-3)
"""

import collections

import torch
import torch.distributed as dist

import stage4_overlap
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class OnMesh:
    """The constructor of both optimizers. `mesh` has the shape (r, s), for r groups of s ranks.

    The s ranks of a group share a state, 1/s each. The same shard is on r ranks, one in each group.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, mesh, gradient_accumulation_steps=1, **kwargs):
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.across = mesh.get_group(0)  # along dimension 0: the r ranks that have the same shard
        self.all_ranks = None  # the process group of the mesh; None means torch's default group
        if mesh.size() < dist.get_world_size():
            # With use_local_synchronization, ranks outside of the mesh needn't make this call.
            self.all_ranks = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
        super().__init__(params, optimizer_cls, process_group=mesh.get_group(1), **kwargs)

    @property
    def _agreement_group(self):
        """Return the process group of all ranks that train the model. The guard reads it, and lets them agree."""
        return self.all_ranks

    def move_to(self, process_group):
        """Refuse `reshard`, which calls this method."""
        raise ValueError("reshard() doesn't know the groups of a mesh: save, and load on another mesh")


class Replicas(OverlapOptimizer):
    """Stage 4's core, which averages each shard of gradients over the ranks of `across`, too."""

    def shard(self, groups):
        """Give all groups the parameters of the first, and shard them. The core's constructor calls this method."""
        self.n_passes = collections.Counter()  # bucket -> how often it was received since the last step
        self.averages = {}  # bucket -> its last all-reduce over `across`, to wait() for
        for param in [param for group in groups for param in group["params"]]:
            dist.broadcast(param.detach(), group=self.across, group_src=0)
        return super().shard(groups)

    def receive_oldest(self):
        """Receive the bucket that was sent first, and begin to average its shard across the groups.

        The core calls this method, and adds the gradients that have come to the shard. The shard may have the average
        of an earlier pass already. It is the same in all groups, so averaging it once more doesn't change it.
        """
        bucket = self.travelling[0].bucket  # `travelling`: the buffers in flight, the oldest first
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
        """Receive all gradients, and average the shards that no backward pass has averaged. `step` calls this first."""
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
        """Drop the gradients, and wait for the averages in flight."""
        super().zero_grad(set_to_none)
        self.finish_averages()


# The core: the bare optimizer.
class ShardedOptimizer(OnMesh, Replicas):
    """Stage 4's core, sharded over the second dimension of `mesh`, with replicas over the first."""


# The guard, with its checks, in front of the core.
class DistributedOptimizer(OnMesh, stage4_overlap.DistributedOptimizer, Replicas):
    """Stage 4's DistributedOptimizer, sharded and replicated in the same way."""
