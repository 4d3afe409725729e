"""Checks each gradient for nan and inf before it is sent, and raises an error on every rank before the update.

Stage 4 (stage4_overlap/) sends gradients in buckets, lists of parameters, during the backward pass. A reduce-scatter
averages the gradients of all ranks.

Situation: the loss explodes on one rank of a thousand. After the reduce-scatter no rank can tell which rank it was.

Names in other libraries: `check_for_nan_in_grad` (Megatron-LM).

Wire (what ranks send): as in stage 4, and in each step one all-gather with a byte per parameter tensor.

Memory: as in stage 4, and a flag per parameter tensor.

Costs: each gradient is read once more. GradScaler doesn't work with this variant, because it expects to find an inf now
and then. Experts don't work either, because only the ranks that have the expert would raise the error.
"""

import torch
import torch.distributed as dist

import stage4_overlap
from guard.groups import name_of
from guard.scaling import tensors_of_ranks
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


# The core: the bare optimizer.
class ShardedOptimizer(OverlapOptimizer):
    """Stage 4's core, which refuses gradients that are not finite.

    Attributes:
        is_finite: parameter -> a flag, a scalar tensor: True if all its gradients since the last comparison are finite.
    """

    def shard(self, groups):
        """Shard as the core does. The constructor and add_param_group() call this method."""
        self.is_finite = {}
        return super().shard(groups)

    @torch.no_grad()
    def send_grads(self, bucket):
        """Set flags, and send the bucket. The core calls this method when all gradients of the bucket are ready."""
        for param, grad in zip(bucket.params, bucket.grads()):
            # The flag so far, True at first, and whether this gradient is finite.
            self.is_finite[param] = self.is_finite.get(param, True) & grad.isfinite().all()
        super().send_grads(bucket)

    def sync_grads(self):
        """Wait for the gradients, and compare the flags of all ranks. The core's `step` calls this method first."""
        super().sync_grads()
        if not self.is_finite:  # clipping has called this method before, in this step
            return
        # The guard sets _agreement_group, the ranks that train the model. A core without a guard has no such attribute,
        # so `process_group` is used. In both None means all ranks, WORLD.
        group = getattr(self, "_agreement_group", self.process_group) or dist.group.WORLD
        params = list(self.is_finite)  # in the same order on each rank
        ranks = dist.get_process_group_ranks(group)
        own_flags = torch.stack([*self.is_finite.values()]).to(torch.uint8)
        self.is_finite = {}
        flags_of_ranks = tensors_of_ranks(own_flags, group)  # an all-gather: a row for each rank
        bad_places = (flags_of_ranks == 0).nonzero().tolist()  # a list of [rank in the group, index in `params`]
        if bad_places:
            words = [f"{name_of(params[index], self.param_groups)} on rank {ranks[rank]}" for rank, index in bad_places]
            self.zero_grad()
            raise RuntimeError(f"a gradient is nan or inf: of parameter {', '.join(words)}")

    def zero_grad(self, set_to_none=True):
        """Drop the gradients and their flags."""
        self.is_finite = {}
        super().zero_grad(set_to_none)


# The guard, with its checks, in front of the core.
class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, which refuses gradients that are not finite.

    Raises ValueError if `average_over` is given, the ranks over which gradients of experts are averaged. Ranks
    outside of `process_group` would wait.
    """

    def _refuse(self, named):
        """Refuse `average_over`. The guard's constructor calls this. named: the parameters, [(name, parameter), …]."""
        if self.average_over is not None:
            raise ValueError("variants/finite.py takes no average_over: ranks outside of process_group would wait")
        return super()._refuse(named)
