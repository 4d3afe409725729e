"""Watches a package on every rank while it is graded.

A rank reports by `event`, while it runs: ("collective", its words, place), ("stuck", "", place), ("moves", "", ""),
("printed", line, ""), ("raised", error, place), ("ended", "", ""). A rank that was killed can't report later.
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

from harness.measuring.ledger import Ledger
from harness.ranks.workers import event

CLASSES = "DistributedOptimizer", "ShardedOptimizer"  # the whole optimizer; a core
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
        boxed = self.works[-1].boxed()
        return [*outputs, boxed] if outputs else boxed


class Awaited(dist.Work):
    """Is a Work that notes whether it is waited for."""

    def __init__(self, work, entry):
        super().__init__()
        self.work = work
        self.entry = entry
        entry.is_awaited = False

    def wait(self, *timeout):
        self.entry.is_awaited = True
        work = self.work
        self.work = None  # a Work keeps the received tensors alive
        return work is None or work.wait(*timeout)

    def is_completed(self):
        self.entry.is_awaited = True
        return self.work is None or self.work.is_completed()

    def get_future(self):
        self.entry.is_awaited = True
        return self.work.get_future()


def where(frames):
    """Return "file:line" of the first (frame, line) in a file of the current folder; "" without one.

    Our own files and those of libraries don't count.
    """
    for frame, line in frames:
        path = frame.f_code.co_filename
        if path.startswith(os.getcwd() + os.sep) and not path.startswith(OURS) and "site-packages" not in path:
            return f"{os.path.relpath(path)}:{line}"
    return ""


class Printed(io.TextIOBase):
    """Reports each line that a rank prints: the grader shows some where a check fails."""

    begun = ""  # the line that has no end yet

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
    """Report "stuck", with the place of the main thread, and "moves" when it goes on.

    A process is stuck if it has used no processor time for `still_s` seconds, or has used `busy_s` seconds of it.
    Processor time counts, and not the clock, because a busy machine makes every process slow.
    """
    main = threading.main_thread().ident
    used_s = time.process_time()
    last_use = time.monotonic()
    was_stuck = False
    end_s = used_s + busy_s
    while not ended.wait(0.25):
        processor_s = time.process_time()
        if processor_s - used_s > 0.05:
            used_s = processor_s
            last_use = time.monotonic()
        is_stuck = processor_s > end_s or time.monotonic() - last_use > still_s
        if is_stuck and not was_stuck:
            event(("stuck", "", where(traceback.walk_stack(sys._current_frames()[main]))))
        elif was_stuck and not is_stuck:
            event(("moves", "", ""))
        was_stuck = is_stuck


def watched(rank, package, limits, function, *args):
    """Return function(candidate, *args), and report events until then, also of the package's import."""
    silence()
    ended = threading.Event()
    threading.Thread(target=watch_for_hangs, args=(ended, *limits), daemon=True).start()
    try:
        modules = [importlib.import_module(package), submodule(package, "optimizer")]
        name, cls = next(((name, getattr(module, name)) for name in CLASSES for module in modules
                          if hasattr(module, name)), ("", None))
        with ReportedLedger() as ledger:
            result = function(SimpleNamespace(place=rank, rank=rank.number, package=package, name=name, cls=cls,
                                              entries=ledger.entries), *args)
        event(("ended", "", ""))
        return result
    except BaseException as error:  # SystemExit, too
        first_line = (str(error).strip().splitlines() or [""])[0]
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
        event(("raised", f"{type(error).__name__}: {first_line}", where(frames)))
        raise
    finally:
        ended.set()


def submodule(package, name):
    """Return the module `name` of a package, or None."""
    has_one = hasattr(sys.modules[package], "__path__") and importlib.util.find_spec(f"{package}.{name}")
    return importlib.import_module(f"{package}.{name}") if has_one else None


def ready(rank):
    """Do nothing: when this function runs, the ranks have met."""


def plays(candidate, module, test):
    """Run a test that takes a stage, in all its situations."""
    play_situations = importlib.import_module("tests.common").play_situations  # needs pytest
    play_situations(candidate.place, module, test, {"stage": candidate.package})


def look(candidate):
    """Return facts of the class for the process that grades, which never imports the package."""
    cls = candidate.cls
    missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
    exercise = re.search(r"The solution is (stage\w+)/", getattr(inspect.getmodule(cls), "__doc__", None) or "")
    return SimpleNamespace(
        name=candidate.name, missing=missing, exercise_of=exercise[1] if exercise else "",
        is_optimizer=isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer),
        is_whole=candidate.name == CLASSES[0],
        prefetches="prefetch_params" not in missing, finishes="finish_param_sync" not in missing)
