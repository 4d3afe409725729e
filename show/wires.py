"""Stands in for torch's collectives: notes what is sent, and delivers each message where it is waited for.

In torch a message may arrive at any line before the line that waits for it. Here ranks exchange copies as a message
leaves, and `wait` puts the received values in place: two recordings are equal, and a core that reads too early reads
the old values. An all-reduce is noted as its two halves: they arrive one after the other at the line that waits. All
reads and writes are noted too, by torch's dispatcher, to tell what nobody reads again.
"""

from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operators that don't read a tensor before they write it, as add_ and others do.
WRITES_ONLY = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_")


class Operation(NamedTuple):
    """One rank's call of a collective, or of a half of an all-reduce."""
    key: int  # the same in the calls of all ranks that belong together
    kind: str  # "broadcast", "reduce-scatter" or "all-gather"
    whole: str  # "all-reduce" in each half of an all-reduce, otherwise the kind again
    root: int | None  # the rank that sends, if only one rank does
    reads: tuple  # cells that are sent: a Span of show/trace.py
    writes: tuple  # cells where the message arrives: a Span


class Work:
    """Delivers a message when somebody first waits for it."""

    def __init__(self, deliver):
        self.deliver = deliver
        self.is_done = False

    def wait(self):
        if not self.is_done:
            self.is_done = True
            self.deliver()


class Wires(TorchDispatchMode):
    """Tells a recorder (a Trace) of each access inside `with wires:`, and of each message inside its collectives()."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder
        self.n_operations = 0  # the n-th operation of all ranks is the same
        self.is_listening = True  # to accesses

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """torch calls this in place of each operator."""
        kwargs = kwargs or {}
        if self.is_listening:
            self.note_accesses(function._schema, args, kwargs)
        return function(*args, **kwargs)

    def note_accesses(self, schema, args, kwargs):
        """Tell the recorder which tensors among the arguments an operator reads, and which it writes."""
        names = [argument.name for argument in schema.arguments]
        values = dict(zip(names, args)) | kwargs
        written = []
        for argument in schema.arguments:
            tensors = [leaf for leaf in tree_leaves(values.get(argument.name)) if isinstance(leaf, torch.Tensor)]
            # torch gives alias_info to an argument that is written, or of which the result is a view.
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
        """Return a context in which torch.distributed has the next four methods in place of its functions."""
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
        whole = torch.cat(self.copies_of_ranks(input))
        return self.send("all-gather", input, output, whole, async_op=async_op)

    def copies_of_ranks(self, tensor):
        """Return a copy of each rank's tensor in this call of a collective."""
        self.is_listening = False  # what is sent counts as read when it arrives
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.detach())
        self.is_listening = True
        return copies

    def send(self, kind, source, target, received, whole="", root=None, async_op=False):
        """Note that `source` leaves, and return the Work that puts `received` into `target`. whole: see Operation."""
        self.n_operations += 1
        reads = self.recorder.span(source)
        writes = self.recorder.span(target)
        operation = Operation(self.n_operations, kind, whole or kind, root, reads, writes)
        self.recorder.record_launch(operation)

        def deliver():
            self.recorder.record_arrival(operation.key)
            self.recorder.record_access([source], "read")
            self.recorder.record_access([target], "write")
            target.copy_(received)

        work = Work(deliver)
        if not async_op:
            work.wait()
        return work


def shard_of(tensor):
    """Return the 1/d of a tensor that this rank gets of a reduce-scatter."""
    return tensor.view(-1).tensor_split(dist.get_world_size())[dist.get_rank()]
