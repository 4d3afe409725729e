"""Shards are cut at multiples of a block, so that states with one scale a block are stepped as in the whole tensor.

Situation: 8-bit moments (bitsandbytes, torchao), which scale blocks of 256 elements together: stage 4 refuses them,
since it cuts through blocks.
Called elsewhere: torchao under FSDP2 keeps 8 bits only of those shards that are multiples of a block. Megatron-LM,
DeepSpeed and modded-nanogpt have no switch for it.
Wire and memory: stage 4's, each parameter padded to 256 elements and a bucket to d · 256; of the moments a byte each.
Costs: padding of small parameters: a bias of 10 elements takes 256.

Exercise: fill in 1 body, see docs/exercise.md. The solution is variants/blocks.py.
"""

import functools

import stage4_overlap
from guard.probe import check_elementwise
from stage4_overlap.buffer import Bucket
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer

BLOCK = 256  # elements; of any dtype a multiple of what stage 4 aligns to


class BlockBucket(Bucket):
    def place(self, alignment):
        raise RuntimeError("fill in place: the core's, with another alignment")


class ShardedOptimizer(OverlapOptimizer):
    bucket_class = BlockBucket


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's, of an optimizer that steps blocks of 256 elements by themselves."""

    _probe = staticmethod(functools.partial(check_elementwise, unit=BLOCK))
