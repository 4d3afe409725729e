"""Lists the collectives that a rank starts, with their bytes. The optimizers have no code for it.

An optimizer calls torch.distributed as usual. Within `with Ledger() as ledger:` torch shows the Ledger every operator
that the rank calls, and the Ledger adds an entry, a `Collective`, for each operator that communicates.

    Work          the object that torch returns for a collective in flight, so that the caller can wait for it
    wire bytes    the bytes that a rank sends, on average over the ranks
"""

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
    """Stands in for the Work of gloo's send or recv, which has no callback and allows only one wait.

    A thread of `executor` waits for the Work, and then calls `on_completion`.
    """

    def __init__(self, work, on_completion, executor):
        super().__init__()
        # A Ledger keeps this object, but a future that is done doesn't keep `work` and its tensors.
        self.future = executor.submit(self.finish, work, on_completion)

    @staticmethod
    def finish(work, on_completion):
        """Wait for the Work, in the executor's thread. If the Work has failed, `wait` raises its error."""
        try:
            work.wait()
        finally:
            on_completion()

    def wait(self, timeout=None):  # a timedelta
        self.future.result((timeout or dist.default_pg_timeout).total_seconds())
        return True

    def is_completed(self):
        return self.future.done()


@dataclass
class Collective:
    """An entry of a Ledger: a collective, or a send or recv, on one rank. Times are seconds of time.perf_counter."""
    kind: str  # the first value of a line of OPERATORS, such as "all_reduce"
    size: int  # bytes of the full tensor; in a reduce-scatter or all-gather each rank has a part of it
    dtype: torch.dtype  # None for a barrier, which has no tensors
    group_size: int  # number of ranks in the process group
    backend: str  # "gloo", "nccl", or "fake", which sends nothing
    wire_bytes: float
    launched_at: float
    completed_at: float | None = None  # None: the collective is in flight, or nobody can see its end


# An operator's full name is "namespace::name". Operators that communicate are in two namespaces. torch.distributed
# calls the first; tensor parallelism and torch.compile call the second, the functional collectives.
COLLECTIVE_NAMESPACES = "c10d", "_c10d_functional"
# Operator of c10d -> kind of collective, name of the argument that is read, name of the argument that is written. None:
# nothing is read or written.
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
# Functional collective, without ENDINGS -> kind of collective. Each reads its first argument.
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "isend": "send",
    "irecv": "recv",
}
# "_coalesced": for several tensors at once. "_" or "_out": the result is written into the input, or an argument.
ENDINGS = re.compile("(_coalesced)?(_|_out)?$")
# Operators in the two namespaces that send nothing.
MOVES_NOTHING = {"c10d::check_for_nan", "_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


def named_arguments(schema, args, kwargs):
    """Return {name: value} of an operator's arguments. `schema`: torch's description of the operator."""
    names = [argument.name for argument in schema.arguments]
    return {**dict(zip(names, args)), **kwargs}


def kind_and_tensors(operator, arguments):
    """Return (kind of a collective, [list of tensors that it reads, list of tensors that it writes]).

    A list is missing where OPERATORS has None. `arguments`: {name: value} of the operator's arguments.
    """
    namespace, name = operator.split("::")
    if namespace == "c10d" and name in OPERATORS:
        kind, *argument_names = OPERATORS[name]
        return kind, [tree_leaves(arguments[argument]) for argument in argument_names if argument]
    name_without_endings = ENDINGS.sub("", name)
    if namespace == "_c10d_functional" and name_without_endings in FUNCTIONAL:
        first_argument = next(iter(arguments.values()))
        return FUNCTIONAL[name_without_endings], [tree_leaves(first_argument)]
    raise LookupError(f"the ledger does not know what {operator} sends: add it to OPERATORS")


def wire_bytes(kind, size, group_size, backend):
    """Return the bytes that a rank sends, on average, for a collective whose full tensor has `size` bytes."""
    if kind in ("recv", "barrier"):
        return 0
    if kind == "send":
        return size
    without_own_part = size * (group_size - 1) / group_size
    if kind in ("scatter", "gather"):
        # All ranks together send everything but the root's own part. This is the average of a rank.
        return without_own_part / group_size
    # gloo's reduce-scatter is an all-reduce underneath.
    is_all_reduce = kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo")
    if is_all_reduce:
        return 2 * without_own_part  # a reduce-scatter and an all-gather
    # In a reduce-scatter, all-gather or all-to-all each rank sends this. In a broadcast or reduce all ranks but one
    # send the whole tensor, and this is the average.
    return without_own_part


class Ledger(TorchDispatchMode):
    """Lists every collective that this rank starts in a `with` block, in order.

    A Ledger is a TorchDispatchMode: in the block torch calls its `__torch_dispatch__` in place of an operator.

        with Ledger() as ledger:
            optimizer.step()
        ledger.collectives   # {"all_reduce": 3, …}
        ledger.wire_bytes    # int: bytes that a rank sends for all these collectives, on average
        ledger.entries       # [Collective, …]
    """

    limit_s = 60  # seconds that __exit__ waits for one collective

    def __init__(self):
        super().__init__()
        self.entries = []
        self.pending = []  # (Collective, threading.Event): the event is set when the collective is complete
        # "send" or "recv" -> executor for the WatchedWorks of this kind. It has one thread, because messages of a kind
        # arrive in order.
        self.executors = {}
        self.works = []  # WatchedWorks; never read: C++ loses a Work whose Python object is gone

    def __exit__(self, *exception):
        """Wait until all collectives are complete, unless there is an exception."""
        exception_type, *_ = exception  # all are None if there was none
        for entry, is_complete in self.pending:
            if exception_type is None and not is_complete.wait(self.limit_s):
                raise TimeoutError(f"{entry.kind} of {entry.size} bytes is not complete after {self.limit_s} s")
        for executor in self.executors.values():
            executor.shutdown(wait=False)
        self.executors = {}
        return super().__exit__(*exception)

    @property
    def collectives(self):
        """Return {kind: how many}."""
        return dict(Counter(entry.kind for entry in self.entries))

    @property
    def wire_bytes(self):
        return round(sum(entry.wire_bytes for entry in self.entries))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Call the operator `function`, and add an entry if the operator communicates."""
        kwargs = kwargs or {}
        if function.namespace not in COLLECTIVE_NAMESPACES:
            return function(*args, **kwargs)
        entry = self.entry_of(function._schema.name, named_arguments(function._schema, args, kwargs))
        result = function(*args, **kwargs)
        if entry is None:
            return result
        self.entries.append(entry)
        return self._watch(entry, result)

    def entry_of(self, operator, arguments):
        """Return a new Collective, or None if the operator moves nothing. harness/planning/alone.py calls this, too."""
        if operator in MOVES_NOTHING:
            return None
        kind, tensor_lists = kind_and_tensors(operator, arguments)
        group = _group(arguments)
        sizes = [sum(tensor.nbytes for tensor in tensors) for tensors in tensor_lists]
        # Drop zeros: only the root of a scatter has an input, and only the root of a gather has an output.
        sizes = list(filter(None, sizes))
        if kind in ("all_gather", "gather", "scatter"):  # the smaller list is this rank's part of the full tensor
            size = min(sizes, default=0) * group.size()
        else:
            size = max(sizes, default=0)
        all_tensors = tree_leaves(tensor_lists)
        dtype = all_tensors[0].dtype if all_tensors else None
        backend = dist.get_backend(group)
        n_bytes_sent = wire_bytes(kind, size, group.size(), backend)
        return Collective(kind, size, dtype, group.size(), backend, n_bytes_sent, time.perf_counter())

    def _watch(self, entry, result):
        """Arrange that `completed_at` of `entry` is set when the collective is complete.

        result: what the operator has returned. Returns what the caller of the operator gets in its place.
        """
        # C++ returns a Work in a box, a torch.ScriptObject. Some operators return (tensors, boxed Work).
        has_tensors_too = isinstance(result, (tuple, list))
        boxed_work = result[-1] if has_tensors_too else result
        # With the fake backend, or for a functional collective, which returns no Work, nobody can see the end. Then
        # `completed_at` stays None.
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
        except RuntimeError:  # the Work of gloo's send or recv has no future, and so no callback
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
    group = arguments["group_name"]  # of a functional collective: a name, or in newer releases of torch a group
    return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
