"""Runs a program on N real processes, and records each rank's lines and memory -> what show/clock.py puts in order."""

import contextlib
import importlib.util
import inspect
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from harness.workers import Workers

from . import labels, loop, replicated
from .trace import Trace
from .wires import Wires

ROOT = Path(__file__).resolve().parents[1]
CORE_FILES = ("optimizer.py", "buffer.py", "transport.py")


@dataclass(frozen=True)
class Program:
    """What is recorded.

    package: of the core; "show.replicated" is rung 0. edits: (file, before, after), made in a copy of it.
    params: elements of each parameter. buckets: how many, where the core has buckets. orders: rank -> order in which
    it calls its layers, where that isn't the order of the parameters. loop: a function of show/loop.py.
    """

    package: str
    ranks: int = 4
    params: tuple = (5, 2, 9)
    dtype: str = "float32"
    grad_dtype: str | None = None
    optimizer: str = "momentum"
    buckets: int = 3
    steps: int = 1
    edits: tuple = ()
    orders: tuple = ()
    loop: str = "train"


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 1.0}),
    "momentum": (torch.optim.SGD, {"lr": 1.0, "momentum": 0.5}),
    "adamw": (torch.optim.AdamW, {"lr": 1.0, "weight_decay": 0.0}),
}


def plain_inputs(program):
    """Values that a reader can check -> weights (n,), gradients (steps + 1, d, n), in fp32.

    A step more than is shown: its first lines are, and the rest tells what is read again.
    """
    elements = torch.arange(1.0, sum(program.params) + 1)
    ranks = 100 * torch.arange(float(program.ranks))
    steps = 20 * torch.arange(program.steps + 1.0)
    return 500 + 2 * elements, elements + ranks[:, None] + steps[:, None, None]


def telling_inputs(program):
    """Values that can't be confused, of the same shapes: each element has a magnitude of its own.

    Weights are larger than what is subtracted from them, or few digits would be left.
    """
    generator = torch.Generator().manual_seed(53)
    n = sum(program.params)
    scale = 2.0 ** torch.randint(-4, 5, (n,), generator=generator)

    def draw(*shape):
        return (1 + torch.rand(*shape, n, generator=generator)) * scale

    return 64 * draw(), draw(program.steps + 1, program.ranks)


def core_files(package):
    """-> {path: name} of the files that are watched, the loop's first."""
    module = importlib.import_module(package)
    folder = Path(module.__file__).parent
    if package == replicated.__name__:
        paths = [Path(replicated.__file__)]
    elif (folder / "optimizer.py").exists():
        paths = [folder / name for name in CORE_FILES if (folder / name).exists()]
    else:
        paths = sorted(folder.glob("*.py")) if Path(module.__file__).name == "__init__.py" else [Path(module.__file__)]
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


def buffer_module(package):
    """-> the module `buffer` of a core, or None. `package` may name a module of it."""
    if not hasattr(importlib.import_module(package), "__path__"):
        package = package.rpartition(".")[0]
    name = f"{package}.buffer"
    return importlib.import_module(name) if package and importlib.util.find_spec(name) else None


def cap_for(program):
    """-> the bucket_cap_mb that makes about as many buckets as are asked for; or a bucket for each parameter."""
    layout = getattr(buffer_module(program.package), "bucket_layout", None)
    if layout is None:
        return 1e-9
    dtype = getattr(torch, program.dtype)
    nbytes = [n * dtype.itemsize for n in program.params]

    def missed_by(cap):
        return abs(len(layout(nbytes, [dtype] * len(nbytes), cap)) - program.buckets)

    return min((1e-3, *range(1, 4 * sum(nbytes) + 1)), key=missed_by) / 2**20


@contextlib.contextmanager
def one_element_aligned(package, itemsize):
    """Shards that cut through parameters, and no padding that isn't needed, in a model of few elements."""
    module = buffer_module(package)
    aligned = hasattr(module, "ALIGNMENT")
    with mock.patch.object(module, "ALIGNMENT", itemsize) if aligned else contextlib.nullcontext():
        yield


def on_native_transport(core):
    """Stage 4 as it is on NCCL: reduce-scatters and all-gathers, whatever carries them here."""
    if not hasattr(core, "transport_for"):
        return contextlib.nullcontext()
    transport = importlib.import_module(f"{core.__module__.rpartition('.')[0]}.transport").Transport
    return mock.patch.object(core, "transport_for", staticmethod(lambda group, device, dtype: transport(group)))


@contextlib.contextmanager
def edited(program):
    """The package of `program`; where it has edits, a changed copy of that. -> its name"""
    if not program.edits:
        yield program.package
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(importlib.import_module(program.package).__file__).parent
        copy = Path(folder) / f"edited_{program.package}"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "guard"))
        (copy / "__init__.py").write_text("")
        for name, before, after in program.edits:
            text = (copy / name).read_text(encoding="utf-8")
            if text.count(before) != 1:
                raise ValueError(f"{name} of {program.package} has {text.count(before)} times {before!r}")
            (copy / name).write_text(text.replace(before, after), encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            yield copy.name
        finally:
            sys.path.remove(folder)
            for name in [name for name in sys.modules if name.split(".")[0] == copy.name]:
                del sys.modules[name]


def run_traced(rank, program, package, inputs):
    """Trains on one rank -> its Trace."""
    dtype = getattr(torch, program.dtype)
    weights, grads = (tensor.to(dtype) for tensor in inputs)
    order = dict(program.orders).get(rank.rank, range(len(program.params)))
    model = loop.Model([part.clone() for part in weights.split(program.params)], order)
    batches = [list(of_step[rank.rank].split(program.params)) for of_step in grads]
    cls = core_class(package)
    torch_class, options = OPTIMIZERS[program.optimizer]
    offered = inspect.signature(cls.__init__).parameters
    if "bucket_cap_mb" in offered:
        options = options | {"bucket_cap_mb": cap_for(program)}
    if program.grad_dtype:
        options = options | {"grad_dtype": getattr(torch, program.grad_dtype)}
    files = core_files(package)
    folder = str(Path(list(files)[-1]).parent) + "/"
    unwatched = (loop.Weigh.forward.__code__,)
    trace = Trace(files, folder if package != replicated.__name__ else replicated.__file__, unwatched, model)
    itemsize = min(dtype.itemsize, options.get("grad_dtype", dtype).itemsize)
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN then
    try:
        with one_element_aligned(package, itemsize), on_native_transport(cls), Wires(trace):
            with trace:
                optimizer = trace.optimizer = cls(model.parameters(), torch_class, **options)
                trace.here = ()
                if hasattr(optimizer, "prefetch_params"):
                    optimizer.prefetch_params(model)
                getattr(loop, program.loop)(model, optimizer, batches)
            if hasattr(optimizer, "finish_param_sync"):
                optimizer.finish_param_sync()
    finally:
        torch.use_deterministic_algorithms(False)
    return trace


def replicated_steps(program, inputs):
    """-> for each step all elements after it, (n,) each: what one process gets from the averaged gradients.

    16-bit parameters are stepped in fp32, and rounded.
    """
    weights, grads = (tensor.to(getattr(torch, program.dtype)).float() for tensor in inputs)
    torch_class, options = OPTIMIZERS[program.optimizer]
    param = torch.nn.Parameter(weights.clone())
    optimizer, later = torch_class([param], **options), []
    for of_ranks in grads:
        param.grad = (of_ranks / program.ranks).sum(0)
        optimizer.step()
        later.append(param.detach().clone())
    return later


def record_rank(rank, program):
    """-> {events, storages, owned} of one rank, all plain data."""
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated")
    with edited(program) as package:
        trace = run_traced(rank, program, package, plain_inputs(program))
        telling = run_traced(rank, program, package, telling_inputs(program))
    inputs = telling_inputs(program)
    if [event.stack for event in trace.events] != [event.stack for event in telling.events]:
        # Whose lines depend on values is labelled by the values that are shown, of which some are equal.
        telling, inputs = trace, plain_inputs(program)
    weights, grads = (tensor.to(getattr(torch, program.dtype)) for tensor in inputs)
    table = labels.Table(weights, grads, replicated_steps(program, inputs), weights.dtype)
    for event, labelled in zip(trace.events, labels.label_all(telling, table)):
        event.labels = labelled
    trace.mark_garbage()
    return {"events": trace.events, "storages": list(trace.storages.values()), "owned": trace.owned()}


def record(program, workers=None):
    """Runs `program` -> what `record_rank` returns, for each rank. Raises WorkerError when a rank fails."""
    if workers is not None:
        return workers.run(record_rank, program)
    with Workers(program.ranks, timeout_s=60) as workers:
        return workers.run(record_rank, program)
