"""Watches a package on every rank while it is graded.

A rank sends a Report by `event`, while it runs: a rank that was killed can't report later.
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
from typing import NamedTuple

import torch
import torch.distributed as dist

from grade.runs import Candidate
from harness.measuring.ledger import Ledger
from harness.ranks.workers import event

CLASSES = "DistributedOptimizer", "ShardedOptimizer"  # the whole optimizer; a core
METHODS = ("step", "zero_grad", "clip_grad_norm_", "no_sync", "state_dict", "load_state_dict", "prefetch_params",
           "finish_param_sync")
OURS = tuple(str(Path(__file__).resolve().parents[1] / folder) for folder in ("grade", "harness"))


class Report(NamedTuple):
    """Says what a rank does. A kind is "collective", "stuck", "moves" (after that), "printed", "raised" or "ended"."""
    kind: str
    text: str = ""  # the collective in words, the printed line, the error
    place: str = ""  # of a collective, an error, or where the rank is stuck: see `where`


class ReportedLedger(Ledger):
    """Lists the collectives of a rank, as entries; reports each before it begins.

    Entries get two attributes more. place: "file:line" of the call. is_awaited: whether somebody has waited for the
    result, or need not wait for it.
    """

    def entry_of(self, operator, arguments):
        """Return the entry of a collective that begins, or None if the operator of torch moves no bytes."""
        entry = super().entry_of(operator, arguments)
        if entry is not None:
            words = f"{entry.kind} of {entry.size} bytes" if entry.size else entry.kind
            root = arguments.get("root_rank", -1)
            if root >= 0:
                words += f" {'to' if entry.kind in ('gather', 'reduce') else 'from'} rank {root}"
            entry.place = where(traceback.walk_stack(sys._getframe()))
            entry.is_awaited = True  # until `_watch` sees that the call returns a Work
            event(Report("collective", words, entry.place))
        return entry

    def _watch(self, entry, result):
        """Return the result of a collective, with an AwaitedWork in place of its Work."""
        result = super()._watch(entry, result)
        # What c10d returns to C++: a Work in a box (ScriptObject), or output tensors and such a box.
        *outputs, boxed = result if isinstance(result, (tuple, list)) else [result]
        if not isinstance(boxed, torch.ScriptObject):  # a functional collective returns a tensor that waits by itself
            return result
        entry.is_awaited = False
        work = AwaitedWork(dist.Work.unbox(boxed), entry)
        self.works.append(work)  # C++ would forget it without a reference in Python
        return [*outputs, work.boxed()] if outputs else work.boxed()


class AwaitedWork(dist.Work):
    """Stands in for a Work, and notes in the ledger's entry that somebody waits for it."""

    def __init__(self, work, entry):
        super().__init__()
        self.work = work  # None after wait()
        self.entry = entry

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
    """Stands in for stdout, and reports each line that a rank prints: the grader shows some where a check fails."""

    begun = ""  # the line that has no end yet

    def write(self, text):
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            event(Report("printed", line[:200]))
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
    """Report "stuck", with the place of the main thread, and "moves" when it goes on, until the event `ended` is set.

    A process is stuck if it has used no processor time for `still_s` seconds, or has used `busy_s` seconds of it.
    Processor time counts, and not the clock, because a busy machine makes every process slow.
    """
    main_thread = threading.main_thread().ident
    used_s = time.process_time()
    last_use = time.monotonic()
    was_stuck = False
    limit_s = used_s + busy_s
    while not ended.wait(0.25):
        processor_s = time.process_time()
        if processor_s - used_s > 0.05:
            used_s = processor_s
            last_use = time.monotonic()
        is_stuck = processor_s > limit_s or time.monotonic() - last_use > still_s
        if is_stuck and not was_stuck:
            frame = sys._current_frames()[main_thread]
            event(Report("stuck", place=where(traceback.walk_stack(frame))))
        elif was_stuck and not is_stuck:
            event(Report("moves"))
        was_stuck = is_stuck


def watched(rank, package, limits, function, *args):
    """Return function(candidate, *args), and report until then what the rank does, from the package's import on.

    rank: a Rank of harness/ranks. limits: (still_s, busy_s), see watch_for_hangs.
    """
    silence()
    ended = threading.Event()
    threading.Thread(target=watch_for_hangs, args=(ended, *limits), daemon=True).start()
    try:
        modules = [importlib.import_module(package), submodule(package, "optimizer")]
        classes = [(getattr(module, name), name) for name in CLASSES for module in modules if hasattr(module, name)]
        cls, name = classes[0] if classes else (None, "")
        with ReportedLedger() as ledger:
            candidate = Candidate(cls, rank.number, ledger.entries, package=package, name=name, worker=rank)
            result = function(candidate, *args)
        event(Report("ended"))
        return result
    except BaseException as error:  # SystemExit, too
        first_line, *_ = [*str(error).strip().splitlines(), ""]
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
        event(Report("raised", f"{type(error).__name__}: {first_line}", where(frames)))
        raise
    finally:
        ended.set()


def submodule(package, name):
    """Return the module `name` of a package, or None."""
    is_folder = hasattr(sys.modules[package], "__path__")
    if is_folder and importlib.util.find_spec(f"{package}.{name}"):
        return importlib.import_module(f"{package}.{name}")
    return None


def ready(rank):
    """Do nothing: when this function runs, the ranks have met."""


def plays(candidate, module, test):
    """Run a test that takes a stage, with each combination of the arguments that it has been given."""
    play_situations = importlib.import_module("tests.common").play_situations  # needs pytest
    play_situations(candidate.worker, module, test, {"stage": candidate.package})


def look(candidate):
    """Return facts about the graded class, for the process that grades, which never imports the package."""
    cls = candidate.cls
    missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
    docstring = getattr(inspect.getmodule(cls), "__doc__", None) or ""
    exercise = re.search(r"The solution is (stage\w+)/", docstring)
    return SimpleNamespace(
        name=candidate.name,  # "" if the package has none of CLASSES
        missing=missing,
        exercise_of=exercise[1] if exercise else "",  # the stage of an exercise
        is_optimizer=isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer),
        is_whole=candidate.name == CLASSES[0],  # and no core
        prefetches="prefetch_params" not in missing,
        finishes="finish_param_sync" not in missing)
