"""What runs on every rank while a package is graded, and what a rank tells meanwhile.

A rank tells the process that grades (by `launch.event`) of each collective as it begins, where it hangs, and what it
has raised: a rank that is killed afterwards can't tell any more.
"""

import contextlib
import copy
import importlib.util
import inspect
import os
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.measure.ledger import Ledger
from harness.measure.memory import Memory
from harness.run.launch import Rank, event

CLASSES = ("DistributedOptimizer", "ShardedOptimizer")  # the whole one, or the idea alone: a core
OURS = tuple(str(Path(__file__).resolve().parents[1] / folder) for folder in ("grade", "harness"))
LR = 0.1
OPTIMIZERS = {"SGD": (torch.optim.SGD, {"lr": LR}),
              "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": False})}


def class_of(package):
    """-> the optimizer's class of a package: in `package` or in `package.optimizer`; None if neither has one."""
    module = importlib.import_module(package)
    modules = [module]
    if hasattr(module, "__path__") and importlib.util.find_spec(f"{package}.optimizer"):
        modules.append(importlib.import_module(f"{package}.optimizer"))
    found = [getattr(module, name) for name in CLASSES for module in modules if hasattr(module, name)]
    return found[0] if found else None


@dataclass
class Candidate:
    """What is graded, on this rank."""

    rank: Rank
    cls: type
    ledger: Ledger

    def make(self, params, optimizer_cls, **kwargs):
        """Buckets, if there are any, are so small that there are several."""
        if "bucket_cap_mb" in inspect.signature(self.cls).parameters:
            params = list(params)
            tensors = [p for group in params for p in group["params"]] if isinstance(params[0], dict) else params
            kwargs["bucket_cap_mb"] = sum(tensor.nbytes for tensor in tensors) / 6 / 2**20
        return self.cls(params, optimizer_cls, **kwargs)


class Told(Ledger):
    """A ledger that tells of each collective before it begins."""

    def entry_of(self, operator, arguments):
        entry = super().entry_of(operator, arguments)
        if entry is not None:
            size = f" of {entry.size} bytes" if entry.size else ""
            event(("collective", f"{entry.kind}{size}", where(sys._getframe())))
        return entry


def of_the_reader(path):
    """Whether a file is in the current folder, and neither ours nor a library's."""
    in_here = path.startswith(os.getcwd() + os.sep)
    return in_here and not path.startswith(OURS) and f"{os.sep}site-packages{os.sep}" not in path


def where(frame):
    """-> "file:line" of the innermost frame of the reader's code; "" if there is none."""
    while frame is not None:
        if of_the_reader(frame.f_code.co_filename):
            return f"{os.path.relpath(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def where_raised(error):
    """The same, of an exception."""
    places = [f"{os.path.relpath(frame.filename)}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
              if of_the_reader(frame.filename)]
    return places[-1] if places else ""


_is_quiet = False


def get_ready(rank, package):
    """Load what is graded. What gloo's C++ says as it dies is left out; what Python prints is not."""
    global _is_quiet
    if not _is_quiet:
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated")
        _is_quiet = True
    class_of(package)


def watched(rank, package, stuck_after_s, function, *args):
    """-> function(candidate, *args), with everything told of that happens on the way."""
    get_ready(rank, package)  # again, where ranks had to be started anew
    main = threading.main_thread().ident
    stuck = threading.Timer(stuck_after_s, lambda: event(("stuck", where(sys._current_frames()[main]))))
    stuck.daemon = True
    stuck.start()
    try:
        with Told() as ledger:
            result = function(Candidate(rank, class_of(package), ledger), *args)
        event(("ended",))
        return result
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        event(("raised", f"{type(error).__name__}: {first_line}", where_raised(error)))
        raise
    finally:
        stuck.cancel()


# ------------------------------------------------------------------------------------------------------------- level 1


def by_hand(candidate):
    """16 elements 0 … 15 in four parameters, the gradient r + 1 on rank r, one step of SGD -> (16,)."""
    params = [nn.Parameter(torch.arange(4.0) + 4 * index) for index in range(4)]
    optimizer = candidate.make(params, torch.optim.SGD, lr=LR)
    (sum(param.sum() for param in params) * (candidate.rank.rank + 1)).backward()
    optimizer.step()
    return torch.cat([param.detach() for param in params])


def constructed(candidate):
    """Rank r begins with r everywhere -> (16,), after the constructor."""
    params = [nn.Parameter(torch.full((4,), float(candidate.rank.rank))) for _ in range(4)]
    candidate.make(params, torch.optim.SGD, lr=LR)
    return torch.cat([param.detach() for param in params])


def state_elements(candidate):
    """-> (elements of AdamW's moments that this rank holds, and those of the whole model, of its largest parameter)."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    optimizer = candidate.make(model.parameters(), torch.optim.AdamW, lr=0.01, foreach=False)
    model(torch.ones(2, 16)).sum().backward()
    stepped = set()
    handle = register_optimizer_step_post_hook(lambda one, *_: stepped.add(one))
    try:
        optimizer.step()
    finally:
        handle.remove()
    inner = stepped - {optimizer} or stepped  # an optimizer around another one may show the other's state as its own
    held = sum(value.numel() for one in inner for state in one.state.values() for value in state.values()
               if torch.is_tensor(value) and value.dim())
    numels = [param.numel() for param in model.parameters()]
    return held, 2 * sum(numels), 2 * max(numels)


def traffic(candidate):
    """-> dict: the second step's collectives by kind, bytes that a rank sends, how many began during the backward pass;
    Ψ; bytes of all tensors that live after the step."""
    def forward_backward(x):
        model(x).sum().backward()

    x = torch.ones(2, 64)
    with Memory("cpu") as memory:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        optimizer = candidate.make(model.parameters(), torch.optim.AdamW, lr=0.01, foreach=False)
        forward_backward(x)
        optimizer.step()
        optimizer.zero_grad()
        before = len(candidate.ledger.entries)
        forward_backward(x)
        after_backward = len(candidate.ledger.entries)
        optimizer.step()
        live = memory.settled()
    entries = candidate.ledger.entries[before:]
    kinds = [entry.kind for entry in entries]
    return {"collectives": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
            "wire_bytes": sum(entry.wire_bytes for entry in entries),
            "large": {entry.kind for entry in entries if entry.size >= 1024},  # flags and norms are smaller
            "during_backward": after_backward - before,
            "numel": sum(param.numel() for param in model.parameters()),
            "live": live}


# ------------------------------------------------------------------------------------- training, for levels 1 and 2


def model_of(seed):
    """Six parameters of odd sizes, 190 elements; x and y are (batch, 7)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 7))


def loss_of(model, number, rank):
    """Of batch `number` of a rank; every batch is another one."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x, y = torch.randn(2, 4, 7, generator=generator)
    return F.mse_loss(model(x), y)


def flat(model):
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


@dataclass(frozen=True)
class Run:
    """A training run, which the ranks and the one process do alike."""

    optimizer: str
    steps: int = 3
    groups: bool = False  # biases have a group of their own, with another lr and weight decay
    schedule: bool = False  # the lr falls to a half in each step
    micro_batches: int = 1
    no_sync: bool = False
    max_norm: float | None = None
    resume: bool = False  # after two steps: save, and go on in another model with another optimizer
    prefetch: bool = False  # parameters come back in the next forward pass, and rank 1's leave late
    defaults: bool = False  # the optimizer's own hyperparameters

    def params(self, model):
        if not self.groups:
            return model.parameters()
        return [{"params": [param for param in model.parameters() if param.dim() == 2]},
                {"params": [param for param in model.parameters() if param.dim() == 1], "lr": 0.05, "weight_decay": 0}]

    def settings(self):
        optimizer_cls, kwargs = OPTIMIZERS[self.optimizer]
        return optimizer_cls, {"foreach": False} if self.defaults else kwargs

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if self.schedule else None


def train(candidate, run):
    """-> (parameters after each step, (numel,) each; what clip_grad_norm_ returned; collectives inside no_sync).

    With `prefetch` only those after the last step: to look at them would be to wait.
    """
    with contextlib.ExitStack() as stack:
        if run.prefetch and candidate.rank.rank == 1:
            stack.callback(register_optimizer_step_post_hook(lambda *_: time.sleep(0.1)).remove)
        return _train(candidate, run)


def _train(candidate, run):
    rank = candidate.rank.rank
    model = model_of(seed=rank)
    optimizer_cls, kwargs = run.settings()
    optimizer = candidate.make(run.params(model), optimizer_cls, **kwargs)
    if run.prefetch:
        optimizer.prefetch_params(model)
    scheduler = run.scheduler(optimizer)
    snapshots, norms, in_no_sync = [], [], 0
    for step in range(run.steps):
        if run.resume and step == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = model_of(seed=rank + 10)
            model.load_state_dict(saved[0])
            optimizer = candidate.make(run.params(model), optimizer_cls, **kwargs)
            optimizer.load_state_dict(saved[1])
        for micro in range(run.micro_batches):
            before = len(candidate.ledger.entries)
            is_last = micro == run.micro_batches - 1
            with optimizer.no_sync() if run.no_sync and not is_last else contextlib.nullcontext():
                loss_of(model, step * run.micro_batches + micro, rank).backward()
            if not is_last:
                in_no_sync += len(candidate.ledger.entries) - before
        if run.max_norm:
            norms.append(float(optimizer.clip_grad_norm_(run.max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        if run.prefetch and step == run.steps - 1:
            optimizer.finish_param_sync()
        if not run.prefetch or step == run.steps - 1:
            snapshots.append(flat(model))
    return snapshots, norms, in_no_sync


def mean(grads):
    return sum(grads) / len(grads)


def in_one_process(run, world_size, combine=mean, zeroes=True, only_last=False, forgets=False):
    """The same run in one process with the batches of all ranks -> (snapshots, norms).

    The other arguments make known mistakes. combine: what becomes of the ranks' gradients of a parameter. zeroes:
    whether gradients are forgotten after a step. only_last: only the last micro-batch counts. forgets: the state is
    new in each step, with `resume` in the third.
    """
    model = model_of(seed=0)
    optimizer_cls, kwargs = run.settings()
    optimizer = optimizer_cls(run.params(model), **kwargs)
    scheduler, params = run.scheduler(optimizer), list(model.parameters())
    snapshots, norms = [], []
    for step in range(run.steps):
        if forgets and (step == 2 or not run.resume):
            optimizer.state.clear()
        for micro in range(run.micro_batches):
            if only_last and micro < run.micro_batches - 1:
                continue
            number = step * run.micro_batches + micro
            of_ranks = [torch.autograd.grad(loss_of(model, number, rank), params) for rank in range(world_size)]
            for param, *grads in zip(params, *of_ranks):
                grad = combine(grads)
                param.grad = grad if param.grad is None else param.grad + grad
        if run.max_norm:
            norms.append(float(nn.utils.clip_grad_norm_(params, run.max_norm)))
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        snapshots.append(flat(model))
    return snapshots[-1:] if run.prefetch else snapshots, norms
