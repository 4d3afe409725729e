"""Runs a program on one rank of several, and records its lines and memory for show/frames.py."""

import contextlib
import importlib
import inspect
import itertools
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from harness.measuring.ledger import Ledger, wire_bytes

from . import frames, labels, loop
from .trace import Trace
from .wires import Wires

CORE_FILES = ("optimizer.py", "buffer.py", "transport.py")
GRADIENT_KINDS = {"gradient", "share", "average"}  # of cells, as in show/labels.py
PARAMETER_KINDS = {"old", "new", "stale"}


@dataclass(frozen=True)
class Program:
    """Describes a run that is recorded."""
    package: str  # of the core; "show.replicated" is the baseline
    ranks: int = 4
    params: tuple = (5, 2, 9)  # number of elements of each parameter
    optimizer: str = "adamw"
    dtype: str = "float32"  # of the parameters
    bucket_bytes: int = 1  # for a core with buckets; 1: each parameter has a bucket of its own
    steps: int = 1
    edit: tuple = ()  # (file, text before, text after) of a change to a copy of the package
    orders: tuple = ()  # (rank, order in which the rank calls its layers), if it isn't the order of the parameters
    loop: str = "train"  # a function of show/loop.py


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1.0}),
    "momentum": (torch.optim.SGD, {"lr": 1.0, "momentum": 0.5}),
    "adamw": (torch.optim.AdamW, {"lr": 1.0, "weight_decay": 0.0}),
}


def plain_inputs(program):
    """Return weights (n,) and gradients (steps + 1, d, n) that a reader can check."""
    elements = torch.arange(1.0, sum(program.params) + 1)
    ranks = 100 * torch.arange(float(program.ranks))
    steps = 20 * torch.arange(program.steps + 1.0)  # with the step after those shown, in which values may be read again
    return 500 + 2 * elements, elements + ranks[:, None] + steps[:, None, None]


def telling_inputs(program):
    """Return weights and gradients of the same shapes, no two of which are alike: each has digits of its own."""
    generator = torch.Generator().manual_seed(53)
    n = sum(program.params)
    scale = 2.0 ** torch.randint(-4, 5, (n,), generator=generator)

    def draw(*shape):
        return (1 + torch.rand(*shape, n, generator=generator)) * scale

    return 64 * draw(), draw(program.steps + 1, program.ranks)  # updates would leave few digits of smaller weights


def core_files(package):
    """Return {path: name} of the files that are watched, show/loop.py first."""
    module = importlib.import_module(package)
    paths = [Path(module.__file__)]
    if hasattr(module, "__path__"):
        folder = paths[0].parent
        paths = [folder / name for name in CORE_FILES if (folder / name).exists()] or sorted(folder.glob("*.py"))
    return {loop.__file__: "loop.py"} | {str(path): path.name for path in paths}


def core_class(package):
    """Return the class of a package that is recorded: its ShardedOptimizer, or else its DistributedOptimizer."""
    for name in (f"{package}.optimizer", package):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            for wanted in ("ShardedOptimizer", "DistributedOptimizer"):
                if hasattr(module, wanted):
                    return getattr(module, wanted)
    raise ValueError(f"{package} has no ShardedOptimizer")


@contextlib.contextmanager
def edited(program):
    """Yield the name of the program's package, or of a copy of the package with the program's edit."""
    if not program.edit:
        yield program.package
        return
    source = Path(importlib.import_module(program.package).__file__).parent
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
        copy = Path(folder, f"edited_{Path(folder).name}")
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "guard"))
        (copy / "__init__.py").write_text("")
        name, before, after = program.edit
        text = (copy / name).read_text(encoding="utf-8")
        (copy / name).write_text(text.replace(before, after, 1), encoding="utf-8")
        yield copy.name


def run_traced(rank, program, package, weights, grads):
    """Train on one rank, and return its Trace."""
    order = dict(program.orders).get(rank.number, range(len(program.params)))
    model = loop.Model([part.clone() for part in weights.split(program.params)], order)
    batches = [list(step_grads[rank.number].split(program.params)) for step_grads in grads]
    cls = core_class(package)
    files = core_files(package)
    torch_class, options = OPTIMIZERS[program.optimizer]

    def watched_modules_with(name):
        return [module for module in list(sys.modules.values())
                if getattr(module, "__file__", None) in files and hasattr(module, name)]

    if "bucket_cap_mb" in inspect.signature(cls.__init__).parameters:
        options = options | {"bucket_cap_mb": program.bucket_bytes / 2**20}
    trace = Trace(files, model)
    wires = Wires(trace)
    with contextlib.ExitStack() as patches:
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        patches.callback(torch.use_deterministic_algorithms, False)
        # With few elements the usual alignment would give padding alone, and no shard that cuts through a parameter.
        for module in watched_modules_with("ALIGNMENT"):
            patches.enter_context(mock.patch.object(module, "ALIGNMENT", weights.itemsize))
        if hasattr(cls, "transport_for"):
            # Stage 4 calls reduce-scatters and all-gathers, as on NCCL, whatever carries the messages here.
            module = watched_modules_with("Transport")[-1]
            native = staticmethod(lambda group, device, dtype: module.Transport(group))
            patches.enter_context(mock.patch.object(cls, "transport_for", native))
        with wires.averaging(), Ledger() as counted, wires, trace:
            optimizer = trace.optimizer = cls(model.parameters(), torch_class, **options)
            if hasattr(optimizer, "prefetch_params"):
                optimizer.prefetch_params(model)
            counted.entries.clear()  # messages of the constructor belong to no step
            getattr(loop, program.loop)(model, optimizer, batches)
            if hasattr(optimizer, "finish_param_sync"):
                optimizer.finish_param_sync()
    trace.sent_bytes = sum(wire_bytes(entry.kind, entry.size, entry.group_size, "nccl")
                           for entry in counted.entries) / len(batches)
    return trace


def replicated_steps(program, weights, grads):
    """Return the elements (n,) after each step, as one process computes them from averaged gradients."""
    torch_class, options = OPTIMIZERS[program.optimizer]
    param = torch.nn.Parameter(weights.float().clone())
    optimizer = torch_class([param], **options)
    later = []
    for step_grads in grads.float():
        param.grad = (step_grads / program.ranks).sum(0)
        optimizer.step()
        later.append(param.detach().clone())
    return later


def record_rank(rank, program):
    """Return the record of a rank, a dict of plain data.

    events: Events (show/trace.py) of the steps that are shown, and of the forward pass after them. storages: {uid: dict
    of `described`}. owned: elements that the rank updates. sources: name of a file -> text. sent_bytes: per step.
    """
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated")
    dtype = getattr(torch, program.dtype)
    plain = [values.to(dtype) for values in plain_inputs(program)]
    inputs = [values.to(dtype) for values in telling_inputs(program)]
    with edited(program) as package:
        trace = run_traced(rank, program, package, *plain)
        telling = run_traced(rank, program, package, *inputs)
        sources = {name: Path(path).read_text(encoding="utf-8") for path, name in core_files(package).items()}
    if [event.stack for event in trace.events] != [event.stack for event in telling.events]:
        # Other values ran other lines. So labels are found by the plain values, though some of these are equal.
        telling = trace
        inputs = plain
    table = labels.Table(*inputs, replicated_steps(program, *inputs))
    labels.put_cells(trace, labels.labels_of(telling, table), telling.events, program.steps)
    in_loop = itertools.dropwhile(lambda event: not event.stack or event.stack[0].file != "loop.py", trace.events)
    shown = itertools.takewhile(lambda event: event.step < program.steps or event.phase == "forward", in_loop)
    events = frames.folded(list(shown))
    storages = {}
    for event in events:
        event.starts = [with_contents(operation, event.cells, trace.storages) for operation in event.starts]
        for uid in event.cells.keys() - storages.keys():
            storages[uid] = described(trace.storages[uid], rank.number, len(event.cells[uid]), program.ranks)
    owned = set()
    for param in trace.updated_params():
        first = param.storage_offset()
        cells = events[0].cells.get(trace.uid_of(param), ())[first : first + param.numel()]
        owned |= {element for _, _, element, _ in cells}
    return {"events": events, "storages": storages, "owned": owned, "sources": sources,
            "sent_bytes": trace.sent_bytes}


def with_contents(operation, memory, storages):
    """Return the operation with spans of cells for spans of bytes, and with the kind and elements of what it sends.

    memory: {uid: cells}, where a cell is (value, kind, element, origin).
    """
    def in_cells(spans):
        sizes = [(span, storages[span[0]].dtype.itemsize) for span in spans if span[0] in memory]
        return tuple((uid, start // itemsize, end // itemsize) for (uid, start, end), itemsize in sizes)

    operation = operation._replace(reads=in_cells(operation.reads), writes=in_cells(operation.writes))
    cells = [cell for uid, first, end in operation.reads for cell in memory[uid][first:end]]
    kinds = {kind for _, kind, *_ in cells}
    what = "gradients" if kinds & GRADIENT_KINDS else ""
    if kinds & PARAMETER_KINDS:
        what = "parameters"
    elements = frozenset(element for _, kind, element, _ in cells if kind in GRADIENT_KINDS | PARAMETER_KINDS)
    return operation._replace(what=what, elements=elements)


def described(storage, rank, numel, d):
    """Return a storage as plain data.

    shards: if the storage is a row of buckets of d equal shards each, the length of a shard in each bucket; else [].
    """
    # (first element, length of a shard): views (d, length) cut a bucket into shards, and so may a view of one shard.
    cuts = {(offset, shape[1]) for offset, shape in storage.views if len(shape) == 2 and shape[0] == d and shape[1]}
    if not cuts and any(shape == (numel // d,) for _, shape in storage.views):
        cuts = {(0, numel // d)}
    shards = []
    bucket_start = 0
    for offset, shard in sorted(cuts, key=lambda cut: (cut[0], -cut[1])):  # of several cuts at an offset the longest
        if offset == bucket_start:
            shards.append(shard)
            bucket_start += d * shard
    is_cut = d > 1 and bucket_start == numel
    return {"rank": rank, "row": storage.row, "part": storage.part, "numel": numel,
            "nbytes": numel * storage.dtype.itemsize, "shards": shards if is_cut else []}
