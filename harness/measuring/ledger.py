"""Lists the collectives that ran, and their bytes, from outside: no stage has code for that."""

import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class WatchedWork(dist.Work):
    """Stands in for a Work of gloo's send or recv. It has no callback and allows one wait(), in `executor`."""

    def __init__(self, work, on_completion, executor):
        super().__init__()
        # Once the future is done, it refers neither to `work` nor to the received tensors.
        self.future = executor.submit(self.finish, work, on_completion)

    @staticmethod
    def finish(work, on_completion):
        try:
            work.wait()
        finally:
            on_completion()

    def wait(self, timeout=None):
        self.future.result((timeout or dist.default_pg_timeout).total_seconds())
        return True

    def is_completed(self):
        return self.future.done()


@dataclass
class Collective:
    """A call on one rank. Times are seconds of time.perf_counter."""
    kind: str
    size: int  # bytes of the full tensor
    dtype: torch.dtype
    group_size: int
    backend: str
    wire_bytes: float  # what a rank sends, on average
    launched_at: float
    completed_at: float | None = None  # None: in flight


# Operators of torch.distributed -> kind, the argument that is read, the argument that is written.
OPERATORS = {
    "allreduce_": ("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors", "tensors"),
    "reduce_": ("reduce", "tensors", "tensors"),
    "broadcast_": ("broadcast", "tensors", "tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", "output_tensors"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs", "outputs"),
    "_allgather_base_": ("all_gather", "input_tensor", "output_tensor"),
    "allgather_": ("all_gather", "input_tensors", "output_tensors"),
    "allgather_coalesced_": ("all_gather", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather", "inputs", "outputs"),
    "alltoall_base_": ("all_to_all", "input", "output"),
    "alltoall_": ("all_to_all", "input_tensors", "output_tensors"),
    "scatter_": ("scatter", "input_tensors", "output_tensors"),
    "gather_": ("gather", "input_tensors", "output_tensors"),
    "send": ("send", "tensors", None),
    "recv_": ("recv", None, "tensors"),
    "recv_any_source_": ("recv", None, "tensors"),
    "barrier": ("barrier", None, None),
    "monitored_barrier_": ("barrier", None, None),
}
# Functional collectives, of tensor parallelism, FSDP2 and torch.compile: all read their first argument.
FUNCTIONAL = re.compile("(all_reduce|reduce_scatter_tensor|all_gather_into_tensor|all_to_all_single|broadcast"
                        "|isend|irecv)(_coalesced)?(_|_out)?")
MOVES_NOTHING = {"c10d::check_for_nan", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


def kind_and_tensors(operator, arguments):
    """Return kind, and [tensors that are read, tensors that are written]; a functional operator has only the former."""
    namespace, name = operator.split("::")
    if namespace == "c10d" and name in OPERATORS:
        kind, *argument_names = OPERATORS[name]
        return kind, [tree_leaves(arguments[argument]) for argument in argument_names if argument]
    if namespace == "_c10d_functional" and (match := FUNCTIONAL.fullmatch(name)):
        kind = re.sub("_(into_)?tensor|_single", "", match[1])
        kind = {"isend": "send", "irecv": "recv"}.get(kind, kind)
        return kind, [tree_leaves(next(iter(arguments.values())))]
    raise LookupError(f"the ledger does not know what {operator} sends: add it to OPERATORS")


def wire_bytes(kind, size, group_size, backend):
    """Return the bytes that a rank sends, on average, for a collective of `size` bytes."""
    if kind in ("recv", "barrier"):
        return 0
    if kind == "send":
        return size
    n_bytes = size * (group_size - 1) / group_size
    if kind in ("scatter", "gather"):  # n_bytes leave one rank, or all other ranks together
        return n_bytes / group_size
    if kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo"):  # gloo's is an all-reduce underneath
        return 2 * n_bytes  # as a reduce-scatter and an all-gather
    return n_bytes


class Ledger(TorchDispatchMode):
    """Lists every collective that this rank starts while it is entered, in order.

        with Ledger() as ledger:
            optimizer.step()
        ledger.collectives   # {"all_reduce": 3, …}
        ledger.wire_bytes    # int: what a rank sends for them, on average
        ledger.entries       # [Collective, …]
    """

    limit_s = 60  # how long __exit__ waits for a collective

    def __init__(self):
        super().__init__()
        self.entries = []
        self.pending = []  # (entry, an event that is set when the collective is complete)
        self.executors = {}  # kind -> an executor with one thread, because messages of a kind arrive in order
        self.works = []  # without a reference in Python, C++ forgets that a work is a WatchedWork

    def __exit__(self, *exception):
        """Wait until everything launched is complete, unless there is an exception."""
        for entry, is_complete in self.pending:
            if exception[0] is None and not is_complete.wait(self.limit_s):
                raise TimeoutError(f"{entry.kind} of {entry.size} bytes is not complete after {self.limit_s} s")
        for executor in self.executors.values():
            executor.shutdown(wait=False)
        self.executors = {}
        return super().__exit__(*exception)

    @property
    def collectives(self):
        return dict(Counter(entry.kind for entry in self.entries))

    @property
    def message_bytes(self):
        """Return {"all_reduce": bytes of all all-reduces together, …}."""
        total = Counter()
        for entry in self.entries:
            total[entry.kind] += entry.size
        return dict(total)

    @property
    def wire_bytes(self):
        return round(sum(entry.wire_bytes for entry in self.entries))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace not in ("c10d", "_c10d_functional"):
            return function(*args, **kwargs)
        names = [argument.name for argument in function._schema.arguments]
        entry = self.entry_of(function._schema.name, {**dict(zip(names, args)), **kwargs})
        result = function(*args, **kwargs)
        if entry is None:
            return result
        self.entries.append(entry)
        return self._watch(entry, result)

    def entry_of(self, operator, arguments):
        """Return a Collective, or None if the operator moves nothing."""
        if operator in MOVES_NOTHING:
            return None
        kind, tensor_lists = kind_and_tensors(operator, arguments)
        group = _group(arguments)
        sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in tensor_lists]
        sizes = [size for size in sizes if size] or [0]  # a gather's output, a scatter's input is of one rank only
        size = max(sizes)
        if kind in ("all_gather", "gather", "scatter"):  # the smaller of input and output is one rank's part
            size = min(sizes) * group.size()
        dtype = next((tensor.dtype for tensors in tensor_lists for tensor in tensors), None)
        backend = dist.get_backend(group)
        wire = wire_bytes(kind, size, group.size(), backend)
        return Collective(kind, size, dtype, group.size(), backend, wire, time.perf_counter())

    def _watch(self, entry, result):
        """Set `completed_at` of `entry` when it is complete. Returns the result that the caller gets."""
        boxed_work = result[-1] if isinstance(result, (tuple, list)) else result
        # A functional collective returns a tensor.
        if entry.backend == "fake" or not isinstance(boxed_work, torch.ScriptObject):
            return result
        work = dist.Work.unbox(boxed_work)
        if work is None:  # NCCL has put the collective into the queue of the current stream, like any other kernel
            entry.completed_at = time.perf_counter()
            return result
        is_complete = threading.Event()
        self.pending.append((entry, is_complete))

        def note_completion(_=None):
            entry.completed_at = time.perf_counter()
            is_complete.set()
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's send or recv
            if entry.kind not in self.executors:
                self.executors[entry.kind] = ThreadPoolExecutor(1)
            self.works.append(WatchedWork(work, note_completion, self.executors[entry.kind]))
            boxed_work = self.works[-1].boxed()
            return [*result[:-1], boxed_work] if isinstance(result, (tuple, list)) else boxed_work
        future.add_done_callback(note_completion)
        return result


def _group(arguments):
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    group = arguments["group_name"]  # in newer releases it may be the group itself
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
