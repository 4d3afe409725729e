"""Gives each matrix whole to one rank, so that Muon, which needs whole matrices, runs sharded and overlapped.

Stage 4 (stage4_overlap/) sends gradients and parameters in buckets, flat tensors of many parameters. Each of d ranks
updates 1/d of a bucket, its shard, and shards end in the middle of matrices. Here a shard has whole matrices.
Situation: a program trains with Muon, SOAP or Shampoo. Stage 4 refuses these optimizers, because they update a piece of
a matrix differently than the whole matrix.
Called elsewhere: the layer-wise distributed optimizer of Megatron-LM (Muon), Owned placement in torchtitan, RaggedShard
in veScale, dion's Muon over FSDP2; modded-nanogpt gives each rank matrices of one shape. DeepSpeed runs Muon beneath
ZeRO-1 and -2.
Wire (what a rank sends per step): 2 · 4Ψ · (d-1)/d bytes for Ψ parameters. Each rank's part of a bucket is sent at its
true length, without padding to the longest.
Memory: stage 4's 4 + 12/d bytes per parameter with AdamW, and 4 + 8/d with Muon, which has one moment.
Costs: with a backend that exchanges gradients, such as gloo, a rank needs memory for a copy of its part from each rank.
If a bucket had fewer matrices than there are ranks, some ranks would receive nothing while the others do. So a bucket
holds a matrix per rank, unless that is more than a twelfth of the model.
Balance: Newton–Schulz of an n × m matrix takes n · m · min(n, m) products. Each matrix goes to the rank that has the
least work so far. A bucket's parameters are sent as soon as they are updated, while the next bucket is being updated.
"""

import torch.distributed as dist

import stage4_overlap
from guard.probe import check_one_by_one
from stage4_overlap.buffer import Bucket, BucketBuffer, Range, padded_numel
from stage4_overlap.transport import Exchange, Transport, transport_for

from .by_bucket import BucketByBucket, tried_tensor_by_tensor


def owners(groups, world_size):
    """Return {parameter: the rank that steps it}, so that all ranks have about as much to compute.

    Parameters are dealt to the ranks in the order of the model. Then each bucket has parameters of every rank, so all
    ranks send at once. If dealing the most expensive parameters first makes the work more even, that order is taken.
    """
    params = [param for group in groups for param in group["params"]]
    # parameter -> the number of products that its update takes, see the module docstring
    work_of = {param: param.numel() * min(param.shape, default=1) for param in params}

    def dealt(params):
        """Give each parameter to the rank with the least work. Return (work of the busiest rank, {parameter: rank})."""
        work_of_ranks = [0] * world_size
        owner_of = {}
        for param in params:
            owner = work_of_ranks.index(min(work_of_ranks))
            owner_of[param] = owner
            work_of_ranks[owner] += work_of[param]
        return max(work_of_ranks), owner_of

    most_work, owner_of = dealt(params)
    most_work_if_sorted, owner_of_if_sorted = dealt(sorted(params, key=work_of.get, reverse=True))
    return owner_of_if_sorted if most_work_if_sorted < most_work else owner_of


class UnevenTransport(Transport):
    """Sends shards of unequal lengths. For these NCCL starts a reduce, or a broadcast, for each rank, all at once."""

    def reduce_scatter(self, sent, received, gradient):
        """Average `sent`, a list of the shards of all ranks. Return (works to wait for, tensors to add up then).

        `gradient` adds them up: the bucket's PartitionedGradient, which may take the average without adding.
        """
        place, parts = gradient.place_for(sent[self.rank])
        return [dist.reduce_scatter(place, list(sent), dist.ReduceOp.AVG, **self.asynchronous)], parts

    def all_gather(self, shards):
        """Send this rank's shard, and receive the other shards in place. Return works to wait for."""
        return [dist.all_gather(list(shards), shards[self.rank], **self.asynchronous)]


class UnevenExchange(Exchange, UnevenTransport):
    """Exchanges gradients, to sum them in fp32 on NCCL, and gathers parameters as UnevenTransport does."""


UNEVEN = {Transport: UnevenTransport, Exchange: UnevenExchange}  # class of stage 4 -> class for unequal shards


class WholeBucket(Bucket):
    """A bucket whose shards are whole parameters.

    Attributes:
        lengths: for each rank, the number of elements of its shard.
        numel, starts, ranges: as in Bucket: all elements, where parameters begin, and what this rank owns.
    """

    def place(self, alignment):
        """Choose where each parameter lies: the shards follow one another, each with the parameters of its owner."""
        owner_of_each = [self.transport.owner_of[param] for param in self.params]
        self.lengths = [0] * self.transport.world_size
        offsets = []  # of each parameter, in the shard of its owner
        for tensor, owner in zip(self.tensors, owner_of_each):
            offsets.append(self.lengths[owner])
            self.lengths[owner] += padded_numel(tensor.numel(), 1, alignment)
        self.numel = sum(self.lengths)
        self.starts = []  # of each parameter, in the bucket
        self.ranges = []  # of this rank's parameters
        for index, (owner, offset) in enumerate(zip(owner_of_each, offsets)):
            start_of_shard = sum(self.lengths[:owner])
            self.starts.append(start_of_shard + offset)
            if owner == self.transport.rank:
                self.ranges.append(Range(index, 0, self.tensors[index].numel(), offset))  # the whole parameter

    def shards_of(self, flat):
        """Cut a tensor of the bucket's length into the shards of all ranks."""
        return flat.split(self.lengths)

    def partition(self):
        """Give main parameters and their gradients the shapes of their parameters, as Muon needs."""
        super().partition()
        for param, main_param in self.main_params.items():
            self.main_params[param] = main_param.view(param.shape)
            self.main_params[param].grad = main_param.grad.view(param.shape)


class WholeBuffer(BucketBuffer):
    """A buffer in which gradients are sent as in stage 4, and received from each rank."""

    def __init__(self, buckets, transport):
        """Make memory to receive this rank's shard from each rank. Together these may be longer than the bucket."""
        super().__init__(buckets, transport)
        if transport.needs_receive_buffer:
            n_ranks = transport.world_size
            sizes = [n_ranks * bucket.lengths[transport.rank] * self.wire_dtype(bucket).itemsize for bucket in buckets]
            self.received = self.sent.new_zeros(max(sizes))  # bytes
            for bucket, n_bytes in zip(buckets, sizes):
                slots, sent, _ = self.places[bucket]  # the third, stage 4's view to receive in, may be too small
                received = self.received[:n_bytes].view(self.wire_dtype(bucket))
                self.places[bucket] = slots, sent, received.view(n_ranks, -1)


class ShardedOptimizer(BucketByBucket):
    """Stage 4's core with whole matrices. BucketByBucket sends a bucket while the next bucket is updated."""

    bucket_class = WholeBucket
    bucket_buffer_class = WholeBuffer

    def transport_for(self, process_group, *args):
        """Return the transport, which sends messages, with an owner for each parameter as `owner_of`.

        The core calls this method before it makes buckets, so this method chooses the size of buckets, too, unless the
        program has given it. A bucket then has room for the largest matrix of each rank, or a twelfth of all parameters
        if that is less.
        """
        usual_class = type(transport_for(process_group, *args))  # GlooTransport can send unequal shards already
        transport = UNEVEN.get(usual_class, usual_class)(process_group)
        transport.owner_of = owners(self.param_groups, transport.world_size)  # for WholeBucket.place
        sizes_mib = [param.nbytes / 2**20 for param in transport.owner_of]
        self.bucket_cap_mb = self.bucket_cap_mb or min(transport.world_size * max(sizes_mib), sum(sizes_mib) / 12)
        return transport


class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, for any optimizer that steps tensors one by one."""

    # The guard reads both. `_probe` refuses a class that updates tensors together, or counts calls of `step`.
    _probe = tried_tensor_by_tensor(check_one_by_one, are_views=True)
    _steps_whole_params = True

    def _refuse(self, named):
        """Refuse DTensors, torch's tensors that are spread over ranks. named: [(name, parameter), …]."""
        for name, param in named:
            if hasattr(param, "placements"):
                raise ValueError(f"parameter {name} is a DTensor, of which a rank has a part; this steps whole "
                                 "matrices")
        return super()._refuse(named)
