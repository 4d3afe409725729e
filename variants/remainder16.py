"""Stores a remainder of 16 bits per bf16 parameter. An fp32 main parameter is made of both, and isn't stored.

Stage 4 (stage4_overlap/) spreads its state over d ranks. The inner optimizer, torch's, updates main parameters: fp32
copies of the bf16 parameters that this rank owns. Parameters are sent in buckets, lists of parameters.

Situation: a model has bf16 parameters. In stage 4 their main parameters are the largest state apart from the moments.

Names in other libraries: `store_param_remainders` (Megatron-LM, TransformerEngine, apex), `mantissa` (modded-nanogpt).

Wire (what ranks send): as in stage 4.

Memory, in bytes per bf16 parameter: 2 (parameter) + 2/d (remainder) + 4/d (gradient) + 8/d (two moments). Stage 4 has
4/d (main parameter) in place of the remainder. During the step, the main parameters of one bucket take memory, too.

How: the upper 16 bits of an fp32 number are a bf16 number. The lower 16 bits are the remainder, read as a signed
number. If the remainder is negative, the upper 16 bits plus 1 are the parameter. So the parameter is always the bf16
number nearest to the main parameter.

Exactness: main parameters equal stage 4's to the bit. If a main parameter lies halfway between two bf16 numbers, as
about 2^-16 of them do, the parameter may differ: it is rounded away from zero, and in stage 4 to the even number.
Parameters of other dtypes, such as fp32 norms in a bf16 model, are kept as in stage 4.

Costs: three passes over what this rank owns. If other code writes a value into the model between steps, the old
remainder is added to it. So the main parameter may differ from the value by half a unit in the last place of bf16.
"""

import torch

import stage4_overlap
from guard.probe import check_elementwise
from stage4_overlap.buffer import Bucket, PartitionedParameter

from .by_bucket import BucketByBucket, probe_of_single_steps


class SplitParameter(PartitionedParameter):
    """What this rank owns of a bucket's parameters.

    BucketByBucket reads `main_shard`, which makes the main parameters, before it steps a bucket. After the step the
    bucket calls copy_main_to_model(), and sends `shard`.

    Attributes, flat tensors:
        shard: the parameters, bf16, in the memory of the model.
        remainder: the lower 16 bits of each main parameter.
        main: the main parameters, fp32, made of both. Outside of a step its storage has no bytes.
    """

    def __init__(self, shard):
        self.shard = shard
        self.main = shard.float()
        self.remainder = torch.zeros_like(shard, dtype=torch.int16)

    @property
    def main_shard(self):
        """Return `main`. If it has no memory, give it memory, and put parameters and remainders together.

        The inner optimizer steps views of `main`. They share its storage, so this gives them memory, too.
        """
        if self.main.untyped_storage().size() == 0:
            self.main.untyped_storage().resize_(self.main.nbytes)
            # Other code may have written zeros into the model. A zero and a negative remainder would make a nan.
            remainder = torch.where(self.shard == 0, self.remainder.clamp(min=0), self.remainder)
            # Reads `main` as int32. copy_ sets it to the bits of the parameters, mul_ shifts them into the upper half,
            # and add_ adds the remainders.
            self.main.view(torch.int32).copy_(self.shard.view(torch.int16)).mul_(2**16).add_(remainder)
        return self.main

    def copy_main_to_model(self):
        """Split `main` into parameters and remainders, and give up the memory of `main`."""
        if self.main.untyped_storage().size():
            bits = self.main.view(torch.int32)
            self.remainder.copy_(bits)  # int32 to int16 keeps the lower 16 bits, as a signed number
            # After the subtraction the lower 16 bits are 0. The upper 16 bits, shifted down, are the bf16 number.
            self.shard.view(torch.int16).copy_(bits.sub_(self.remainder) >> 16)
            self.main.untyped_storage().resize_(0)


class SplitBucket(Bucket):
    """A bucket that stores no main parameters of bf16 parameters. Stage 4's Bucket calls `parameter_of`."""

    def parameter_of(self, shard):
        return SplitParameter(shard) if shard.dtype == torch.bfloat16 else super().parameter_of(shard)


# The core: the bare optimizer.
class ShardedOptimizer(BucketByBucket):
    """Stage 4's core, with remainders. BucketByBucket updates one bucket after the other."""

    bucket_class = SplitBucket


# The guard, with its checks, in front of the core. It reads the names that begin with an underscore.
class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, for bf16 parameters without fp32 copies."""

    # Refuses an optimizer class that isn't element-wise, or that counts calls of `step`, one for each bucket here.
    _probe = probe_of_single_steps(check_elementwise)
    # state_dict() calls it on each main parameter: a clone keeps its values when main parameters give up their memory.
    _main_to_save = staticmethod(torch.clone)

    def pieces(self):
        """Return (parameter, start, stop, main parameter) for each piece of a parameter that this rank updates.

        Saving and loading call this method, and then read the main parameters.
        """
        for bucket in self.buckets:
            self.unpack(bucket)  # reads `main_shard`, which gives main parameters memory
        return super().pieces()
