"""Stands in for torch's collectives: notes what is sent, and delivers each message when somebody waits for it.

In torch a message may arrive at any line between the call of a collective and the line that waits for it. Here the
ranks exchange copies when a collective is called, and `wait` puts what was received into its place. Therefore a program
that is recorded twice gives the same recording, and an optimizer that reads too early reads the old values.

An operation is a broadcast, a reduce-scatter or an all-gather of all ranks. An all-reduce is noted as two operations,
a reduce-scatter and an all-gather, at the line of the all-reduce. The first arrives before the second leaves.

Reads and writes of memory are noted, too: show/labels.py uses them to find garbage, values that nobody reads again.
torch calls all its functions on tensors through its dispatcher, which says what each function reads and writes.
Memory is counted in cells of 4 bytes. A Span of show/trace.py names some cells of a storage.
"""

from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# torch's functions that write a tensor without reading it first. Others, such as add_, read what they write.
WRITES_ONLY = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_")


class Call(NamedTuple):
    """What one rank does of an operation."""
    key: int  # the number of the operation: equal on all ranks, which call the same operations in the same order
    kind: str  # "broadcast", "reduce-scatter" or "all-gather"
    whole: str  # the collective that the program called: "all-reduce" in both halves of one, otherwise `kind`
    root: int | None  # in a broadcast the rank that sends, otherwise None
    reads: tuple  # the Span that this rank sends, or would send if it were the root
    writes: tuple  # the Span where the message arrives on this rank


class Work:
    """Stands in for torch's Work: calls `deliver` when `wait` is called for the first time."""

    def __init__(self, deliver):
        self.deliver = deliver
        self.is_done = False

    def wait(self):
        if not self.is_done:
            self.is_done = True
            self.deliver()


class Wires(TorchDispatchMode):
    """Notes in a recorder, a Trace of show/trace.py, what this rank reads, writes, sends and receives.

    Reads and writes are noted inside `with wires:`, messages inside `with wires.collectives():`.
    """

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder
        self.n_operations = 0  # how many operations this rank has begun
        self.is_listening = True  # whether reads and writes are noted

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Note what a function of torch reads and writes, and call it. torch calls this method in its place."""
        kwargs = kwargs or {}
        if self.is_listening:
            self.note_accesses(function._schema, args, kwargs)
        return function(*args, **kwargs)

    def note_accesses(self, schema, args, kwargs):
        """Note which tensors among the arguments a function of torch reads, and which it writes. schema: torch's."""
        names = [argument.name for argument in schema.arguments]
        values = dict(zip(names, args)) | kwargs
        written = []
        for argument in schema.arguments:
            # An argument may be a tensor, a list of tensors, or no tensor at all.
            tensors = [leaf for leaf in tree_leaves(values.get(argument.name)) if isinstance(leaf, torch.Tensor)]
            # An argument has alias_info if it is written, or if the result is a view of it. A view reads nothing.
            alias = argument.alias_info
            if alias is None:
                self.recorder.record_access(tensors, "read")
            elif alias.is_write:
                written += tensors
                is_read_first = argument.name != "out" and schema.name not in WRITES_ONLY
                if is_read_first:
                    self.recorder.record_access(tensors, "read")
        self.recorder.record_access(written, "write")

    def collectives(self):
        """Return a context in which the next four methods replace torch.distributed's functions of the same names."""
        return mock.patch.multiple(
            dist, broadcast=self.broadcast, all_reduce=self.all_reduce,
            reduce_scatter_tensor=self.reduce_scatter_tensor, all_gather_into_tensor=self.all_gather_into_tensor)

    def broadcast(self, tensor, src=None, group=None, group_src=None):
        root = group_src if src is None else src
        copies = self.copies_of_ranks(tensor)
        self.send("broadcast", tensor, tensor, copies[root], root=root)

    def all_reduce(self, tensor, group=None):
        total = sum(self.copies_of_ranks(tensor))
        own_shard = shard_of(tensor)
        self.send("reduce-scatter", tensor, own_shard, shard_of(total), whole="all-reduce")
        self.send("all-gather", own_shard, tensor, total, whole="all-reduce")

    def reduce_scatter_tensor(self, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        total = sum(self.copies_of_ranks(input))
        if op == dist.ReduceOp.AVG:
            total /= dist.get_world_size()
        return self.send("reduce-scatter", input, output, shard_of(total), async_op=async_op)

    def all_gather_into_tensor(self, output, input, group=None, async_op=False):
        gathered = torch.cat(self.copies_of_ranks(input))
        return self.send("all-gather", input, output, gathered, async_op=async_op)

    def copies_of_ranks(self, tensor):
        """Return a list with a copy of each rank's `tensor`. All ranks call this at the same collective."""
        # This all-gather isn't the program's, so its reads don't count. `deliver` notes what the program reads.
        self.is_listening = False
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.detach())
        self.is_listening = True
        return copies

    def send(self, kind, source, target, received, whole="", root=None, async_op=False):
        """Note that `source` leaves, and return the Work that puts `received` into `target` in its wait().

        kind, whole and root: see Call. async_op: as in torch, False if `send` itself shall wait.
        """
        self.n_operations += 1
        reads = self.recorder.span(source)
        writes = self.recorder.span(target)
        call = Call(self.n_operations, kind, whole or kind, root, reads, writes)
        self.recorder.record_launch(call)

        def deliver():
            self.recorder.record_arrival(call.key)
            self.recorder.record_access([source], "read")
            self.recorder.record_access([target], "write")
            # __torch_dispatch__ notes this write again, and a read of `received`. Neither changes a recording:
            # labels.py asks only whether the next access of a cell is a read, and `received` isn't shown.
            target.copy_(received)

        work = Work(deliver)
        if not async_op:
            work.wait()
        return work


def shard_of(tensor):
    """Return the part of a tensor that this rank gets of a reduce-scatter: 1/d of it, on d ranks."""
    return tensor.view(-1).tensor_split(dist.get_world_size())[dist.get_rank()]
