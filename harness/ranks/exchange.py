"""Replaces gloo's reduce-scatter by one that sends what the formula says, and its all-gather by a faster one.

gloo's own reduce-scatter is an all-reduce underneath, which sends twice the bytes. Its all-gather takes 1.5 times as
long as the link: messages of more than 1 MiB are slow. All rows are measured with the functions below, which exchange
pieces as stage 4's transport does. In a reduce-scatter a rank has room for two pieces from each other rank.
"""

import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist

from stage4_overlap.transport import PIECE_BYTES, Exchange

# torch before 2.13 has only the first name of each pair; where torch has the second name, FSDP2 calls that.
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
    transport = Exchange(group)
    d = transport.world_size
    own_part = output.view(-1)  # (shard_numel,)
    parts = input.view(d, -1)  # (d, shard_numel)
    piece_numel = max(1, PIECE_BYTES // input.itemsize)
    pieces = list(zip(*(part.split(piece_numel) for part in parts)))  # pieces[number][rank]
    # Pieces arrive in two buffers by turns: while a piece is added up, the next piece arrives.
    buffers = input.new_empty(2, d, min(piece_numel, own_part.numel()))

    def start(number):
        """Send piece `number` of each rank's part. Returns works to wait for, and the summands they bring, by rank."""
        numel_to_send = pieces[number][0].numel()  # the last piece may be shorter
        return transport.exchange(pieces[number], buffers[number % 2, :, :numel_to_send])

    next_works, next_summands = start(0)
    for number, own_piece in enumerate(own_part.split(piece_numel)):
        works, summands = next_works, next_summands
        if number + 1 < len(pieces):
            next_works, next_summands = start(number + 1)
        for work in works:
            work.wait()
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
    transport = Exchange(group)
    parts = output_tensor.view(transport.world_size, -1)
    own_part = input_tensor.reshape(-1)
    if own_part.data_ptr() != parts[transport.rank].data_ptr():
        parts[transport.rank].copy_(own_part)
    works, _ = transport.exchange([own_part] * transport.world_size, parts)
    for work in works:
        work.wait()
