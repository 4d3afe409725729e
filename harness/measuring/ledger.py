"""Lists the collectives that a rank starts, with their bytes, from outside: no stage has code for a ledger."""

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
    """Stands in for the Work of gloo's send or recv, which has no callback and may be waited for only once.

    A thread of `executor` waits for the Work, and then calls `on_completion`.
    """

    def __init__(self, work, on_completion, executor):
        super().__init__()
        # A future that is done refers neither to `work` nor to the received tensors.
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
    """A collective, or a send or recv, on one rank. Times are seconds of time.perf_counter."""
    kind: str
    size: int  # bytes of the full tensor
    dtype: torch.dtype
    group_size: int
    backend: str
    wire_bytes: float  # what a rank sends, on average
    launched_at: float
    completed_at: float | None = None  # None: in flight


COLLECTIVE_NAMESPACES = "c10d", "_c10d_functional"  # of the operators that communicate
# Operator of c10d -> kind, name of the argument that is read, name of the argument that is written.
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
# Functional collectives, which tensor parallelism and torch.compile call. Each reads the first argument.
FUNCTIONAL = re.compile("(all_reduce|reduce_scatter_tensor|all_gather_into_tensor|all_to_all_single|broadcast"
                        "|isend|irecv)(_coalesced)?(_|_out)?")
MOVES_NOTHING = {"c10d::check_for_nan", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


def kind_and_tensors(operator, arguments):
    """Return the kind of a collective, and lists of tensors: those that it reads, and maybe those that it writes."""
    namespace, name = operator.split("::")
    if namespace == "c10d" and name in OPERATORS:
        kind, *argument_names = OPERATORS[name]
        return kind, [tree_leaves(arguments[argument]) for argument in argument_names if argument]
    match = FUNCTIONAL.fullmatch(name)
    if namespace == "_c10d_functional" and match:
        kind = re.sub("_(into_)?tensor|_single", "", match[1])
        kind = {"isend": "send", "irecv": "recv"}.get(kind, kind)
        first_argument = next(iter(arguments.values()))
        return kind, [tree_leaves(first_argument)]
    raise LookupError(f"the ledger does not know what {operator} sends: add it to OPERATORS")


def wire_bytes(kind, size, group_size, backend):
    """Return the bytes that a rank sends, on average, for a collective of `size` bytes."""
    if kind in ("recv", "barrier"):
        return 0
    if kind == "send":
        return size
    without_own_part = size * (group_size - 1) / group_size
    if kind in ("scatter", "gather"):  # these bytes leave one rank, or all other ranks together
        return without_own_part / group_size
    is_all_reduce = kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo")  # as gloo does it
    if is_all_reduce:
        return 2 * without_own_part  # a reduce-scatter and an all-gather
    return without_own_part


class Ledger(TorchDispatchMode):
    """Lists, while entered, every collective that this rank starts, in order.

        with Ledger() as ledger:
            optimizer.step()
        ledger.collectives   # {"all_reduce": 3, …}
        ledger.wire_bytes    # int: bytes that a rank sends for all of these, on average
        ledger.entries       # [Collective, …]
    """

    limit_s = 60  # how long __exit__ waits for a collective

    def __init__(self):
        super().__init__()
        self.entries = []
        self.pending = []  # (Collective, threading.Event that is set when the collective is complete)
        self.executors = {}  # kind -> executor with one thread, because messages of a kind arrive in order
        self.works = []  # WatchedWorks, which C++ would forget without a reference in Python

    def __exit__(self, *exception):
        """Wait until all collectives are complete, unless there is an exception."""
        exception_type, *_ = exception
        for entry, is_complete in self.pending:
            if exception_type is None and not is_complete.wait(self.limit_s):
                raise TimeoutError(f"{entry.kind} of {entry.size} bytes is not complete after {self.limit_s} s")
        for executor in self.executors.values():
            executor.shutdown(wait=False)
        self.executors = {}
        return super().__exit__(*exception)

    @property
    def collectives(self):
        return dict(Counter(entry.kind for entry in self.entries))

    @property
    def wire_bytes(self):
        return round(sum(entry.wire_bytes for entry in self.entries))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace not in COLLECTIVE_NAMESPACES:
            return function(*args, **kwargs)
        names = [argument.name for argument in function._schema.arguments]
        arguments = {**dict(zip(names, args)), **kwargs}
        entry = self.entry_of(function._schema.name, arguments)
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
        sizes = list(filter(None, sizes))  # 0 where this rank has no input of a scatter, or no output of a gather
        if kind in ("all_gather", "gather", "scatter"):  # the smaller list is one rank's part
            size = min(sizes, default=0) * group.size()
        else:
            size = max(sizes, default=0)
        dtype = next((tensor.dtype for tensors in tensor_lists for tensor in tensors), None)
        backend = dist.get_backend(group)
        n_bytes_sent = wire_bytes(kind, size, group.size(), backend)
        return Collective(kind, size, dtype, group.size(), backend, n_bytes_sent, time.perf_counter())

    def _watch(self, entry, result):
        """Set `completed_at` of `entry` when the collective is complete. Returns the result that the caller gets."""
        has_tensors_too = isinstance(result, (tuple, list))  # before the Work, which C++ returns in a box
        boxed_work = result[-1] if has_tensors_too else result
        # A functional collective returns a tensor.
        if entry.backend == "fake" or not isinstance(boxed_work, torch.ScriptObject):
            return result
        work = dist.Work.unbox(boxed_work)
        if work is None:  # NCCL has put the collective into the queue of the current stream, like a kernel
            entry.completed_at = time.perf_counter()
            return result
        is_complete = threading.Event()
        self.pending.append((entry, is_complete))

        def note_completion(_=None):
            entry.completed_at = time.perf_counter()
            is_complete.set()
        try:
            future = work.get_future()
        except RuntimeError:  # the work of gloo's send or recv has no future
            if entry.kind not in self.executors:
                self.executors[entry.kind] = ThreadPoolExecutor(1)
            watched_work = WatchedWork(work, note_completion, self.executors[entry.kind])
            self.works.append(watched_work)
            boxed_work = watched_work.boxed()
            return [*result[:-1], boxed_work] if has_tensors_too else boxed_work
        future.add_done_callback(note_completion)
        return result


def _group(arguments):
    """Return the process group among the arguments of an operator."""
    if "process_group" in arguments:
        return dist.ProcessGroup.unbox(arguments["process_group"])
    group = arguments["group_name"]  # a name, or in newer releases of torch a group
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
