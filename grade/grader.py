"""Runs a check on ranks. An exception, a death or a hang there becomes a Wrong, which says what happened."""

import functools
import itertools

from grade import on_ranks, runs
from harness.workers import WorkerError, Workers

LIMITS_S = 8, 10  # of a check: without the processor on all ranks, which is a hang; and of the processor's time
LAST_S = 600  # where neither is seen
UNKNOWN = "no known mistake gives these figures: see the next line"
KNOWN_ERRORS = {  # a part of an exception's message -> the cause
    "fill in ": "this exercise is not finished yet: docs/exercise.md has hints",
    "empty parameter list": "a rank owns nothing here: give the inner optimizer a group without parameters then",
    "__init__() got an unexpected keyword": "the constructor hands on what it doesn't know: **optimizer_kwargs",
    "leaf Variable that requires grad": "step() and the constructor must run under torch.no_grad()",
    "SystemExit": "the program that trains decides when a rank ends, and not its optimizer",
    "cycle_momentum": "give torch.optim.Optimizer's constructor the defaults of the inner optimizer: betas and so on",
}


class Wrong(Exception):
    """Says what was expected, what came (a line, or a list of them), and the likely cause."""

    def __init__(self, expected, came, cause=UNKNOWN, step=1):
        super().__init__(came)
        self.step = step  # that is wrong; 0: none, but an exception or a hang
        first, *more = [came] if isinstance(came, str) else came
        lines = [("expected", expected), ("came", first), *(("", line) for line in more), ("cause", cause)]
        self.lines = [(what, line) for what, line in lines if line]


def first_wrong(rows):
    """Raise the first of `rows` that is wrong: (whether it is, expected, came, cause)."""
    for is_wrong, *lines in rows:
        if is_wrong:
            raise Wrong(*lines)


class Grader:
    """Runs functions of grade/on_ranks.py on ranks, with the optimizer of `package`; a failure becomes a Wrong."""

    def __init__(self, package, workers=None, beside_ddp=False):
        self.package = package
        self.beside_ddp = beside_ddp
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

    def run(self, world_size, function, *args, hint=None):
        """-> [function(candidate, *args) of rank 0, 1, …]. hint: the likely cause where an exception has no other."""
        if function is runs.play:
            self.run_under_way = *args, world_size
        key = world_size, function, args
        if key in self.answers:
            return self.answers[key]
        if world_size not in self.workers:
            self.workers[world_size] = Workers(world_size, timeout_s=LAST_S)
        told = [[] for _ in range(world_size)]  # by rank: (what it does, its words, the place); see on_ranks
        raised = []  # (rank, what it says, the place), in the order in which they did

        def hear(rank, message):
            if message[0] == "printed":
                self.printed.append(f"rank {rank}: {message[1]}")
                return
            told[rank].append(message)
            if message[0] == "raised":
                raised.append((rank, *message[1:]))
            doing = {messages[-1][0] if messages else "" for messages in told}
            if "stuck" in doing and doing <= {"stuck", "ended"}:
                raise WorkerError("all ranks stand still")

        try:
            self.answers[key] = self.workers[world_size].run(on_ranks.watched, self.package, self.beside_ddp, LIMITS_S,
                                                             function, *args, on_event=hear)
        except WorkerError as error:
            raise Wrong(*failure(str(error), told, raised, hint), step=0) from None
        return self.answers[key]


def failure(error, told, raised, hint):
    """-> what a Wrong is made of, from what the ranks have told."""
    parting = first_difference(told)
    own = [entry for entry in raised if "gloo" not in entry[1]]  # others have lost it
    has_died = " ended with exit code " in error or " was killed by signal " in error
    if own or raised and not has_died:
        rank, text, place = (own or raised)[0]
        cause = next((cause for part, cause in KNOWN_ERRORS.items() if part in text), hint)
        return ("no exception", [shorten(f"rank {rank}: {text}"), f"in {place}" if place else ""],
                cause if own else hint or parting or UNKNOWN)
    if has_died:
        is_aborted = " was killed by signal 6" in error  # by gloo, if messages of two sizes meet
        last = last_of(told[int(error.split()[1])])
        return ("every rank lives until the end of this check",
                [shorten(error), f"after {last}" if last else "before its first collective"],
                is_aborted and (hint or parting) or "os._exit() or a crash ended it; the other ranks have only lost it")
    doings = {}  # what a rank does -> the ranks
    for rank, messages in enumerate(told):
        doings.setdefault(doing(messages), []).append(str(rank))
    first, *others = [f"rank {', '.join(ranks)} {what}" for what, ranks in doings.items()]
    return ("every rank ends this check", [shorten(first), shorten("; ".join(others))],
            parting or "all ranks have called the same collectives: look at what else is waited for")


def shorten(line):
    return line if len(line) <= 105 else line[:104] + "…"


def at(text, place):
    return f"{text} ({place})" if place else text


def last_of(messages):
    """-> the last collective that a rank has told of; "" without one."""
    return next((at(*message[1:]) for message in reversed(messages) if message[0] == "collective"), "")


def doing(messages):
    """What a rank did last -> "hangs in broadcast of 64 bytes from rank 1 (mine.py:31)"."""
    last, stuck = last_of(messages), [place for kind, *place in messages if kind == "stuck"]
    if messages and messages[-1][0] == "ended":
        return f"has ended; its last was {last or 'no collective'}"
    if last and (not stuck or last.endswith(f"({stuck[-1][0]})")):
        return f"hangs in {last}"
    place = stuck[-1][0] if stuck and stuck[-1][0] else "code of others"
    return f"hangs in {place}, {f'after {last}' if last else 'before any collective'}"


def first_difference(told):
    """-> where the ranks' collectives part, in a sentence; "" if they don't. Sends and receives don't count."""
    lists = [[message[1] for message in messages if message[0] == "collective"
              and not message[1].startswith(("send", "recv"))] for messages in told]
    for number, (first, *others) in enumerate(itertools.zip_longest(*lists, fillvalue="nothing"), start=1):
        for rank, call in enumerate(others, start=1):
            if call != first:
                kind, _, root = call.partition(" from ")
                other = f"from {root}" if root and kind == first.partition(" from ")[0] else call
                return f"the ranks part at collective {number}: {first} on rank 0, {other} on rank {rank}"
    return ""
