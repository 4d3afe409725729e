"""Runs a program on one rank of several, and records its lines and memory for show/frames.py."""

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

CORE_FILES = ("replicated.py", "optimizer.py", "buffer.py", "transport.py")
ADAMW = {"lr": 1.0, "weight_decay": 0.0}


class Edit(NamedTuple):
    """A change of one file of a package."""
    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Program:
    """Describes a run that is recorded, with AdamW and parameters of 32 bits."""
    package: str  # whose ShardedOptimizer is recorded; "show.replicated" is the baseline
    ranks: int = 4
    params: tuple = (5, 2, 9)  # number of elements of each parameter
    bucket_bytes: int = 1  # for a core with buckets; 1: each parameter has a bucket of its own
    steps: int = 1
    edit: Edit | None = None  # of a copy of the package
    is_rank_1_reversed: bool = False  # whether rank 1 calls its layers in the reverse order
    loop: str = "train"  # a function of show/loop.py


class Record(NamedTuple):
    """What one rank has recorded, as plain data."""
    events: list  # of the steps that are shown, and of the forward pass after them: see Event in show/trace.py
    storages: dict  # number of a storage -> {rank, row, part, numel, nbytes}
    owned: set  # elements that the rank updates
    sources: dict  # name of a file -> its text


def plain_inputs(program):
    """Return weights (n,) and gradients (steps + 1, ranks, n) that a reader can check."""
    elements = torch.arange(1.0, sum(program.params) + 1)
    ranks = 100 * torch.arange(float(program.ranks))
    steps = 20 * torch.arange(program.steps + 1.0)  # one more step: its forward pass reads what the last step wrote
    weights = 500 + 2 * elements
    gradients = elements + ranks[:, None] + steps[:, None, None]
    return weights, gradients


def distinguishable_inputs(program):
    """Return weights and gradients of the same shapes, no two of which are alike: each has digits of its own.

    With plain inputs some sums of gradients and parameters equal other parameters.
    """
    generator = torch.Generator().manual_seed(53)
    n = sum(program.params)
    scale = 2.0 ** torch.randint(-4, 5, (n,), generator=generator)

    def draw(*shape):
        return (1 + torch.rand(*shape, n, generator=generator)) * scale

    weights = 64 * draw()  # large beside the updates, which would leave few digits of smaller weights
    return weights, draw(program.steps + 1, program.ranks)


def core_module(package):
    """Return the module that has the core."""
    module = importlib.import_module(package)
    if hasattr(module, "__path__"):
        return importlib.import_module(f"{package}.optimizer")
    return module


def core_files(package):
    """Return {path: name} of the files that are watched, show/loop.py first."""
    folder = Path(core_module(package).__file__).parent
    names = [name for name in CORE_FILES if (folder / name).exists()]
    return {loop.__file__: "loop.py"} | {str(folder / name): name for name in names}


@contextlib.contextmanager
def edited(program):
    """Yield the name of the program's package, or of a copy of the package with the program's edit."""
    if program.edit is None:
        yield program.package
        return
    source = Path(importlib.import_module(program.package).__file__).parent
    with tempfile.TemporaryDirectory(prefix="edited_") as folder, mock.patch.object(sys, "path", [folder, *sys.path]):
        copy = Path(folder, Path(folder).name)
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / program.edit.file
        text = path.read_text(encoding="utf-8").replace(program.edit.before, program.edit.after, 1)
        path.write_text(text, encoding="utf-8")
        yield copy.name


@contextlib.contextmanager
def sharding_as_on_a_cluster(package, cls):
    """Inside, a few elements are cut into shards and sent in the way in which a cluster does that with many."""
    with contextlib.ExitStack() as patches:
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        patches.callback(torch.use_deterministic_algorithms, False)
        # The usual alignment would give padding alone, and no shard that cuts through a parameter.
        buffer = sys.modules.get(f"{package}.buffer")
        if buffer:
            patches.enter_context(mock.patch.object(buffer, "ALIGNMENT", CELL_BYTES))
        # Stage 4 calls reduce-scatters and all-gathers, as on NCCL, whatever carries the messages here.
        transport = sys.modules.get(f"{package}.transport")
        if transport:
            native = staticmethod(lambda group, device, dtype: transport.Transport(group))
            patches.enter_context(mock.patch.object(cls, "transport_for", native))
        yield


def run_traced(rank, program, package, weights, grads):
    """Train on one rank, and return its Trace."""
    order = list(range(len(program.params)))
    if program.is_rank_1_reversed and rank.number == 1:
        order.reverse()
    model = loop.Model([part.clone() for part in weights.split(program.params)], order)
    batches = [list(step_grads[rank.number].split(program.params)) for step_grads in grads]
    cls = core_module(package).ShardedOptimizer
    options = ADAMW
    has_buckets = hasattr(cls, "prefetch_params")
    if has_buckets:
        options = ADAMW | {"bucket_cap_mb": program.bucket_bytes / 2**20}
    trace = Trace(core_files(package), model)
    wires = Wires(trace)
    with sharding_as_on_a_cluster(package, cls), wires.collectives(), wires, trace:
        optimizer = trace.optimizer = cls(model.parameters(), torch.optim.AdamW, **options)
        if has_buckets:
            optimizer.prefetch_params(model)
        getattr(loop, program.loop)(model, optimizer, batches)
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
    inputs = distinguishable_inputs(program)
    with edited(program) as package:
        trace = run_traced(rank, program, package, *plain_inputs(program))
        # In a second run the digits of each value tell where the value comes from.
        telling = run_traced(rank, program, package, *inputs)
        sources = {name: Path(path).read_text(encoding="utf-8") for path, name in core_files(package).items()}
    table = labels.Table(*inputs, replicated_steps(program, *inputs))
    labelled = labels.labelled_events(trace, telling, table, program.steps)
    in_loop = itertools.dropwhile(lambda event: not event.stack or event.stack[0].file != "loop.py", labelled)
    shown = itertools.takewhile(lambda event: event.step < program.steps or event.phase == "forward", in_loop)
    events = frames.folded(list(shown))
    storages = {}
    for event in events:
        for uid, cells in event.cells.items():
            storage = trace.storages[uid]
            storages[uid] = {"rank": rank.number, "row": storage.row, "part": storage.part, "numel": len(cells),
                             "nbytes": CELL_BYTES * len(cells)}
    owned = set()
    for param in trace.states():
        uid, first, end = trace.span(param)
        owned |= {cell.element for cell in events[0].cells[uid][first:end]}  # cells at the start name their element
    return Record(events, storages, owned, sources)
