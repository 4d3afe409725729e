"""Runs a program on one rank of several, and records which lines the rank executes, and what its memory holds.

A program is a short training with a core. The core is the optimizer class that is shown: the class ShardedOptimizer of
a stage (a folder stage*/), of show/replicated.py, or of another package. Three modules take part in a run:

    loop.py     the model and the training loop
    trace.py    a Trace watches the lines and the memory of the rank, and makes a list of events: what each line did
    wires.py    replaces torch's collectives, and notes each message in the Trace

Each program runs twice, with different numbers. labels.py compares the runs, and finds out what each value is, such as
a gradient. frames.py then joins the records of all ranks into one recording, which the page docs/watch.html plays.
"""

import contextlib
import importlib
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

FILES_BESIDE = ("buffer.py", "transport.py")  # files of a stage that are watched like the core's own file
ADAMW = {"lr": 1.0, "weight_decay": 0.0}  # with these options the first step takes 1 from each parameter


class Edit(NamedTuple):
    """A change of one file of a package: the text `before` is replaced by `after`."""
    file: str
    before: str
    after: str


@dataclass(frozen=True)
class Program:
    """Describes a training that is recorded, with AdamW and parameters of 32 bits."""
    package: str  # the name of the package or module that contains the core
    ranks: int = 4
    params: tuple = (5, 2, 9)  # number of elements of each parameter
    # Only stage 4 reads this: a bucket, which is sent at once, has at least so many bytes. 1: a bucket a parameter.
    bucket_bytes: int = 1
    steps: int = 1  # how many steps of training are shown
    edit: Edit | None = None  # if given, the edit is made in a copy of the package, and the copy is recorded
    is_rank_1_reversed: bool = False  # whether rank 1 calls the model's layers in the reverse order
    loop: str = "train"  # the name of a function of show/loop.py


class Record(NamedTuple):
    """What one rank has recorded. It holds no tensors, and can be sent to another process."""
    events: list  # Events of show/trace.py: what the rank did in the steps that are shown, and in one more forward pass
    storages: dict  # number of a storage -> {rank, row, part, numel, nbytes}, see show/frames.py
    owned: set  # the elements that the rank updates: elements of all parameters are counted from 0
    sources: dict  # name of each file that was watched -> its text


def plain_inputs(program):
    """Return weights (n,) and gradients (steps + 1, ranks, n) that a reader can check. n: elements of all parameters.

    There is one step more than is shown: its forward pass reads what the last step wrote.
    """
    elements = torch.arange(1.0, sum(program.params) + 1)
    ranks = 100 * torch.arange(float(program.ranks))
    steps = 20 * torch.arange(program.steps + 1.0)
    weights = 500 + 2 * elements
    gradients = elements + ranks[:, None] + steps[:, None, None]
    return weights, gradients


def distinguishable_inputs(program):
    """Return weights and gradients of the same shapes as plain_inputs. Every value has digits of its own.

    The digits show where a value in memory comes from. With plain inputs some sums of gradients equal parameters.
    """
    generator = torch.Generator().manual_seed(53)
    n = sum(program.params)
    scale = 2.0 ** torch.randint(-4, 5, (n,), generator=generator)  # elements differ in size, too

    def draw(*shape):
        return (1 + torch.rand(*shape, n, generator=generator)) * scale

    weights = 64 * draw()  # large beside the updates, which would leave few digits of smaller weights
    gradients = draw(program.steps + 1, program.ranks)
    return weights, gradients


def core_module(package):
    """Return the module that contains the core: `package` itself if it is a module, or `package`.optimizer."""
    module = importlib.import_module(package)
    is_package = hasattr(module, "__path__")
    return importlib.import_module(f"{package}.optimizer") if is_package else module


def core_files(package):
    """Return {path: name} of the files whose lines are watched. The first is show/loop.py."""
    core = Path(core_module(package).__file__)
    files = {loop.__file__: "loop.py"}
    for name in (core.name, *FILES_BESIDE):
        path = core.with_name(name)
        if path.exists():
            files[str(path)] = name
    return files


@contextlib.contextmanager
def edited(program):
    """Yield the name of the package to run: the program's package, or a copy with the program's edit."""
    if program.edit is None:
        yield program.package
        return
    # The copy is imported from a temporary folder, which is put on Python's search path.
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
    """Return a context in which the core treats this small model as it treats a large one on a cluster.

    package: its name. core: the class ShardedOptimizer of the package.
    """
    with contextlib.ExitStack() as patches:
        torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
        patches.callback(torch.use_deterministic_algorithms, False)  # called when the context ends
        # In stage 4 a shard begins at a multiple of 64 bytes, which are 16 elements. Here shards would be mostly
        # padding, and none would end inside a parameter, as shards do on a cluster.
        buffer = sys.modules.get(f"{package}.buffer")
        if hasattr(buffer, "ALIGNMENT"):
            patches.enter_context(mock.patch.object(buffer, "ALIGNMENT", CELL_BYTES))
        # With gloo stage 4 calls no reduce-scatter. Here it shall call what it calls with NCCL. Therefore `native`
        # replaces its method transport_for, which chooses by the backend.
        transport = sys.modules.get(f"{package}.transport")
        if transport:
            native = staticmethod(lambda group, device, dtype: transport.Transport(group))
            patches.enter_context(mock.patch.object(core, "transport_for", native))
        yield


def run_traced(rank, program, package, weights, grads):
    """Train on this rank, and return its Trace.

    rank: an object of harness/ranks that has the rank's number. package: the name that `edited` yields. weights, grads:
    see plain_inputs.
    """
    order = list(range(len(program.params)))
    if program.is_rank_1_reversed and rank.number == 1:
        order.reverse()
    model = loop.Model([part.clone() for part in weights.split(program.params)], order)
    batches = [list(step_grads[rank.number].split(program.params)) for step_grads in grads]
    core = core_module(package).ShardedOptimizer
    options = ADAMW
    has_buckets = hasattr(core, "prefetch_params")  # only stage 4 has this method, and buckets
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
    """Return a list: all parameters (n,) after each step, as one process computes them from averaged gradients."""
    param = torch.nn.Parameter(weights.clone())
    optimizer = torch.optim.AdamW([param], **ADAMW)
    after_steps = []
    for step_grads in grads:
        param.grad = (step_grads / program.ranks).sum(0)
        optimizer.step()
        after_steps.append(param.detach().clone())
    return after_steps


def record_rank(rank, program):
    """Run a program twice on this rank, and return the rank's Record. All ranks call this."""
    weights, grads = distinguishable_inputs(program)
    with edited(program) as package:
        trace = run_traced(rank, program, package, *plain_inputs(program))
        second_trace = run_traced(rank, program, package, weights, grads)
        sources = {name: Path(path).read_text(encoding="utf-8") for path, name in core_files(package).items()}
    table = labels.Table(weights, grads, replicated_steps(program, weights, grads))
    labelled = labels.labelled_events(trace, second_trace, table, program.steps)
    events = frames.folded(events_shown(labelled, program.steps))
    storages = {}  # only those that appear in an event that is shown
    for event in events:
        for uid, cells in event.cells.items():
            storage = trace.storages[uid]
            storages[uid] = {"rank": rank.number, "row": storage.row, "part": storage.part, "numel": len(cells),
                             "nbytes": CELL_BYTES * len(cells)}
    owned = set()
    for param in trace.states():  # the parameters, or the parts of them, that this rank updates
        uid, first, end = trace.span(param)
        cells_at_start = events[0].cells[uid][first:end]  # nothing was overwritten yet, so each cell has an element
        owned |= {cell.element for cell in cells_at_start}
    return Record(events, storages, owned, sources)


def events_shown(events, n_steps):
    """Return the events of the first n_steps steps, and of the forward pass that follows. Only the loop's count."""
    shown = []
    for event in events:
        is_in_the_loop = event.stack and event.stack[0].file == "loop.py"
        is_early = event.step < n_steps or event.phase == "forward"
        if is_in_the_loop and is_early:
            shown.append(event)
    return shown
