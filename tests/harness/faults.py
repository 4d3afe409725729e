"""Training runs that are watched and disturbed; and the table of what was done to them.

    python -m pytest -p tests.harness.faults -m faults [--kills 10] [--faults-json FILE]      # make faults
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoint import latest
from checkpoint.convert import convert
from harness import processes, results
from harness.examine import made_here
from harness.results import Report
from harness.tables import TEXT, column, made_line, names, sheet_of
from tests.checkpoint.compare import equal
from tests.ranks import ROOT

SILENT_S = 900  # a run that says nothing for so long hangs
ROWS, STOPS = [], []  # of the table


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=10, help="at random moments (default 10; without make faults 1)")
    parser.addoption("--faults-json", type=Path, help="where to write the result")


def pytest_sessionfinish(session, exitstatus):
    path = session.config.getoption("--faults-json")
    if path and exitstatus == 0 and ROWS:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheets = {"faults": fault_sheet(ROWS, made_here()), "journey": journey_sheet(STOPS)}
        path.write_text(results.to_json(Report(made_here(), sheets)), encoding="utf-8")


class FaultRow(NamedTuple):
    """What was done to a run, how often, what was seen, and whether its end was that of an undisturbed run."""
    fault: str
    times: int
    seen: str
    end: str


class Stop(NamedTuple):
    """Where a run that moves on was trained until this step, its loss, and DDP's."""
    step: int
    place: str
    loss: float
    undisturbed: float


def seen(fault, times, what, end="equal"):
    ROWS.append(FaultRow(fault, times, what, end))


def fault_sheet(rows, made):
    return sheet_of(
        "Faults", rows, {"fault": names("fault"), "times": column("times", "times", "counted", ".0f"),
                         "seen": column("went on from", "seen", form=TEXT),
                         "end": column("at the\nend", "end", "compared")},
        [made_line(made, "stage 4 on two ranks or three")])


def journey_sheet(stops):
    return sheet_of(
        "A run that changes stages, beside undisturbed DDP", stops, {
            "step": column("after\nstep", "step", form=".0f"), "place": column("trained until there by", "place"),
            "loss": column("validation\nloss", "loss", "measured", ".4f"),
            "ddp": column("of DDP", "undisturbed", "measured", ".4f"),
            "difference": column("|Δ|", lambda stop: abs(stop.loss - stop.undisturbed), "measured", ".0e")},
        ["The number of ranks changes the order of sums, and so the last bits."])


class Run:
    """torchrun with a train.py; it ends with the `with` that it stands in. `lines`: what it has printed so far."""

    def __init__(self, script, ranks, steps, folder, *more, max_restarts=0):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   f"--max-restarts={max_restarts}", script, "--model=nano", "--sequence-length=32", "--batch-size=4",
                   f"--steps={steps}", f"--checkpoint={folder}", "--save-every=20", *more]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        preexec_fn=processes.end_with_parent)
        self.lines, self.limit = [], threading.Timer(0, None)
        self._wait_anew()

    def _wait_anew(self):
        self.limit.cancel()
        self.limit = threading.Timer(SILENT_S, self.process.kill)
        self.limit.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.limit.cancel()
        self.process.terminate()
        self.process.wait(60)  # torchrun gives its ranks 30

    def said(self, pattern):
        """Reads on until a line matches -> the match; None: the run has ended."""
        for line in self.process.stdout:
            self._wait_anew()
            self.lines.append(line.rstrip())
            if match := re.search(pattern, self.lines[-1]):
                return match
        return None

    def starts(self):
        """Yield, for each attempt to train, the name of the checkpoint it goes on from; "" for none."""
        while match := self.said(r"^resumed from ([^,]+)|^validation loss before"):
            if match[1]:
                self.said("^validation loss before")
            yield Path(match[1] or "").name

    def rank_processes(self):
        """-> the ids of torchrun's children, in the order of ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children]

    def end(self):
        """-> the exit code, which torchrun is given a moment for. All lines have been read then."""
        self.said("(?!)")
        return self.process.wait(60)


def run_undisturbed(*args, begin=""):
    """A Run to its end, from a checkpoint of that name on, or from the beginning."""
    with Run(*args) as run:
        assert list(run.starts()) == [begin] and run.end() == 0, "\n".join(run.lines[-20:])


def converted(path, scratch):
    """A checkpoint, as `python -m checkpoint convert` makes it -> {"model": …, "optimizer": …}, both by name."""
    Path(scratch).unlink(missing_ok=True)
    convert(path, scratch)
    return torch.load(scratch, weights_only=True)


def same(folder, other, scratch):
    """Whether two runs have ended with the same parameters and state, to the bit: those of their last checkpoints."""
    one, other = (converted(latest(run), scratch / "one.pt") for run in (folder, other))
    return equal(one["model"], other["model"]) and equal(one["optimizer"]["state"], other["optimizer"]["state"])


CHANGING = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}


def die_at(number):
    """End this process before its file operation of that number, from 0 on."""
    operations = itertools.count()

    def operation():
        if next(operations) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(event, arguments):
        if event in CHANGING or event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            operation()

    fsync = os.fsync  # the one operation that Python tells no audit hook of
    os.fsync = lambda descriptor: (operation(), fsync(descriptor))[1]
    sys.addaudithook(heard)
