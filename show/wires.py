"""What travels, seen by torch's dispatcher; and delivered where it is waited for, whenever it really came.

A message that a rank doesn't wait for may arrive at any line. Here what is sent is copied as it leaves, what is
received arrives in a copy, and `wait` puts it in place: two recordings are equal, and whoever reads too early reads
what was there before. All reads and writes are noted too, to tell what nobody reads again.
"""

from collections import Counter
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from harness.measuring import ledger

WRITES_ONLY = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_")


class Operation(NamedTuple):
    """One call of one rank. Ranks' calls of the same `key` belong together."""
    key: tuple
    kind: str  # "all-reduce" and so on; between two ranks "send" or "recv"
    arrows: tuple  # (from rank, to rank, bytes): what this rank sends, in the algorithm that moves the fewest bytes
    reads: tuple = ()  # (storage, first byte, end) of what is sent; later in cells
    writes: tuple = ()  # the same of where it arrives
    what: str = ""  # this and `elements`: what is sent, known when cells are labelled
    elements: frozenset = frozenset()


class Wires(TorchDispatchMode):
    """While it is entered, `recorder` hears of every message that leaves or arrives, and of every access."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder, self.counts = recorder, Counter()
        self.works = []  # kept: without its Python half a Work waits for ever
        self.divisor = 1  # of what a reduce-scatter sums

    def averaging(self):
        """NCCL averages on the way; what carries messages here, gloo, can only sum."""
        native = dist.reduce_scatter_tensor

        def averaged(output, full, op=dist.ReduceOp.SUM, group=None, **options):
            divisor = dist.get_world_size(group) if op == dist.ReduceOp.AVG else 1
            with mock.patch.object(self, "divisor", divisor):
                return native(output, full, group=group, **options)

        return mock.patch.object(dist, "reduce_scatter_tensor", averaged)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs, schema = kwargs or {}, function._schema
        arguments = dict(zip((argument.name for argument in schema.arguments), args)) | kwargs
        kind, *used = ledger.OPERATORS.get(schema.name.removeprefix("c10d::"), ("",))
        if any(used):
            return self.communicate(function, args, kwargs, kind, *used, arguments)
        written = []
        for argument in schema.arguments:
            alias = argument.alias_info
            tensors = tensors_of(arguments.get(argument.name))
            written += tensors if alias and alias.is_write else []
            if not alias or alias.is_write and argument.name != "out" and schema.name not in WRITES_ONLY:
                self.recorder.record_access(tensors, "read")
        self.recorder.record_access(written, "write")
        return function(*args, **kwargs)

    def communicate(self, function, args, kwargs, kind, read, written, arguments):
        sources, targets = tensors_of(arguments.get(read)), tensors_of(arguments.get(written))
        operation = self.operation(kind, arguments, sources, targets)
        self.recorder.record_launch(operation)
        copies = {}  # tensor -> its copy; one that is read and written has one
        args = tree_map_only(torch.Tensor, lambda tensor: copies.setdefault(id(tensor), tensor.clone()), args)
        for source in sources if self.divisor > 1 else ():
            copies[id(source)] /= self.divisor
        result = function(*args, **kwargs)
        is_pair = isinstance(result, (tuple, list))

        def deliver():
            self.recorder.record_arrival(operation.key)
            self.recorder.record_access(sources, "read")
            self.recorder.record_access(targets, "write")
            for target in targets:
                target.copy_(copies[id(target)])

        self.works.append(Delayed(dist.Work.unbox(result[-1] if is_pair else result), deliver))
        boxed = self.works[-1].boxed()
        return [arguments[written], boxed] if is_pair else boxed

    def operation(self, kind, arguments, sources, targets):
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        rank, d = group.rank(), group.size()
        sent, received = sum(t.nbytes for t in sources), sum(t.nbytes for t in targets)
        root = arguments.get("root_rank", rank)
        to = {"reduce": [root], "gather": [root], "send": [arguments.get("dst")], "recv": []}
        part = sent // d
        nbytes = {"all_reduce": 2 * sent // d, "reduce_scatter": part, "all_to_all": part, "scatter": received}
        arrows = tuple((rank, other, nbytes.get(kind, sent))
                       for other in to.get(kind, range(d) if rank == root else []) if other != rank)
        # The n-th collective of a group is the same on all of its ranks; and so is the n-th message between two.
        key = ("collective", group.group_name)
        if kind in ("send", "recv"):
            key = ("message", arguments.get("src", rank), arguments.get("dst", rank), arguments["tag"])
        self.counts[key] += 1
        reads, writes = (tuple(map(self.recorder.span, tensors)) for tensors in (sources, targets))
        return Operation((*key, self.counts[key]), kind.replace("_", "-"), arrows, reads, writes)


class Delayed(dist.Work):
    """A Work that puts in place what has arrived when it is waited for."""

    def __init__(self, work, deliver):
        super().__init__()
        self.todo = [work.wait, deliver]

    def wait(self, timeout=None):
        while self.todo:
            self.todo.pop(0)()
        return True


def tensors_of(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
