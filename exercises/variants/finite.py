"""A gradient that is nan or inf is noticed before it travels, and every rank raises before the step.

Situation: a loss explodes on one rank of a thousand, and after the reduce-scatter nobody knows on which.
Called elsewhere: check_for_nan_in_grad in Megatron-LM, which raises on the rank that has it, before the collective.
A loss scaler (torch's, DeepSpeed's, Megatron-LLaMA's) looks after it, and skips the step. With FSDP2 it is
error_if_nonfinite of torch's clip, after the average too; modded-nanogpt has none.
Wire: stage 4's, and one all-gather of a byte a parameter tensor before the step. Memory: a flag for each parameter.
Costs: one read of each gradient, in the backward pass. Not for GradScaler, which means to meet an inf: it skips.

Exercise: fill in 2 bodies, see docs/exercise.md. The solution is variants/finite.py.
"""

import torch
import torch.distributed as dist

import stage4_overlap
from guard.groups import name_of
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class ShardedOptimizer(OverlapOptimizer):
    checks = ()  # (parameter, whether its gradient is finite, a tensor) of all that have left since the last step

    @torch.no_grad()
    def send_grads(self, bucket):
        raise RuntimeError("fill in send_grads: note for each gradient whether it is finite, then the core's")

    def sync_grads(self):
        raise RuntimeError("fill in sync_grads: the core's, then all ranks learn of all, and raise")

    def zero_grad(self, set_to_none=True):
        self.checks = ()
        super().zero_grad(set_to_none)


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's, which refuses what is not finite."""
