"""For gloo, a reduce-scatter that sends what the formula says, and an all-gather that takes what the line takes.

gloo's own reduce-scatter is an all-reduce underneath, which sends twice the bytes. Its all-gather is half as slow again
as the line: messages of more than a MiB are slow. Rows are measured with these, all alike, put in from outside: none
knows. They are the exchange of stage 4's transport, in pieces: what a rank holds for the sum is two pieces of every
other rank's, and no more. Rows called "gloo's own" are those without.
"""

import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist

PIECE_BYTES = 1 << 20  # gloo is fast up to 1 MiB a message and peer
# Both names of torch; releases before 2.13 have the first alone, and FSDP2 calls the second where there is one.
NAMES = [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)]
GATHERS = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]


@contextlib.contextmanager
def in_place_of_gloos():
    """While it is entered, torch's reduce-scatter and all-gather of a tensor are these for groups of gloo."""
    own = {name: functools.partial(reduce_scatter, getattr(dist, name)) for name in NAMES}
    own |= {name: functools.partial(all_gather, getattr(dist, name)) for name in GATHERS}
    with mock.patch.multiple(dist, **own):
        yield


@torch.no_grad()
def reduce_scatter(native, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """As torch.distributed.reduce_scatter_tensor, `native`; sums in rank order. `output` may be this rank's own part
    of `input`, as in stage 3. Raises NotImplementedError where nothing here has asked for it: async_op, other ops."""
    if dist.get_backend(group) != "gloo":
        return native(output, input, op=op, group=group, async_op=async_op)
    if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise NotImplementedError("the exchange in place of gloo's reduce-scatter waits, and sums or averages")
    rank, d = dist.get_rank(group), dist.get_world_size(group)
    out, parts = output.view(-1), input.view(d, -1)  # (shard_numel,), (d, shard_numel)
    numel = max(1, PIECE_BYTES // input.itemsize)
    pieces = [part.split(numel) for part in parts]
    received = input.new_empty(2, d, min(numel, out.numel()))  # one is added up while the other fills
    next_works = exchange(pieces, received, 0, rank, group)
    for number, piece in enumerate(out.split(numel)):
        works, next_works = next_works, exchange(pieces, received, number + 1, rank, group)
        for work in works:
            work.wait()
        arrived = received[number % 2, :, : piece.numel()]
        *first, last = [*arrived[:rank], pieces[rank][number], *arrived[rank + 1 :]]
        if first:
            torch.add(functools.reduce(torch.add, first), last, out=piece)
        else:
            piece.copy_(last)
    if op == dist.ReduceOp.AVG:
        out /= d


@torch.no_grad()
def all_gather(native, output_tensor, input_tensor, group=None, async_op=False):
    """As torch.distributed.all_gather_into_tensor, `native`. `input_tensor` may be this rank's own part of the output,
    as in stage 3. Raises NotImplementedError for async_op."""
    if dist.get_backend(group) != "gloo":
        return native(output_tensor, input_tensor, group=group, async_op=async_op)
    if async_op:
        raise NotImplementedError("the exchange in place of gloo's all-gather waits")
    rank, d = dist.get_rank(group), dist.get_world_size(group)
    numel, parts = max(1, PIECE_BYTES // input_tensor.itemsize), output_tensor.view(d, -1)
    mine = input_tensor.reshape(-1)
    if mine.data_ptr() != parts[rank].data_ptr():
        parts[rank].copy_(mine)
    for work in start([(piece, to, received, by) for to, by in neighbours(rank, d)
                       for piece, received in zip(mine.split(numel), parts[by].split(numel))], group):
        work.wait()


def neighbours(rank, d):
    """-> (to, by) for each other rank: nearest first, so that no rank is the target of all."""
    return [((rank + distance) % d, (rank - distance) % d) for distance in range(1, d)]


def start(messages, group):
    """`messages`: (sent, to, received, by) -> the works."""
    operations = []
    for sent, to, received, by in messages:
        operations.append(dist.P2POp(dist.isend, sent, group=group, group_peer=to))
        operations.append(dist.P2POp(dist.irecv, received, group=group, group_peer=by))
    return dist.batch_isend_irecv(operations) if operations else []


def exchange(pieces, received, number, rank, group):
    """Start piece `number`, if there is one, of every other rank's part, and of this rank's from every other -> the
    works."""
    return start([(pieces[to][number], to, received[number % 2, by, : pieces[to][number].numel()], by)
                  for to, by in neighbours(rank, len(pieces)) if number < len(pieces[to])], group)
