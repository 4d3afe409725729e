"""Each gradient is checked for nan and inf before it is sent, and every rank raises an error before the update.

Situation: the loss explodes on one rank of a thousand. After the reduce-scatter nobody can tell which rank it was.
Called elsewhere: check_for_nan_in_grad in Megatron-LM, which raises the error before the collective, on the rank that
has the nan. Loss scalers (of torch, DeepSpeed, Megatron-LLaMA) look after the collective, and skip the step. FSDP2
users pass error_if_nonfinite to torch's clipping, which also looks at the average. modded-nanogpt has no such check.
Wire: as in stage 4, and before the update one all-gather with a byte per parameter tensor. Memory: a flag per tensor.
Costs: the backward pass reads each gradient once more. It does not work with GradScaler, which expects to find an inf
and then skips the step. In a `Chained` all optimizers raise, or leave the step out, where one finds a nan.
"""

import torch
import torch.distributed as dist

import stage4_overlap
from guard.groups import name_of
from guard.scaling import gather
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class WithSkip:
    """Counts in `n_skipped` the steps that `skip=True` has left out.

    Attributes:
        is_finite: parameter -> whether all its gradients that have left since the last exchange are finite, a tensor.
        _bad_grads: the error, which names parameters and ranks; "" while all gradients are finite.
    """

    _checks_grads, _bad_grads, n_skipped = True, "", 0

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, skip=False, **kwargs):
        self.skip, self.is_finite = skip, {}
        super().__init__(params, optimizer_cls, **kwargs)


class CheckedOptimizer(OverlapOptimizer):
    @torch.no_grad()
    def send_grads(self, bucket):
        for param, grad in zip(bucket.params, bucket.grads()):
            self.is_finite[param] = self.is_finite.get(param, True) & grad.isfinite().all()
        super().send_grads(bucket)

    def sync_grads(self):
        super().sync_grads()
        is_finite, self.is_finite = self.is_finite, {}
        if is_finite:  # the same parameters on each rank, and in the same order
            group = getattr(self, "_agreement_group", self.process_group) or dist.group.WORLD
            flags = gather(torch.stack([*is_finite.values()]).to(torch.uint8), group)
            params, ranks = list(is_finite), dist.get_process_group_ranks(group)
            if bad := [f"{name_of(params[i], self.param_groups)} on rank {ranks[r]}" for r, i in (1 - flags).nonzero()]:
                self._bad_grads = f"a gradient is nan or inf: of parameter {', '.join(bad)}"

    def step_own(self):
        """Step, raise, or leave the step out. Where there is a guard, it has decided before."""
        error, self._bad_grads = self._bad_grads, ""
        if not error:
            return super().step_own()
        if not self.skip:
            self.zero_grad()
            raise RuntimeError(error)
        self.finish_param_sync()
        self.n_skipped += 1

    def zero_grad(self, set_to_none=True):
        self.is_finite, self._bad_grads = {}, ""
        super().zero_grad(set_to_none)


class ShardedOptimizer(WithSkip, CheckedOptimizer):
    """Stage 4's core, which refuses what is not finite."""


class DistributedOptimizer(WithSkip, stage4_overlap.DistributedOptimizer, CheckedOptimizer):
    """The same with the guard."""
