"""Keeps 16 bits per bf16 parameter in place of an fp32 main parameter, which is the parameter and these 16 bits.

Situation: a model has bf16 parameters, whose main parameters are stage 4's largest state apart from the moments.
Called elsewhere: store_param_remainders in Megatron-LM, apex's DistributedFusedAdam and TransformerEngine's FusedAdam;
mantissa in modded-nanogpt, which truncates instead of rounding. DeepSpeed and FSDP2 have no such option.
Wire: as in stage 4. Memory: 2 + 14/d bytes per parameter instead of 2 + 16/d, and during the step the main parameters
of one bucket.
How: the upper 16 bits of an fp32 number are a bf16 number. The remainder is the rest, a signed 16-bit number.
Main parameters equal stage 4's to the bit. Parameters differ only at ties, about 2^-16 of all: they are rounded up
(away from zero) instead of to even, which is one unit in the last place.
Other dtypes, such as fp32 norms in a bf16 model: kept as in stage 4.
Costs: three passes over the shard. A value that other code writes into the model between steps counts to half a unit
in the last place.
"""

import torch

import stage4_overlap
from guard.probe import check_elementwise
from stage4_overlap.buffer import Bucket, PartitionedParameter

from .by_bucket import BucketByBucket, tried_tensor_by_tensor


class SplitParameter(PartitionedParameter):
    """This rank's part of a bucket's parameters: `shard` in bf16, `remainder`, and both together in `main`, in fp32.

    Outside of a step the storage of `main` has no bytes.
    """

    def __init__(self, shard):
        self.shard = shard
        self.main = shard.float()
        self.remainder = torch.zeros_like(shard, dtype=torch.int16)

    @property
    def main_shard(self):
        """Return `main`, put together if it has no memory. Its views, which are stepped, then have this memory, too."""
        if self.main.untyped_storage().size() == 0:
            self.main.untyped_storage().resize_(self.main.nbytes)
            # Other code may have written a zero into the model. The bits of zero plus a negative remainder are a nan.
            remainder = torch.where(self.shard == 0, self.remainder.clamp(min=0), self.remainder)
            # Multiplying by 2**16 shifts the bits of the parameter into the upper half.
            self.main.view(torch.int32).copy_(self.shard.view(torch.int16)).mul_(2**16).add_(remainder)
        return self.main

    def copy_main_to_model(self):
        """Split `main` into the shard and the remainder, and give up the memory of `main`."""
        if self.main.untyped_storage().size():
            bits = self.main.view(torch.int32)
            self.remainder.copy_(bits)  # int32 to int16: keeps the lower 16 bits, as a signed number
            self.shard.view(torch.int16).copy_(bits.sub_(self.remainder) >> 16)
            self.main.untyped_storage().resize_(0)


class SplitBucket(Bucket):
    def parameter_of(self, shard):
        return SplitParameter(shard) if shard.dtype == torch.bfloat16 else super().parameter_of(shard)


class ShardedOptimizer(BucketByBucket):
    bucket_class = SplitBucket


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, for bf16 parameters without fp32 copies."""

    _probe = tried_tensor_by_tensor(check_elementwise)
    _main_to_save = staticmethod(torch.clone)  # because a step gives up the memory of main parameters

    def pieces(self):
        for bucket in self.buckets:
            self.unpack(bucket)  # gives the main parameters memory
        return super().pieces()
