"""Buckets, the buffer that parameters live in, and the buffers that gradients travel in.

Sources of the ideas: DistributedDataParallel's buckets, Megatron-LLaMA's OverlappedDistributedOptimizer, veScale.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

PIECE_BYTES = 1 << 20  # gloo is fast up to 1 MB a message and peer


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


def ranges_in_shard(numels: list[int], shard_start: int, shard_stop: int) -> list[Range]:
    """Which parts of parameters that lie end to end fall between two positions. Shards ignore parameter boundaries."""
    ranges, param_start = [], 0
    for index, numel in enumerate(numels):
        start, stop = max(shard_start, param_start), min(shard_stop, param_start + numel)
        if start < stop:
            ranges.append(Range(index, start - param_start, stop - param_start, start - shard_start))
        param_start += numel
    return ranges


def bucket_layout(nbytes: list[int], dtypes: list, cap_bytes: int) -> list[list[int]]:
    """Which parameters go into which bucket, by index, in the order in which the buckets leave.

    Gradients become ready in about the reverse order of the parameters. A bucket holds whole parameters of one dtype
    and is closed when it has at least `cap_bytes`. The first one is closed at a quarter of that, so that communication
    starts early; the last one takes only a quarter too, since nothing is left to hide it behind.
    """
    n_last, last_bytes = 0, 0
    while n_last < len(nbytes) and last_bytes < cap_bytes / 4:
        last_bytes += nbytes[n_last]
        n_last += 1
    buckets, filling = [], {}  # filling: dtype -> the bucket that is open for it
    for index in reversed(range(n_last, len(nbytes))):
        bucket = filling.setdefault(dtypes[index], [])
        bucket.append(index)
        if sum(nbytes[i] for i in bucket) >= (cap_bytes if buckets else cap_bytes / 4):
            buckets.append(filling.pop(dtypes[index]))
    buckets += filling.values()
    for dtype in dict.fromkeys(dtypes[:n_last]):
        buckets.append([index for index in reversed(range(n_last)) if dtypes[index] == dtype])
    return buckets


class Bucket:
    """Whole parameters of one dtype, whose gradients leave together; each rank owns 1/d of their elements.

    Args:
        params: in the order in which their gradients are expected.
        process_group: the d ranks that own a shard each.
        alignment: bytes of which a shard is a multiple. 64 is a cache line and the widest vector of a CPU: a fused
            kernel then rounds a shard as it rounds the whole. GPUs and NCCL want 16.

    Attributes:
        flat_params: (numel,): its part of the ParameterBuffer; the model's tensors are views of it. Padded to numel.
        param_shard: (shard_numel,): this rank's part of that; the all-gather is in place.
        grad_shard: (shard_numel,) fp32: this rank's part of the averaged gradients (PartitionedGradient).
        main_params: for each range in this rank's shard what the inner optimizer steps (PartitionedParameter): views
            of param_shard where that is fp32, else fp32 copies.
        ranges: where in the parameters those are.
    """

    def __init__(self, params, process_group, alignment=64):
        self.params = params
        self.process_group = process_group
        self.dtype = params[0].dtype
        self.world_size, self.rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        self.numels = [param.numel() for param in params]
        self.numel = padded_numel(sum(self.numels), self.world_size, alignment // self.dtype.itemsize)
        self.shard_numel = self.numel // self.world_size
        self.ranges = ranges_in_shard(self.numels, self.rank * self.shard_numel, (self.rank + 1) * self.shard_numel)
        self.ready = set()  # ids of the parameters whose gradient is there
        self.has_grads = False  # whether grad_shard holds something to add to
        self.param_sync = None  # the all-gather that is under way

    def move_in(self, flat_params):
        """Make the parameters views of `flat_params`, (numel,), and make what this rank steps."""
        self.flat_params = flat_params
        for param, piece in zip(self.params, split_like(flat_params, self.params)):
            param.data = piece.copy_(param)
        self.param_shard = flat_params.view(self.world_size, self.shard_numel)[self.rank]
        main_dtype = torch.promote_types(self.dtype, torch.float32)
        self.grad_shard = torch.zeros_like(self.param_shard, dtype=main_dtype)
        self.main_shard = self.param_shard.to(main_dtype)  # the same tensor if it is fp32
        self.main_params = self._cut(self.main_shard)
        self.main_grads = self._cut(self.grad_shard)

    def is_full(self):
        return all(id(param) in self.ready or not param.requires_grad for param in self.params)

    def add_grads(self, parts):
        """Sum what the ranks sent, in rank order and in fp32, onto what earlier micro-batches left."""
        for part in parts:
            if self.has_grads:
                self.grad_shard += part
            else:
                self.grad_shard.copy_(part)
            self.has_grads = True

    def hand_out_grads(self, unused):
        """Give each main parameter its gradient, or None if its parameter is frozen or in `unused`, a set of ids."""
        for r, main_param, main_grad in zip(self.ranges, self.main_params, self.main_grads):
            param = self.params[r.index]
            main_param.grad = main_grad if param.requires_grad and id(param) not in unused else None

    def start_param_sync(self):
        """Launch the all-gather of the stepped parameters, in place."""
        self.param_shard.copy_(self.main_shard)
        self.param_sync = dist.all_gather_into_tensor(
            self.flat_params, self.param_shard, group=self.process_group, async_op=True
        )

    def finish_param_sync(self):
        if self.param_sync is not None:
            self.param_sync.wait()
            self.param_sync = None

    def _cut(self, shard):
        return [shard[r.offset : r.offset + r.stop - r.start] for r in self.ranges]


def fill_parameter_buffer(buckets):
    """Move the parameters into one flat tensor a dtype, bucket after bucket: the ParameterBuffer."""
    for dtype in dict.fromkeys(bucket.dtype for bucket in buckets):
        same = [bucket for bucket in buckets if bucket.dtype == dtype]
        flat = same[0].params[0].new_zeros(sum(bucket.numel for bucket in same))
        for bucket, flat_params in zip(same, flat.split([bucket.numel for bucket in same])):
            bucket.move_in(flat_params)


class BucketBuffer:
    """Where the gradients of one bucket travel. There are two of them, and a third bucket waits: memory is bounded.

    NCCL has a reduce-scatter. That of gloo is an all-reduce underneath, twice the bytes: there, and wherever
    `reduce_dtype` is given, the ranks exchange their parts, and each one sums what it owns in fp32 and in rank order.

    Args:
        nbytes: size of the largest bucket.
    """

    def __init__(self, nbytes, device, process_group, reduce_dtype):
        self.process_group = process_group
        self.exchange = reduce_dtype is not None or dist.get_backend(process_group) == "gloo"
        self.sent = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.received = torch.empty(nbytes if self.exchange else 0, dtype=torch.uint8, device=device)
        self.nbytes = self.sent.nbytes + self.received.nbytes

    def start_grad_sync(self, bucket):
        """Take the gradients out of the parameters of `bucket`, scale them by 1/d, and send them off."""
        self.bucket = bucket
        bucket.ready.clear()
        flat = self.sent[: bucket.numel * bucket.dtype.itemsize].view(bucket.dtype)
        for param, slot in zip(bucket.params, split_like(flat, bucket.params)):
            if param.grad is None:
                slot.zero_()
            else:
                slot.copy_(param.grad)
                param.grad = None
        flat[sum(bucket.numels) :].zero_()
        flat /= bucket.world_size
        self.mine = flat.view(bucket.world_size, -1)  # (d, shard_numel): row r is what rank r owns
        if self.exchange:
            self.theirs = self.received[: flat.nbytes].view(bucket.dtype).view_as(self.mine)
            self.works = self._start_exchange(bucket)
        else:
            self.works = [
                dist.reduce_scatter_tensor(self.mine[bucket.rank], flat, group=self.process_group, async_op=True)
            ]

    def finish_grad_sync(self):
        """Wait, and add the sum to the shard of the bucket."""
        for work in self.works:
            work.wait()
        parts = [self.mine[self.bucket.rank]]
        if self.exchange:
            parts = [*self.theirs[: self.bucket.rank], *parts, *self.theirs[self.bucket.rank + 1 :]]
        self.bucket.add_grads(parts)

    def _start_exchange(self, bucket):
        """Send every other rank its row, and receive this rank's from each, in pieces."""
        piece = PIECE_BYTES // bucket.dtype.itemsize
        operations = []
        for distance in range(1, bucket.world_size):
            to, by = (bucket.rank + distance) % bucket.world_size, (bucket.rank - distance) % bucket.world_size
            for start in range(0, bucket.shard_numel, piece):
                send, receive = self.mine[to, start : start + piece], self.theirs[by, start : start + piece]
                operations.append(dist.P2POp(dist.isend, send, group=self.process_group, group_peer=to))
                operations.append(dist.P2POp(dist.irecv, receive, group=self.process_group, group_peer=by))
        return dist.batch_isend_irecv(operations) if operations else []


def split_like(flat, params):
    """Cut the start of `flat` into views shaped like `params`."""
    pieces = flat[: sum(param.numel() for param in params)].split([param.numel() for param in params])
    return [piece.view(param.shape) for piece, param in zip(pieces, params)]
