"""Checks each gradient for nan and inf before it is sent, and raises an error on every rank before the update.

Stage 4 (stage4_overlap/) sends gradients in buckets, lists of parameters, during the backward pass. A reduce-scatter
adds up the gradients of all ranks.
Situation: the loss explodes on one rank of a thousand. After the reduce-scatter no rank can tell which rank it was.
Called elsewhere: `check_for_nan_in_grad` in Megatron-LM, which raises the error before the collective, on the rank that
has the nan. Loss scalers (of torch, DeepSpeed, Megatron-LLaMA) look after the collective, and skip the step. FSDP2
users pass `error_if_nonfinite` to torch's clipping, which also looks at the average. modded-nanogpt has no such check.
Wire (what ranks send): as in stage 4, and before the update one all-gather with a byte per parameter tensor. Memory: a
flag per tensor.
Costs: the backward pass reads each gradient once more. This variant does not work with GradScaler, which expects to
find an inf and then skips the step. Nor does it work for experts: only the ranks that have the expert would raise the
error.
"""

import torch
import torch.distributed as dist

import stage4_overlap
from guard.groups import name_of
from guard.scaling import tensors_of_ranks
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class ShardedOptimizer(OverlapOptimizer):
    """Stage 4's core, which refuses gradients that are not finite.

    Attributes:
        is_finite: parameter -> a flag, a tensor without dimensions: whether all gradients of this parameter are finite
            that were sent since the ranks have last compared flags.
    """

    def shard(self, groups):
        """Shard as the core does. This runs in the constructor, and for each group that is added later."""
        self.is_finite = {}
        return super().shard(groups)

    @torch.no_grad()
    def send_grads(self, bucket):
        """Set flags, and send the bucket. The core calls this method when all gradients of the bucket have come."""
        for param, grad in zip(bucket.params, bucket.grads()):
            self.is_finite[param] = self.is_finite.get(param, True) & grad.isfinite().all()
        super().send_grads(bucket)

    def sync_grads(self):
        """Wait for the gradients, and compare the flags of all ranks. The core's `step` calls this method first."""
        super().sync_grads()
        if not self.is_finite:  # an earlier call in this step has compared the flags
            return
        # The guard knows all ranks that train the model. The core alone has only `process_group`.
        group = getattr(self, "_agreement_group", self.process_group) or dist.group.WORLD
        params = list(self.is_finite)  # the same on each rank, and in the same order
        ranks = dist.get_process_group_ranks(group)
        own_flags = torch.stack([*self.is_finite.values()]).to(torch.uint8)
        self.is_finite = {}
        flags_of_ranks = tensors_of_ranks(own_flags, group)
        bad_places = (flags_of_ranks == 0).nonzero().tolist()  # [rank in the group, place in `params`] each
        if bad_places:
            words = [f"{name_of(params[place], self.param_groups)} on rank {ranks[rank]}" for rank, place in bad_places]
            self.zero_grad()
            raise RuntimeError(f"a gradient is nan or inf: of parameter {', '.join(words)}")

    def zero_grad(self, set_to_none=True):
        """Drop the gradients and their flags."""
        self.is_finite = {}
        super().zero_grad(set_to_none)


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, which refuses gradients that are not finite.

    Raises ValueError: `average_over` is given. Ranks of other groups would not hear of the error, and would wait.
    """

    def _refuse(self, named):
        """Refuse `average_over`. The guard calls this method in the constructor."""
        if self.average_over is not None:
            raise ValueError("variants/finite.py takes no average_over: ranks outside of process_group would wait")
        return super()._refuse(named)
