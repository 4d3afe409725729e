"""Cuts shards at multiples of a block, so that an optimizer with one scale per block works as on the whole tensor.

Stage 4 (stage4_overlap/) sends parameters in buckets, flat tensors of many parameters. Each of d ranks updates 1/d of a
bucket, its shard, wherever that begins.
Situation: a program trains with 8-bit moments (bitsandbytes, torchao), which share one scale per block of 256 elements.
Stage 4 refuses such optimizers, because its shards cut through blocks.
Called elsewhere: torchao under FSDP2 keeps 8 bits only in shards whose length is a multiple of a block. Megatron-LM,
DeepSpeed and modded-nanogpt have no switch for it.
Wire and memory: as in stage 4, except that each parameter is padded to a multiple of 256 elements, and each bucket to a
multiple of d · 256. Each moment takes one byte per element.
Costs: padding. A bias of 10 elements takes the place of 256.
"""

import functools

import stage4_overlap
from guard.probe import check_elementwise
from stage4_overlap.buffer import Bucket
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer

BLOCK = 256  # elements: in any dtype a multiple of 64 bytes, at which stage 4 aligns parameters


class BlockBucket(Bucket):
    def place(self, alignment):
        """Place parameters, and cut shards, at multiples of a block instead of `alignment`."""
        super().place(BLOCK)


class ShardedOptimizer(OverlapOptimizer):
    """Stage 4's core with shards of whole blocks."""

    bucket_class = BlockBucket


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, for an optimizer that steps each block of 256 elements by itself."""

    # The guard calls it to refuse an optimizer class that updates blocks differently from whole tensors.
    _probe = staticmethod(functools.partial(check_elementwise, unit=BLOCK))
