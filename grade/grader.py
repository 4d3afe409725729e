"""Runs a check on ranks. An exception, a death or a hang there becomes a Wrong, which says what happened."""

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
    """Says what was expected, what came (one line or two), and the likely cause. lines: [(first word, rest)]."""

    def __init__(self, expected, came, cause=UNKNOWN, step=1):
        super().__init__(came)
        self.step = step  # the number of the wrong step; 0: an exception or a hang
        came = [came] if isinstance(came, str) else came
        lines = [("expected", expected), *zip(("came", ""), came), ("cause", cause)]
        self.lines = [(word, rest) for word, rest in lines if rest]


def require(is_right, *lines):
    """Raise Wrong(*lines) unless the package `is_right`. lines: expected, came and perhaps cause."""
    if not is_right:
        raise Wrong(*lines)


class Grader:
    """Runs functions of grade/on_ranks.py on ranks, with the optimizer of `package`; a failure becomes a Wrong."""

    def __init__(self, package, workers=None):
        self.package = package
        self.workers = {} if workers is None else workers  # {world size: Workers}
        self.answers = {}  # {(world size, function, args): what the ranks returned}, because several checks share a run
        self.printed = []  # lines that its ranks have printed, the latest last

    def close(self):
        for workers in self.workers.values():
            workers.kill()  # an orderly end takes seconds, and saves nothing here

    @functools.cached_property
    def facts(self):
        """Return facts of the class. Only ranks import the package, so that its mistakes can't end this process."""
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
            self.workers[world_size] = Workers(world_size, timeout_s=LAST_S)
            self.workers[world_size].run(on_ranks.ready)

    def run(self, world_size, function, *args, hint=None):
        """Return [function(candidate, *args) of each rank]. hint: the likely cause if an exception shows no other."""
        key = world_size, function, args
        if key in self.answers:
            return self.answers[key]
        if world_size not in self.workers:
            self.workers[world_size] = Workers(world_size, timeout_s=LAST_S)
        reports = [[] for _ in range(world_size)]  # by rank: (kind, text, place), see grade/on_ranks.py
        raised = []  # (rank, text, place) of each exception, in order of time

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
            self.answers[key] = self.workers[world_size].run(on_ranks.watched, self.package, LIMITS_S, function, *args,
                                                             on_event=hear)
        except WorkerError as error:
            raise Wrong(*failure(str(error), reports, raised, hint), step=0) from None
        return self.answers[key]


def failure(error, reports, raised, hint):
    """Return (expected, came, cause) of an exception, a death or a hang, from the ranks' reports."""
    parting = first_difference(reports)
    culprits = [entry for entry in raised if "gloo" not in entry[1]]  # gloo raises on a rank that has lost another one
    has_died = " ended with exit code " in error or " was killed by signal " in error
    if culprits or raised and not has_died:
        rank, text, place = (culprits or raised)[0]
        cause = next((cause for part, cause in KNOWN_ERRORS.items() if part in text), hint)
        return ("no exception", [shorten(f"rank {rank}: {text}"), f"in {place}" if place else ""],
                cause if culprits else hint or parting or UNKNOWN)
    if has_died:
        is_aborted = " was killed by signal 6" in error  # gloo aborts a rank that gets a message of another size
        latest = latest_collective(reports[int(error.split()[1])])
        return ("every rank lives until the end of this check",
                [shorten(error), f"after {latest}" if latest else "before its first collective"],
                is_aborted and (hint or parting) or "os._exit() or a crash ended it; the other ranks have only lost it")
    ranks_doing = {}  # words of `doing` -> the ranks that do this
    for rank, of_rank in enumerate(reports):
        ranks_doing.setdefault(doing(of_rank), []).append(str(rank))
    first, *further = [f"rank {', '.join(ranks)} {words}" for words, ranks in ranks_doing.items()]
    return ("every rank ends this check", [shorten(first), shorten("; ".join(further))],
            parting or "all ranks have called the same collectives: look at what else is waited for")


def say(*lines):
    """Print lines, each given as (first word, rest)."""
    print("\n".join(f"  {word:9} {rest}".rstrip() for word, rest in lines), flush=True)


def shorten(line):
    return line if len(line) <= 105 else line[:104] + "…"


def latest_collective(reports):
    """Return the latest collective in a rank's reports, in words; "" without one."""
    return next((f"{text} ({place})" if place else text for kind, text, place in reversed(reports)
                 if kind == "collective"), "")


def doing(reports):
    """Return a rank's state in words: "hangs in broadcast of 64 bytes from rank 1 (mine.py:31)"."""
    latest = latest_collective(reports)
    place = next((place for kind, _, place in reversed(reports) if kind == "stuck"), None)
    if reports and reports[-1][0] == "ended":
        return f"has ended; its last was {latest or 'no collective'}"
    if latest and (place is None or latest.endswith(f"({place})")):
        return f"hangs in {latest}"
    return f"hangs in {place or 'code of others'}, {f'after {latest}' if latest else 'before any collective'}"


def first_difference(reports):
    """Return in a sentence where the ranks' collectives first differ, or "". Sends and receives don't count."""
    calls = [[text for kind, text, _ in of_rank if kind == "collective" and not text.startswith(("send", "recv"))]
             for of_rank in reports]
    for number, (first, *further) in enumerate(itertools.zip_longest(*calls, fillvalue="nothing"), start=1):
        for rank, call in enumerate(further, start=1):
            if call != first:
                kind, _, root = call.partition(" from ")
                difference = f"from {root}" if root and kind == first.partition(" from ")[0] else call
                return f"the ranks part at collective {number}: {first} on rank 0, {difference} on rank {rank}"
    return ""
