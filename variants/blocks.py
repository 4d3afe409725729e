"""Cuts shards at multiples of 256 elements, so that 8-bit moments can be sharded.

Stage 4 (stage4_overlap/) spreads its work over d ranks. It sends parameters in buckets, flat tensors of many
parameters. Each rank updates 1/d of each bucket, its shard.

Situation: a program trains with the 8-bit moments of bitsandbytes or torchao. A block of 256 elements has one scale.
Stage 4 refuses these optimizers, because its shards end within blocks.

Names in other libraries: none.

Wire (what ranks send): as in stage 4, and padding.

Memory, in bytes per fp32 parameter: 4 (parameter) + 4/d (gradient) + 2/d (two moments), and padding. A block's scales
take a few bytes more.

Costs: padding. Each parameter is padded to a multiple of 256 elements, and each bucket to a multiple of d · 256. A bias
of 10 elements takes the place of 256.
"""

import functools

import stage4_overlap
from guard.probe import check_elementwise
from stage4_overlap.buffer import Bucket
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer

BLOCK = 256  # elements: in any dtype a multiple of 64 bytes, at which stage 4 aligns parameters


class BlockBucket(Bucket):
    """A bucket whose shards consist of whole blocks."""

    def lay_out(self, alignment):
        """Begin parameters and shards at multiples of a block instead of `alignment`."""
        super().lay_out(BLOCK)


# The core: the bare optimizer.
class ShardedOptimizer(OverlapOptimizer):
    """Stage 4's core with shards of whole blocks."""

    bucket_class = BlockBucket


# The guard, with its checks, in front of the core. It reads the names that begin with an underscore.
class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, for an optimizer that steps each block of 256 elements by itself."""

    # Refuses an optimizer class that updates a block of 256 elements differently if it is alone.
    _probe = staticmethod(functools.partial(check_elementwise, unit=BLOCK))
