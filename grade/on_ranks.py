"""What runs on every rank while a package is graded, and what a rank tells meanwhile.

A rank tells the process that grades (by `workers.event`) of each collective as it begins, where it stands still, and
what it has raised: a rank that is killed afterwards can't tell any more.
"""

import contextlib
import copy
import functools
import importlib.util
import inspect
import math
import os
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from harness.ledger import Ledger
from harness.memory import Memory, plain_tensors
from harness.workers import event

CLASSES = "DistributedOptimizer", "ShardedOptimizer"  # the whole one, or the idea alone: a core
METHODS = ("step", "zero_grad", "clip_grad_norm_", "no_sync", "state_dict", "load_state_dict", "prefetch_params",
           "finish_param_sync")
OURS = tuple(str(Path(__file__).resolve().parents[1] / folder) for folder in ("grade", "harness"))
LR = 0.1
OPTIMIZERS = {"SGD": (torch.optim.SGD, {"lr": LR}),
              "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": False})}


class Told(Ledger):
    """A ledger that tells of each collective before it begins, and knows whether somebody has waited for it."""

    def entry_of(self, operator, arguments):
        entry = super().entry_of(operator, arguments)
        if entry is not None:
            size, root = f" of {entry.size} bytes" if entry.size else "", arguments.get("root_rank", -1)
            towards = "" if root < 0 else f" {'to' if entry.kind in ('gather', 'reduce') else 'from'} rank {root}"
            entry.place, entry.is_awaited = where(traceback.walk_stack(sys._getframe())), True
            event(("collective", f"{entry.kind}{size}{towards}", entry.place))
        return entry

    def _watch(self, entry, result):
        result = super()._watch(entry, result)
        *others, boxed = result if isinstance(result, (tuple, list)) else [result]
        if not isinstance(boxed, torch.ScriptObject):  # a functional collective returns a tensor that waits by itself
            return result
        self.works.append(Awaited(dist.Work.unbox(boxed), entry))
        return [*others, self.works[-1].boxed()] if others else self.works[-1].boxed()


class Awaited(dist.Work):
    """A Work that notes whether it is waited for."""

    def __init__(self, work, entry):
        super().__init__()
        self.work, self.entry, entry.is_awaited = work, entry, False

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


def where(frames):
    """-> "file:line" of the first of (frame, line) in the current folder that is not ours nor a library's; or ""."""
    for frame, line in frames:
        path = frame.f_code.co_filename
        if path.startswith(os.getcwd() + os.sep) and not path.startswith(OURS) and "site-packages" not in path:
            return f"{os.path.relpath(path)}:{line}"
    return ""


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


def judges():
    """-> {"module.name": function}: all by which the grader judges, as they are now."""
    places = {name: vars(module) for name, module in list(sys.modules.items())
              if name.split(".")[0] in ("grade", "harness")}
    classes = {f"{module}.{name}": vars(value) for module, its in places.items() for name, value in list(its.items())
               if inspect.isclass(value) and not issubclass(value, torch.optim.Optimizer)}  # whose step() torch wraps
    return {f"{place}.{name}": value for place, its in {**places, **classes}.items()
            for name, value in list(its.items()) if inspect.isfunction(value)}


def watched(rank, package, limits, function, *args):
    """-> function(candidate, *args), with everything told of that happens on the way, in the package's import too: also
    what the package replaces of ours, which is known before it is imported: it would judge itself."""
    silence()
    ours_now, ours, tell, place_of, ended = judges, judges(), event, where, threading.Event()
    threading.Thread(target=watch_for_hangs, args=(ended, *limits), daemon=True).start()

    def refuse_replaced():
        now = ours_now()
        if replaced := [name for name in ours if now.get(name) is not ours[name]]:
            raise AssertionError(f"{package} replaces {replaced[0]}, by which it is graded")

    try:
        modules = importlib.import_module(package), beside(package, "optimizer")
        name, cls = next(((name, getattr(module, name)) for name in CLASSES for module in modules
                          if hasattr(module, name)), ("", None))
        refuse_replaced()
        with Told() as ledger:
            result = function(SimpleNamespace(rank=rank.rank, package=package, name=name, cls=cls,
                                              entries=ledger.entries), *args)
        refuse_replaced()
        tell(("ended",))
        return result
    except BaseException as error:  # SystemExit, too
        first_line = (str(error).strip().splitlines() or [""])[0]
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
        tell(("raised", f"{type(error).__name__}: {first_line}", place_of(frames)))
        raise
    finally:
        ended.set()


def beside(package, name):
    """-> the module `name` of a package, or None."""
    has_one = hasattr(sys.modules[package], "__path__") and importlib.util.find_spec(f"{package}.{name}")
    return importlib.import_module(f"{package}.{name}") if has_one else None


def look(candidate):
    """-> facts of the class, as far as the process that grades has to know: it never imports the package."""
    cls, signature, refusal = candidate.cls, "", ""
    try:
        signature = inspect.signature(cls)
        signature.bind([], torch.optim.SGD, process_group=None, lr=LR)
    except TypeError as error:
        refusal = f"{signature}: {error}"
    missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
    return SimpleNamespace(
        name=candidate.name, kind="class" if isinstance(cls, type) else type(cls).__name__, refusal=refusal,
        missing=missing, file=getattr(sys.modules[candidate.package], "__file__", None),
        is_optimizer=isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer),
        is_core=candidate.name == CLASSES[1], is_whole=candidate.name != CLASSES[1],
        prefetches="prefetch_params" not in missing, finishes="finish_param_sync" not in missing,
        takes_grad_dtype="grad_dtype" in str(signature), has_ranges=ranges_of(candidate.package) is not None,
        says_gone="Gradients are gone afterwards" in (getattr(getattr(cls, "step", None), "__doc__", None) or ""))


def ranges_of(package):
    """-> the function of stage 3's buffer, of `mine`, or of `mine.optimizer`; None if there is none."""
    folders = [name for name in (package, package.rpartition(".")[0]) if name]
    return next(filter(None, (getattr(beside(name, "buffer"), "ranges_in_shard", None) for name in folders)), None)


def ranges(candidate, cases):
    """-> what ranges_in_shard says to each of `cases`, as plain tuples."""
    return [[tuple(one) for one in ranges_of(candidate.package)(*case)] for case in cases]


@dataclass(frozen=True)
class Run:
    """A training run, which the ranks and the one process do alike: of odd sizes, 190 elements by default."""

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
    sizes: tuple = (7, 11, 5, 7)  # of layers
    counts: bool = False  # what is held, and values at the end alone: they would be held, too
    frees: bool = True  # gradients, before what is held is counted

    def model(self, seed):
        torch.manual_seed(seed)
        layers = [(nn.Linear(*pair), nn.Tanh()) for pair in zip(self.sizes, self.sizes[1:])]
        return nn.Sequential(*sum(layers, ())[:-1])

    def loss(self, model, number, rank):
        """Of batch `number` of a rank; every batch is another one."""
        x, y = torch.randn(2, 4, self.sizes[0], generator=torch.Generator().manual_seed(1000 * number + rank))
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
        if "bucket_cap_mb" in inspect.signature(candidate.cls).parameters:  # so small that there are several buckets
            n_bytes = sum(param.nbytes for param in model.parameters())
            kwargs = {**kwargs, "bucket_cap_mb": n_bytes / 6 / 2**20}
        return candidate.cls(self.params(model), optimizer_cls, **kwargs)

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
    """What a Run shows on a rank."""

    snapshots: list = field(default_factory=list)  # (numel,) after the constructor, and after each step
    norms: list = field(default_factory=list)  # what clip_grad_norm_ has returned
    inner: SimpleNamespace = None  # at the inner optimizer's first step: model, own, grads
    in_no_sync: int = 0  # collectives
    entries: list = ()  # of the last step, with its forward and backward pass
    in_backward: int = 0  # how many of them
    after_inner: list = ()  # those of them that began after the inner optimizer had stepped
    awaited: list = ()  # of these of the step before: whether the first layer has waited
    unawaited: list = ()  # those for whose result nobody has waited when the step ends
    state: tuple = ()  # elements of AdamW's moments: that this rank holds and aren't 0, that are, as padding is
    held: float = 0  # bytes of all tensors


def flat(params):
    local = [plain for param in params for plain in plain_tensors(param.detach())]
    return torch.cat([torch.zeros(0), *(tensor.float().reshape(-1) for tensor in local)])


def play(candidate, run, ranks=None, factor=lambda step, micro: 1):
    """-> Seen of this rank. With `prefetch` there is a snapshot after the last step alone: to look would be to wait.
    ranks: whose batches it has, on average; its own by default. factor: of the gradients of a micro-batch."""
    rank, entries, ranks = candidate.rank, candidate.entries, ranks or [candidate.rank]
    seen, stepped, at_inner = Seen(), set(), []

    def note(one, *_):
        """A torch optimizer has stepped: the inner one, or then the one around it."""
        stepped.add(one)
        if one is not optimizer:
            at_inner.append(len(entries))
            if not run.counts and seen.inner is None:
                params = [param for group in one.param_groups for param in group["params"]]
                grads = [param.grad for param in params if param.grad is not None]
                seen.inner = SimpleNamespace(model=flat(model.parameters()), own=flat(params),
                                             grads=flat(grads) if grads else None)
        if run.prefetch and rank == 1 and one is not optimizer:
            time.sleep(0.2)

    def begin(seed):
        model = run.model(seed)
        optimizer = run.make(candidate, model)
        if run.prefetch:
            optimizer.prefetch_params(model)
            if run.counts:
                model[0].register_forward_hook(
                    lambda *_: setattr(seen, "awaited", [entry.is_awaited for entry in seen.after_inner]))
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
                saved = copy.deepcopy([part.state_dict() for part in (model, optimizer, scheduler)])
                model, optimizer, scheduler = parts = begin(rank + 10)
                for part, its in zip(parts, saved):
                    part.load_state_dict(its)
            for micro in range(run.micro_batches):
                is_quiet, n_before = run.no_sync and micro < run.micro_batches - 1, len(entries)
                with optimizer.no_sync() if is_quiet else contextlib.nullcontext():
                    losses = (run.loss(model, step * run.micro_batches + micro, one) for one in ranks)
                    (sum(losses) * (factor(step, micro) / len(ranks))).backward()
                seen.in_no_sync += is_quiet * (len(entries) - n_before)
            after_backward = len(entries)
            if run.max_norms:
                seen.norms.append(float(optimizer.clip_grad_norm_(run.max_norms[step])))
            at_inner.clear()
            optimizer.step()
            seen.entries, seen.in_backward = entries[before:], after_backward - before
            seen.after_inner = entries[at_inner[0] if at_inner else after_backward :]
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
            inner = stepped - {optimizer} or stepped  # one around another may show the other's state as its own
            moments = [plain for one in inner for state in one.state.values() for value in state.values()
                       if torch.is_tensor(value) and value.dim() for plain in plain_tensors(value)]
            n_real = sum(int(value.count_nonzero()) for value in moments)
            seen.state = n_real, sum(value.numel() for value in moments) - n_real
            del moments
            seen.held = memory.settled() - run.left_out(optimizer)
            seen.snapshots.append(flat(model.parameters()))
    return seen


class OneProcess:
    """A torch optimizer with the interface of a sharded one. A known mistake replaces one of its methods."""

    no_sync = contextlib.nullcontext

    def __init__(self, params, optimizer_cls, **kwargs):
        super().__init__(params, **kwargs)
        self.start = [dict(group) for group in self.param_groups]

    def used(self, now):
        """-> the groups' hyperparameters with which a step is done; `now`: those that they have."""
        return now

    def kept(self, param):
        """-> what its gradient begins with after a step."""

    def scaled(self, ratio, norm):
        """-> what gradients are scaled by, where max_norm / norm is `ratio`, and what clip_grad_norm_ returns."""
        return min(ratio, 1), norm

    def update(self, groups):
        for group, its in zip(self.param_groups, groups):
            group.update(its)

    def step(self):
        now = [{**group, "last_lr": group["lr"]} for group in self.param_groups]
        self.update(self.used(now))
        super().step()
        self.update(now)

    def zero_grad(self):
        for param in self.params():
            param.grad = self.kept(param)

    def params(self):
        return [param for group in self.param_groups for param in group["params"]]

    def clip_grad_norm_(self, max_norm):
        norm = nn.utils.clip_grad_norm_(self.params(), math.inf).item()
        factor, norm = self.scaled(max_norm / norm, norm)
        torch._foreach_mul_([param.grad for param in self.params()], factor)
        return norm


def in_one_process(run, ranks, factor=lambda step, micro: 1, **methods):
    """-> Seen of one process with the batches of all `ranks`, and with these methods of a mistake."""
    cls = type("Mistaken", (OneProcess, run.settings()[0]), methods)
    seen = play(SimpleNamespace(rank=0, cls=cls, entries=[]), replace(run, prefetch=False), ranks, factor)
    if run.prefetch:
        del seen.snapshots[1:-1]
    return seen
