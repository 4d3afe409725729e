"""Stores a remainder of 16 bits per bf16 parameter. An fp32 main parameter is made of both, and isn't stored.

Stage 4 (stage4_overlap/) shards state over d ranks. Its inner optimizer, torch's, updates main parameters: fp32 copies
of the bf16 parameters that this rank owns. Parameters are sent in buckets, lists of parameters.
Situation: a model has bf16 parameters. In stage 4 their main parameters are the largest state apart from the moments.
Called elsewhere: `store_param_remainders` in Megatron-LM, apex's DistributedFusedAdam and TransformerEngine's
FusedAdam; `mantissa` in modded-nanogpt, which truncates instead of rounding. DeepSpeed and FSDP2 have no such option.
Wire (what ranks send): as in stage 4. Memory: 2 + 14/d bytes per parameter. The parameter takes 2 bytes; the rank that
owns it has also 2 of the remainder, 4 of the gradient and 8 of two moments. Stage 4 takes 2 + 16/d: a main parameter
has 4 bytes. During the step the main parameters of one bucket take memory, too.
How: the upper 16 bits of an fp32 number are a bf16 number. The lower 16 bits are the remainder. It is read as a signed
number, so that the bf16 number is the nearest: if the remainder is negative, the bf16 number is the upper 16 bits plus
one unit in the last place.
Main parameters equal stage 4's to the bit. Parameters may differ where a main parameter lies halfway between two bf16
numbers, which happens for about 2^-16 of all. This variant then rounds away from zero, and stage 4 to the even number.
Other dtypes, such as fp32 norms in a bf16 model, are kept as in stage 4.
Costs: three passes over this rank's part. If other code writes a value into the model between steps, the old remainder
is added to it. So the main parameter may differ from this value by half a unit in the last place of bf16.
"""

import torch

import stage4_overlap
from guard.probe import check_elementwise
from stage4_overlap.buffer import Bucket, PartitionedParameter

from .by_bucket import BucketByBucket, tried_tensor_by_tensor


class SplitParameter(PartitionedParameter):
    """This rank's part of a bucket's parameters. `main` is `shard` and `remainder` together.

    In its constructor the bucket cuts `main_shard` into main parameters. BucketByBucket reads `main_shard` before it
    steps a bucket. After this step the bucket calls copy_main_to_model(), and sends `shard`.

    Attributes:
        shard: bf16, in the memory of the model.
        remainder: the lower 16 bits of each main parameter.
        main: fp32. Outside of a step its storage has no bytes.
    """

    def __init__(self, shard):
        self.shard = shard
        self.main = shard.float()
        self.remainder = torch.zeros_like(shard, dtype=torch.int16)

    @property
    def main_shard(self):
        """Return `main`. If it has no memory, give it memory, and put the main parameters together.

        The inner optimizer steps views of `main`. They have the same storage, so they have memory then, too.
        """
        if self.main.untyped_storage().size() == 0:
            self.main.untyped_storage().resize_(self.main.nbytes)
            # Other code may have written a zero into the model. The bits of zero plus a negative remainder are a nan.
            remainder = torch.where(self.shard == 0, self.remainder.clamp(min=0), self.remainder)
            # Read `main` as int32. copy_ sets it to the bits of the parameter, mul_ shifts these into the upper half,
            # and add_ adds the remainder.
            self.main.view(torch.int32).copy_(self.shard.view(torch.int16)).mul_(2**16).add_(remainder)
        return self.main

    def copy_main_to_model(self):
        """Split `main` into the shard and the remainder, and give up the memory of `main`."""
        if self.main.untyped_storage().size():
            bits = self.main.view(torch.int32)
            self.remainder.copy_(bits)  # int32 to int16: keeps the lower 16 bits, as a signed number
            # Without the remainder the lower 16 bits are 0, and the upper 16 bits, shifted down, are the bf16 number.
            self.shard.view(torch.int16).copy_(bits.sub_(self.remainder) >> 16)
            self.main.untyped_storage().resize_(0)


class SplitBucket(Bucket):
    """A bucket that splits main parameters of bf16 parameters."""

    def parameter_of(self, shard):
        return SplitParameter(shard) if shard.dtype == torch.bfloat16 else super().parameter_of(shard)


class ShardedOptimizer(BucketByBucket):
    """Stage 4's core with remainders. It updates one bucket after the other."""

    bucket_class = SplitBucket


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, for bf16 parameters without fp32 copies."""

    # The guard calls `_probe` to refuse an optimizer class that isn't element-wise or counts calls of `step`, and
    # `_main_to_save` on each main parameter for state_dict(). A clone keeps its values when the next step gives up the
    # memory of main parameters.
    _probe = tried_tensor_by_tensor(check_elementwise)
    _main_to_save = staticmethod(torch.clone)

    def pieces(self):
        """Return (parameter, start, stop, main parameter) for each piece that this rank updates, as the guard does.

        Saving and loading call this method, and read the main parameters.
        """
        for bucket in self.buckets:
            self.unpack(bucket)  # gives the main parameters memory
        return super().pieces()
