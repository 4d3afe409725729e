"""Runs a program on one rank of several, and records its lines and memory: show/frames.py makes a recording of them."""

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
GRADIENTS, PARAMETERS = {"gradient", "share", "average"}, {"old", "new", "stale"}


@dataclass(frozen=True)
class Program:
    """What is recorded."""
    package: str  # of the core; "show.replicated" is rung 0
    ranks: int = 4
    params: tuple = (5, 2, 9)  # elements of each parameter
    optimizer: str = "adamw"
    dtype: str = "float32"  # of the parameters
    bucket_bytes: int = 1  # where the core has buckets; 1: each parameter has its own
    steps: int = 1
    edit: tuple = ()  # (file, before, after), made in a copy of the package
    orders: tuple = ()  # (rank, order in which it calls its layers), where that isn't the order of the parameters
    loop: str = "train"  # a function of show/loop.py


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1.0}),
    "momentum": (torch.optim.SGD, {"lr": 1.0, "momentum": 0.5}),
    "adamw": (torch.optim.AdamW, {"lr": 1.0, "weight_decay": 0.0}),
}


def plain_inputs(program):
    """Values that a reader can check -> weights (n,), gradients (steps + 1, d, n)."""
    elements = torch.arange(1.0, sum(program.params) + 1)
    ranks = 100 * torch.arange(float(program.ranks))
    steps = 20 * torch.arange(program.steps + 1.0)  # one more than is shown: it tells what is read again
    return 500 + 2 * elements, elements + ranks[:, None] + steps[:, None, None]


def telling_inputs(program):
    """Values that can't be confused, of the same shapes: each element has a magnitude of its own."""
    generator = torch.Generator().manual_seed(53)
    n = sum(program.params)
    scale = 2.0 ** torch.randint(-4, 5, (n,), generator=generator)

    def draw(*shape):
        return (1 + torch.rand(*shape, n, generator=generator)) * scale

    return 64 * draw(), draw(program.steps + 1, program.ranks)  # with smaller weights few digits would be left


def core_files(package):
    """-> {path: name} of the files that are watched, the loop's first."""
    module = importlib.import_module(package)
    paths = [Path(module.__file__)]
    if hasattr(module, "__path__"):
        folder = paths[0].parent
        paths = [folder / name for name in CORE_FILES if (folder / name).exists()] or sorted(folder.glob("*.py"))
    return {loop.__file__: "loop.py"} | {str(path): path.name for path in paths}


def core_class(package):
    """The core of a package: its ShardedOptimizer, or what it has in place of one."""
    for name in (f"{package}.optimizer", package):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            for wanted in ("ShardedOptimizer", "DistributedOptimizer"):
                if hasattr(module, wanted):
                    return getattr(module, wanted)
    raise ValueError(f"{package} has no ShardedOptimizer")


@contextlib.contextmanager
def edited(program):
    """The package of `program`; where it has an edit, a changed copy of that, of another name -> the name."""
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
    """Trains on one rank -> its Trace."""
    order = dict(program.orders).get(rank.rank, range(len(program.params)))
    model = loop.Model([part.clone() for part in weights.split(program.params)], order)
    batches = [list(of_step[rank.rank].split(program.params)) for of_step in grads]
    cls, files = core_class(package), core_files(package)
    torch_class, options = OPTIMIZERS[program.optimizer]

    def all_of(name):
        modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) in files]
        return [(module, getattr(module, name)) for module in modules if hasattr(module, name)]

    if "bucket_cap_mb" in inspect.signature(cls.__init__).parameters:
        options = options | {"bucket_cap_mb": program.bucket_bytes / 2**20}
    trace = Trace(files, model)
    wires = Wires(trace)
    with contextlib.ExitStack() as patches:
        torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN then
        patches.callback(torch.use_deterministic_algorithms, False)
        # Shards that cut through parameters, and no padding that isn't needed, in a model of few elements.
        for module, _ in all_of("ALIGNMENT"):
            patches.enter_context(mock.patch.object(module, "ALIGNMENT", weights.itemsize))
        # Stage 4 as it is on NCCL: reduce-scatters and all-gathers, whatever carries them here.
        for _, transport in all_of("Transport") if hasattr(cls, "transport_for") else ():
            native = staticmethod(lambda group, device, dtype, transport=transport: transport(group))
            patches.enter_context(mock.patch.object(cls, "transport_for", native))
        with wires.averaging(), Ledger() as counted, wires, trace:
            optimizer = trace.optimizer = cls(model.parameters(), torch_class, **options)
            if hasattr(optimizer, "prefetch_params"):
                optimizer.prefetch_params(model)
            counted.entries.clear()  # what building the optimizer has sent is no step's
            getattr(loop, program.loop)(model, optimizer, batches)
            getattr(optimizer, "finish_param_sync", lambda: None)()
    trace.sent_bytes = sum(wire_bytes(entry.kind, entry.size, entry.group_size, "nccl")
                           for entry in counted.entries) / len(batches)
    return trace


def replicated_steps(program, weights, grads):
    """Return for each step all elements after it, (n,) each: what one process gets from averaged gradients."""
    torch_class, options = OPTIMIZERS[program.optimizer]
    param = torch.nn.Parameter(weights.float().clone())
    optimizer, later = torch_class([param], **options), []
    for of_ranks in grads.float():
        param.grad = (of_ranks / program.ranks).sum(0)
        optimizer.step()
        later.append(param.detach().clone())
    return later


def record_rank(rank, program):
    """-> what a rank did, in plain data. events: see show/trace.py; of the steps that are shown, and the forward pass
    after them. storages: uid -> as `described`. owned: elements that it steps. sources: name -> text of a file."""
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated")
    dtype = getattr(torch, program.dtype)
    plain, inputs = ([values.to(dtype) for values in make(program)] for make in (plain_inputs, telling_inputs))
    with edited(program) as package:
        trace, telling = (run_traced(rank, program, package, *values) for values in (plain, inputs))
        sources = {name: Path(path).read_text(encoding="utf-8") for path, name in core_files(package).items()}
    if [event.stack for event in trace.events] != [event.stack for event in telling.events]:
        # Whose lines depend on values is labelled by the values that are shown, of which some are equal.
        telling, inputs = trace, plain
    table = labels.Table(*inputs, replicated_steps(program, *inputs))
    labels.put_cells(trace, labels.labels_of(telling, table), telling.events, program.steps)
    in_loop = itertools.dropwhile(lambda event: not event.stack or event.stack[0].file != "loop.py", trace.events)
    shown = itertools.takewhile(lambda event: event.step < program.steps or event.phase == "forward", in_loop)
    events, storages = frames.folded(list(shown)), {}
    for event in events:
        event.starts = [with_contents(operation, event.cells, trace.storages) for operation in event.starts]
        for uid in event.cells.keys() - storages.keys():
            storages[uid] = described(trace.storages[uid], rank.rank, len(event.cells[uid]), program.ranks)
    spans = [(trace.uid_of(param), param.storage_offset(), param.numel()) for param in trace.updated_params()]
    owned = {cell[2] for uid, start, numel in spans for cell in events[0].cells.get(uid, ())[start : start + numel]}
    return {"events": events, "storages": storages, "owned": owned, "sources": sources,
            "sent_bytes": trace.sent_bytes}


def with_contents(operation, memory, storages):
    """Return the operation with its spans in cells, and with what lies in those that it sends."""
    def in_cells(spans):
        sizes = [(span, storages[span[0]].dtype.itemsize) for span in spans if span[0] in memory]
        return tuple((uid, start // itemsize, end // itemsize) for (uid, start, end), itemsize in sizes)

    operation = operation._replace(reads=in_cells(operation.reads), writes=in_cells(operation.writes))
    cells = [cell for uid, first, end in operation.reads for cell in memory[uid][first:end]]
    kinds = {kind for _, kind, *_ in cells}
    what = "parameters" if kinds & PARAMETERS else "gradients" if kinds & GRADIENTS else ""
    elements = frozenset(element for _, kind, element, _ in cells if kind in GRADIENTS | PARAMETERS)
    return operation._replace(what=what, elements=elements)


def described(storage, rank, numel, d):
    """A storage as plain data. shards: of memory that is cut into d, bucket after bucket, the length of one in each."""
    cuts = {(offset, shape[1]) for offset, shape in storage.views if len(shape) == 2 and shape[0] == d and shape[1]}
    if not cuts and any(shape == (numel // d,) for _, shape in storage.views):
        cuts = {(0, numel // d)}
    shards = []
    for offset, shard in sorted(cuts, key=lambda cut: (cut[0], -cut[1])):
        if offset == d * sum(shards):
            shards.append(shard)
    is_cut = d > 1 and d * sum(shards) == numel
    return {"rank": rank, "row": storage.row, "part": storage.part, "numel": numel,
            "nbytes": numel * storage.dtype.itemsize, "shards": shards if is_cut else []}
