"""Buckets, the buffer that parameters live in, and the buffers that gradients travel in.

Sources of the ideas: DistributedDataParallel's buckets, Megatron-LLaMA's OverlappedDistributedOptimizer, veScale.
"""

import itertools
import threading
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from .checks import backends_of, local
from .hooks import Awaited, awaited

PIECE_BYTES = 1 << 20  # gloo is fast up to 1 MiB a message and peer
UNDER_WAY = set()  # what travels: an optimizer that is gone must not take its messages with it, others expect them


class Range(NamedTuple):
    """The part of a parameter that lies in a shard: `param.view(-1)[start:stop]` is `shard[offset:][:stop - start]`."""

    index: int  # which parameter
    start: int
    stop: int
    offset: int


def padded_numel(numel: int, world_size: int, alignment: int) -> int:
    """The least length of at least `numel` that cuts into `world_size` equal shards, each a multiple of `alignment`."""
    unit = world_size * alignment
    return -(-numel // unit) * unit


def param_starts(numels: list[int], alignment: int) -> list[int]:
    """Where parameters begin that lie one after the other, each at a multiple of `alignment`; and where they end."""
    return list(itertools.accumulate((padded_numel(numel, 1, alignment) for numel in numels), initial=0))


def ranges_in_shard(numels: list[int], starts: list[int], shard_start: int, shard_stop: int) -> list[Range]:
    """Which parts of parameters fall between two positions. Shards ignore parameter boundaries."""
    ranges = []
    for index, (numel, param_start) in enumerate(zip(numels, starts)):
        start, stop = max(shard_start, param_start), min(shard_stop, param_start + numel)
        if start < stop:
            ranges.append(Range(index, start - param_start, stop - param_start, start - shard_start))
    return ranges


def bucket_layout(nbytes: list[int], dtypes: list, cap_bytes: int) -> list[list[int]]:
    """Which parameters go into which bucket, by index, in the order in which the buckets leave.

    Gradients become ready in about the reverse order of the parameters. A bucket holds whole parameters of one dtype
    and is closed when it has at least `cap_bytes`. The first one is closed at a quarter of that, so that communication
    starts early; the last one takes about a quarter too, or half with what is left over, since nothing is left to hide
    it behind.
    """
    def nbytes_of(bucket):
        return sum(nbytes[i] for i in bucket)

    small = cap_bytes / 4
    n_last, last_bytes = 0, 0
    while n_last < len(nbytes) and last_bytes < small:
        last_bytes += nbytes[n_last]
        n_last += 1
    buckets, filling = [], {}  # filling: dtype -> the bucket that is open for it
    for index in reversed(range(n_last, len(nbytes))):
        bucket = filling.setdefault(dtypes[index], [])
        bucket.append(index)
        if nbytes_of(bucket) >= (cap_bytes if buckets else small):
            buckets.append(filling.pop(dtypes[index]))
    # What is left over joins the last one, unless that would make it large.
    buckets += [filling.pop(dtype) for dtype in list(filling) if nbytes_of(filling[dtype]) >= small]
    for index in reversed(range(n_last)):
        filling.setdefault(dtypes[index], []).append(index)
    return buckets + list(filling.values())


class Bucket:
    """Whole parameters of one dtype, whose gradients leave together; each rank owns 1/d of their elements.

    Args:
        params: in the order in which their gradients are expected.
        process_group: the d ranks that own a shard each.
        alignment: bytes, of which a shard is a multiple and at which each parameter begins. 64 is a cache line and the
            widest vector of a CPU: what a fused kernel makes of a part is then, to the bit, what it makes of the whole.
            GPUs and NCCL want 16.

    Attributes:
        ranges: where in the parameters this rank's shard lies.
        flat_params: (numel,): its part of the ParameterBuffer, padded to numel.
        shards: (shard_numel,) of each rank: views of flat_params.
        main_params: what this rank steps, one for each of `ranges`.
        parameter, gradient: this rank's PartitionedParameter and PartitionedGradient.
    """

    def __init__(self, params, process_group, alignment=64):
        self.params = params
        self.process_group = process_group
        self.dtype = params[0].dtype
        self.world_size, self.rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        numels = [local(param).numel() for param in params]
        alignment //= self.dtype.itemsize  # in elements
        *self.starts, end = param_starts(numels, alignment)
        self.numel = padded_numel(end, self.world_size, alignment)
        self.shard_numel = self.numel // self.world_size
        shard_start = self.rank * self.shard_numel
        self.ranges = ranges_in_shard(numels, self.starts, shard_start, shard_start + self.shard_numel)
        slots = zip(self.starts, numels, [*self.starts[1:], self.numel])
        self.padding = [slice(start + numel, stop) for start, numel, stop in slots if start + numel < stop]
        self.on_gloo = is_on_gloo(process_group, local(params[0]).device)
        self.param_sync = None  # the works of the all-gather that is under way
        self.lock = threading.RLock()  # several threads may wait for it
        self.awaited = {kind: awaited(kind) for kind in set(map(type, params))}

    def move_in(self, flat_params):
        """Make the parameters views of `flat_params`, (numel,), and make what this rank steps."""
        self.flat_params = flat_params
        params = [local(param) for param in self.params]
        self.views = views_of(flat_params, params, self.starts)
        for param, view in zip(params, self.views):
            param.data = view.copy_(param)
        self.note_new_params(self.params)
        self.shards = flat_params.view(self.world_size, -1).unbind()
        self.parameter = PartitionedParameter(self.shards[self.rank], self.ranges)
        self.main_params = self.parameter.main_params
        self.gradient = PartitionedGradient(self.parameter.main_shard, self.ranges)

    def is_full(self, ready):
        """Whether every gradient has come, by the ids in `ready`. What comes last is looked for first: it is quick."""
        return all(id(param) in ready or not param.requires_grad for param in reversed(self.params))

    def moved_params(self):
        """Those whose `data` somebody has replaced: they are no views of `flat_params` any more."""
        return [param for param, view in zip(self.params, self.views) if local(param).data_ptr() != view.data_ptr()]

    def hand_out_grads(self, unused):
        """Give each main parameter its gradient, or None if its parameter is in `unused`, a set of ids."""
        for r, main_param, main_grad in zip(self.ranges, self.main_params, self.gradient.main_grads):
            main_param.grad = None if id(self.params[r.index]) in unused else main_grad

    def start_param_sync(self, unused):
        """Launch the all-gather of the parameters, in place.

        Those in `unused`, a set of ids, were not stepped: graphs that have read them may live on.
        """
        self.stepped = [param for param in self.params if id(param) not in unused]
        self.parameter.copy_main_to_model()
        self.note_new_params(self.stepped)
        # This reference stays until the next: gloo's thread lets go of a work a moment after wait(). Held by it alone,
        # the tensors would make it ask for the GIL, and abort the process where Python ends meanwhile.
        self.last_param_sync = self._start_all_gather()
        under_way = [(self, "param_sync", self.last_param_sync)]
        under_way += [(kind, "bucket", self) for kind in self.awaited.values()]
        under_way += [(param, "__class__", self.awaited[type(param)]) for param in self.params]
        # In one call: if a signal handler, or another thread, waited amid these, some would be awaited for ever.
        deque(itertools.starmap(setattr, under_way), maxlen=0)

    def finish_param_sync(self):
        """Wait for the all-gather, if one is under way, and give the parameters their classes back. In any thread."""
        with self.lock:
            if self.param_sync is not None:
                for work in self.param_sync:
                    work.wait()
                # A signal handler that reads a parameter comes here too, between any two of these lines.
                with torch._C.DisableTorchFunctionSubclass():
                    self.note_new_params(self.stepped)
                for param in self.params:
                    if isinstance(param, Awaited):
                        param.__class__ = type(param).kind
                for kind in self.awaited.values():
                    kind.bucket = None
                self.param_sync = None

    def _start_all_gather(self):
        """That of gloo copies all that arrives out of a buffer of its own: there, a broadcast of each shard instead."""
        common = {"group": self.process_group, "async_op": True}
        if not self.on_gloo:
            return [dist.all_gather_into_tensor(self.flat_params, self.parameter.shard, **common)]
        return [dist.broadcast(shard, group_src=rank, **common) for rank, shard in enumerate(self.shards)]

    def note_new_params(self, changed):
        """Tell autograd, which saw nothing, that these are new: a graph that has read the old ones is refused."""
        torch.autograd.graph.increment_version([*changed, *map(local, changed)])
        self.versions = list(map(versions_of, self.params))

    def take_model_changes(self):
        """Where somebody has written into the parameters since, model.load_state_dict() say, main_shard follows."""
        if self.versions != list(map(versions_of, self.params)):
            self.parameter.copy_changes_to_main()


class ParameterBuffer:
    """Parameters of one dtype in one tensor, bucket after bucket: the model's are views, all-gathers land in place.

    Attributes:
        flat: (sum of the buckets' numel,).
    """

    def __init__(self, buckets):
        numels = [bucket.numel for bucket in buckets]
        self.flat = local(buckets[0].params[0]).new_zeros(sum(numels))
        for bucket, flat_params in zip(buckets, self.flat.split(numels)):
            bucket.move_in(flat_params)


class PartitionedParameter:
    """This rank's 1/d of the parameters of a bucket, in fp32 at least: what the inner optimizer steps.

    Attributes:
        shard: (shard_numel,): where it lies in the ParameterBuffer.
        main_shard: (shard_numel,) fp32, of fp64 parameters fp64: the same tensor unless the parameters have 16 bits.
        main_params: views of main_shard, one for each range.
    """

    def __init__(self, shard, ranges):
        self.shard = shard
        self.main_shard = shard.to(torch.promote_types(shard.dtype, torch.float32))
        self.main_params = cut_ranges(self.main_shard, ranges)

    def copy_main_to_model(self):
        self.shard.copy_(self.main_shard)

    def copy_changes_to_main(self):
        """An element that is still what main_shard rounds to keeps its fp32 value."""
        changed = self.shard != self.main_shard.to(self.shard.dtype)
        self.main_shard.copy_(torch.where(changed, self.shard, self.main_shard))


class PartitionedGradient:
    """This rank's 1/d of the averaged gradients of a bucket, in fp32 at least: all that stays of them.

    Attributes:
        shard: (shard_numel,), of the dtype of `main_shard`.
        main_grads: views of shard, one for each range.
        is_empty: whether the next sum replaces what it holds.
    """

    def __init__(self, main_shard, ranges):
        self.shard = torch.zeros_like(main_shard)
        self.main_grads = cut_ranges(self.shard, ranges)
        self.is_empty = True

    def add(self, parts):
        """Sum `parts`, one of each rank or their sum, in order and in fp32, onto what earlier micro-batches left."""
        if self.is_empty and len(parts) > 1 and parts[0].dtype == self.shard.dtype:
            torch.add(parts[0], parts[1], out=self.shard)  # one pass over memory instead of two
            parts = parts[2:]
        elif self.is_empty:
            self.shard.copy_(parts[0])
            parts = parts[1:]
        for part in parts:
            self.shard += part
        self.is_empty = False


class Place(NamedTuple):
    """A bucket in a BucketBuffer: made once, since Python is slow at making views, and computing waits meanwhile."""

    flat: torch.Tensor  # (numel,) of what is sent
    slots: list  # views of flat, shaped like the parameters: where the gradients go
    padding: list  # and what is left
    parts: list  # (shard_numel,) each: what this rank sums, of every rank in order; without an exchange its own only
    messages: list  # of the exchange, (isend or irecv, view, rank) each: a P2POp would keep a group that is destroyed


class BucketBuffer:
    """Where the gradients of one bucket travel. There are two of them, and a third bucket waits: memory is bounded.

    NCCL has a reduce-scatter. That of gloo is an all-reduce underneath, twice the bytes: there, and wherever
    `reduce_dtype` is given, the ranks exchange their parts, and each one sums what it owns in fp32 and in rank order.

    Args:
        buckets: those that it may be for, of one process group and device.
        tag: of its messages, another one for each optimizer.
    """

    def __init__(self, buckets, reduce_dtype, tag):
        self.tag = tag
        self.exchange = reduce_dtype is not None or buckets[0].on_gloo
        nbytes, device = max(bucket.flat_params.nbytes for bucket in buckets), buckets[0].flat_params.device
        self.sent = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.received = torch.empty(nbytes if self.exchange else 0, dtype=torch.uint8, device=device)
        self.nbytes = self.sent.nbytes + self.received.nbytes
        self.places = {bucket: self._place(bucket) for bucket in buckets}

    @torch.no_grad()
    def take_grads(self, bucket):
        """Take the gradients out of the parameters of `bucket`, and scale them by 1/d."""
        self.bucket, self.works = bucket, None  # what is under way, when it has left
        self.place = self.places[bucket]
        for param, slot in zip(bucket.params, self.place.slots):
            if param.grad is None:
                slot.zero_()
            else:
                torch.div(local_grad(param).to_dense(), bucket.world_size, out=slot)
                param.grad = None
        for padding in self.place.padding:
            padding.zero_()  # nobody reads it, but nothing of another bucket is to leave with this one

    def start_grad_sync(self):
        """Send them off."""
        place, group = self.place, self.bucket.process_group
        if self.exchange:
            operations = [dist.P2POp(op, view, None, group, self.tag, rank) for op, view, rank in place.messages]
            self.works = dist.batch_isend_irecv(operations) if operations else []
        else:
            self.works = [dist.reduce_scatter_tensor(place.parts[0], place.flat, group=group, async_op=True)]
        self.under_way = self.sent, self.received, *self.works
        UNDER_WAY.add(self.under_way)

    def finish_grad_sync(self):
        """Wait, and add the sum to the shard of the bucket."""
        for work in self.works:
            work.wait()
        UNDER_WAY.remove(self.under_way)
        self.bucket.gradient.add(self.place.parts)

    def _place(self, bucket):
        flat = self.sent[: bucket.numel * bucket.dtype.itemsize].view(bucket.dtype)
        slots = views_of(flat, [local(param) for param in bucket.params], bucket.starts)
        padding = [flat[positions] for positions in bucket.padding]
        mine = flat.view(bucket.world_size, -1).unbind()  # (shard_numel,) each: the r-th is what rank r owns
        if not self.exchange:
            return Place(flat, slots, padding, [mine[bucket.rank]], [])
        theirs = self.received[: flat.nbytes].view(bucket.dtype).view(bucket.world_size, -1).unbind()
        parts = [*theirs[: bucket.rank], mine[bucket.rank], *theirs[bucket.rank + 1 :]]
        return Place(flat, slots, padding, parts, exchange_messages(bucket, mine, theirs))


def exchange_messages(bucket, mine, theirs):
    """-> those that send every other rank its part, and receive this rank's from each, in pieces."""
    piece = PIECE_BYTES // bucket.dtype.itemsize
    messages = []
    for distance in range(1, bucket.world_size):
        to, by = (bucket.rank + distance) % bucket.world_size, (bucket.rank - distance) % bucket.world_size
        for send, receive in zip(mine[to].split(piece), theirs[by].split(piece)):
            messages += [(dist.isend, send, to), (dist.irecv, receive, by)]
    return messages


def is_on_gloo(process_group, device):
    return backends_of(process_group).get(device.type) == "gloo"


def versions_of(param):
    """A DTensor has a version counter, and so has what this rank has of it: a write moves on one of the two."""
    return param._version, local(param)._version


def local_grad(param):
    """What this rank has of a parameter's gradient; that of a DTensor may be a partial sum, or lie otherwise."""
    grad = param.grad
    if hasattr(param, "placements") and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def cut_ranges(shard, ranges):
    """Cut a shard into views, one for each of its `ranges`; what is left is padding."""
    return [shard[r.offset : r.offset + r.stop - r.start] for r in ranges]


def views_of(flat, params, starts):
    """Views of `flat`, shaped like `params`, which begin at `starts`."""
    return [flat[start : start + param.numel()].view(param.shape) for param, start in zip(params, starts)]
