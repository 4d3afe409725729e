"""Whole parameters are the shards of a bucket, so that optimizers that need whole matrices run overlapped.

Situation: Muon, SOAP or Shampoo, which stage 4 refuses since a piece of a matrix is stepped otherwise than the whole.
Called elsewhere: the layer-wise distributed optimizer of Megatron-LM (Muon), RaggedShard in veScale, dion's Muon over
FSDP2; modded-nanogpt gives each rank whole matrices of one shape. DeepSpeed steps Muon beneath ZeRO-1 and -2.
Wire: 2 · 4Ψ · (d-1)/d bytes and the padding: a collective has equal shards, and the rank that owns most of a bucket
decides their length: `padding` below. Memory: stage 4's 4 + 12/d bytes a parameter, padded likewise.
Costs: padding. A bucket should hold d matrices or more: bucket_cap_mb is d of the largest, or what latency allows.
Balanced by work: Newton–Schulz of n × m takes n · m · min(n, m) products, and the next matrix goes to the rank with the
least so far, over all buckets. In a GPT all matrices have the same min(n, m), so that balances elements too.

Exercise: fill in 2 bodies, see docs/exercise.md. The solution is variants/whole_matrices.py.
"""

import stage4_overlap
from guard.probe import check_one_by_one
from stage4_overlap.buffer import Bucket, Range, padded_numel
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class WholeBucket(Bucket):
    def place(self, alignment):
        """The most laborious first, to the rank with the least work in this bucket and those before it."""
        raise RuntimeError("fill in place: an owner for each matrix, the most laborious first; numel, starts, ranges")

    def partition(self):
        raise RuntimeError("fill in partition: the core's, then main parameters and gradients in the model's shapes")


class ShardedOptimizer(OverlapOptimizer):
    bucket_class = WholeBucket


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's, of any optimizer that steps tensors one by one."""

    _probe = staticmethod(check_one_by_one)
