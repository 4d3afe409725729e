"""Each gradient is checked for nan and inf before it is sent, and every rank raises an error before the update.

Situation: the loss explodes on one rank of a thousand. After the reduce-scatter nobody can tell which rank it was.
Called elsewhere: check_for_nan_in_grad in Megatron-LM, which raises the error before the collective, on the rank that
has the nan. Loss scalers (of torch, DeepSpeed, Megatron-LLaMA) look after the collective, and skip the step. FSDP2
users pass error_if_nonfinite to torch's clipping, which also looks at the average. modded-nanogpt has no such check.
Wire: as in stage 4, and before the update one all-gather with a byte per parameter tensor. Memory: a flag per tensor.
Costs: the backward pass reads each gradient once more. It does not work with GradScaler, which expects to find an inf
and then skips the step.
"""

import torch
import torch.distributed as dist

import stage4_overlap
from guard.groups import name_of
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class WithSkip:
    """Counts in `n_skipped` the steps that were left out. `has_bad_grads`: whether the next one will be."""

    n_skipped, has_bad_grads = 0, False

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, skip=False, **kwargs):
        self.skip = skip
        super().__init__(params, optimizer_cls, **kwargs)


class CheckedOptimizer(OverlapOptimizer):
    checks = ()  # (parameter, whether its gradient is finite, a tensor) of all that have left since the last step

    @torch.no_grad()
    def send_grads(self, bucket):
        self.checks = [*self.checks, *((p, grad.isfinite().all()) for p, grad in zip(bucket.params, bucket.grads()))]
        super().send_grads(bucket)

    def sync_grads(self):
        super().sync_grads()
        checks, self.checks = self.checks, ()
        if checks:  # as many on each rank, and in the same order
            own_flags = torch.stack([is_finite for _, is_finite in checks]).to(torch.uint8)
            flags = own_flags.new_empty(dist.get_world_size(self.process_group), len(checks))
            dist.all_gather_into_tensor(flags.view(-1), own_flags, group=self.process_group)
            bad = [f"{name_of(checks[i][0], self.param_groups)} on rank {r}" for r, i in (flags == 0).nonzero()]
            self.has_bad_grads |= bool(bad)
            if bad and not self.skip:
                self.zero_grad()
                raise RuntimeError(f"a gradient is nan or inf: of parameter {', '.join(bad)}")

    def step_own(self):
        self.finish_param_sync()
        if not self.has_bad_grads:
            super().step_own()
        self.n_skipped += int(self.has_bad_grads)
        self.has_bad_grads = False

    def zero_grad(self, set_to_none=True):
        self.checks = ()
        self.has_bad_grads = False
        super().zero_grad(set_to_none)


class ShardedOptimizer(WithSkip, CheckedOptimizer):
    """Stage 4's core, which refuses what is not finite."""


class DistributedOptimizer(WithSkip, stage4_overlap.DistributedOptimizer, CheckedOptimizer):
    """The same with the guard."""
