"""Buckets, the buffer that parameters live in, and the buffers that gradients travel in.

Sources of the ideas: DistributedDataParallel's buckets, Megatron-LLaMA's OverlappedDistributedOptimizer, veScale.
"""

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist

ALIGNMENT = 64  # bytes: the widest vector of a CPU; torch's fused kernels round what fills none otherwise


class Range(NamedTuple):
    """The part of a parameter that lies in a shard: `param.view(-1)[start:stop]` is `shard[offset:][:stop - start]`."""

    index: int  # which parameter
    start: int
    stop: int
    offset: int


def bucket_layout(nbytes, dtypes, cap_bytes):
    """Which parameters go into which bucket -> lists of indices, in the order in which the buckets leave.

    Gradients become ready in about the reverse order of the parameters. A bucket holds whole parameters of one dtype
    and is closed when it has at least `cap_bytes`.
    """
    buckets, filling, filled = [], {}, dict.fromkeys(dtypes, 0)  # by dtype: the bucket that is open, and its bytes
    for index in reversed(range(len(nbytes))):
        filling.setdefault(dtypes[index], []).append(index)
        filled[dtypes[index]] += nbytes[index]
        if filled[dtypes[index]] >= cap_bytes:
            buckets.append(filling.pop(dtypes[index]))
            filled[dtypes[index]] = 0
    return buckets + list(filling.values())


class Bucket:
    """Whole parameters of one dtype, whose gradients leave together; each of the d ranks owns 1/d of their elements.

    Args:
        params: in the order in which their gradients are expected.
        transport: between the d ranks.

    Attributes:
        ready: those of `params` whose gradient has come in this round.
        starts, ranges: where each parameter begins; which parts of them this rank owns.
        numel: of all, padded.
        flat_params: (numel,): this bucket's part of the ParameterBuffer.
        shards: (d, numel / d): the same, row r is rank r's.
        parameter, gradient: this rank's PartitionedParameter and PartitionedGradient.
        main_params: parameter -> what of it this rank updates, (range numel,), if anything.
    """

    def __init__(self, params, transport):
        self.params, self.transport, self.ready = params, transport, set()
        self.tensors = [self.tensor_of(param) for param in params]
        self.param_sync = None  # the works of the all-gather in flight
        self.place(ALIGNMENT // params[0].dtype.itemsize)

    def tensor_of(self, param):
        return param

    def place(self, alignment):
        """Where each parameter begins, at a multiple of `alignment` elements, and what of them this rank owns."""
        numels, world_size = [tensor.numel() for tensor in self.tensors], self.transport.world_size
        *self.starts, end = param_starts(numels, alignment)
        self.numel = padded_numel(end, world_size, alignment)
        shard_numel = self.numel // world_size
        shard_start = self.transport.rank * shard_numel
        self.ranges = ranges_in_shard(numels, self.starts, shard_start, shard_start + shard_numel)

    def shards_of(self, flat):
        return flat.view(self.transport.world_size, -1)

    def move_in(self, flat_params):
        """Make the parameters views of `flat_params`, (numel,)."""
        self.flat_params, self.shards = flat_params, self.shards_of(flat_params)
        self.views = views_of(flat_params, self.tensors, self.starts)
        for tensor, view in zip(self.tensors, self.views):
            tensor.data = view.copy_(tensor)

    def partition(self):
        """Take this rank's 1/d of the parameters, as they are now, and make room for 1/d of the gradients."""
        self.parameter = self.parameter_of(self.shards[self.transport.rank])
        self.gradient = PartitionedGradient(self.parameter.main_shard, self.transport.divisor)
        main_params = cut_ranges(self.parameter.main_shard, self.ranges)
        for main_param, main_grad in zip(main_params, cut_ranges(self.gradient.shard, self.ranges)):
            main_param.grad = main_grad
        self.main_params = {self.params[r.index]: main for r, main in zip(self.ranges, main_params)}

    def parameter_of(self, shard):
        return PartitionedParameter(shard)

    def is_full(self):
        return len(self.ready) == len(self.params)

    def grads(self):
        return [param.grad for param in self.params]

    def start_param_sync(self):
        """Send the updated parameters to all ranks, in place."""
        self.parameter.copy_main_to_model()
        self.param_sync = self.transport.all_gather(self.shards)

    def finish_param_sync(self):
        if self.param_sync is not None:
            for work in self.param_sync:
                work.wait()
            # Kept until the next all-gather: a work that nobody here holds may abort the process as Python ends.
            self.last_param_sync, self.param_sync = self.param_sync, None


class ParameterBuffer:
    """Parameters of one dtype in one tensor, bucket after bucket: the model's are views, all-gathers land in place."""

    def __init__(self, buckets):
        numels, like = [bucket.numel for bucket in buckets], buckets[0].tensors[0]
        self.flat = torch.zeros(sum(numels), dtype=like.dtype, device=like.device)
        for bucket, flat_params in zip(buckets, self.flat.split(numels)):
            bucket.move_in(flat_params)
        dist.broadcast(self.flat, group=buckets[0].transport.process_group, group_src=0)  # all ranks start alike
        for bucket in buckets:
            bucket.partition()


class PartitionedParameter:
    """This rank's 1/d of a bucket's parameters, in fp32 at least: what the inner optimizer updates.

    Attributes:
        shard: (numel / d,): where it lies in the ParameterBuffer.
        main_shard: (numel / d,) fp32, of fp64 parameters fp64: the same tensor unless the parameters have 16 bits.
    """

    def __init__(self, shard):
        self.shard = shard
        self.main_shard = shard.to(torch.promote_types(shard.dtype, torch.float32))

    def copy_main_to_model(self):
        if self.main_shard is not self.shard:
            self.shard.copy_(self.main_shard)


class PartitionedGradient:
    """This rank's 1/d of a bucket's averaged gradients, in fp32 at least: all that stays of them.

    Attributes:
        shard: (numel / d,), of the dtype of `main_shard`.
        divisor: of what is added: the transport's.
        is_empty: whether the next sum replaces what `shard` holds; else it is of another micro-batch, and is added.
    """

    def __init__(self, main_shard, divisor):
        self.shard, self.is_empty = torch.zeros_like(main_shard), True
        self.divisor = divisor

    def place_for(self, part):
        """-> where a collective puts an average like `part`, and what is added then: nothing, if it is `shard`."""
        is_free = self.is_empty and (part.dtype, part.device) == (self.shard.dtype, self.shard.device)
        self.is_empty = self.is_empty and not is_free
        return (self.shard, []) if is_free else (part, [part])

    def add(self, parts):
        """Divide and add `parts`, one of each rank, in rank order and in fp32; or the average of a collective."""
        divisor = self.shard.new_full((), self.divisor)
        for part in parts:
            self.shard.copy_(part).div_(divisor) if self.is_empty else self.shard.addcdiv_(part, divisor)
            self.is_empty = False


class BucketBuffer:
    """Where the gradients of a bucket travel; every bucket fits. There are two: a third bucket waits for the first.

    Attributes:
        places: bucket -> slots, views shaped like its parameters; and sent and received, (d, numel / d) each. Made
            once, since Python is slow at making views and computing waits meanwhile.
        bucket, works, parts: whose gradients are in it; what to wait for; what is added up then, (numel / d,) each.
    """

    def __init__(self, buckets, transport):
        self.transport, self.places = transport, {}
        nbytes = max(bucket.numel * self.wire_dtype(bucket).itemsize for bucket in buckets)
        self.sent = torch.zeros(nbytes, dtype=torch.uint8, device=buckets[0].flat_params.device)
        self.received = torch.zeros_like(self.sent) if transport.needs_receive_buffer else self.sent
        for bucket in buckets:
            dtype = self.wire_dtype(bucket)
            sent, received = [memory[: bucket.numel * dtype.itemsize].view(dtype)
                              for memory in (self.sent, self.received)]
            slots = views_of(sent, bucket.tensors, bucket.starts)
            self.places[bucket] = slots, bucket.shards_of(sent), bucket.shards_of(received)

    def wire_dtype(self, bucket):
        return bucket.flat_params.dtype

    def start_grad_sync(self, bucket):
        """Take the gradients of `bucket` out of its parameters, and send them off."""
        self.bucket = bucket
        slots, sent, received = self.places[bucket]
        torch._foreach_copy_(slots, bucket.grads())
        for param in bucket.params:
            param.grad = None
        bucket.ready.clear()
        self.works, self.parts = self.transport.reduce_scatter(sent, received, bucket.gradient)

    def finish_grad_sync(self):
        """Wait, and add what has arrived to this rank's shard."""
        for work in self.works:
            work.wait()
        self.bucket.gradient.add(self.parts)


def param_starts(numels, alignment):
    """-> where parameters begin that lie one after the other, each at a multiple of `alignment`; and where they end."""
    return list(itertools.accumulate((padded_numel(numel, 1, alignment) for numel in numels), initial=0))


def padded_numel(numel, world_size, alignment):
    """-> the least length of at least `numel` that cuts into `world_size` equal shards, multiples of `alignment`."""
    unit = world_size * alignment
    return -(-numel // unit) * unit


def ranges_in_shard(numels, starts, shard_start, shard_stop):
    """-> which parts of parameters lie between two positions, a Range each. Shards ignore parameter boundaries."""
    ranges = []
    for index, (numel, param_start) in enumerate(zip(numels, starts)):
        start, stop = max(shard_start, param_start), min(shard_stop, param_start + numel)
        if start < stop:
            ranges.append(Range(index, start - param_start, stop - param_start, start - shard_start))
    return ranges


def views_of(flat, params, starts):
    """-> views of `flat`, shaped like `params`, which begin at `starts`."""
    return [flat[start : start + param.numel()].view(param.shape) for param, start in zip(params, starts)]


def cut_ranges(shard, ranges):
    """-> views of a shard, (range numel,) each; between them lies padding."""
    return [shard[r.offset : r.offset + r.stop - r.start] for r in ranges]
