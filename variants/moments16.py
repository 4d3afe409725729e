"""Moments are kept in bf16: 4 bytes a parameter less, over d. Each step computes in fp32.

Situation: the state decides whether a model fits.
Called elsewhere: use_precision_aware_optimizer with exp_avg_dtype and exp_avg_sq_dtype in Megatron-LM,
bf16_optimizer_states in DeepSpeed; under FSDP2 it is the optimizer's own business, as of torchao's and of
bitsandbytes', with 8 bits. modded-nanogpt keeps fp32.
Wire: stage 4's. Memory: 4 + 8/d bytes a parameter of fp32 in place of 4 + 12/d, and 2 + 12/d of 16 bits in place of
2 + 16/d; during the step the moments of one bucket in fp32 besides.
Costs: two conversions a step, and the second moment: with beta2 = 0.999 a step changes it by less than bf16 can show
(2^-9) wherever gradients are steady, and then it stays. Use beta2 <= 0.99, or compare the losses.
"""

import torch

import stage4_overlap
from guard.probe import check_elementwise

from .by_bucket import BucketByBucket, tried_tensor_by_tensor


class ShardedOptimizer(BucketByBucket):
    def unpack(self, bucket):
        super().unpack(bucket)
        self.cast_moments(bucket, torch.float32)

    def pack(self, bucket):
        self.cast_moments(bucket, torch.bfloat16)
        super().pack(bucket)

    def cast_moments(self, bucket, dtype):
        """Of a state what has the shape of its parameter: counts of steps have none."""
        for main_param in bucket.main_params.values():
            state = self.optimizer.state.get(main_param, {})
            state.update({name: value.to(dtype) for name, value in state.items()
                          if isinstance(value, torch.Tensor) and value.shape == main_param.shape})


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's, with moments in bf16."""

    _probe = tried_tensor_by_tensor(check_elementwise)
