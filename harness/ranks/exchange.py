"""Replaces the reduce-scatter and the all-gather of gloo, torch's backend for CPUs, while ways to train are measured.

In a reduce-scatter of n bytes over d ranks, each rank should send (d-1)/d n bytes. gloo's reduce-scatter is an
all-reduce underneath, which sends twice as many. gloo's all-gather sends the right number of bytes, but takes 1.5 times
as long as the link needs for them, because gloo is slow at messages of more than 1 MiB.

So the functions below cut tensors into pieces, and each rank sends a piece to each other rank. They use the class
Exchange, by which stage 4 (stage4_overlap/) sends on CPUs. All ways to train that are compared are measured with these
functions. In a reduce-scatter a rank needs memory for two pieces from each other rank.
"""

import contextlib
import functools
from unittest import mock

import torch
import torch.distributed as dist

from stage4_overlap.transport import PIECE_BYTES, Exchange

# Names of the replaced functions in torch.distributed. torch before 2.13 has only the first name of each pair. If torch
# has the second name, FSDP2 calls the function by that name.
SCATTERS = [name for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(dist, name)]
GATHERS = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]


@contextlib.contextmanager
def in_place_of_gloos():
    """Within this context, replace torch's reduce-scatter and all-gather of a tensor for groups of gloo.

    The functions of this file get torch's function as their first argument, `native`, and call it for other groups,
    such as NCCL's.
    """
    replaced = {name: functools.partial(reduce_scatter, getattr(dist, name)) for name in SCATTERS}
    replaced |= {name: functools.partial(all_gather, getattr(dist, name)) for name in GATHERS}
    with mock.patch.multiple(dist, **replaced):
        yield


@torch.no_grad()
def reduce_scatter(native, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
    """Do what torch's function `native` does, and add in the order of ranks. It takes torch's arguments after `native`.

    `output` may be this rank's part of `input` itself.
    """
    if dist.get_backend(group) != "gloo":
        return native(output, input, op=op, group=group, async_op=async_op)
    if async_op or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise NotImplementedError("the exchange in place of gloo's reduce-scatter waits, and sums or averages")
    transport = Exchange(group)  # sends pieces between the ranks of the group
    d = transport.world_size
    own_part = output.view(-1)  # (shard_numel,)
    parts = input.view(d, -1)  # (d, shard_numel)
    piece_numel = max(1, PIECE_BYTES // input.itemsize)
    # pieces[number][rank] is a piece of the part that this rank has for `rank`.
    pieces = list(zip(*(part.split(piece_numel) for part in parts)))
    # Two buffers take turns: while pieces from all ranks are added up in a buffer, the next pieces arrive in the other.
    buffers = input.new_empty(2, d, min(piece_numel, own_part.numel()))

    def start(number):
        """Send to each rank piece `number` of its part, and start to receive that piece of this rank's own part.

        Returns (works, summands): after a wait for all works, the summands, one from each rank, have arrived.
        """
        numel_to_send = pieces[number][0].numel()  # the last piece may be shorter
        return transport.exchange(pieces[number], buffers[number % 2, :, :numel_to_send])

    next_works, next_summands = start(0)
    for number, own_piece in enumerate(own_part.split(piece_numel)):
        works, summands = next_works, next_summands
        # The next piece is under way while this rank waits for this piece, and adds it up.
        if number + 1 < len(pieces):
            next_works, next_summands = start(number + 1)
        for work in works:
            work.wait()
        sum_into(own_piece, summands)
    if op == dist.ReduceOp.AVG:
        own_part /= d


def sum_into(total, summands):
    """Add up the tensors `summands` in their order, and write the sum into `total`, which may be one of them itself."""
    *others, last = summands
    if others:
        torch.add(functools.reduce(torch.add, others), last, out=total)
    else:
        total.copy_(last)


@torch.no_grad()
def all_gather(native, output_tensor, input_tensor, group=None, async_op=False):
    """Do what torch's function `native` does. It takes torch's arguments after `native`.

    `input_tensor` may be this rank's part of `output_tensor` itself, which then needs no copy.
    """
    if dist.get_backend(group) != "gloo":
        return native(output_tensor, input_tensor, group=group, async_op=async_op)
    if async_op:
        raise NotImplementedError("the exchange in place of gloo's all-gather waits")
    transport = Exchange(group)
    parts = output_tensor.view(transport.world_size, -1)
    own_part = input_tensor.reshape(-1)
    if own_part.data_ptr() != parts[transport.rank].data_ptr():
        parts[transport.rank].copy_(own_part)
    # Every rank gets this rank's own part, which `exchange` cuts into pieces. What another rank sends arrives in that
    # rank's row of `parts`.
    works, _ = transport.exchange([own_part] * transport.world_size, parts)
    for work in works:
        work.wait()
