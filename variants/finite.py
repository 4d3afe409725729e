"""A gradient that is nan or inf is noticed before it travels, and every rank raises before the step.

Situation: a loss explodes on one rank of a thousand, and after the reduce-scatter nobody knows on which.
Called elsewhere: check_for_nan_in_grad in Megatron-LM, which raises on the rank that has it, before the collective.
A loss scaler (torch's, DeepSpeed's, Megatron-LLaMA's) looks after it, and skips the step. With FSDP2 it is
error_if_nonfinite of torch's clip, after the average too; modded-nanogpt has none.
Wire: stage 4's, and one all-gather of a byte a parameter tensor before the step. Memory: a flag for each parameter.
Costs: one read of each gradient, in the backward pass. Not for GradScaler, which means to meet an inf: it skips.
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
        self.checks = [*self.checks, *((p, grad.isfinite().all()) for p, grad in zip(bucket.params, bucket.grads()))]
        super().send_grads(bucket)

    def sync_grads(self):
        super().sync_grads()
        checks, self.checks = self.checks, ()
        if checks:  # as many on each rank, and in the same order
            mine = torch.stack([is_finite for _, is_finite in checks]).to(torch.uint8)
            everyone = mine.new_empty(dist.get_world_size(self.process_group), len(checks))
            dist.all_gather_into_tensor(everyone.view(-1), mine, group=self.process_group)
            bad = [f"{name_of(checks[i][0], self.param_groups)} on rank {r}" for r, i in (everyone == 0).nonzero()]
            if bad:
                self.zero_grad()
                raise RuntimeError(f"a gradient is nan or inf: of parameter {', '.join(bad)}")

    def zero_grad(self, set_to_none=True):
        self.checks = ()
        super().zero_grad(set_to_none)


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's, which refuses what is not finite."""
