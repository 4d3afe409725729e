"""Runs a program on one rank of several, and records its lines and memory. show/frames.py joins the ranks' records."""

import contextlib
import importlib
import itertools
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch

from . import frames, labels, loop
from .frames import CELL_BYTES
from .trace import Trace
from .wires import Wires

FILES_BESIDE = ("buffer.py", "transport.py")  # what the core is split into, beside its module
ADAMW = {"lr": 1.0, "weight_decay": 0.0}


class Edit(NamedTuple):
    """A change of one file of a package: the text `before` is replaced by `after`."""
    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Program:
    """Describes a run that is recorded, with AdamW and parameters of 32 bits."""
    package: str  # the package or module whose ShardedOptimizer is recorded
    ranks: int = 4
    params: tuple = (5, 2, 9)  # number of elements of each parameter
    bucket_bytes: int = 1  # for a core with buckets; 1: each parameter has a bucket of its own
    steps: int = 1
    edit: Edit | None = None  # of a copy of the package, which is recorded in place of the package
    is_rank_1_reversed: bool = False  # whether rank 1 calls its layers in the reverse order
    loop: str = "train"  # a function of show/loop.py


class Record(NamedTuple):
    """What one rank has recorded, as plain data."""
    events: list  # of the steps that are shown, and of the forward pass after them: see Event in show/trace.py
    storages: dict  # number of a storage -> {rank, row, part, numel, nbytes}, see show/frames.py
    owned: set  # elements that the rank updates
    sources: dict  # name of a file -> its text


def plain_inputs(program):
    """Return weights (n,) and gradients (steps + 1, ranks, n) that a reader can check.

    There is a step more than is recorded: its forward pass reads what the last step wrote.
    """
    elements = torch.arange(1.0, sum(program.params) + 1)
    ranks = 100 * torch.arange(float(program.ranks))
    steps = 20 * torch.arange(program.steps + 1.0)
    weights = 500 + 2 * elements
    gradients = elements + ranks[:, None] + steps[:, None, None]
    return weights, gradients


def distinguishable_inputs(program):
    """Return weights and gradients of the same shapes, in which every value has digits of its own.

    With plain inputs some sums of gradients equal parameters.
    """
    generator = torch.Generator().manual_seed(53)
    n = sum(program.params)
    scale = 2.0 ** torch.randint(-4, 5, (n,), generator=generator)

    def draw(*shape):
        return (1 + torch.rand(*shape, n, generator=generator)) * scale

    weights = 64 * draw()  # large beside the updates, which would leave few digits of smaller weights
    gradients = draw(program.steps + 1, program.ranks)
    return weights, gradients


def core_module(package):
    """Return the module with the core: `package` itself, if it is a module, or its module optimizer."""
    module = importlib.import_module(package)
    is_package = hasattr(module, "__path__")
    return importlib.import_module(f"{package}.optimizer") if is_package else module


def core_files(package):
    """Return {path: name} of the files that are watched, show/loop.py first."""
    core = Path(core_module(package).__file__)
    files = {loop.__file__: "loop.py"}
    for name in (core.name, *FILES_BESIDE):
        path = core.with_name(name)
        if path.exists():
            files[str(path)] = name
    return files


@contextlib.contextmanager
def edited(program):
    """Yield the name of the program's package, or of a copy of the package with the program's edit."""
    if program.edit is None:
        yield program.package
        return
    source = Path(importlib.import_module(program.package).__file__).parent
    with tempfile.TemporaryDirectory(prefix="edited_") as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
        copy = Path(folder, Path(folder).name)  # a new name each time: Python keeps imported modules by name
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / program.edit.file
        text = path.read_text(encoding="utf-8").replace(program.edit.before, program.edit.after, 1)
        path.write_text(text, encoding="utf-8")
        yield copy.name


@contextlib.contextmanager
def sharding_as_on_a_cluster(package, core):
    """Inside, the few elements of this model are cut into shards and sent as a cluster does it with many elements.

    core: the ShardedOptimizer of the package.
    """
    with contextlib.ExitStack() as patches:
        torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
        patches.callback(torch.use_deterministic_algorithms, False)
        # The usual alignment, 64 bytes, would pad the few elements of a shard, and cut through no parameter.
        buffer = sys.modules.get(f"{package}.buffer")
        if hasattr(buffer, "ALIGNMENT"):
            patches.enter_context(mock.patch.object(buffer, "ALIGNMENT", CELL_BYTES))
        # Stage 4 calls reduce-scatters and all-gathers, as on NCCL, whatever carries the messages here.
        transport = sys.modules.get(f"{package}.transport")
        if transport:
            native = staticmethod(lambda group, device, dtype: transport.Transport(group))
            patches.enter_context(mock.patch.object(core, "transport_for", native))
        yield


def run_traced(rank, program, package, weights, grads):
    """Train on one rank, and return its Trace."""
    order = list(range(len(program.params)))
    if program.is_rank_1_reversed and rank.number == 1:
        order.reverse()
    model = loop.Model([part.clone() for part in weights.split(program.params)], order)
    batches = [list(step_grads[rank.number].split(program.params)) for step_grads in grads]
    core = core_module(package).ShardedOptimizer
    options = ADAMW
    has_buckets = hasattr(core, "prefetch_params")
    if has_buckets:
        options = ADAMW | {"bucket_cap_mb": program.bucket_bytes / 2**20}
    train = getattr(loop, program.loop)
    trace = Trace(core_files(package), model)
    wires = Wires(trace)
    with sharding_as_on_a_cluster(package, core), wires.collectives(), wires, trace:
        optimizer = core(model.parameters(), torch.optim.AdamW, **options)
        trace.optimizer = optimizer
        if has_buckets:
            optimizer.prefetch_params(model)
        train(model, optimizer, batches)
        if has_buckets:
            optimizer.finish_param_sync()
    return trace


def replicated_steps(program, weights, grads):
    """Return the elements (n,) after each step, as one process computes them from averaged gradients."""
    param = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([param], **ADAMW)
    after_steps = []
    for step_grads in grads:
        param.grad = (step_grads / program.ranks).sum(0)
        optimizer.step()
        after_steps.append(param.detach().clone())
    return after_steps


def record_rank(rank, program):
    """Return the Record of a rank."""
    weights, grads = distinguishable_inputs(program)
    with edited(program) as package:
        trace = run_traced(rank, program, package, *plain_inputs(program))
        # In a second run the digits of each value tell where the value comes from.
        telling = run_traced(rank, program, package, weights, grads)
        sources = {name: Path(path).read_text(encoding="utf-8") for path, name in core_files(package).items()}
    table = labels.Table(weights, grads, replicated_steps(program, weights, grads))
    labelled = labels.labelled_events(trace, telling, table, program.steps)
    events = frames.folded(events_shown(labelled, program.steps))
    storages = {}
    for event in events:
        for uid, cells in event.cells.items():
            storage = trace.storages[uid]
            storages[uid] = {"rank": rank.number, "row": storage.row, "part": storage.part, "numel": len(cells),
                             "nbytes": CELL_BYTES * len(cells)}
    owned = set()
    for param in trace.states():
        uid, first, end = trace.span(param)
        cells_at_start = events[0].cells[uid][first:end]  # no cell has been written yet: each names its element
        owned |= {cell.element for cell in cells_at_start}
    return Record(events, storages, owned, sources)


def events_shown(events, n_steps):
    """Return the events from the loop's first line to the end of the forward pass that follows the last step."""
    def is_before_the_loop(event):
        return not event.stack or event.stack[0].file != "loop.py"

    def is_shown(event):
        return event.step < n_steps or event.phase == "forward"

    return list(itertools.takewhile(is_shown, itertools.dropwhile(is_before_the_loop, events)))
