"""Keeps moments in bf16 between steps, and computes each step in fp32.

Stage 4 (stage4_overlap/) spreads its state over d ranks. A bucket is a list of parameters that are sent together. The
inner optimizer, torch's, updates main parameters: the parts of parameters that this rank owns, or fp32 copies of these
parts if the parameters have 16 bits.

Situation: the optimizer's state decides whether a model fits.

Names in other libraries: `use_precision_aware_optimizer`, `exp_avg_dtype` and `exp_avg_sq_dtype` (Megatron-LM),
`bf16_optimizer_states` (DeepSpeed).

Wire (what ranks send): as in stage 4.

Memory, in bytes per fp32 parameter: 4 (parameter) + 4/d (gradient) + 4/d (two moments). Per 16-bit parameter: 2
(parameter) + 4/d (main parameter) + 4/d (gradient) + 4/d (two moments). During the step, the moments of one bucket are
in fp32, too.

Costs: two conversions per step, and precision of the second moment. With beta2 = 0.999 and steady gradients, a step
changes the second moment by less than 2^-9 of its value, which bf16 rounds away. Use beta2 <= 0.99, or compare the
losses.
"""

import torch

import stage4_overlap
from guard.probe import check_elementwise

from .by_bucket import BucketByBucket, probe_of_single_steps


# The core: the bare optimizer.
class ShardedOptimizer(BucketByBucket):
    """Stage 4's core, with moments in bf16. BucketByBucket calls `unpack`, steps a bucket, and calls `pack`."""

    def unpack(self, bucket):
        """Cast the moments of a bucket to the dtype of its main parameters: fp32."""
        super().unpack(bucket)
        # bucket.parameter.main_shard: all main parameters of the bucket, as one flat tensor.
        self.cast_moments(bucket, bucket.parameter.main_shard.dtype)

    def pack(self, bucket):
        """Cast the moments of a bucket to bf16, and send its parameters."""
        self.cast_moments(bucket, torch.bfloat16)
        super().pack(bucket)

    def cast_moments(self, bucket, dtype):
        """Cast the moments, which have the shape of their main parameter. A count of steps has another shape."""
        for main_param in bucket.main_params.values():  # main_params: parameter -> its main parameter on this rank
            state = self.optimizer.state.get(main_param, {})  # {} before the first step
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == main_param.shape:
                    state[name] = value.to(dtype)


# The guard, with its checks, in front of the core. It reads the names that begin with an underscore.
class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, with moments in bf16."""

    # Refuses an optimizer class that isn't element-wise, or that counts calls of `step`, one for each bucket here.
    _probe = probe_of_single_steps(check_elementwise)
