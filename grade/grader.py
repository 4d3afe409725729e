"""Runs a check on ranks. An exception, a death or a hang there becomes a Failed, which says what happened.

A check calls functions on ranks, and raises Wrong where a learner's package does another thing than it should. The
cause that a Wrong names is a line about the likely mistake.
"""

import functools
import itertools

from grade import on_ranks
from harness.ranks.workers import WorkerError, Workers

LIMITS_S = 8, 10  # seconds in which no rank uses its processor, which is a hang; seconds of processor time of a check
LAST_S = 600  # seconds after which a check ends that has reached neither limit
UNKNOWN = "no known mistake gives these figures: print gradients around the average, parameters around the step"
KNOWN_ERRORS = {  # a part of an exception's message -> the cause
    "fill in ": "this exercise is not finished yet: docs/exercise.md has hints",
    "empty parameter list": "a rank owns nothing here: give the inner optimizer a group without parameters then",
    "__init__() got an unexpected keyword": "the constructor hands on what it doesn't know: **optimizer_kwargs",
    "leaf Variable that requires grad": "step() and the constructor must run under torch.no_grad()",
    "SystemExit": "the program that trains decides when a rank ends, and not its optimizer",
    "cycle_momentum": "give torch.optim.Optimizer's constructor the defaults of the inner optimizer: betas and so on"}


class Wrong(Exception):
    """Says what was expected, what came (a text of one line or two), and the likely cause; "" has no line."""

    def __init__(self, expected, came, cause=UNKNOWN):
        super().__init__(came)
        self.expected = expected
        self.came = came.strip()
        # (first word, rest) of each line that is printed; the second line of what came has no word.
        lines = [("expected", expected), *zip(("came", ""), self.came.split("\n")), ("cause", cause)]
        self.lines = [(word, rest) for word, rest in lines if rest]


class Failed(Wrong):
    """Says that an exception, a death or a hang has ended a check."""


def require(is_right, *lines):
    """Raise Wrong(*lines) unless the package `is_right`. lines: expected, came and perhaps cause."""
    if not is_right:
        raise Wrong(*lines)


class Grader:
    """Runs functions on ranks, with the optimizer of `package`."""

    def __init__(self, package, workers=None):
        self.package = package
        self.workers = {} if workers is None else workers  # {world size: Workers}
        self.results = {}  # {(world size, function, args): what the ranks returned}, because several checks share a run
        self.printed = []  # lines that the ranks have printed, the latest last

    def close(self):
        for workers in self.workers.values():
            workers.kill()  # an orderly end takes seconds, and saves nothing here

    @functools.cached_property
    def facts(self):
        """Return what on_ranks.look does. Only ranks import the package, whose mistakes can end a process."""
        return self.run(2, on_ranks.look)[0]

    def outcome(self, check):
        """Run a check; return the lines that it prints when it passes, or its Wrong."""
        self.printed.clear()
        try:
            return check.function(self) or []
        except Wrong as wrong:
            return wrong

    def start(self):
        """Start the ranks of level 1 in advance. They import the package later, when a check runs."""
        for world_size in (2, 3, 4):
            self.workers_of(world_size).run(on_ranks.ready)

    def workers_of(self, world_size):
        if world_size not in self.workers:
            self.workers[world_size] = Workers(world_size, timeout_s=LAST_S)
        return self.workers[world_size]

    def run(self, world_size, function, *args, cause_of_error=None):
        """Return [function(candidate, *args) of each rank]; candidate: grade/runs.py's, which each rank makes.

        Raise Failed if a rank fails. cause_of_error: the likely cause if an exception shows no other.
        """
        key = world_size, function, args
        if key in self.results:
            return self.results[key]
        workers = self.workers_of(world_size)
        reports = [[] for _ in range(world_size)]  # by rank: its on_ranks.Reports in order of time
        raised = []  # (rank, Report) of each exception, in order of time

        def hear(rank, report):
            if report.kind == "printed":
                self.printed.append(f"rank {rank}: {report.text}")
                return
            reports[rank].append(report)
            if report.kind == "raised":
                raised.append((rank, report))
            latest = {of_rank[-1].kind if of_rank else "" for of_rank in reports}
            if "stuck" in latest and latest <= {"stuck", "ended"}:
                raise WorkerError("all ranks stand still")

        try:
            self.results[key] = workers.run(on_ranks.watched, self.package, LIMITS_S, function, *args, on_event=hear)
        except WorkerError as error:
            raise Failed(*failure(str(error), reports, raised, cause_of_error)) from None
        return self.results[key]


def failure(error, reports, raised, cause_of_error):
    """Return (expected, came, cause) of an exception, a death or a hang, from the ranks' reports."""
    parting = first_difference(reports)  # "" if all ranks call the same collectives
    # gloo raises on a rank that has lost another one.
    culprits = [(rank, report) for rank, report in raised if "gloo" not in report.text]
    has_died = " ended with exit code " in error or " was killed by signal " in error
    if culprits or (raised and not has_died):
        rank, report = (culprits or raised)[0]
        came = shorten(f"rank {rank}: {report.text}")
        if report.place:
            came += f"\nin {report.place}"
        if not culprits:
            return "no exception", came, cause_of_error or parting or UNKNOWN
        known = [cause for part, cause in KNOWN_ERRORS.items() if part in report.text]
        return "no exception", came, known[0] if known else cause_of_error
    if has_died:
        dead = int(error.split()[1])  # "rank 1 ended with exit code 0"
        latest = latest_collective(reports[dead])
        came = f"{shorten(error)}\n{f'after {latest}' if latest else 'before its first collective'}"
        cause = "os._exit() or a crash ended it; the other ranks have only lost it"
        if " was killed by signal 6" in error:  # gloo aborts a rank that gets a message of another size
            cause = cause_of_error or parting or cause
        return "every rank lives until the end of this check", came, cause
    ranks_doing = {}  # words of `doing` -> the ranks that do this
    for rank, of_rank in enumerate(reports):
        ranks_doing.setdefault(doing(of_rank), []).append(str(rank))
    first, *further = [f"rank {', '.join(ranks)} {words}" for words, ranks in ranks_doing.items()]
    return ("every rank ends this check", f"{shorten(first)}\n{shorten('; '.join(further))}",
            parting or "all ranks have called the same collectives: look at what else is waited for")


def shorten(line):
    return line if len(line) <= 105 else line[:104] + "…"


def latest_collective(reports):
    """Return the latest collective in a rank's reports, in words; "" without one."""
    for report in reversed(reports):
        if report.kind == "collective":
            return f"{report.text} ({report.place})" if report.place else report.text
    return ""


def doing(reports):
    """Return a rank's state in words: "hangs in broadcast of 64 bytes from rank 1 (mine.py:31)"."""
    latest = latest_collective(reports)
    if reports and reports[-1].kind == "ended":
        return f"has ended; its last was {latest or 'no collective'}"
    places = [report.place for report in reports if report.kind == "stuck"]
    if latest and (not places or latest.endswith(f"({places[-1]})")):
        return f"hangs in {latest}"
    place = places[-1] if places else ""
    return f"hangs in {place or 'code of others'}, {f'after {latest}' if latest else 'before any collective'}"


def first_difference(reports):
    """Return in a sentence where the ranks' collectives first differ, or "". Sends and receives don't count."""
    calls = [[report.text for report in of_rank
              if report.kind == "collective" and not report.text.startswith(("send", "recv"))] for of_rank in reports]
    for number, (first, *further) in enumerate(itertools.zip_longest(*calls, fillvalue="nothing"), start=1):
        for rank, call in enumerate(further, start=1):
            if call != first:
                kind, _, root = call.partition(" from ")  # "broadcast of 16 bytes", "rank 0"
                difference = f"from {root}" if root and kind == first.partition(" from ")[0] else call
                return f"the ranks part at collective {number}: {first} on rank 0, {difference} on rank {rank}"
    return ""
