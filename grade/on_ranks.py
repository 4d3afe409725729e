"""What watches a package on every rank while it is graded.

A rank reports meanwhile, by `event`, ("collective", what begins, place), ("stuck", "", place), ("moves", "", ""),
("printed", line, ""), ("raised", error, place), ("ended", "", ""). When it is killed it can't report any more.
"""

import functools
import importlib.util
import inspect
import io
import os
import re
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from grade.runs import LR
from harness.measuring.ledger import Ledger
from harness.ranks.workers import event

CLASSES = "DistributedOptimizer", "ShardedOptimizer"  # the whole one, or the idea alone: a core
BESIDE_DDP = "Sharded"  # the class that only shards, beside torch's DDP
METHODS = ("step", "zero_grad", "clip_grad_norm_", "no_sync", "state_dict", "load_state_dict", "prefetch_params",
           "finish_param_sync")
OURS = tuple(str(Path(__file__).resolve().parents[1] / folder) for folder in ("grade", "harness"))


class ReportedLedger(Ledger):
    """Reports each collective before it begins, and knows whether somebody has waited for it."""

    def entry_of(self, operator, arguments):
        entry = super().entry_of(operator, arguments)
        if entry is not None:
            text = f"{entry.kind} of {entry.size} bytes" if entry.size else entry.kind
            if arguments.get("root_rank", -1) >= 0:
                text += f" {'to' if entry.kind in ('gather', 'reduce') else 'from'} rank {arguments['root_rank']}"
            entry.place = where(traceback.walk_stack(sys._getframe()))
            entry.is_awaited = True
            event(("collective", text, entry.place))
        return entry

    def _watch(self, entry, result):
        result = super()._watch(entry, result)
        *outputs, boxed = result if isinstance(result, (tuple, list)) else [result]
        if not isinstance(boxed, torch.ScriptObject):  # a functional collective returns a tensor that waits by itself
            return result
        self.works.append(Awaited(dist.Work.unbox(boxed), entry))
        return [*outputs, self.works[-1].boxed()] if outputs else self.works[-1].boxed()


class Awaited(dist.Work):
    """Is a Work that notes whether it is waited for."""

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


def where(frames):
    """Return "file:line" of the first of (frame, line) in the current folder not ours nor a library's; or ""."""
    for frame, line in frames:
        path = frame.f_code.co_filename
        if path.startswith(os.getcwd() + os.sep) and not path.startswith(OURS) and "site-packages" not in path:
            return f"{os.path.relpath(path)}:{line}"
    return ""


class Printed(io.TextIOBase):
    """Reports each line that a rank prints: the grader shows some where a check fails."""

    begun = ""  # of a line

    def write(self, text):
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            event(("printed", line[:200], ""))
        return len(text)


@functools.cache
def silence():
    """Report what Python prints, and drop what gloo's C++ says as it dies."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout = sys.stderr = Printed()
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated")


def watch_for_hangs(ended, still_s, busy_s):
    """Report where the main thread is when this process has done nothing for `still_s` seconds, and when it goes on;
    and when it has computed for `busy_s`. The processor's time counts, which a busy machine takes longer to give."""
    main = threading.main_thread().ident
    used_s, since, was_stuck = time.process_time(), time.monotonic(), False
    end_s = used_s + busy_s
    while not ended.wait(0.25):
        processor_s = time.process_time()
        if processor_s - used_s > 0.05:
            used_s, since = processor_s, time.monotonic()
        is_stuck = processor_s > end_s or time.monotonic() - since > still_s
        if is_stuck != was_stuck:
            event(("stuck", "", where(traceback.walk_stack(sys._current_frames()[main]))) if is_stuck
                  else ("moves", "", ""))
        was_stuck = is_stuck


def judges():
    """Return {(module or class, name): function}: all by which the grader judges, as they are at the moment."""
    owners = [module for name, module in list(sys.modules.items()) if name.split(".")[0] in ("grade", "harness")]
    owners += [cls for module in owners for cls in list(vars(module).values())
               if inspect.isclass(cls) and not issubclass(cls, torch.optim.Optimizer)]  # whose step() torch wraps
    return {(owner, name): value for owner in owners for name, value in list(vars(owner).items())
            if inspect.isfunction(value)}


def watched(rank, package, beside_ddp, limits, function, *args):
    """Return function(candidate, *args), and report what happens on the way, in the package's import too. Refuse a
    package that replaces functions of ours, which are noted before it is imported: it would judge itself."""
    silence()
    judges_at_the_end, judges_before, tell, place_of, ended = judges, judges(), event, where, threading.Event()
    threading.Thread(target=watch_for_hangs, args=(ended, *limits), daemon=True).start()

    def refuse_replaced():
        functions = judges_at_the_end()
        for (owner, name), function in judges_before.items():
            if functions.get((owner, name)) is not function:
                raise AssertionError(f"{package} replaces {owner.__name__}.{name}, by which it is graded")

    try:
        modules = [importlib.import_module(package), submodule(package, "optimizer")]
        names = [BESIDE_DDP] if beside_ddp else CLASSES
        name, cls = next(((name, getattr(module, name)) for name in names for module in modules
                          if hasattr(module, name)), ("", None))
        refuse_replaced()
        with ReportedLedger() as ledger:
            result = function(SimpleNamespace(rank=rank.rank, package=package, beside_ddp=beside_ddp, name=name,
                                              cls=cls, entries=ledger.entries), *args)
        refuse_replaced()
        tell(("ended", "", ""))
        return result
    except BaseException as error:  # SystemExit, too
        first_line = (str(error).strip().splitlines() or [""])[0]
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
        tell(("raised", f"{type(error).__name__}: {first_line}", place_of(frames)))
        raise
    finally:
        ended.set()


def submodule(package, name):
    """Return the module `name` of a package, or None."""
    has_one = hasattr(sys.modules[package], "__path__") and importlib.util.find_spec(f"{package}.{name}")
    return importlib.import_module(f"{package}.{name}") if has_one else None


def look(candidate):
    """Return facts of the class, as far as the process that grades has to know: it never imports the package."""
    cls, signature, refusal = candidate.cls, "", ""
    keywords = {"lr": LR} if candidate.beside_ddp else {"lr": LR, "process_group": None}
    try:
        signature = inspect.signature(cls)
        signature.bind([], torch.optim.SGD, **keywords)
    except TypeError as error:
        refusal = f"{signature}: {error}"
    missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
    exercise = re.search(r"The solution is (stage\w+)/", getattr(inspect.getmodule(cls), "__doc__", None) or "")
    return SimpleNamespace(
        name=candidate.name, kind="class" if isinstance(cls, type) else type(cls).__name__, refusal=refusal,
        missing=missing, file=getattr(sys.modules[candidate.package], "__file__", None),
        exercise_of=exercise[1] if exercise else "",
        is_optimizer=isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer),
        averages=not candidate.beside_ddp, is_core=candidate.name == CLASSES[1],
        is_whole=candidate.name not in (CLASSES[1], BESIDE_DDP),
        prefetches="prefetch_params" not in missing, finishes="finish_param_sync" not in missing,
        takes_grad_dtype="grad_dtype" in str(signature), has_ranges=ranges_of(candidate.package) is not None,
        says_gone="Gradients are gone afterwards" in (getattr(getattr(cls, "step", None), "__doc__", None) or ""))


def ranges_of(package):
    """Return the function of stage 3's buffer, of `mine`, or of `mine.optimizer`; None if there is none."""
    folders = [name for name in (package, package.rpartition(".")[0]) if name]
    return next(filter(None, (getattr(submodule(name, "buffer"), "ranges_in_shard", None) for name in folders)), None)


def ranges(candidate, cases):
    """Return what ranges_in_shard says to each of `cases`, as plain tuples."""
    return [[tuple(part) for part in ranges_of(candidate.package)(*case)] for case in cases]
