"""Runs a check on ranks. An exception, a death or a hang there becomes a Wrong, which says what happened."""

from grade import on_ranks
from harness.run.launch import WorkerError, Workers

START_S = 60  # to start the ranks, and to import what is graded
LIMIT_S = 8  # of a check, which takes a second or less
UNKNOWN = "the figures don't give one away"
KNOWN_ERRORS = {  # a part of an exception's message -> the cause
    "fill in ": "this exercise is not finished yet: docs/exercise.md has hints",
    "empty parameter list": "a rank owns nothing here: there may be fewer parameters than ranks",
    "__init__() got an unexpected keyword": "the constructor hands on what it doesn't know: **optimizer_kwargs",
    "leaf Variable that requires grad": "step() and the constructor must run under torch.no_grad()",
}


class Wrong(Exception):
    """What was expected, what came (a line, or a list of two), and the likely cause, or None."""

    def __init__(self, expected, came, cause=UNKNOWN):
        super().__init__(came)
        first, *more = [came] if isinstance(came, str) else came
        lines = [("expected", expected), ("came", first), *(("", line) for line in more), ("cause", cause)]
        self.lines = [(what, line) for what, line in lines if line]


class Grader:
    """Runs functions of grade/on_ranks.py on ranks, with the optimizer of `package`; a failure becomes a Wrong."""

    def __init__(self, package, workers=None):
        self.package = package
        self.workers = {} if workers is None else workers  # by world size

    def close(self):
        for workers in self.workers.values():
            workers.close()

    @property
    def cls(self):
        return on_ranks.class_of(self.package)

    @property
    def is_core(self):
        return self.cls.__name__ == "ShardedOptimizer"

    def run(self, world_size, function, *args):
        """-> [function(candidate, *args) of rank 0, 1, …]. Ends within LIMIT_S seconds."""
        if world_size not in self.workers:
            self.workers[world_size] = Workers(world_size, timeout_s=START_S)
            self.workers[world_size].run(on_ranks.get_ready, self.package)
        workers = self.workers[world_size]
        workers.timeout_s = LIMIT_S
        told = []  # (rank, what it tells)
        try:
            return workers.run(on_ranks.watched, self.package, LIMIT_S - 1, function, *args,
                               on_event=lambda *message: told.append(message))
        except WorkerError as error:
            raise failure(error, told, world_size) from None


def failure(error, told, world_size):
    """-> a Wrong that names the rank, from what the ranks have told."""
    by_rank = [[message for rank, message in told if rank == one] for one in range(world_size)]
    parting = first_difference(by_rank)
    raised = [(rank, message) for rank, message in told if message[0] == "raised"]
    own = [(rank, message) for rank, message in raised if "gloo" not in message[1]]
    if own:  # the first to raise; others have lost it
        rank, (_, text, place) = own[0]
        cause = next((cause for part, cause in KNOWN_ERRORS.items() if part in text), None)
        return Wrong("no exception", [shorten(f"rank {rank}: {text}"), f"in {place}" if place else ""], cause)
    if raised or "no answer" not in str(error):
        came = f"rank {raised[0][0]}: {raised[0][1][1]}" if raised else str(error)
        return Wrong("no exception", shorten(came), parting or UNKNOWN)
    doings = {}  # what a rank does -> the ranks
    for rank, messages in enumerate(by_rank):
        doings.setdefault(doing(messages), []).append(str(rank))
    first, *others = [f"rank {', '.join(ranks)} {what}" for what, ranks in doings.items()]
    return Wrong(f"every rank ends this check, within {LIMIT_S} seconds", [shorten(first), shorten("; ".join(others))],
                 parting or "all ranks have called the same collectives: look at what else is waited for")


def shorten(line):
    return line if len(line) <= 105 else line[:104] + "…"


def at(text, place):
    return f"{text} ({place})" if place else text


def doing(messages):
    """What a rank did last -> "hangs in broadcast of 64 bytes (mine.py:31)"."""
    collectives = [message[1:] for message in messages if message[0] == "collective"]
    last, place = collectives[-1] if collectives else ("no collective", "")
    stuck = [message[1] for message in messages if message[0] == "stuck"]
    if messages and messages[-1][0] == "ended":
        return f"has ended; its last was {at(last, place)}"
    if not stuck or stuck[0] == place:
        return f"hangs in {at(last, place)}"
    return f"hangs in {stuck[0] or 'code of others'}, after {at(last, place)}"


def first_difference(told):
    """-> where the ranks' collectives part, in a sentence; "" if they don't. Sends and receives don't count."""
    lists = [[message[1:] for message in messages if message[0] == "collective"
              and not message[1].startswith(("send", "recv"))] for messages in told]
    for number in range(max(map(len, lists))):
        calls = [collectives[number] if number < len(collectives) else ("nothing", "") for collectives in lists]
        for rank, call in enumerate(calls):
            if call[0] != calls[0][0]:
                return f"the ranks part at collective {number + 1}: {calls[0][0]} on rank 0, {call[0]} on rank {rank}"
    return ""
