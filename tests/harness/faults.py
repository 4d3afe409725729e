"""Training runs that are watched and disturbed; and the table of what was done to them.

    python -m pytest -p tests.harness.faults -m faults [--kills 20] [--faults-json FILE]      # make faults
"""

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import torch

from checkpoint import latest, load
from harness.publishing import tables
from harness.publishing.tables import TEXT, Report, column, made_here, name_column, sheet_of
from harness.training.models import GPT, MODELS
from tests.checkpoint.compare import equal
from tests.ranks import ROOT

LIMIT_S = 1800  # a run that takes so long hangs
ROWS = []  # of the table


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, default=20, help="at random moments (default 20; without make faults 1)")
    parser.addoption("--faults-json", type=Path, help="where to write the result")


def pytest_sessionfinish(session, exitstatus):
    path = session.config.getoption("--faults-json")
    if path and exitstatus == 0 and ROWS:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = Report(made_here(), {"faults": fault_sheet(ROWS)}, "stage 4 on two ranks or three")
        path.write_text(tables.to_json(report), encoding="utf-8")


class FaultRow(NamedTuple):
    """What was done to a run, how often, and from where the run went on. Its end was that of an undisturbed run."""
    fault: str
    times: int
    seen: str
    end: str = "equal"


def note(fault, times, seen):
    ROWS.append(FaultRow(fault, times, seen))


def fault_sheet(rows):
    return sheet_of(
        "Faults", rows, {"fault": name_column("fault"), "times": column("times", "times", "counted", ".0f"),
                         "seen": column("went on from", "seen", form=TEXT),
                         "end": column("at the\nend", "end", "compared")})


class Run:
    """Runs torchrun with a train.py, until the end of the `with` statement. `lines`: what it has printed so far."""

    def __init__(self, script, ranks, steps, folder, *more, max_restarts=0):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   f"--max-restarts={max_restarts}", script, "--model=nano", "--sequence-length=32", "--batch-size=4",
                   f"--steps={steps}", f"--checkpoint={folder}", "--save-every=20", *more]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines = []
        self.limit = threading.Timer(LIMIT_S, self.process.kill)
        self.limit.start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.limit.cancel()
        self.process.terminate()
        self.process.wait(60)  # torchrun gives its ranks 30

    def read_until(self, pattern):
        """Return the match of the next line that matches, or None if the run has ended without one."""
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if match := re.search(pattern, self.lines[-1]):
                return match
        return None

    def starts(self):
        """Yield, for each attempt to train, the name of the checkpoint that it goes on from; "" for none."""
        conditions = r"rank\(s\) with"  # of a line that every attempt prints before its first step
        while match := self.read_until(f"^resumed from (.+)|{conditions}"):
            if match[1]:
                self.read_until(conditions)
            yield Path(match[1] or "").name

    def rank_processes(self):
        """Return the ids of torchrun's children, in the order of ranks."""
        return [*map(int, Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split())]

    def end(self):
        """Read all lines, and return the exit code."""
        self.read_until("(?!)")  # matches no line
        return self.process.wait(60)


def run_undisturbed(*args, begin=""):
    """Let a Run train to its end, from a checkpoint of that name on, or from the beginning."""
    with Run(*args) as run:
        assert list(run.starts()) == [begin] and run.end() == 0, "\n".join(run.lines[-20:])


def end_of(folder):
    """Return weights, optimizer state and learning rate of a run's newest checkpoint, loaded in plain torch."""
    model = GPT(MODELS["nano"])
    optimizer = torch.optim.AdamW(model.parameters())
    load(latest(folder), model, optimizer)
    return model.state_dict(), optimizer.state_dict()


def end_equally(folder, other_folder):
    return equal(end_of(folder), end_of(other_folder))
