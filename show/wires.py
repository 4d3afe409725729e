"""Stands in for torch's collectives: notes what is sent, and delivers each message where it is waited for.

A message that a rank doesn't wait for may arrive at any line. Here ranks exchange copies as a message leaves, and
`wait` puts the received values in place: two recordings are equal, and whoever reads too early reads what was there
before. An all-reduce is noted as its two halves: they arrive one after the other at the line that waits. All reads and
writes are noted too, by torch's dispatcher, to tell what nobody reads again.
"""

from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = ("broadcast", "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")
# Operators that don't read what they write; others, such as add_, read it first.
WRITES_ONLY = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_")


class Operation(NamedTuple):
    """One call of one rank. Ranks' calls of the same `key` belong together."""
    key: int
    kind: str  # "reduce-scatter" and so on
    whole: str  # "all-reduce" where it is a half of one, otherwise the kind again
    root: int | None  # the rank that sends, if only one rank does
    reads: tuple  # the Span (show/trace.py) of what is sent
    writes: tuple  # the Span where it arrives


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
    """While it is entered, `recorder` hears of every access. In `collectives` it hears of every message, too."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder = recorder
        self.n_operations = 0  # the n-th is the same on all ranks
        self.is_listening = True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.is_listening:
            self.note_accesses(function._schema, args, kwargs)
        return function(*args, **kwargs)

    def note_accesses(self, schema, args, kwargs):
        names = [argument.name for argument in schema.arguments]
        values = dict(zip(names, args)) | kwargs
        written = []
        for argument in schema.arguments:
            tensors = [leaf for leaf in tree_leaves(values.get(argument.name)) if isinstance(leaf, torch.Tensor)]
            alias = argument.alias_info  # of an argument that is written, or of which the result is a view
            if alias is None:
                self.recorder.record_access(tensors, "read")
            elif alias.is_write:
                written += tensors
                if argument.name != "out" and schema.name not in WRITES_ONLY:
                    self.recorder.record_access(tensors, "read")
        self.recorder.record_access(written, "write")

    def collectives(self):
        """Return a context in which torch.distributed has the four methods below in place of its functions."""
        return mock.patch.multiple(dist, **{name: getattr(self, name) for name in COLLECTIVES})

    def broadcast(self, tensor, src=None, group=None, group_src=None):
        root = group_src if src is None else src
        self.send("broadcast", tensor, tensor, self.gathered(tensor)[root], root=root)

    def all_reduce(self, tensor, group=None):
        total = sum(self.gathered(tensor))
        own = shard_of(tensor)
        self.send("reduce-scatter", tensor, own, shard_of(total), whole="all-reduce")
        self.send("all-gather", own, tensor, total, whole="all-reduce")

    def reduce_scatter_tensor(self, output, input, op=dist.ReduceOp.SUM, group=None, async_op=False):
        total = sum(self.gathered(input))
        if op == dist.ReduceOp.AVG:
            total /= dist.get_world_size()
        return self.send("reduce-scatter", input, output, shard_of(total), async_op=async_op)

    def all_gather_into_tensor(self, output, input, group=None, async_op=False):
        return self.send("all-gather", input, output, torch.cat(self.gathered(input)), async_op=async_op)

    def gathered(self, tensor):
        """Return a copy of this tensor of each rank."""
        self.is_listening = False  # what is sent counts as read when it arrives
        copies = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, tensor.detach())
        self.is_listening = True
        return copies

    def send(self, kind, source, target, received, whole="", root=None, async_op=False):
        """Send a message, and return its Work. whole: the collective, if the message is a half of one."""
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
