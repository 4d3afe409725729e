"""Runs in each rank, a process of the grader: calls a function with the learner's package, and watches the package.

A rank sends Reports to the grader's process (grade/grader.py). The function `event` sends a Report at once, because a
rank that was killed can't report later what it has done. The ledger is the list of collectives that a rank has begun.
Its entry for a collective has the kind and the bytes. A Work is torch's handle of a collective that runs in the
background: a program calls its wait() before it reads the result.
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

# A package has one of these classes. The first is a whole optimizer; the second is a core, which may lack some METHODS.
CLASSES = "DistributedOptimizer", "ShardedOptimizer"
# Methods that a check may call. `look` notes which of them the class lacks.
METHODS = ("step", "zero_grad", "clip_grad_norm_", "no_sync", "state_dict", "load_state_dict", "prefetch_params",
           "finish_param_sync")
# Folders of the grader's own code, which is never the place of a mistake.
OURS = tuple(str(Path(__file__).resolve().parents[1] / folder) for folder in ("grade", "harness"))


class Report(NamedTuple):
    """Says what a rank does or has met."""
    # "collective": the rank begins a collective
    # "stuck": it doesn't go on
    # "moves": it goes on, after it was stuck
    # "printed": it has printed a line
    # "raised": it has ended with an error
    # "ended": it has ended without an error
    kind: str
    text: str = ""  # the collective in words, or the printed line, or the error
    place: str = ""  # "file:line" of a collective or an error, or where the rank is stuck; "" if it isn't the learner's


class ReportedLedger(Ledger):
    """Lists the collectives of a rank as entries, as Ledger does, and reports each collective before it begins.

    Each entry gets two more attributes, which grade/runs.py and grade/by_hand.py read:
    place: "file:line" of the call. is_awaited: whether somebody has waited for the result. It is True, too, if the call
    itself has waited.
    """

    def entry_of(self, operator, arguments):
        """Return the entry of a collective that begins, or None if torch's operator moves no bytes.

        Ledger calls this before it calls the operator. arguments: {name: argument} of the operator.
        """
        entry = super().entry_of(operator, arguments)
        if entry is not None:
            words = f"{entry.kind} of {entry.size} bytes" if entry.size else entry.kind
            root = arguments.get("root_rank", -1)  # the one rank that sends, or that receives; -1: there is none
            if root >= 0:
                words += f" {'to' if entry.kind in ('gather', 'reduce') else 'from'} rank {root}"
            entry.place = where(traceback.walk_stack(sys._getframe()))
            entry.is_awaited = True  # `_watch` sets it to False if the call returns a Work
            event(Report("collective", words, entry.place))
        return entry

    def _watch(self, entry, result):
        """Return the result of a collective, with an AwaitedWork in place of its Work.

        Ledger calls this with the result of the operator. The caller of the collective gets what this returns.
        """
        result = super()._watch(entry, result)
        # An operator returns a Work in a box of C++ (ScriptObject), or a list of output tensors that ends with the box.
        results = result if isinstance(result, (tuple, list)) else [result]
        *outputs, boxed = results
        if not isinstance(boxed, torch.ScriptObject):  # a functional collective returns a tensor that waits by itself
            return result
        entry.is_awaited = False
        work = AwaitedWork(dist.Work.unbox(boxed), entry)
        self.works.append(work)  # Ledger's list. It keeps the Python object alive, which C++ doesn't
        return [*outputs, work.boxed()] if outputs else work.boxed()


class AwaitedWork(dist.Work):
    """Stands in for a Work, and notes in the ledger's entry that somebody waits for it. Torch calls the methods."""

    def __init__(self, work, entry):
        super().__init__()
        self.work = work  # None after wait()
        self.entry = entry

    def wait(self, *timeout):
        self.entry.is_awaited = True
        work = self.work
        self.work = None  # a Work keeps the received tensors alive
        return work is None or work.wait(*timeout)  # True at a second call: the collective is complete

    def is_completed(self):
        self.entry.is_awaited = True
        return self.work is None or self.work.is_completed()

    def get_future(self):
        self.entry.is_awaited = True
        return self.work.get_future()


def where(frames):
    """Return "file:line" of the first (frame, line) in `frames` that is in the learner's code; "" if none is.

    The learner's code is every file below the current folder, except the grader's own files and libraries.
    """
    for frame, line in frames:
        path = frame.f_code.co_filename
        if path.startswith(os.getcwd() + os.sep) and not path.startswith(OURS) and "site-packages" not in path:
            return f"{os.path.relpath(path)}:{line}"
    return ""


class Printed(io.TextIOBase):
    """Stands in for stdout, and reports each line that a rank prints. The grader prints some if a check fails."""

    begun = ""  # what was printed of a line that has no end yet

    def write(self, text):
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            event(Report("printed", line[:200]))
        return len(text)


@functools.cache
def silence():
    """Report what Python prints. Drop what C++ prints, such as gloo's last words. Only the first call has an effect."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # stdout of C++
    os.dup2(nowhere, 2)  # its stderr
    sys.stdout = sys.stderr = Printed()
    warnings.filterwarnings("ignore", ".*(all_gather_into_tensor|reduce_scatter_tensor).* is deprecated")


def watch_for_hangs(has_ended, still_s, busy_s):
    """Report "stuck", with the place of the main thread, and "moves" when it goes on, until `has_ended` is set.

    has_ended: a threading.Event. This function runs in a thread of its own. A rank is stuck if it has used no processor
    time for `still_s` seconds. It is also stuck if it has used `busy_s` seconds of processor time since this function
    was called: then it seems to loop for ever. Wall-clock time can't show a loop, because every process is slow on a
    busy machine.
    """
    main_thread = threading.main_thread().ident
    used_s = time.process_time()  # the processor time of the rank when it was last seen to work
    last_use = time.monotonic()  # when that was
    was_stuck = False
    limit_s = used_s + busy_s
    while not has_ended.wait(0.25):
        processor_s = time.process_time()
        if processor_s - used_s > 0.05:  # more than this thread itself uses
            used_s = processor_s
            last_use = time.monotonic()
        is_stuck = processor_s > limit_s or time.monotonic() - last_use > still_s
        if is_stuck and not was_stuck:
            frame = sys._current_frames()[main_thread]  # Python has no public way to this frame
            event(Report("stuck", place=where(traceback.walk_stack(frame))))
        elif was_stuck and not is_stuck:
            event(Report("moves"))
        was_stuck = is_stuck


def watched(worker, package, limits, function, *args):
    """Import the package, call function(candidate, *args) and return the result. Report meanwhile what the rank does.

    candidate: a Candidate, the graded class and what belongs to it on this rank. worker: a Rank of harness/ranks, which
    has the rank's number. limits: (still_s, busy_s), see watch_for_hangs.
    """
    silence()
    has_ended = threading.Event()
    threading.Thread(target=watch_for_hangs, args=(has_ended, *limits), daemon=True).start()
    try:
        modules = [importlib.import_module(package), submodule_optimizer(package)]
        # (class, its name). A whole optimizer comes before a core, and the package before its module `optimizer`.
        classes = [(getattr(module, name), name) for name in CLASSES for module in modules if hasattr(module, name)]
        cls, name = classes[0] if classes else (None, "")
        with ReportedLedger() as ledger:
            candidate = Candidate(cls, worker.number, ledger.entries, package=package, name=name, worker=worker)
            result = function(candidate, *args)
        event(Report("ended"))
        return result
    except BaseException as error:  # SystemExit, too
        first_line = (str(error).strip().splitlines() or [""])[0]  # "" for an error without text
        # The frame that has raised comes first.
        frames = reversed(list(traceback.walk_tb(error.__traceback__)))
        event(Report("raised", f"{type(error).__name__}: {first_line}", where(frames)))
        raise
    finally:
        has_ended.set()


def submodule_optimizer(package):
    """Return the module `optimizer` of a package that was imported, or None if the package lacks it."""
    is_folder = hasattr(sys.modules[package], "__path__")  # a module that is one file has no path
    if is_folder and importlib.util.find_spec(f"{package}.optimizer"):
        return importlib.import_module(f"{package}.optimizer")
    return None


def ready(worker):
    """Do nothing. The grader calls this to start ranks in advance: ranks run a function only after all have met."""


def plays(candidate, module, name):
    """Run the test `name` of `module` on this rank, with the learner's package as its argument `stage`.

    A situation is a combination of the other arguments, whose values the test's decorator lists. play_situations calls
    the test with every combination.
    """
    play_situations = importlib.import_module("tests.common").play_situations  # imported here, because it needs pytest
    play_situations(candidate.worker, module, name, {"stage": candidate.package})


def look(candidate):
    """Return facts about the graded class, which the grader's process needs: it never imports the package itself."""
    cls = candidate.cls
    missing = [name for name in METHODS if not callable(getattr(cls, name, None))]
    docstring = getattr(inspect.getmodule(cls), "__doc__", None) or ""
    # `make exercise` (grade/exercises.py) writes this sentence into the module.
    exercise = re.search(r"The solution is (stage\w+)/", docstring)
    return SimpleNamespace(
        name=candidate.name,  # "" if the package has none of CLASSES
        missing=missing,  # the METHODS that the class lacks
        exercise_of=exercise[1] if exercise else "",  # the stage whose core the learner was to fill in, or ""
        is_optimizer=isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer),
        is_whole=candidate.name == CLASSES[0],  # not a core
        prefetches="prefetch_params" not in missing,
        finishes="finish_param_sync" not in missing)
