"""Sends gradients of fp32 parameters in bf16, and sums them in fp32: 6 bytes per parameter sent instead of 8.

Stage 4 (stage4_overlap/) sends gradients in buckets, lists of parameters, and each of d ranks adds up its 1/d of them.
Situation: a model has fp32 parameters, and a network link limits the speed.
Called elsewhere: `reduce_scatter_with_fp32_accumulation` in Megatron-LM, which also sums in fp32. `bf16_compress_hook`
of DDP, `communication_data_type` of DeepSpeed and `reduce_dtype` of FSDP2's MixedPrecisionPolicy sum in bf16.
modded-nanogpt sends gradients in the dtype of their parameters, most of which have 16 bits.
Wire (what a rank sends per step): (2 + 4)Ψ · (d-1)/d bytes for Ψ parameters. Memory: stage 4's 4 + 12/d bytes per
parameter, and half the size of the buffers in which gradients are sent and received.
Other dtypes: 16-bit parameters are sent as in stage 4.
Costs: each rank's gradient is rounded to 8 bits of precision once, a relative error of at most about 2^-8. The sum adds
no error of its own. NCCL would sum in bf16, so on NCCL, too, the ranks exchange the parts and sum them themselves.
"""

import torch

import stage4_overlap
from stage4_overlap.buffer import BucketBuffer
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class WireBuffer(BucketBuffer):
    """A buffer in which the gradients of a bucket are sent and received, in bf16."""

    def wire_dtype(self, bucket):
        """Return the dtype in which gradients are sent."""
        dtype = super().wire_dtype(bucket)
        return torch.bfloat16 if dtype.itemsize > 2 else dtype


class ShardedOptimizer(OverlapOptimizer):
    """Stage 4's core with 16-bit gradients on the wire."""

    bucket_buffer_class = WireBuffer

    def shard(self, groups):
        """Shard as the core does, in its constructor. reduce_dtype lets ranks sum in fp32 on every backend."""
        self.reduce_dtype = torch.float32
        return super().shard(groups)


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, with bf16 gradients on the wire."""
