"""Communication between ranks that ends in one error on all of them, and not in a hang.

Ranks that save and load together have gloo groups for this alone. Their time-out is long, so that a slow disk doesn't
end training.
"""

import atexit
import contextlib
import secrets
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

TIMEOUT = timedelta(minutes=30)  # for which ranks wait for another one that writes or reads
LONGEST_LINE = 500  # letters
SAVERS = weakref.WeakKeyDictionary()  # the group of all ranks -> ranks of some groups -> their Saver


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or loaded here. The message says why, in one line, the same kind on every rank."""


class DamagedCheckpoint(CheckpointError):
    """It is incomplete, changed since it was written, or unreadable. An earlier checkpoint may be intact."""


class ForeignCheckpoint(CheckpointError):
    """It is intact, but from another model or optimizer, or another version of this program."""


class UnfitModel(CheckpointError, ValueError):
    """The model or its optimizer can't be saved in a checkpoint, or loaded from one."""


def rank_and_size(group) -> tuple[int, int]:
    """Return this process's rank and the number of ranks; without a process group a program is rank 0 of 1."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def all_gather(value, group) -> list:
    """Return the `value` of each rank, in rank order; an object that pickle can send. Collective."""
    if group is None and not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather(value, to_rank, group) -> list:
    """Return the `value` of each rank on one rank of the group; None: on all. Elsewhere an empty list. Collective."""
    if to_rank is None or rank_and_size(group)[1] == 1:
        return all_gather(value, group)
    values = [None] * dist.get_world_size(group) if dist.get_rank(group) == to_rank else None
    dist.gather_object(value, values, group=group, group_dst=to_rank)
    return values or []


def broadcast(value, source, group):
    """Return the `value` of rank `source` of the group, an object that pickle can send. Collective."""
    if group is None and not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


class Saving(Future):
    """The Future of an asynchronous save, which knows whether somebody has asked it how the save went."""

    was_asked = False

    def result(self, timeout=None):
        try:
            return super().result(timeout)
        finally:
            self.was_asked = self.done()

    def unread_error(self) -> str:
        """Wait for the save. Return the line of its error if nobody has asked for it, else an empty text."""
        error = self.exception()
        line = first_line(error) if error and not self.was_asked else ""
        self.was_asked = True
        return line


class Saver:
    """What the ranks that save and load together share.

    Attributes:
        group: their gloo group for files, which a thread may be using; None without process groups.
        state_group: another one, for states that go from rank to rank.
        thread: writes one asynchronous save after the other.
        last: the Saving of the last asynchronous save.
    """

    def __init__(self, group, state_group):
        self.group, self.state_group = group, state_group
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.last = Saving()
        self.last.set_result(None)

    def finish_last(self):
        """Wait for the last asynchronous save. Raise its error on every rank unless somebody asked for it. Collective.
        """
        for line in filter(None, all_gather(self.last.unread_error(), self.group)):
            raise CheckpointError(line)


def saver_of(group, meshes=()) -> Saver:
    """Return the Saver of the ranks of `group`, and of the device meshes that its ranks are in. Collective.

    The first message is in `group`: a rank that doesn't come is an error after the time-out of the user's own group.
    """
    if not dist.is_initialized():
        return SAVERS.setdefault(Saver, {}).setdefault((), Saver(None, None))
    if dist.get_rank(group) < 0:
        raise CheckpointError("this rank is in no process group since reshard(): the others save, and load")
    groups = dict.fromkeys([group or dist.group.WORLD, *(along for mesh in meshes for along in mesh.get_all_groups())])
    savers = SAVERS.setdefault(dist.group.WORLD, {})
    key = tuple(tuple(dist.get_process_group_ranks(along)) for along in groups)
    tokens = {dist.get_rank(): secrets.token_hex(8)}
    for along in list(groups)[: 1 if key in savers else None]:
        for tokens_of_rank in all_gather(tokens, along):
            tokens = tokens | tokens_of_rank
    if key not in savers:
        ranks, name = sorted(tokens), tokens[min(tokens)]
        savers[key] = Saver(new_group(ranks, f"{name} files"), new_group(ranks, f"{name} states"))
    return savers[key]


def new_group(ranks, name):
    """Return a gloo group of some `ranks`, which are those that call this, under a `name` that no group ever had.

    torch would name it after the number of groups that a rank is in. That may differ between the ranks; and where
    torchrun has started them again, its store still has the addresses of the dead group of that name.
    """
    with mock.patch.object(dist.distributed_c10d, "_hash_ranks_to_str", lambda _: name):
        return dist.new_group(ranks, timeout=TIMEOUT, backend="gloo", use_local_synchronization=True)


@contextlib.contextmanager
def errors_on_all(error_prefix, group, refined=lambda error: error):
    """Turn any error inside, on any rank, into a CheckpointError on all; one that is one keeps its class. Collective.

    An interrupt by Ctrl-C stays what it is on its rank. The message names the rank unless all have the same error.
    `refined(error)` may return an error of another class.
    """
    caught = report = None
    try:
        yield
    except BaseException as error:  # CheckpointException isn't an Exception
        caught = own_failure(error, group)
        if caught is not None:
            caught = refined(caught)
            report = type(caught) if isinstance(caught, CheckpointError) else CheckpointError, first_line(caught)
    reports = all_gather(report, group)
    if caught and not isinstance(caught, Exception):
        raise caught from None
    for rank, report in enumerate(reports):
        if report:
            kind, line = report
            raise kind(f"{error_prefix}: " + (f"rank {rank}: {line}" if len(set(reports)) > 1 else line)) from None


def own_failure(error, group):
    """Return the failure of this rank; None: torch.distributed.checkpoint reports those of other ranks alone."""
    if not isinstance(error, CheckpointException):
        return error
    rank, _ = rank_and_size(group)
    return error.failures[rank][0] if rank in error.failures else None


def first_line(error) -> str:
    """Return the first line of a message, safe for a terminal: names from a file may contain control characters."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = (text.strip().splitlines() or [type(error).__name__])[0]
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line[: 2 * LONGEST_LINE])
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} …"


@atexit.register
def print_unread_errors():
    """Print the errors of asynchronous saves that nobody has asked about."""
    for saver in [saver for savers in SAVERS.values() for saver in savers.values()]:
        if saver.last.done() and (line := saver.last.unread_error()):
            print(f"error: {line}", file=sys.stderr)
