"""Sends gradients of fp32 parameters in bf16, and sums them in fp32: 6 bytes per parameter sent instead of 8.

Stage 4 (stage4_overlap/) sends gradients in buckets, lists of parameters. Each of d ranks adds up its 1/d of a bucket.

Situation: a model has fp32 parameters, and a network link limits the speed.

Names in other libraries: `reduce_scatter_with_fp32_accumulation` (Megatron-LM). With sums in bf16,
not fp32: `bf16_compress_hook` (DDP), `communication_data_type` (DeepSpeed), `reduce_dtype` (FSDP2).

Wire (what a rank sends), in bytes per step, for Ψ parameters: 2Ψ · (d-1)/d of gradients and 4Ψ · (d-1)/d of parameters.
Gradients of 16-bit parameters are sent as in stage 4.

Memory, in bytes per fp32 parameter: 4 (parameter) + 4/d (gradient) + 8/d (two moments), as in stage 4. The two buffers
in which gradients are sent and received have half the size.

Costs: each rank's gradient is rounded to 8 bits of precision once, a relative error of at most about 2^-8. NCCL would
also sum in bf16. So on NCCL, too, the ranks exchange the gradients, and each rank sums its part.
"""

import torch

import stage4_overlap
from stage4_overlap.buffer import BucketBuffer
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class WireBuffer(BucketBuffer):
    """A buffer in which the gradients of a bucket are sent and received, in bf16."""

    def wire_dtype(self, bucket):
        """Return the dtype in which gradients are sent. Stage 4's BucketBuffer calls this method."""
        dtype = super().wire_dtype(bucket)
        return torch.bfloat16 if dtype.itemsize > 2 else dtype  # itemsize: bytes


# The core: the bare optimizer.
class ShardedOptimizer(OverlapOptimizer):
    """Stage 4's core, which sends gradients in bf16."""

    bucket_buffer_class = WireBuffer

    def shard(self, groups):
        """Shard as the core does, in its constructor."""
        self.reduce_dtype = torch.float32  # the core reads it: on NCCL, too, the ranks sum in fp32
        return super().shard(groups)


# The guard, with its checks, in front of the core.
class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, which sends gradients in bf16."""
