"""Keeps moments in bf16, which saves 4/d bytes per parameter. Each step still computes in fp32.

Stage 4 (stage4_overlap/) shards state over d ranks. Its inner optimizer, torch's, updates main parameters: the parts of
parameters that this rank owns, or fp32 copies. A bucket is a list of parameters that are sent together.
Situation: the optimizer's state decides whether a model fits.
Called elsewhere: `use_precision_aware_optimizer` with `exp_avg_dtype` and `exp_avg_sq_dtype` in Megatron-LM,
`bf16_optimizer_states` in DeepSpeed. Under FSDP2 the optimizer itself decides: moments of torchao's and bitsandbytes'
optimizers have 8 bits. modded-nanogpt keeps fp32.
Wire (what ranks send): as in stage 4. Memory: 4 + 8/d bytes per fp32 parameter instead of 4 + 12/d, and 2 + 12/d per
16-bit parameter instead of 2 + 16/d. During the step, the moments of one bucket are also held in fp32.
Costs: two conversions per step, and precision of the second moment. With beta2 = 0.999 and steady gradients, a step
changes the second moment by a smaller part than bf16 can represent (2^-9 of it), so the second moment stays as it is.
Use beta2 <= 0.99, or compare the losses.
"""

import torch

import stage4_overlap
from guard.probe import check_elementwise

from .by_bucket import BucketByBucket, tried_tensor_by_tensor


class ShardedOptimizer(BucketByBucket):
    """Stage 4's core, with moments in bf16. BucketByBucket unpacks a bucket, steps it, and packs it."""

    def unpack(self, bucket):
        """Cast the moments to fp32."""
        super().unpack(bucket)
        self.cast_moments(bucket, bucket.parameter.main_shard.dtype)

    def pack(self, bucket):
        """Cast the moments to bf16, and send the parameters."""
        self.cast_moments(bucket, torch.bfloat16)
        super().pack(bucket)

    def cast_moments(self, bucket, dtype):
        """Cast moments, but not counts of steps: a moment is a tensor in the shape of the main parameter."""
        for main_param in bucket.main_params.values():
            state = self.optimizer.state.get(main_param, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == main_param.shape:
                    state[name] = value.to(dtype)


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, with moments in bf16."""

    # The guard calls it to refuse an optimizer class that isn't element-wise or counts calls of `step`.
    _probe = tried_tensor_by_tensor(check_elementwise)
