"""Runs a check on ranks. An exception, a death or a hang there becomes a Wrong, which says what happened."""

import contextlib
import functools
import itertools
import os
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path

from grade import on_ranks, runs
from harness.ranks.workers import WorkerError, Workers

LIMITS_S = 8, 10  # of a check: without the processor on all ranks, which is a hang; and of the processor's time
LAST_S = 600  # where neither is seen
MARK = "GRADED_IN"  # in the environment, which a process inherits from the one that starts it
GRACE_S = 60  # helpers of Python's end after who has started them: on a busy machine not at once
UNKNOWN = "no known mistake gives these figures: see the next line"
KNOWN_ERRORS = {  # a part of an exception's message -> the cause
    "fill in ": "this exercise is not finished yet: docs/exercise.md has hints",
    "empty parameter list": "a rank owns nothing here: give the inner optimizer a group without parameters then",
    "__init__() got an unexpected keyword": "the constructor hands on what it doesn't know: **optimizer_kwargs",
    "leaf Variable that requires grad": "step() and the constructor must run under torch.no_grad()",
    "SystemExit": "the program that trains decides when a rank ends, and not its optimizer",
    "cycle_momentum": "give torch.optim.Optimizer's constructor the defaults of the inner optimizer: betas and so on"}


class Wrong(Exception):
    """Says what was expected, what came (a line, or two of them), and the likely cause."""

    def __init__(self, expected, came, cause=UNKNOWN, step=1):
        super().__init__(came)
        self.step = step  # that is wrong; 0: none, but an exception or a hang
        came = [came] if isinstance(came, str) else came
        lines = [("expected", expected), *zip(("came", ""), came), ("cause", cause)]
        self.lines = [(what, line) for what, line in lines if line]


def require(is_right, *lines):
    """Raise a Wrong of these lines, (expected, came, cause), unless it `is_right`."""
    if not is_right:
        raise Wrong(*lines)


class Grader:
    """Runs functions of grade/on_ranks.py on ranks, with the optimizer of `package`; a failure becomes a Wrong."""

    def __init__(self, package, workers=None, beside_ddp=False):
        self.package, self.beside_ddp = package, beside_ddp
        self.workers = {} if workers is None else workers  # by world size
        self.answers = {}  # a run that two checks ask for is done once
        self.run_under_way = None  # (the Run, the number of ranks) of the check that goes on
        self.printed = []  # lines that its ranks have printed, the latest last

    def close(self):
        for workers in self.workers.values():
            workers.close()

    @functools.cached_property
    def facts(self):
        """Look at the class. The package is imported on ranks alone: whatever it does, it doesn't do here."""
        return self.run(2, on_ranks.look)[0]

    def outcomes(self, title, checks):
        """Yield (check, lines to print or a Wrong) of each; a terminal shows meanwhile which one is under way."""
        is_terminal = sys.stderr.isatty()
        for number, check in enumerate(checks, start=1):
            self.run_under_way = None
            self.printed.clear()
            if is_terminal:
                line = f"  {title.partition(':')[0]}, {number} of {len(checks)}: {check.name}"
                print(line[: shutil.get_terminal_size().columns - 1], end="", file=sys.stderr, flush=True)
            try:
                outcome = check.function(self) or []
            except Wrong as wrong:
                outcome = wrong
            if is_terminal:
                print("\r\033[K", end="", file=sys.stderr, flush=True)  # takes the line away
            yield check, outcome

    def run(self, world_size, function, *args, hint=None):
        """Return [function(candidate, *args) of rank 0, …]. hint: the likely cause where an exception has no other."""
        if function is runs.play:
            self.run_under_way = *args, world_size
        key = world_size, function, args
        if key in self.answers:
            return self.answers[key]
        if world_size not in self.workers:
            self.workers[world_size] = Workers(world_size, timeout_s=LAST_S)
        reports = [[] for _ in range(world_size)]  # by rank: (kind, text, place), see grade/on_ranks.py
        raised = []  # (rank, text, place), in the order in which they did

        def hear(rank, report):
            kind, *text_and_place = report
            if kind == "printed":
                self.printed.append(f"rank {rank}: {text_and_place[0]}")
                return
            reports[rank].append(report)
            if kind == "raised":
                raised.append((rank, *text_and_place))
            latest = {of_rank[-1][0] if of_rank else "" for of_rank in reports}
            if "stuck" in latest and latest <= {"stuck", "ended"}:
                raise WorkerError("all ranks stand still")

        try:
            self.answers[key] = self.workers[world_size].run(on_ranks.watched, self.package, self.beside_ddp, LIMITS_S,
                                                             function, *args, on_event=hear)
        except WorkerError as error:
            raise Wrong(*failure(str(error), reports, raised, hint), step=0) from None
        return self.answers[key]


def failure(error, reports, raised, hint):
    """Return what a Wrong is made of, from what the ranks have reported: an exception, a death or a hang."""
    parting = first_difference(reports)
    culprits = [entry for entry in raised if "gloo" not in entry[1]]  # a rank that gloo ends has lost another
    has_died = " ended with exit code " in error or " was killed by signal " in error
    if culprits or raised and not has_died:
        rank, text, place = (culprits or raised)[0]
        cause = next((cause for part, cause in KNOWN_ERRORS.items() if part in text), hint)
        return ("no exception", [shorten(f"rank {rank}: {text}"), f"in {place}" if place else ""],
                cause if culprits else hint or parting or UNKNOWN)
    if has_died:
        is_aborted = " was killed by signal 6" in error  # by gloo, if messages of two sizes meet
        latest = latest_collective(reports[int(error.split()[1])])
        return ("every rank lives until the end of this check",
                [shorten(error), f"after {latest}" if latest else "before its first collective"],
                is_aborted and (hint or parting) or "os._exit() or a crash ended it; the other ranks have only lost it")
    ranks_of = {}  # what ranks do -> these ranks
    for rank, of_rank in enumerate(reports):
        ranks_of.setdefault(doing(of_rank), []).append(str(rank))
    first, *further = [f"rank {', '.join(ranks)} {what}" for what, ranks in ranks_of.items()]
    return ("every rank ends this check", [shorten(first), shorten("; ".join(further))],
            parting or "all ranks have called the same collectives: look at what else is waited for")


def say(*lines):
    """Print (what, line) of each."""
    print("\n".join(f"  {what:9} {line}".rstrip() for what, line in lines), flush=True)


def shorten(line):
    return line if len(line) <= 105 else line[:104] + "…"


def latest_collective(reports):
    """Return the latest collective among a rank's reports; "" without one."""
    return next((f"{text} ({place})" if place else text for kind, text, place in reversed(reports)
                 if kind == "collective"), "")


def doing(reports):
    """Return what a rank did last: "hangs in broadcast of 64 bytes from rank 1 (mine.py:31)"."""
    latest = latest_collective(reports)
    place = next((place for kind, _, place in reversed(reports) if kind == "stuck"), None)
    if reports and reports[-1][0] == "ended":
        return f"has ended; its last was {latest or 'no collective'}"
    if latest and (place is None or latest.endswith(f"({place})")):
        return f"hangs in {latest}"
    return f"hangs in {place or 'code of others'}, {f'after {latest}' if latest else 'before any collective'}"


def first_difference(reports):
    """Return where the ranks' collectives part, in a sentence; "" if they don't. Sends and receives don't count."""
    calls = [[text for kind, text, _ in of_rank if kind == "collective" and not text.startswith(("send", "recv"))]
             for of_rank in reports]
    for number, (first, *further) in enumerate(itertools.zip_longest(*calls, fillvalue="nothing"), start=1):
        for rank, call in enumerate(further, start=1):
            if call != first:
                kind, _, root = call.partition(" from ")
                difference = f"from {root}" if root and kind == first.partition(" from ")[0] else call
                return f"the ranks part at collective {number}: {first} on rank 0, {difference} on rank {rank}"
    return ""


@contextlib.contextmanager
def processes_ended():
    """End processes that are started in this context and outlive it. Yields a set for their ids: none without /proc."""
    os.environ[MARK], left = secrets.token_hex(8), set()
    try:
        yield left
    finally:
        deadline = time.monotonic() + GRACE_S
        while processes := marked(f"{MARK}={os.environ[MARK]}"):  # what they start meanwhile, too
            for process in processes if time.monotonic() > deadline else ():
                left.add(process)
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.05)


def marked(mark):
    """Return ids of the living processes that have `mark` in their environment, but for our own children."""
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if os.getpid() not in (parent, int(folder.name)):
                    processes.append(int(folder.name))
    return processes
