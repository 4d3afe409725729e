"""Replaces gloo's reduce-scatter by one that sends what the formula says, and its all-gather by a faster one.

gloo's own reduce-scatter is an all-reduce underneath, which sends twice the bytes. Its all-gather takes 1.5 times as
long as the link: messages of more than 1 MiB are slow. All rows are measured with the functions below. They exchange
pieces of at most 1 MiB, as stage 4's transport does. To sum, a rank holds two pieces of every other rank.
"""

import contextlib
import functools
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

PIECE_BYTES = 1 << 20  # gloo is fast up to 1 MiB a message and peer
# torch before 2.13 has only the first of both names; FSDP2 calls the second, where there is one.
SCATTERS = [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)]
GATHERS = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]


@contextlib.contextmanager
def in_place_of_gloos():
    """Replace, while entered, torch's reduce-scatter and all-gather of a tensor for groups of gloo."""
    replaced = {name: functools.partial(reduce_scatter, getattr(dist, name)) for name in SCATTERS}
    replaced |= {name: functools.partial(all_gather, getattr(dist, name)) for name in GATHERS}
    with mock.patch.multiple(dist, **replaced):
        yield


@torch.no_grad()
def reduce_scatter(native, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """Stand in for torch's function, `native`, and sum in rank order. `output` may be this rank's part of `input`."""
    if dist.get_backend(group) != "gloo":
        return native(output, input, op=op, group=group, async_op=async_op)
    if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise NotImplementedError("the exchange in place of gloo's reduce-scatter waits, and sums or averages")
    rank = dist.get_rank(group)
    d = dist.get_world_size(group)
    own_part = output.view(-1)  # (shard_numel,)
    parts = input.view(d, -1)  # (d, shard_numel)
    numel = max(1, PIECE_BYTES // input.itemsize)
    pieces = [part.split(numel) for part in parts]  # pieces[rank][number]
    # Pieces arrive in one of two buffers by turns: while a piece is added up, the next piece arrives.
    buffers = input.new_empty(2, d, min(numel, own_part.numel()))
    next_works = exchange(pieces, buffers, 0, rank, group)
    for number, own_piece in enumerate(own_part.split(numel)):
        works = next_works
        next_works = exchange(pieces, buffers, number + 1, rank, group)
        for work in works:
            work.wait()
        summands = [*buffers[number % 2, :, : own_piece.numel()]]  # (d, numel of the piece), by rank
        summands[rank] = pieces[rank][number]
        sum_into(own_piece, summands)
    if op == dist.ReduceOp.AVG:
        own_part /= d


def sum_into(total, summands):
    """Write the sum of `summands`, in their order, into `total`, which may be one of them."""
    *others, last = summands
    if others:
        torch.add(functools.reduce(torch.add, others), last, out=total)
    else:
        total.copy_(last)


@torch.no_grad()
def all_gather(native, output_tensor, input_tensor, group=None, async_op=False):
    """Stand in for torch's function, `native`. `input_tensor` may be this rank's part of `output_tensor`."""
    if dist.get_backend(group) != "gloo":
        return native(output_tensor, input_tensor, group=group, async_op=async_op)
    if async_op:
        raise NotImplementedError("the exchange in place of gloo's all-gather waits")
    rank = dist.get_rank(group)
    d = dist.get_world_size(group)
    numel = max(1, PIECE_BYTES // input_tensor.itemsize)
    parts = output_tensor.view(d, -1)
    own_part = input_tensor.reshape(-1)
    if own_part.data_ptr() != parts[rank].data_ptr():
        parts[rank].copy_(own_part)
    messages = [Message(piece, to, received, source)
                for to, source in neighbours(rank, d)
                for piece, received in zip(own_part.split(numel), parts[source].split(numel))]
    for work in start(messages, group):
        work.wait()


class Message(NamedTuple):
    """A tensor that is sent to a rank of the group, and a tensor into which one is received from a rank."""
    sent: torch.Tensor
    to: int
    received: torch.Tensor
    source: int


def exchange(pieces, buffers, number, rank, group):
    """Send piece `number` of each other rank's part, if there is one, and receive this rank's. Returns the works."""
    messages = []
    for to, source in neighbours(rank, len(pieces)):
        if number < len(pieces[to]):
            sent = pieces[to][number]
            messages.append(Message(sent, to, buffers[number % 2, source, : sent.numel()], source))
    return start(messages, group)


def neighbours(rank, d):
    """Return [(to, source), …], the nearest first, so that ranks don't all send to the same one."""
    return [((rank + distance) % d, (rank - distance) % d) for distance in range(1, d)]


def start(messages, group):
    """Send and receive Messages. Returns the works."""
    operations = []
    for message in messages:
        operations.append(dist.P2POp(dist.isend, message.sent, group=group, group_peer=message.to))
        operations.append(dist.P2POp(dist.irecv, message.received, group=group, group_peer=message.source))
    return dist.batch_isend_irecv(operations) if operations else []
