"""Lets the ranks that save or load together communicate: an error on one rank becomes an error on all ranks.

These ranks have gloo groups of their own, whose time-out is long, so that a slow disk doesn't end training.
"""

import contextlib
import secrets
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

TIMEOUT = timedelta(minutes=30)  # a rank waits so long for another rank that writes or reads
LONGEST_LINE = 500  # letters of an error
SAVERS = weakref.WeakKeyDictionary()  # the default process group -> {ranks of process groups: the Saver of these ranks}


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or loaded here. The message says why, in one line. All ranks raise one class."""


class DamagedCheckpoint(CheckpointError):
    """The checkpoint is incomplete, changed since it was written, or unreadable. An earlier one may be intact."""


class ForeignCheckpoint(CheckpointError):
    """The checkpoint is intact, but from another model or optimizer, or another version of this program."""


class UnfitModel(CheckpointError, ValueError):
    """The model or its optimizer can't be saved in a checkpoint, or loaded from one."""


def rank_and_size(group) -> tuple[int, int]:
    """Return this process's rank and the number of ranks. A program without process groups is rank 0 of 1."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def all_gather(value, group) -> list:
    """Return the `value` of each rank, in rank order. `value`: an object that can be pickled. Collective."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def errors_on_all(error_prefix, group, as_checkpoint_error=lambda error: error):
    """Turn any error inside, on any rank, into a CheckpointError on all ranks. Collective, at the end of the block.

    A collective inside a block must be its first line, because a rank that has failed before it would be missing. The
    message names the rank, unless all ranks have the same error. An interrupt by Ctrl-C stays an interrupt on its rank.

    as_checkpoint_error: function error -> an error of a subclass of CheckpointError, or `error` itself. An error of any
        other class becomes a CheckpointError.
    """
    own_error = None
    own_report = None  # what the other ranks hear: (class of the error, first line of its text)
    try:
        yield
    except BaseException as error:  # DCP's CheckpointException isn't an Exception
        own_error = error_of_this_rank(error, group)
        if own_error is not None:
            own_error = as_checkpoint_error(own_error)
            kind = type(own_error) if isinstance(own_error, CheckpointError) else CheckpointError
            own_report = kind, first_line(own_error)
    reports = all_gather(own_report, group)
    if own_error and not isinstance(own_error, Exception):  # Ctrl-C, say
        raise own_error from None
    are_different = len(set(reports)) > 1
    for rank, report in enumerate(reports):
        if report:
            kind, line = report
            of_rank = f"rank {rank}: " if are_different else ""
            raise kind(f"{error_prefix}: {of_rank}{line}") from None


def error_of_this_rank(error, group):
    """Return the error of this rank, of which `error` may be DCP's report. None: only other ranks have failed."""
    if not isinstance(error, CheckpointException):
        return error
    rank, _ = rank_and_size(group)
    own_error, _ = error.failures.get(rank, (None, None))  # rank that has failed -> (error, where it was raised)
    return own_error


def first_line(error) -> str:
    """Return the first line of a message, safe for a terminal: names from a file may contain control characters."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror  # without the number and the file
    line, *_ = text.strip().splitlines() or [type(error).__name__]
    letters = line[: 2 * LONGEST_LINE]  # enough: LONGEST_LINE of them are shown
    line = "".join(letter if letter.isprintable() else repr(letter).strip("'") for letter in letters)
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} …"


class Saving(Future):
    """The Future of an asynchronous save."""

    was_asked = False  # whether a program has called result() since the save ended, and so has heard of its error

    def result(self, timeout=None):
        try:
            return super().result(timeout)
        finally:
            self.was_asked = self.done()

    def run(self, function, *args):
        try:
            self.set_result(function(*args))
        except BaseException as error:
            print(f"error: {first_line(error)}", file=sys.stderr)
            self.set_exception(error.with_traceback(None))  # a traceback would keep the tensors in memory


class Saver:
    """The process groups, the thread and the last save of ranks that save and load together.

    Attributes:
        group: gloo group of the ranks for files, which the thread may be using. None: a program without process groups.
        state_group: another gloo group of the ranks, for states that they send each other meanwhile.
        thread: writes one asynchronous save after the other.
        last: the Saving of the last asynchronous save.
    """

    def __init__(self, group, state_group):
        self.group = group
        self.state_group = state_group
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.last = Saving()
        self.last.set_result(None)

    def finish_last(self):
        """Wait for the last asynchronous save, and raise its error on every rank unless a program has. Collective."""
        error = self.last.exception()
        own_line = first_line(error) if error and not self.last.was_asked else None
        self.last.was_asked = True
        for line in all_gather(own_line, self.group):
            if line:
                raise CheckpointError(line)

    def in_background(self, function, *args) -> Saving:
        """Call `function` in the thread. Return the Saving that says how it went."""
        self.last = Saving()
        self.thread.submit(self.last.run, function, *args)
        return self.last


ALONE = Saver(None, None)  # of a program without process groups


def saver_of(process_group, meshes=()) -> Saver:
    """Return the Saver of all ranks of `process_group` and of `meshes`, the meshes of the parameters. Collective.

    Each rank knows only the ranks of its own process groups. Passing on what it hears, group after group, it gets to
    know all. The first message is in `process_group`, so that a missing rank is an error after the time-out of the
    user's group.
    """
    if not dist.is_initialized():
        return ALONE
    if dist.get_rank(process_group) < 0:
        raise CheckpointError("this rank is in no process group since reshard(): the others save, and load")
    groups_of_meshes = [group for mesh in meshes for group in mesh.get_all_groups()]
    groups = [*dict.fromkeys([process_group or dist.group.WORLD, *groups_of_meshes])]
    ranks_of_groups = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
    savers = SAVERS.setdefault(dist.group.WORLD, {})
    is_known = ranks_of_groups in savers
    token_of_rank = {dist.get_rank(): secrets.token_hex(8)}  # random texts of the ranks heard of
    groups_to_hear = groups[:1] if is_known else groups
    for group in groups_to_hear:
        for tokens in all_gather(token_of_rank, group):
            token_of_rank = token_of_rank | tokens
    if not is_known:
        ranks = sorted(token_of_rank)
        name = token_of_rank[ranks[0]]
        savers[ranks_of_groups] = Saver(new_group(ranks, f"{name} files"), new_group(ranks, f"{name} states"))
    return savers[ranks_of_groups]


def new_group(ranks, name):
    """Return a gloo group of `ranks`, all of which call this function, under a `name` that no group ever had.

    torch would name the group after the number of groups that a rank is in. This number may differ between the ranks.
    And if torchrun has started the ranks again, its store has the addresses of a dead group of the same name.
    """
    # new_group() takes no name. With use_local_synchronization=True it calls this function to make one.
    with mock.patch.object(dist.distributed_c10d, "_hash_ranks_to_str", lambda _: name):
        return dist.new_group(ranks, timeout=TIMEOUT, backend="gloo", use_local_synchronization=True)
