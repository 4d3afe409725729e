"""Buckets, the buffer that parameters live in, and the buffers that gradients travel in.

A bucket is a list of parameters whose gradients are sent together. Each rank owns 1/d of every bucket, its shard. A
range is the part of a parameter that lies in a shard. The inner optimizer is a usual torch optimizer, which updates
only the main parameters of this rank: its ranges, or fp32 copies of them if they have 16 bits. A work is what an
asynchronous collective of torch returns; its wait() ends when the collective has ended.
Sources of the ideas: DistributedDataParallel's buckets, Megatron-LLaMA's OverlappedDistributedOptimizer, veScale.
"""

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist

# Bytes: the widest vector of a CPU. A parameter begins at a multiple of it, because torch's fused kernels may round an
# element differently if the element is in no full vector.
ALIGNMENT = 64


class Range(NamedTuple):
    """The part of a parameter that lies in a shard: `param.view(-1)[start:stop]` is `shard[offset:][:stop - start]`."""

    index: int  # of the parameter, in a list of parameters
    start: int  # in the parameter, flattened
    stop: int
    offset: int  # in the shard, where the range begins


def bucket_layout(nbytes, dtypes, cap_bytes):
    """Return which parameters go into which bucket: lists of indices, in the order in which the buckets are sent.

    Gradients become ready in about the reverse order of the parameters. A bucket holds whole parameters of one dtype
    and is closed when it has at least `cap_bytes`.
    """
    # open_bucket: dtype -> the bucket that is being filled. open_bytes: dtype -> the bytes of this bucket.
    buckets, open_bucket, open_bytes = [], {}, dict.fromkeys(dtypes, 0)
    for index in reversed(range(len(nbytes))):
        open_bucket.setdefault(dtypes[index], []).append(index)
        open_bytes[dtypes[index]] += nbytes[index]
        if open_bytes[dtypes[index]] >= cap_bytes:
            buckets.append(open_bucket.pop(dtypes[index]))
            open_bytes[dtypes[index]] = 0
    return buckets + list(open_bucket.values())


class Bucket:
    """Whole parameters of one dtype, whose gradients are sent together. Each of the d ranks owns 1/d of their elements.

    Args:
        params: the parameters, in the order in which their gradients are expected.
        transport: sends messages between the d ranks, see transport.py.

    Attributes:
        ready: the parameters whose gradient has come in this backward pass. The optimizer adds them.
        tensors: for each parameter the tensor to store, usually the parameter itself.
        starts: where each parameter begins.
        ranges: which parts of the parameters this rank owns, as Ranges.
        numel: the number of elements of all parameters and padding.
        flat_params: (numel,): this bucket's part of the ParameterBuffer.
        views: for each of `tensors` its view of `flat_params`.
        shards: (d, numel / d): `flat_params`, cut into a row for each rank.
        parameter, gradient: this rank's PartitionedParameter and PartitionedGradient.
        main_params: parameter -> its main parameter, (range numel,); only parameters of which this rank owns elements.
        param_sync: the works of the all-gather in flight, or None.
        last_param_sync: the works of the last all-gather that has ended.
    """

    def __init__(self, params, transport):
        self.params, self.transport, self.ready = params, transport, set()
        self.tensors = [self.tensor_of(param) for param in params]
        self.param_sync = None
        self.lay_out(ALIGNMENT // params[0].dtype.itemsize)

    def tensor_of(self, param):
        """Return the tensor to store. distributed.py overrides this, for a parameter of which a rank has a part."""
        return param

    def lay_out(self, alignment):
        """Set where each parameter begins, at a multiple of `alignment` elements, and which ranges this rank owns."""
        numels, world_size = [tensor.numel() for tensor in self.tensors], self.transport.world_size
        *self.starts, end = param_starts(numels, alignment)
        self.numel = padded_numel(end, world_size, alignment)
        shard_numel = self.numel // world_size
        shard_start = self.transport.rank * shard_numel
        self.ranges = ranges_in_shard(numels, self.starts, shard_start, shard_start + shard_numel)

    def shards_of(self, flat):
        """Cut a tensor of the bucket's length into shards, a row for each rank."""
        return flat.view(self.transport.world_size, -1)

    def move_in(self, flat_params):
        """Copy the parameters into `flat_params`, (numel,), and make them views of it."""
        self.flat_params, self.shards = flat_params, self.shards_of(flat_params)
        self.views = views_of(flat_params, self.tensors, self.starts)
        for tensor, view in zip(self.tensors, self.views):
            tensor.data = view.copy_(tensor)  # copy_ returns the view

    def partition(self):
        """Make main parameters of this rank's 1/d of the parameters, and memory for 1/d of the gradients."""
        self.parameter = self.parameter_of(self.shards[self.transport.rank])
        self.gradient = PartitionedGradient(self.parameter.main_shard, self.transport.divisor)
        main_params = cut_ranges(self.parameter.main_shard, self.ranges)
        for main_param, main_grad in zip(main_params, cut_ranges(self.gradient.shard, self.ranges)):
            main_param.grad = main_grad
        self.main_params = {self.params[r.index]: main for r, main in zip(self.ranges, main_params)}

    def parameter_of(self, shard):
        """Return the PartitionedParameter of this rank's shard. Variants override this method."""
        return PartitionedParameter(shard)

    def is_full(self):
        """Return whether all gradients have come."""
        return len(self.ready) == len(self.params)

    def grads(self):
        """Return the gradients to send. distributed.py overrides this method, for gradients that are missing."""
        return [param.grad for param in self.params]

    def start_param_sync(self):
        """Send this rank's updated shard to all ranks. The shards of the others arrive in place."""
        self.parameter.copy_main_to_model()
        self.param_sync = self.transport.all_gather(self.shards)

    def finish_param_sync(self):
        """Wait until the parameters have arrived, if they are in flight."""
        if self.param_sync is not None:
            for work in self.param_sync:
                work.wait()
            # Keep the works until the next all-gather: a work that nobody keeps may abort the process when Python ends.
            self.last_param_sync, self.param_sync = self.param_sync, None


class ParameterBuffer:
    """One tensor with the parameters of all buckets of one dtype. The model's parameters become views of it.

    So an all-gather into this tensor updates the model, without a copy.
    """

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
        shard: (numel / d,): this rank's part of the bucket in the ParameterBuffer.
        main_shard: (numel / d,): `shard` itself, or an fp32 copy of it if the parameters have 16 bits.
    """

    def __init__(self, shard):
        self.shard = shard
        self.main_shard = shard.to(torch.promote_types(shard.dtype, torch.float32))

    def copy_main_to_model(self):
        """Round the updated main parameters to 16 bits, if they are copies."""
        if self.main_shard is not self.shard:
            self.shard.copy_(self.main_shard)


class PartitionedGradient:
    """This rank's 1/d of a bucket's averaged gradients, in fp32 at least. The other gradients are dropped.

    Attributes:
        shard: (numel / d,), in the dtype of `main_shard`.
        divisor: `add` divides by it: the `divisor` of the transport.
        is_empty: whether the next average replaces what `shard` holds. False after a micro-batch: then the average of
            the next micro-batch is added. The optimizer sets it to True after a step, and in zero_grad.
    """

    def __init__(self, main_shard, divisor):
        self.shard, self.is_empty = torch.zeros_like(main_shard), True
        self.divisor = divisor

    def place_for(self, part):
        """Return (tensor for a collective to put an average into, list of the tensors to `add` afterwards).

        These are (shard, []) if the average needn't be added to another or cast. Else they are (part, [part]).
        """
        is_free = self.is_empty and (part.dtype, part.device) == (self.shard.dtype, self.shard.device)
        self.is_empty = self.is_empty and not is_free
        return (self.shard, []) if is_free else (part, [part])

    def add(self, parts):
        """Divide each of `parts` and add it, in fp32: the parts of all ranks, in rank order, or one average."""
        divisor = self.shard.new_full((), self.divisor)
        for part in parts:
            # Either shard = part / divisor, or shard += part / divisor.
            self.shard.copy_(part).div_(divisor) if self.is_empty else self.shard.addcdiv_(part, divisor)
            self.is_empty = False


class BucketBuffer:
    """Memory in which the gradients of one bucket are sent and received. It has room for the largest bucket.

    The optimizer has two BucketBuffers, so a third bucket waits until the first has arrived.

    Attributes:
        sent, received: bytes. They are the same tensor if the transport needs no memory to receive in.
        places: bucket -> (slots, sent, received): views of `sent`, shaped like the bucket's parameters; and the two
            memories as (d, numel / d). Made once, since Python makes views slowly, and computing waits meanwhile.
        bucket: the bucket whose gradients are in the buffer.
        works: the works to wait for, until the gradients have arrived.
        parts: the tensors to add up then, (numel / d,) each.
    """

    def __init__(self, buckets, transport):
        self.transport, self.places = transport, {}
        nbytes = max(bucket.numel * self.wire_dtype(bucket).itemsize for bucket in buckets)
        self.sent = torch.zeros(nbytes, dtype=torch.uint8, device=buckets[0].flat_params.device)
        self.received = torch.zeros_like(self.sent) if transport.needs_receive_buffer else self.sent
        for bucket in buckets:
            dtype = self.wire_dtype(bucket)
            # A bucket takes only the first bytes of both memories.
            sent, received = [memory[: bucket.numel * dtype.itemsize].view(dtype)
                              for memory in (self.sent, self.received)]
            slots = views_of(sent, bucket.tensors, bucket.starts)
            self.places[bucket] = slots, bucket.shards_of(sent), bucket.shards_of(received)

    def wire_dtype(self, bucket):
        """Return the dtype in which gradients are sent. Variants override this method."""
        return bucket.flat_params.dtype

    def start_grad_sync(self, bucket):
        """Take the gradients of `bucket` out of its parameters, and send them."""
        self.bucket = bucket
        slots, sent, received = self.places[bucket]
        torch._foreach_copy_(slots, bucket.grads())
        for param in bucket.params:
            param.grad = None
        bucket.ready.clear()
        self.works, self.parts = self.transport.reduce_scatter(sent, received, bucket.gradient)

    def finish_grad_sync(self):
        """Wait until the gradients have arrived, and add them to this rank's shard."""
        for work in self.works:
            work.wait()
        self.bucket.gradient.add(self.parts)


def param_starts(numels, alignment):
    """Lay parameters one after the other, at multiples of `alignment`. Return where each begins, and the end."""
    return list(itertools.accumulate((padded_numel(numel, 1, alignment) for numel in numels), initial=0))


def padded_numel(numel, world_size, alignment):
    """Round `numel` up to a length that cuts into `world_size` equal shards of multiples of `alignment`."""
    unit = world_size * alignment
    return -(-numel // unit) * unit  # -(-a // b) rounds a / b up


def ranges_in_shard(numels, starts, shard_start, shard_stop):
    """Return, as Ranges, the parts of parameters between two positions. A shard may begin or end within a parameter."""
    ranges = []
    for index, (numel, param_start) in enumerate(zip(numels, starts)):
        start, stop = max(shard_start, param_start), min(shard_stop, param_start + numel)
        if start < stop:
            ranges.append(Range(index, start - param_start, stop - param_start, start - shard_start))
    return ranges


def views_of(flat, params, starts):
    """Return views of `flat` that are shaped like `params` and begin at `starts`."""
    return [flat[start : start + param.numel()].view(param.shape) for param, start in zip(params, starts)]


def cut_ranges(shard, ranges):
    """Return for each of `ranges` a view of `shard`, (range numel,). Padding may lie between them."""
    return [shard[r.offset : r.offset + r.stop - r.start] for r in ranges]
