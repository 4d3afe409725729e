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

from harness.ledger import Ledger
from harness.meeting import Rank
from harness.memory import Memory
from harness.workers import event

CLASSES = ("DistributedOptimizer", "ShardedOptimizer")  # the whole one, or the idea alone: a core
OURS = tuple(str(Path(__file__).resolve().parents[1] / folder) for folder in ("grade", "harness"))
LR = 0.1
N_TENSORS = 16  # of the model whose state and traffic are counted: eight layers
OPTIMIZERS = {"SGD": (torch.optim.SGD, {"lr": LR}),
              "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": False})}


def class_of(package):
    """-> (name, the optimizer's class) of a package, in `package` or in `package.optimizer`; ("", None) without one."""
    modules = [importlib.import_module(package), beside(package, "optimizer")]
    found = [(name, getattr(module, name)) for name in CLASSES for module in modules if hasattr(module, name)]
    return found[0] if found else ("", None)


def beside(package, name):
    """-> the module `name` of a package, or None."""
    has_one = hasattr(sys.modules[package], "__path__") and importlib.util.find_spec(f"{package}.{name}")
    return importlib.import_module(f"{package}.{name}") if has_one else None


@dataclass
class Candidate:
    """What is graded, on this rank."""

    rank: Rank
    package: str
    name: str
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
            root = arguments.get("root_rank", -1)
            towards = "" if root < 0 else f" {'to' if entry.kind in ('gather', 'reduce') else 'from'} rank {root}"
            event(("collective", f"{entry.kind}{size}{towards}", where(sys._getframe())))
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
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.relpath(error.filename)}:{error.lineno}"
    places = [f"{os.path.relpath(frame.filename)}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
              if of_the_reader(frame.filename)]
    return places[-1] if places else ""


_is_quiet = False


def get_ready(rank):
    """Join the group. What gloo's C++ says as it dies is left out from here on; what Python prints is not."""
    global _is_quiet
    if not _is_quiet:
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated")
        _is_quiet = True


def watched(rank, package, stuck_after_s, function, *args):
    """-> function(candidate, *args), with everything told of that happens on the way, in the package's import too."""
    get_ready(rank)  # again, where ranks had to be started anew
    main = threading.main_thread().ident
    stuck = threading.Timer(stuck_after_s, lambda: event(("stuck", where(sys._current_frames()[main]))))
    stuck.daemon = True
    stuck.start()
    try:
        name, cls = class_of(package)
        with Told() as ledger:
            result = function(Candidate(rank, package, name, cls, ledger), *args)
        event(("ended",))
        return result
    except BaseException as error:  # SystemExit, too
        first_line = (str(error).strip().splitlines() or [""])[0]
        event(("raised", f"{type(error).__name__}: {first_line}", where_raised(error)))
        raise
    finally:
        stuck.cancel()


# ------------------------------------------------------------------------------------------------------------- level 1


@dataclass(frozen=True)
class Facts:
    """What the package's class is, as far as the process that grades has to know: it never imports the package."""

    name: str  # "" if there is none
    kind: str  # "class", or the name of what it is
    missing: tuple = ()  # of METHODS
    refusal: str = ""  # what the constructor's signature says to the arguments that it is due
    arguments: tuple = ()
    is_optimizer: bool = False
    has_ranges: bool = False  # a function of stage 3's buffer


METHODS = ("step", "zero_grad", "clip_grad_norm_", "no_sync", "state_dict", "load_state_dict", "prefetch_params")


def look(candidate):
    """-> Facts."""
    cls, package = candidate.cls, candidate.package
    if not isinstance(cls, type):
        return Facts(candidate.name, type(cls).__name__)
    refusal, arguments = "", ()
    try:
        signature = inspect.signature(cls)
        arguments = tuple(signature.parameters)
        signature.bind([], torch.optim.SGD, process_group=None, lr=LR)
    except TypeError as error:
        refusal = f"{signature}: {error}"
    missing = tuple(name for name in METHODS if not callable(getattr(cls, name, None)))
    is_optimizer = issubclass(cls, torch.optim.Optimizer)
    return Facts(candidate.name, "class", missing, refusal, arguments, is_optimizer, ranges_of(package) is not None)


def ranges_of(package):
    """-> the function of `mine`, or of `mine.optimizer`; None if there is none."""
    folders = [name for name in (package, package.rpartition(".")[0]) if name]
    return next(filter(None, (getattr(beside(name, "buffer"), "ranges_in_shard", None) for name in folders)), None)


def ranges(candidate, cases):
    """-> what ranges_in_shard says to each of `cases`, as plain tuples."""
    return [[tuple(one) for one in ranges_of(candidate.package)(*case)] for case in cases]


@dataclass(frozen=True)
class ByHand:
    """Elements 0, 1, 2, … in a few parameters; rank r's gradient of parameter k is (r + 1) · scales[k].

    reverse: on rank 1 gradients come in the other order. zero: whether zero_grad() is called after a step.
    """

    numels: tuple = (4, 4, 4, 4)
    scales: tuple = (1, 1, 1, 1)
    dtype: torch.dtype = torch.float32
    options: tuple = ()  # further arguments of the constructor: ("name", value), …
    lr: float = LR
    steps: int = 1
    zero: bool = True
    reverse: bool = False

    def start(self):
        return torch.arange(float(sum(self.numels)))

    def grad(self, rank):
        return torch.cat([torch.full((n,), float((rank + 1) * s)) for n, s in zip(self.numels, self.scales)])


@dataclass(frozen=True)
class Seen:
    """After ByHand on a rank: all elements; what they were as the inner optimizer had stepped; what that was fed."""

    came: torch.Tensor  # (n,)
    own: torch.Tensor | None  # (n,)
    fed: str  # "nothing": no torch optimizer has stepped; "no gradients", "zeros", "gradients"
    grad: float | None  # the mean of these gradients


def by_hand(candidate, case):
    params = [nn.Parameter(part.to(case.dtype)) for part in case.start().split(case.numels)]
    optimizer = candidate.make(params, torch.optim.SGD, lr=case.lr, **dict(case.options))
    own, fed, means = [], [], []

    def all_elements():
        return torch.cat([param.detach().float().reshape(-1) for param in params])

    def note(one, *_):
        if one is not optimizer:
            own.append(all_elements())
            grads = [param.grad for group in one.param_groups for param in group["params"]]
            of_any = [grad.float().reshape(-1) for grad in grads if grad is not None]
            means.append(torch.cat(of_any).mean().item() if of_any else None)
            is_any = any(grad is not None and grad.any() for grad in grads)
            fed.append("gradients" if is_any else "zeros" if any(grad is not None for grad in grads) else
                       "no gradients" if grads else "nothing")

    handle = register_optimizer_step_post_hook(note)
    try:
        for _ in range(case.steps):
            terms = list(zip(params, case.scales))[:: -1 if case.reverse and candidate.rank.rank == 1 else 1]
            loss = sum((param * scale).sum() for param, scale in terms)  # the last term's gradient is the first
            (loss * (candidate.rank.rank + 1)).backward()
            optimizer.step()
            if case.zero:
                optimizer.zero_grad()
        return Seen(all_elements(), *((own[0], fed[0], means[0]) if own else (None, "nothing", None)))
    finally:
        handle.remove()


def constructed(candidate):
    """Rank r begins with r everywhere -> (16,) after the constructor, and after a step with gradients of 0."""
    params = [nn.Parameter(torch.full((4,), float(candidate.rank.rank))) for _ in range(4)]
    optimizer = candidate.make(params, torch.optim.SGD, lr=LR)
    values = torch.cat([param.detach() for param in params])
    sum(param.sum() * 0 for param in params).backward()
    optimizer.step()
    return values, torch.cat([param.detach() for param in params])


def state_elements(candidate):
    """-> elements of AdamW's moments: that this rank holds and that aren't 0, that are, as padding is; those of the
    whole model; those of its largest parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(N_TENSORS // 2)))
    optimizer = candidate.make(model.parameters(), torch.optim.AdamW, lr=0.01, foreach=False)
    model(torch.ones(2, 64)).sum().backward()
    stepped = set()
    handle = register_optimizer_step_post_hook(lambda one, *_: stepped.add(one))
    try:
        optimizer.step()
    finally:
        handle.remove()
    inner = stepped - {optimizer} or stepped  # an optimizer around another one may show the other's state as its own
    tensors = [value.to_local() if hasattr(value, "to_local") else value  # of a DTensor what lies on this rank
               for one in inner for state in one.state.values() for value in state.values()
               if torch.is_tensor(value) and value.dim()]
    numels = [param.numel() for param in model.parameters()]
    real = sum(int(value.count_nonzero()) for value in tensors)
    return real, sum(value.numel() for value in tensors) - real, 2 * sum(numels), 2 * max(numels)


def traffic(candidate):
    """-> dict: the second step's collectives by kind, bytes that a rank sends, how many began during the backward pass;
    Ψ; bytes of all tensors that live after the step."""
    def forward_backward(x):
        model(x).sum().backward()

    x = torch.ones(2, 64)
    with Memory("cpu") as memory:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(N_TENSORS // 2)))
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
            "wire_bytes": {one: sum(entry.wire_bytes for entry in entries if entry.kind == one) for one in set(kinds)},
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
    groups: bool = False  # one bias, the matrices, the other biases: each with an lr and a weight decay of its own
    schedule: str = ""  # "lr": it falls to a half in each step; "cycle": torch's one-cycle, which writes betas, too
    micro_batches: int = 1
    no_sync: bool = False
    max_norm: float | None = None
    resume: bool = False  # after two steps: save, and go on in another model with another optimizer
    prefetch: bool = False  # parameters come back in the next forward pass, and rank 1's leave late
    defaults: bool = False  # the optimizer's own hyperparameters

    def params(self, model):
        if not self.groups:
            return model.parameters()
        *others, last = [param for param in model.parameters() if param.dim() == 1]
        matrices = [param for param in model.parameters() if param.dim() == 2]
        return [{"params": [last], "lr": 0.05, "weight_decay": 0.5},
                {"params": matrices, "lr": 0.02, "weight_decay": 0.2},
                {"params": others, "lr": 0.03, "weight_decay": 0.0}]

    def settings(self):
        optimizer_cls, kwargs = OPTIMIZERS[self.optimizer]
        return optimizer_cls, {"foreach": False} if self.defaults else kwargs

    def scheduler(self, optimizer):
        if self.schedule == "cycle":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6, pct_start=0.5)
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


def in_one_process(run, world_size, combine=mean, zeroes=True, weights=None, forgets=False, hyper=None):
    """The same run in one process with the batches of all ranks -> (snapshots, norms).

    The other arguments make known mistakes. combine: what becomes of the ranks' gradients of a parameter. zeroes:
    whether gradients are forgotten after a step. weights: how often each micro-batch counts. forgets: the state is new
    in each step, with `resume` in the third. hyper: (hyperparameters of the groups now, at the start) -> those that the
    step uses.
    """
    model = model_of(seed=0)
    optimizer_cls, kwargs = run.settings()
    optimizer = optimizer_cls(run.params(model), **kwargs)
    at_start = hyperparameters(optimizer)
    scheduler, params = run.scheduler(optimizer), list(model.parameters())
    snapshots, norms = [], []
    for step in range(run.steps):
        if forgets and (step == 2 or not run.resume):
            optimizer.state.clear()
        for micro, weight in enumerate(weights or [1] * run.micro_batches):
            number = step * run.micro_batches + micro
            of_ranks = [torch.autograd.grad(loss_of(model, number, rank), params) for rank in range(world_size)]
            for param, *grads in zip(params, *of_ranks):
                grad = combine(grads) * weight
                param.grad = grad if param.grad is None else param.grad + grad
        if run.max_norm:
            norms.append(float(nn.utils.clip_grad_norm_(params, run.max_norm)))
        now = hyperparameters(optimizer)
        for group, used in zip(optimizer.param_groups, hyper(now, at_start) if hyper else now):
            group.update(used)
        optimizer.step()
        for group, right in zip(optimizer.param_groups, now):
            group.update(right)
        if zeroes:
            optimizer.zero_grad()
        if scheduler:
            scheduler.step()
        snapshots.append(flat(model))
    return snapshots[-1:] if run.prefetch else snapshots, norms


def hyperparameters(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
