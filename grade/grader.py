"""Runs the checks by which a learner's package is graded, on several processes, which are called ranks.

A check calls functions on ranks by Grader.run. It raises a verdict, Wrong, if the package does another thing than it
should. A Wrong names a cause, a line about the likely mistake. If a rank has an exception, dies or hangs, Grader.run
raises a Failed, a Wrong that says what happened. It learns this from Reports (grade/on_ranks.py), which each rank sends
while it runs: a Report has a kind, such as "collective", "printed" or "raised", a text, and a place, "file:line".
"""

import functools
import itertools

from grade import on_ranks
from harness.ranks.workers import WorkerError, Workers

# A rank is stuck if it has used no processor time for 8 seconds, or more than 10 seconds of it in one run.
LIMITS_S = 8, 10
LAST_S = 600  # seconds after which a run ends in any case
UNKNOWN = "no known mistake gives these figures: print gradients around the average, parameters around the step"
KNOWN_ERRORS = {  # a part of an exception's message -> the cause
    "fill in ": "this exercise is not finished yet: docs/exercise.md has hints",
    "empty parameter list": "a rank owns nothing here: give the inner optimizer a group without parameters then",
    "__init__() got an unexpected keyword": "the constructor hands on what it doesn't know: **optimizer_kwargs",
    "leaf Variable that requires grad": "step() and the constructor must run under torch.no_grad()",
    "SystemExit": "the program that trains decides when a rank ends, and not its optimizer",
    "cycle_momentum": "give torch.optim.Optimizer's constructor the defaults of the inner optimizer: betas and so on"}


class Wrong(Exception):
    """Says what was expected, what came instead (one line or two), and the likely cause, or "" for none."""

    def __init__(self, expected, came, cause=UNKNOWN):
        super().__init__(came)
        self.expected = expected
        self.came = came.strip()
        # (first word, rest) of each line that grade/report.py prints. The second line of `came` has "" as its word.
        lines = [("expected", expected), *zip(("came", ""), self.came.split("\n")), ("cause", cause)]
        self.lines = [(word, rest) for word, rest in lines if rest]


class Failed(Wrong):
    """The Wrong of a check that an exception, a death or a hang of a rank has ended."""


def require(is_right, *texts):
    """Raise Wrong with the given texts unless `is_right`. texts: what was expected, what came, and maybe the cause."""
    if not is_right:
        raise Wrong(*texts)


class Grader:
    """Keeps ranks, and runs functions on them with the optimizer of `package`, the learner's."""

    def __init__(self, package, workers=None):
        self.package = package
        self.workers = {} if workers is None else workers  # {number of ranks: Workers, which are as many processes}
        # {arguments of `run`: what the ranks have returned}, for further checks with the same arguments.
        self.results = {}
        # Lines that the ranks have printed in the latest check. report.py prints some of them if the check fails.
        self.printed = []

    def close(self):
        """End all ranks."""
        for workers in self.workers.values():
            workers.kill()  # an orderly end takes seconds, and saves nothing here

    @functools.cached_property
    def facts(self):
        """Facts about the graded class, such as its name and the methods that it lacks.

        on_ranks.look finds them on a rank. Only ranks import the package, because its mistakes can end a process.
        """
        return self.run(2, on_ranks.look)[0]

    def outcome(self, check):
        """Run a Check of grade/levels.py. Return a list of lines to print if it passes, or its Wrong if it fails."""
        self.printed.clear()
        try:
            return check.function(self) or []
        except Wrong as wrong:
            return wrong

    def start(self):
        """Start the ranks that level 1 needs. They import the package only when a check runs."""
        for world_size in (2, 3, 4):
            self.workers_of(world_size).run(on_ranks.ready)

    def workers_of(self, world_size):
        """Return the Workers for this number of ranks. The first call starts them."""
        if world_size not in self.workers:
            self.workers[world_size] = Workers(world_size, timeout_s=LAST_S)
        return self.workers[world_size]

    def run(self, world_size, function, *args, cause_of_error=None):
        """Call function(candidate, *args) on each rank. Return the list of results. Raise Failed if a rank fails.

        candidate: a Candidate (grade/runs.py): the graded class, and what belongs to it on the rank. cause_of_error:
        the likely cause to name if the failure itself doesn't show one.
        """
        key = world_size, function, args
        if key in self.results:
            return self.results[key]
        workers = self.workers_of(world_size)
        # For each rank its Reports in order of time, without printed lines.
        reports_by_rank = [[] for _ in range(world_size)]
        raised = []  # (rank, Report) of each exception, in order of time

        def hear(rank, report):
            """Note a Report. End the run if all ranks stand still. Workers call this for each Report that arrives."""
            if report.kind == "printed":
                self.printed.append(f"rank {rank}: {report.text}")
                return
            reports_by_rank[rank].append(report)
            if report.kind == "raised":
                raised.append((rank, report))
            # The kinds that the ranks have reported last. All ranks stand still if each is stuck or has ended.
            latest = {reports[-1].kind if reports else "" for reports in reports_by_rank}
            if "stuck" in latest and latest <= {"stuck", "ended"}:
                raise WorkerError("all ranks stand still")  # workers.run ends the ranks, and raises this error below

        try:
            self.results[key] = workers.run(on_ranks.watched, self.package, LIMITS_S, function, *args, on_event=hear)
        except WorkerError as error:
            raise Failed(*failure(str(error), reports_by_rank, raised, cause_of_error)) from None
        return self.results[key]


def failure(error, reports_by_rank, raised, cause_of_error):
    """Return the arguments of a Failed (expected, came, cause) for an exception, a death or a hang.

    error: the text of the WorkerError. reports_by_rank, raised, cause_of_error: as in Grader.run.
    """
    parting = first_difference(reports_by_rank)  # "" if all ranks call the same collectives
    # If a rank dies or raises, gloo raises on the ranks that wait for it. These are no culprits.
    culprits = [(rank, report) for rank, report in raised if "gloo" not in report.text]
    has_died = " ended with exit code " in error or " was killed by signal " in error
    if culprits or (raised and not has_died):
        rank, report = (culprits or raised)[0]  # the first in time
        came = shorten(f"rank {rank}: {report.text}")
        if report.place:
            came += f"\nin {report.place}"
        if not culprits:  # only gloo has raised, for example because ranks call different collectives
            return "no exception", came, cause_of_error or parting or UNKNOWN
        known_cause = next((cause for part, cause in KNOWN_ERRORS.items() if part in report.text), cause_of_error)
        return "no exception", came, known_cause
    if has_died:
        dead = int(error.split()[1])  # "rank 1 ended with exit code 0"
        latest = latest_collective(reports_by_rank[dead])
        came = f"{shorten(error)}\n{f'after {latest}' if latest else 'before its first collective'}"
        cause = "os._exit() or a crash ended it; the other ranks have only lost it"
        if " was killed by signal 6" in error:  # gloo aborts a rank that gets a message of another size
            cause = cause_of_error or parting or cause
        return "every rank lives until the end of this check", came, cause
    # Otherwise the ranks hang: say where each stands, and name ranks together that stand at the same place.
    ranks_doing = {}  # words about what a rank does -> the ranks that do this
    for rank, reports in enumerate(reports_by_rank):
        ranks_doing.setdefault(doing(reports), []).append(str(rank))
    first, *further = [f"rank {', '.join(ranks)} {words}" for words, ranks in ranks_doing.items()]
    return ("every rank ends this check", f"{shorten(first)}\n{shorten('; '.join(further))}",
            parting or "all ranks have called the same collectives: look at what else is waited for")


def shorten(line):
    """Return a line as it is, or cut to 105 characters."""
    return line if len(line) <= 105 else line[:104] + "…"


def latest_collective(reports):
    """Return the latest collective in the reports of one rank, in words; "" if the rank has begun none."""
    for report in reversed(reports):
        if report.kind == "collective":
            return f"{report.text} ({report.place})" if report.place else report.text
    return ""


def doing(reports):
    """Return in words where a rank stands: "hangs in broadcast of 64 bytes from rank 1 (mine.py:31)".

    reports: of this rank.
    """
    latest = latest_collective(reports)
    if reports and reports[-1].kind == "ended":
        return f"has ended; its last was {latest or 'no collective'}"
    places = [report.place for report in reports if report.kind == "stuck"]  # the last place counts
    # The rank hangs in its latest collective if it is stuck in the line that has called the collective.
    if latest and (not places or latest.endswith(f"({places[-1]})")):
        return f"hangs in {latest}"
    place = places[-1] if places else ""
    return f"hangs in {place or 'code of others'}, {f'after {latest}' if latest else 'before any collective'}"


def first_difference(reports_by_rank):
    """Return a sentence that says at which collective the ranks first differ; "" if they never do.

    Sends and receives don't count, because they differ between ranks in right programs, too.
    """
    calls_by_rank = []  # for each rank its collectives in words, such as "broadcast of 16 bytes from rank 0"
    for reports in reports_by_rank:
        calls_by_rank.append([report.text for report in reports
                              if report.kind == "collective" and not report.text.startswith(("send", "recv"))])
    # calls: the collective `number` of each rank; "nothing" for a rank that has called fewer.
    for number, calls in enumerate(itertools.zip_longest(*calls_by_rank, fillvalue="nothing"), start=1):
        first = calls[0]
        for rank, call in enumerate(calls):
            if call != first:
                kind, _, root = call.partition(" from ")  # "broadcast of 16 bytes", "rank 0"
                # If only the sender differs, the sentence repeats only the sender.
                difference = f"from {root}" if root and kind == first.partition(" from ")[0] else call
                return f"the ranks part at collective {number}: {first} on rank 0, {difference} on rank {rank}"
    return ""
