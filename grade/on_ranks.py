"""What runs on every rank while a package is graded, and what a rank tells meanwhile.

A rank tells the process that grades (by `workers.event`) of each collective as it begins, where it stands still, and
what it has raised: a rank that is killed afterwards can't tell any more.
"""

import contextlib
import copy
import functools
import importlib.util
import inspect
import os
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.ledger import Ledger
from harness.meeting import Rank
from harness.memory import Memory, plain_tensors
from harness.workers import event

CLASSES = ("DistributedOptimizer", "ShardedOptimizer")  # the whole one, or the idea alone: a core
METHODS = ("step", "zero_grad", "clip_grad_norm_", "no_sync", "state_dict", "load_state_dict", "prefetch_params",
           "finish_param_sync")
OURS = tuple(str(Path(__file__).resolve().parents[1] / folder) for folder in ("grade", "harness"))
LR = 0.1
OPTIMIZERS = {"SGD": (torch.optim.SGD, {"lr": LR}),
              "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": False})}


def class_of(package):
    """-> (name, class) of what is graded, in `package` or in `package.optimizer`; ("", None) without one."""
    modules = [importlib.import_module(package), beside(package, "optimizer")]
    return next(((name, getattr(module, name)) for name in CLASSES for module in modules if hasattr(module, name)),
                ("", None))


def beside(package, name):
    """-> the module `name` of a package, or None."""
    has_one = hasattr(sys.modules[package], "__path__") and importlib.util.find_spec(f"{package}.{name}")
    return importlib.import_module(f"{package}.{name}") if has_one else None


class Told(Ledger):
    """A ledger that tells of each collective before it begins, and knows whether somebody has waited for it."""

    def entry_of(self, operator, arguments):
        entry = super().entry_of(operator, arguments)
        if entry is not None:
            size = f" of {entry.size} bytes" if entry.size else ""
            root = arguments.get("root_rank", -1)
            towards = "" if root < 0 else f" {'to' if entry.kind in ('gather', 'reduce') else 'from'} rank {root}"
            entry.place, entry.is_awaited = where(traceback.walk_stack(sys._getframe())), True
            event(("collective", f"{entry.kind}{size}{towards}", entry.place))
        return entry

    def _watch(self, entry, result):
        result = super()._watch(entry, result)
        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        if not isinstance(boxed, torch.ScriptObject):  # a functional collective returns a tensor that waits by itself
            return result
        self.works.append(Awaited(dist.Work.unbox(boxed), entry))
        boxed = self.works[-1].boxed()
        return [*result[:-1], boxed] if isinstance(result, (tuple, list)) else boxed


class Awaited(dist.Work):
    """A Work that notes whether it is waited for."""

    def __init__(self, work, entry):
        super().__init__()
        self.work, self.entry = work, entry
        entry.is_awaited = False

    def wait(self, *timeout):
        self.entry.is_awaited = True
        work, self.work = self.work, None  # which holds what has arrived
        return work is None or work.wait(*timeout)

    def is_completed(self):
        self.entry.is_awaited = True
        return self.work is None or self.work.is_completed()

    def get_future(self):
        self.entry.is_awaited = True
        return self.work.get_future()


@dataclass
class Candidate:
    """What is graded, on this rank."""

    rank: Rank
    package: str
    name: str
    cls: type
    ledger: Ledger

    def make(self, params, optimizer_cls, **kwargs):
        if "bucket_cap_mb" in inspect.signature(self.cls).parameters:  # so small that there are several buckets
            params = list(params)
            tensors = [p for group in params for p in group["params"]] if isinstance(params[0], dict) else params
            kwargs["bucket_cap_mb"] = sum(tensor.nbytes for tensor in tensors) / 6 / 2**20
        return self.cls(params, optimizer_cls, **kwargs)


# ------------------------------------------------------------------------------------------------- what a rank tells


def where(frames):
    """-> "file:line" of the first of (frame, line) in a file of the current folder that is neither ours nor a
    library's; "" if there is none."""
    for frame, line in frames:
        path = frame.f_code.co_filename
        if path.startswith(os.getcwd() + os.sep) and not path.startswith(OURS) and "site-packages" not in path:
            return f"{os.path.relpath(path)}:{line}"
    return ""


def where_raised(error):
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.relpath(error.filename)}:{error.lineno}"
    return where(reversed(list(traceback.walk_tb(error.__traceback__))))


@functools.cache
def silence():
    """What gloo's C++ says as it dies is left out from here on; what Python prints is not."""
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated")


def watch_for_hangs(ended, still_s, busy_s):
    """Tells where the main thread is when this process has done nothing for `still_s` seconds, and when it goes on; and
    when it has computed for `busy_s`. The processor's time counts, which a busy machine takes longer to give."""
    main, used, since, was_stuck = threading.main_thread().ident, time.process_time(), time.monotonic(), False
    busy_at = used + busy_s
    while not ended.wait(0.25):
        now = time.process_time()
        if now - used > 0.05:
            used, since = now, time.monotonic()
        is_stuck = now > busy_at or time.monotonic() - since > still_s
        if is_stuck != was_stuck:
            event(("stuck", where(traceback.walk_stack(sys._current_frames()[main]))) if is_stuck else ("moves",))
        was_stuck = is_stuck


def of_the_grader():
    """-> {(module, name, attribute): function}: all functions by which the grader judges, as they are now."""
    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] in ("grade", "harness")]
    held = {(module.__name__, name, ""): value for module in modules for name, value in list(vars(module).items())}
    inside = {(*key[:2], name): its for key, value in held.items() if inspect.isclass(value)
              and not issubclass(value, torch.optim.Optimizer)  # torch itself wraps their methods
              for name, its in list(vars(value).items())}
    return {key: value for key, value in {**held, **inside}.items() if inspect.isfunction(value)}


def watched(rank, package, limits, function, *args):
    """-> function(candidate, *args), with everything told of that happens on the way, in the package's import too.

    What the package replaces of ours is told of: it would judge itself. Our own is known before it is imported.
    """
    silence()
    ours_now, ours, tell, place_of = of_the_grader, of_the_grader(), event, where_raised
    ended = threading.Event()
    threading.Thread(target=watch_for_hangs, args=(ended, *limits), daemon=True).start()

    def refuse_replaced():
        now = ours_now()
        if replaced := [key for key in ours if now.get(key) is not ours[key]]:
            raise AssertionError(f"{package} replaces {'.'.join(filter(None, replaced[0]))}, by which it is graded")

    try:
        name, cls = class_of(package)
        refuse_replaced()
        with Told() as ledger:
            result = function(Candidate(rank, package, name, cls, ledger), *args)
        refuse_replaced()
        tell(("ended",))
        return result
    except BaseException as error:  # SystemExit, too
        first_line = (str(error).strip().splitlines() or [""])[0]
        tell(("raised", f"{type(error).__name__}: {first_line}", place_of(error)))
        raise
    finally:
        ended.set()


def look(candidate):
    """-> facts of the class, as far as the process that grades has to know: it never imports the package."""
    cls, signature, arguments, refusal = candidate.cls, "", (), ""
    try:
        signature = inspect.signature(cls)
        arguments = tuple(signature.parameters)
        signature.bind([], torch.optim.SGD, process_group=None, lr=LR)
    except TypeError as error:
        refusal = f"{signature}: {error}"
    step = getattr(cls, "step", None)
    return SimpleNamespace(
        name=candidate.name, kind="class" if isinstance(cls, type) else type(cls).__name__, arguments=arguments,
        refusal=refusal, missing=[name for name in METHODS if not callable(getattr(cls, name, None))],
        is_optimizer=isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer),
        has_ranges=ranges_of(candidate.package) is not None,
        says_gone="Gradients are gone afterwards" in (getattr(step, "__doc__", None) or ""))


def ranges_of(package):
    """-> the function of stage 3's buffer, of `mine`, or of `mine.optimizer`; None if there is none."""
    folders = [name for name in (package, package.rpartition(".")[0]) if name]
    return next(filter(None, (getattr(beside(name, "buffer"), "ranges_in_shard", None) for name in folders)), None)


def ranges(candidate, cases):
    """-> what ranges_in_shard says to each of `cases`, as plain tuples."""
    return [[tuple(one) for one in ranges_of(candidate.package)(*case)] for case in cases]


# --------------------------------------------------------------------------------------------- training, by one runner


@dataclass(frozen=True)
class Run:
    """A training run, which the ranks and the one process do alike: six parameters of odd sizes, 190 elements."""

    optimizer: str = "SGD"
    steps: int = 3
    groups: bool = False  # one bias, the matrices, the other biases: each with an lr and a weight decay of its own
    schedule: str = ""  # "lr": it falls to a half in each step; "cycle": torch's one-cycle, which writes betas, too
    micro_batches: int = 1
    no_sync: bool = False
    max_norms: tuple = ()  # one of each step
    resume: bool = False  # after two steps: save, and go on in another model with another optimizer
    prefetch: bool = False  # parameters come back in the next forward pass, and rank 1's leave late
    zero: bool = True  # zero_grad() after a step
    defaults: bool = False  # the optimizer's own hyperparameters

    counts = False  # what is sent and held, and values at the end alone: they would be held, too
    frees = True  # gradients, before what is held is counted

    def model(self, seed):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 5), nn.Tanh(), nn.Linear(5, 7))

    def loss(self, model, number, rank):
        """Of batch `number` of a rank; every batch is another one."""
        x, y = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(1000 * number + rank))
        return F.mse_loss(model(x), y)

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

    def make(self, candidate, model):
        optimizer_cls, kwargs = self.settings()
        return candidate.make(self.params(model), optimizer_cls, **kwargs)

    def scheduler(self, optimizer):
        if self.schedule == "cycle":
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=6, pct_start=0.5)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) if self.schedule else None

    def shown_by(self, world_size, step):
        """-> options by which `make show` trains so, up to this step; "" where it can't."""
        is_plain = self == Run(self.optimizer, self.steps)
        return f"--ranks {world_size} --steps {step} --optimizer {self.optimizer.lower()}" if is_plain else ""

    def left_out(self, optimizer):
        """-> bytes that don't count as held."""
        return 0


@dataclass
class Seen:
    """What a Run shows on a rank. Snapshots: (numel,) after the constructor, and after each step."""

    snapshots: list = field(default_factory=list)
    norms: list = field(default_factory=list)  # what clip_grad_norm_ has returned
    inner: list = field(default_factory=list)  # of each step of the inner optimizer: model, own, grads
    in_no_sync: int = 0  # collectives
    entries: list = field(default_factory=list)  # of the last step, with its forward and backward pass
    in_backward: int = 0  # how many of them
    after_inner: int = 0  # how many of them began after the inner optimizer had stepped
    awaited: list = field(default_factory=list)  # of these of the step before: whether the first layer has waited
    unawaited: list = field(default_factory=list)  # those for whose result nobody has waited when the step ends
    state: tuple = ()  # elements of AdamW's moments: that this rank holds and aren't 0, that are, as padding is
    held: float = 0  # bytes of all tensors


def flat(params):
    local = [plain for param in params for plain in plain_tensors(param.detach())]
    return torch.cat([torch.zeros(0), *(tensor.float().reshape(-1) for tensor in local)])


def moments(optimizers):
    """-> Seen.state"""
    tensors = [local for one in optimizers for state in one.state.values() for value in state.values()
               if torch.is_tensor(value) and value.dim() for local in plain_tensors(value)]
    real = sum(int(value.count_nonzero()) for value in tensors)
    return real, sum(value.numel() for value in tensors) - real


def play(candidate, run):
    """-> Seen of this rank.

    With `prefetch` there is a snapshot after the last step alone: to look at parameters would be to wait.
    """
    rank, entries = candidate.rank.rank, candidate.ledger.entries
    seen, stepped, travels, at_inner = Seen(), set(), [], []

    def note(one, *_):
        """A torch optimizer has stepped: the inner one, or then the one around it."""
        stepped.add(one)
        if one is not optimizer:
            at_inner.append(len(entries))
            params = [param for group in one.param_groups for param in group["params"] if not run.counts]
            grads = [param.grad for param in params if param.grad is not None]
            if not run.counts:
                seen.inner.append(SimpleNamespace(model=flat(model.parameters()), own=flat(params),
                                                  grads=flat(grads) if grads else None))
        if run.prefetch and rank == 1:
            time.sleep(0.1)

    def begin(seed):
        model = run.model(seed)
        optimizer = run.make(candidate, model)
        if run.prefetch:
            optimizer.prefetch_params(model)
        if run.counts and isinstance(model, nn.Sequential):
            model[0].register_forward_hook(
                lambda *_: setattr(seen, "awaited", [entry.is_awaited for entry in travels]))
        return model, optimizer, run.scheduler(optimizer)

    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(Memory("cpu")) if run.counts else None
        stack.callback(register_optimizer_step_post_hook(note).remove)
        model, optimizer, scheduler = begin(rank)
        if not run.counts:
            seen.snapshots.append(flat(model.parameters()))
        for step in range(run.steps):
            is_last, before = step == run.steps - 1, len(entries)
            if run.resume and step == 2:
                parts = model, optimizer, scheduler
                saved = copy.deepcopy([part.state_dict() for part in parts])
                parts = model, optimizer, scheduler = begin(rank + 10)
                for part, its in zip(parts, saved):
                    part.load_state_dict(its)
            for micro in range(run.micro_batches):
                is_quiet, n_before = run.no_sync and micro < run.micro_batches - 1, len(entries)
                with optimizer.no_sync() if is_quiet else contextlib.nullcontext():
                    run.loss(model, step * run.micro_batches + micro, rank).backward()
                seen.in_no_sync += is_quiet * (len(entries) - n_before)
            seen.in_backward = len(entries) - before
            if run.max_norms:
                seen.norms.append(float(optimizer.clip_grad_norm_(run.max_norms[step])))
            at_inner.clear()
            optimizer.step()
            seen.entries, travels = entries[before:], entries[at_inner[0] if at_inner else before + seen.in_backward :]
            seen.after_inner = len(travels)
            seen.unawaited = [entry for entry in seen.entries
                              if not entry.is_awaited and entry.kind not in ("send", "barrier")]
            if run.zero and (run.frees or not is_last):
                optimizer.zero_grad()
            if scheduler:
                scheduler.step()
            if run.prefetch and is_last:
                optimizer.finish_param_sync()
            if not run.counts and (is_last or not run.prefetch):
                seen.snapshots.append(flat(model.parameters()))
        if run.counts:
            seen.state = moments(stepped - {optimizer} or stepped)  # one around another may show the other's as its own
            seen.held = memory.settled() - run.left_out(optimizer)
            seen.snapshots.append(flat(model.parameters()))
    return seen


def mean(grads):
    return sum(grads) / len(grads)


def hyperparameters(optimizer):
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def in_one_process(run, world_size, combine=mean, kept=None, misses=False, weights=None, forgets=False, restarts="",
                   always=False, hyper=lambda now, start: now):
    """The same run in one process with the batches of all ranks -> (snapshots, norms).

    The other arguments make known mistakes. combine: what becomes of the ranks' gradients of a parameter. kept: of a
    parameter what its gradient begins with after a step, and misses: that nothing is added to it. weights: how often
    each micro-batch counts. forgets: the state is new in each step, with `resume` in the third; restarts: the lr there
    is that of the "start", or of the last "step". always: gradients are scaled to max_norm, also where they are
    smaller. hyper: (hyperparameters of the groups now, at the start) -> those that the step uses.
    """
    model = run.model(seed=0)
    optimizer_cls, kwargs = run.settings()
    optimizer = optimizer_cls(run.params(model), **kwargs)
    now = start = hyperparameters(optimizer)
    scheduler, params = run.scheduler(optimizer), list(model.parameters())
    snapshots, norms = [flat(params)], []
    for step in range(run.steps):
        if forgets and (step == 2 or not run.resume):
            optimizer.state.clear()
        if restarts and step == 2:
            for group, old in zip(optimizer.param_groups, start if restarts == "start" else now):
                group["lr"] = old["lr"]
        for micro, weight in enumerate(weights or [1] * run.micro_batches):
            number = step * run.micro_batches + micro
            of_ranks = [torch.autograd.grad(run.loss(model, number, rank), params) for rank in range(world_size)]
            for param, *grads in zip(params, *of_ranks):
                grad = combine(grads) * weight
                param.grad = grad if param.grad is None else param.grad + grad * (not misses)
        if run.max_norms:
            norms.append(float(nn.utils.clip_grad_norm_(params, run.max_norms[step])))
            if always and norms[-1] < run.max_norms[step]:
                torch._foreach_mul_([param.grad for param in params], run.max_norms[step] / norms[-1])
        now = hyperparameters(optimizer)
        for group, used in zip(optimizer.param_groups, hyper(now, start)):
            group.update(used)
        optimizer.step()
        for group, right in zip(optimizer.param_groups, now):
            group.update(right)
        for param in params:
            param.grad = kept(param) if kept else None
        if scheduler:
            scheduler.step()
        snapshots.append(flat(params))
    return [snapshots[0], snapshots[-1]] if run.prefetch else snapshots, norms
