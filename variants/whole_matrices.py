"""Whole parameters are the shards of a bucket, so that optimizers that need whole matrices run overlapped.

Situation: Muon, SOAP or Shampoo, which stage 4 refuses since a piece of a matrix is stepped otherwise than the whole.
Called elsewhere: the layer-wise distributed optimizer of Megatron-LM (Muon), RaggedShard in veScale, dion's Muon over
FSDP2; modded-nanogpt gives each rank whole matrices of one shape. DeepSpeed steps Muon beneath ZeRO-1 and -2.
Wire: 2 · 4Ψ · (d-1)/d bytes and the padding: a collective has equal shards, and the rank that owns most of a bucket
decides their length: `padding` below. Memory: stage 4's 4 + 12/d bytes a parameter, padded likewise.
Costs: padding. A bucket should hold d matrices or more: bucket_cap_mb is d of the largest, or what latency allows.
Balanced by work: Newton–Schulz of n × m takes n · m · min(n, m) products, and the next matrix goes to the rank with the
least so far, over all buckets. In a GPT all matrices have the same min(n, m), so that balances elements too.
"""

import stage4_overlap
from guard.probe import check_one_by_one
from stage4_overlap.buffer import Bucket, Range, padded_numel
from stage4_overlap.optimizer import ShardedOptimizer as OverlapOptimizer


class WholeBucket(Bucket):
    def place(self, alignment):
        """The most laborious first, to the rank with the least work in this bucket and those before it."""
        works = [tensor.numel() * min(tensor.shape, default=1) for tensor in self.tensors]
        work = vars(self.transport).setdefault("work", [0] * self.transport.world_size)  # all buckets have this one
        ends, places = [0] * len(work), {}  # ends: of what each rank owns of this bucket
        for index in sorted(range(len(works)), key=works.__getitem__, reverse=True):
            owner = work.index(min(work))
            places[index] = owner, ends[owner]
            work[owner] += works[index]
            ends[owner] += padded_numel(self.tensors[index].numel(), 1, alignment)
        self.numel = max(ends) * len(work)
        self.starts = [owner * max(ends) + offset for _, (owner, offset) in sorted(places.items())]
        self.ranges = [Range(index, 0, self.tensors[index].numel(), offset)
                       for index, (owner, offset) in sorted(places.items()) if owner == self.transport.rank]

    def partition(self):
        super().partition()
        for param, main_param in self.main_params.items():
            self.main_params[param] = whole = main_param.view(param.shape)
            whole.grad = main_param.grad.view(param.shape)


class ShardedOptimizer(OverlapOptimizer):
    bucket_class = WholeBucket


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's, of any optimizer that steps tensors one by one."""

    _probe = staticmethod(check_one_by_one)
