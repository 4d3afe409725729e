"""What travels, seen by torch's dispatcher; and delivered where it is waited for, whenever it really came.

A message that a rank doesn't wait for may arrive at any line. Here what is sent is copied as it leaves, what is
received arrives in a copy, and `wait` puts it in place: two recordings are equal, and whoever reads too early reads
what was there before, each time. Everything that is read and written is noted too, so that afterwards one can tell
what nobody reads again.
"""

from functools import partial
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from harness import ledger

# Operator -> kind, and its arguments that are read and that are written.
OPERATORS = {name: ({"recv": "receive"}.get(kind, kind.replace("_", "-")), *used)
             for name, (kind, *used) in ledger.OPERATORS.items() if any(used) and name != "recv_any_source_"}
WRITES_ONLY = ("aten::copy_", "aten::zero_", "aten::fill_", "aten::_foreach_copy_", "aten::_foreach_zero_")


class Operation(NamedTuple):
    """One call of one rank. Ranks' calls of the same `key` belong together.

    kind: "all-reduce" and so on; between two ranks "send" or "receive".
    arrows: (from rank, to rank, bytes): what this rank sends, in the algorithm that moves the fewest bytes.
    spans: (storage, first byte, end) of what is sent.
    """

    key: tuple
    kind: str
    arrows: tuple
    spans: tuple


class Wires(TorchDispatchMode):
    """While it is entered, `recorder` hears of every message: `starts(operation)`, `ends(key)`, `touches(…)`."""

    def __init__(self, recorder):
        super().__init__()
        self.recorder, self.counts = recorder, {}
        self.works = []  # kept: without its Python half a Work waits for ever
        self.divisor = 1  # of what a reduce-scatter sums
        native = dist.reduce_scatter_tensor
        self.patch = mock.patch.object(dist, "reduce_scatter_tensor", partial(self.averaged, native))

    def __enter__(self):
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def averaged(self, native, output, full, op=dist.ReduceOp.SUM, group=None, **options):
        """NCCL averages on the way; what carries messages here, gloo, can only sum."""
        self.divisor = dist.get_world_size(group) if op == dist.ReduceOp.AVG else 1
        try:
            return native(output, full, group=group, **options)
        finally:
            self.divisor = 1

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name
        if name.removeprefix("c10d::") in OPERATORS:
            return self.communicate(function, args, kwargs)
        self.note(function, args, kwargs)
        return function(*args, **kwargs)

    def note(self, function, args, kwargs):
        """Tell the recorder what an operator of torch reads, and then what it writes."""
        arguments = function._schema.arguments
        values = [*zip(arguments, args), *((one, kwargs[one.name]) for one in arguments if one.name in kwargs)]
        written = []
        for argument, value in values:
            alias = argument.alias_info
            tensors = tensors_of(value)
            written += tensors if alias and alias.is_write else []
            if not alias or alias.is_write and argument.name != "out" and function._schema.name not in WRITES_ONLY:
                self.recorder.touches(tensors, "read")
        self.recorder.touches(written, "write")

    def communicate(self, function, args, kwargs):
        kind, read, written = OPERATORS[function._schema.name.removeprefix("c10d::")]
        arguments = {argument.name: value for argument, value in zip(function._schema.arguments, args)} | kwargs
        sources, targets = tensors_of(arguments.get(read)), tensors_of(arguments.get(written))
        operation = self.operation(kind, arguments, sources, targets)
        self.recorder.starts(operation)
        copies = {}  # tensor -> its copy; one that is read and written has one

        def copied(tensor):
            return copies.setdefault(id(tensor), tensor.clone())

        args = tree_map_only(torch.Tensor, copied, args)
        for source in sources if self.divisor > 1 else ():
            copies[id(source)] /= self.divisor
        result = function(*args, **kwargs)
        work = dist.Work.unbox(result[-1] if isinstance(result, (tuple, list)) else result)

        def deliver():
            self.recorder.ends(operation.key)
            self.recorder.touches(sources, "read")
            self.recorder.touches(targets, "write")
            for target in targets:
                target.copy_(copies[id(target)])

        self.works.append(Delayed(work, deliver))
        boxed = self.works[-1].boxed()
        return [arguments[written], boxed] if isinstance(result, (tuple, list)) else boxed

    def operation(self, kind, arguments, sources, targets):
        group = dist.ProcessGroup.unbox(arguments["process_group"])
        rank, d = group.rank(), group.size()
        others = [other for other in range(d) if other != rank]
        sent, received = sum(t.nbytes for t in sources), sum(t.nbytes for t in targets)
        if kind in ("send", "receive"):
            pair = (rank, arguments["dst"]) if kind == "send" else (arguments["src"], rank)
            key = ("message", *pair, arguments["tag"])
            arrows = [(*pair, sent)] if kind == "send" else []
        else:
            key = ("collective", group.group_name)
            root, is_root = arguments.get("root_rank"), arguments.get("root_rank") == rank
            arrows = {
                "all-reduce": [(rank, other, 2 * sent // d) for other in others],
                "broadcast": [(rank, other, sent) for other in others if is_root],
                "all-gather": [(rank, other, sent) for other in others],
                "reduce": [(rank, root, sent)] if not is_root else [],
                "gather": [(rank, root, sent)] if not is_root else [],
                "scatter": [(rank, other, received) for other in others if is_root],
            }.get(kind, [(rank, other, sent // d) for other in others])
        # The n-th collective of a group is the same on all of its ranks; and so is the n-th message between two.
        number = self.counts[key] = self.counts.get(key, -1) + 1
        return Operation((*key, number), kind, tuple(arrows), tuple(map(self.recorder.span, sources)))


class Delayed(dist.Work):
    """A Work that puts in place what has arrived when it is waited for."""

    def __init__(self, work, deliver):
        super().__init__()
        self.work, self.deliver = work, deliver

    def wait(self, timeout=None):
        if self.deliver is not None:
            self.work.wait()
            self.deliver()
            self.deliver = None
        return True

    def is_completed(self):
        return self.deliver is None or self.work.is_completed()


def tensors_of(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
