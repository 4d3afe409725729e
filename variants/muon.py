"""Gives each matrix whole to one rank, so that Muon, which needs whole matrices, runs sharded and overlapped.

Stage 4 (stage4_overlap/) spreads its work over d ranks. It sends gradients and parameters in buckets, flat tensors of
many parameters. Each rank updates 1/d of a bucket, its shard, and shards end in the middle of matrices. Here a shard
consists of whole matrices, so shards have unequal lengths.

Situation: a program trains with Muon, SOAP or Shampoo. Stage 4 refuses these optimizers, because they update a piece of
a matrix differently than the whole matrix.

Names in other libraries: layer-wise distributed optimizer (Megatron-LM), Owned placement (torchtitan), RaggedShard
(veScale), Muon (dion, modded-nanogpt, DeepSpeed).

Wire (what a rank sends), in bytes per step: 4Ψ · (d-1)/d of gradients and 4Ψ · (d-1)/d of parameters, for Ψ parameters.
Shards are sent at their true lengths, without padding to the longest.

Memory, in bytes per fp32 parameter with Muon: 4 (parameter) + 4/d (gradient) + 4/d (moment). With AdamW: 4 (parameter)
+ 4/d (gradient) + 8/d (two moments). If ranks exchange gradients, as on gloo, a rank also has memory to receive its
shard of a bucket from each rank.

Costs: larger buckets, so that every rank owns a matrix of each bucket. A bucket has at most a twelfth of the
model, so that the two buffers in which gradients are sent stay small.

Balance: an update of an n × m matrix by Muon (Newton–Schulz) takes n · m · min(n, m) products. Each matrix goes to the
rank that has the least work so far.
"""

import torch.distributed as dist

import stage4_overlap
from guard.probe import check_one_by_one
from stage4_overlap.buffer import Bucket, BucketBuffer, Range, padded_numel
from stage4_overlap.transport import Exchange, Transport
from stage4_overlap.transport import transport_for as usual_transport

from .by_bucket import BucketByBucket, probe_of_single_steps


def owners(groups, world_size):
    """Return {parameter: the rank that owns and updates it}, so that all ranks have about the same work.

    Parameters are given away in the order of the model, so that each bucket has parameters of every rank. If it makes
    the work more even, they are given away in the order of their work, the most expensive first.
    """
    params = [param for group in groups for param in group["params"]]
    # parameter -> how many products its update takes. A scalar has no shape, so `min` returns the default.
    work_of = {param: param.numel() * min(param.shape, default=1) for param in params}

    def give_away(params):
        """Give each parameter to the rank with the least work. Return (work of the busiest rank, {parameter: rank})."""
        work_of_ranks = [0] * world_size
        owner_of = {}
        for param in params:
            owner = work_of_ranks.index(min(work_of_ranks))
            owner_of[param] = owner
            work_of_ranks[owner] += work_of[param]
        return max(work_of_ranks), owner_of

    most_work, owner_of = give_away(params)
    most_work_if_sorted, owner_of_if_sorted = give_away(sorted(params, key=work_of.get, reverse=True))
    return owner_of_if_sorted if most_work_if_sorted < most_work else owner_of


class UnevenTransport(Transport):
    """Sends shards of unequal lengths on NCCL. torch then starts one reduce, or broadcast, per rank, all together.

    `self.asynchronous` is {"group": the process group, "async_op": True}.
    """

    def reduce_scatter(self, sent, received, gradient):
        """Average `sent`, a list with a shard for each rank. Return (works to wait for, tensors for `gradient` to add).

        gradient: the bucket's PartitionedGradient, in which this rank adds up the gradients of its shard.
        received: unused here.
        """
        # `place` is the memory for the average. If the average must be added to another, `parts` is [place], else [].
        place, parts = gradient.place_for(sent[self.rank])
        return [dist.reduce_scatter(place, list(sent), dist.ReduceOp.AVG, **self.asynchronous)], parts

    def all_gather(self, shards):
        """Send this rank's shard, and receive the other shards in place. Return works to wait for."""
        return [dist.all_gather(list(shards), shards[self.rank], **self.asynchronous)]


class UnevenExchange(Exchange, UnevenTransport):
    """Exchanges gradients as Exchange does, to sum them in fp32, and gathers parameters as UnevenTransport does."""


UNEVEN = {Transport: UnevenTransport, Exchange: UnevenExchange}  # class of stage 4 -> class for unequal shards


class WholeBucket(Bucket):
    """A bucket whose shards are whole parameters.

    Attributes:
        lengths: for each rank, the number of elements of its shard.
        params, tensors: as in Bucket: the parameters, and for each the tensor to store, here the parameter itself.
        numel: as in Bucket: the number of all elements, and of padding.
        starts, ranges: as in Bucket: where each parameter begins, and the Ranges, parts of parameters, of this rank.
        main_params: as in Bucket: parameter -> its main parameter, which the inner optimizer, torch's, updates.
        transport: as in Bucket: sends messages. Its `owner_of` is {parameter: the rank that owns it}.
    """

    def lay_out(self, alignment):
        """Set where each parameter begins: shard after shard, each with the parameters of its owner."""
        owner_of_each = [self.transport.owner_of[param] for param in self.params]
        self.lengths = [0] * self.transport.world_size
        offsets = []  # of each parameter, in the shard of its owner
        for tensor, owner in zip(self.tensors, owner_of_each):
            offsets.append(self.lengths[owner])
            self.lengths[owner] += padded_numel(tensor.numel(), 1, alignment)  # 1: the parameter isn't cut
        self.numel = sum(self.lengths)
        self.starts = []  # of each parameter, in the bucket
        self.ranges = []  # of this rank's parameters
        for index, (owner, offset) in enumerate(zip(owner_of_each, offsets)):
            start_of_shard = sum(self.lengths[:owner])
            self.starts.append(start_of_shard + offset)
            if owner == self.transport.rank:
                # The whole parameter, from element 0 to its end; it begins at `offset` of this rank's shard.
                self.ranges.append(Range(index, 0, self.tensors[index].numel(), offset))

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
    """A buffer in which gradients are sent as in stage 4, and shards of unequal lengths are received."""

    def __init__(self, buckets, transport):
        """Make memory to receive this rank's shard from each rank. This may be more than a bucket's length."""
        super().__init__(buckets, transport)
        if transport.needs_receive_buffer:
            n_ranks = transport.world_size
            # For each bucket: ranks · elements of this rank's shard · bytes of an element, in the dtype that is sent.
            sizes = [n_ranks * bucket.lengths[transport.rank] * self.wire_dtype(bucket).itemsize for bucket in buckets]
            self.received = self.sent.new_zeros(max(sizes))  # bytes, for the largest bucket
            for bucket, n_bytes in zip(buckets, sizes):
                # slots: views of `sent`, shaped like the parameters. The third is where stage 4 would receive.
                slots, sent, _ = self.places[bucket]
                received = self.received[:n_bytes].view(self.wire_dtype(bucket))
                self.places[bucket] = slots, sent, received.view(n_ranks, -1)


# The core: the bare optimizer.
class ShardedOptimizer(BucketByBucket):
    """Stage 4's core with whole matrices. BucketByBucket sends a bucket while the next bucket is updated."""

    bucket_class = WholeBucket
    bucket_buffer_class = WholeBuffer

    def transport_for(self, process_group, *args):
        """Return the transport, which sends messages. Set its `owner_of`, which WholeBucket.lay_out reads.

        The core calls this method before it makes buckets. So the method also sets `bucket_cap_mb`, the size of buckets
        in MiB, if the program hasn't.
        """
        # The usual transport is made only to learn its class. GlooTransport can send unequal shards as it is.
        usual_class = type(usual_transport(process_group, *args))
        transport = UNEVEN.get(usual_class, usual_class)(process_group)
        transport.owner_of = owners(self.param_groups, transport.world_size)
        sizes_mib = [param.nbytes / 2**20 for param in transport.owner_of]  # of all parameters
        # The largest matrix of each rank, but no more than a twelfth of the model, see the module docstring.
        self.bucket_cap_mb = self.bucket_cap_mb or min(transport.world_size * max(sizes_mib), sum(sizes_mib) / 12)
        return transport


# The guard, with its checks, in front of the core. It reads the names that begin with an underscore.
class DistributedOptimizer(stage4_overlap.DistributedOptimizer, ShardedOptimizer):
    """Stage 4's DistributedOptimizer, for any optimizer that steps tensors one by one."""

    # Refuses an optimizer class that updates tensors together, or that counts calls of `step`, one for each bucket
    # here. are_views: the probe steps views of one flat tensor, as main parameters are.
    _probe = probe_of_single_steps(check_one_by_one, are_views=True)
    _steps_whole_params = True  # main parameters have the shapes of their parameters

    def _refuse(self, named):
        """Refuse DTensors, tensors that are spread over ranks. named: the parameters, [(name, parameter), …]."""
        for name, param in named:
            if hasattr(param, "placements"):  # only DTensors have them
                raise ValueError(f"parameter {name} is a DTensor, of which a rank has a part; this steps whole "
                                 "matrices")
        return super()._refuse(named)
