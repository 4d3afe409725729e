"""fp32 parameters whose gradients travel in bf16, and are summed in fp32: 6 bytes a parameter sent in place of 8.

Situation: fp32 parameters, and a line that decides.
Called elsewhere: reduce_scatter_with_fp32_accumulation in Megatron-LM, which sums in fp32 as here. In bf16 sum
bf16_compress_hook of DDP, communication_data_type of DeepSpeed, and reduce_dtype of FSDP2's MixedPrecisionPolicy.
In modded-nanogpt gradients travel in the dtype of their parameters, of which most have 16 bits.
Wire: (2 + 4)Ψ · (d-1)/d bytes. Memory: stage 4's 4 + 12/d, and bucket buffers of half the size.
Costs: each rank's gradient, divided by d, is rounded to 8 bits once, a relative error of at most 2^-8 or so; the sum
has none of its own. NCCL would sum in bf16, so that the parts are exchanged there too.

Exercise: fill in 2 bodies, see docs/exercise.md. The solution is variants/wire16.py.
"""

import torch

import stage4_overlap
from stage4_overlap.buffer import BucketBuffer
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class WireBuffer(BucketBuffer):
    def wire_dtype(self, bucket):
        raise RuntimeError("fill in wire_dtype: what a gradient is on the wire")


class ShardedOptimizer(OverlapOptimizer):
    bucket_buffer_class = WireBuffer

    def shard(self, groups):
        raise RuntimeError("fill in shard: parts are to be added in fp32, then the core's")


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's, with bf16 gradients on the wire."""
