"""Lets the ranks that save or load together communicate, so that an error on one rank becomes an error on all ranks.

A *Saver* belongs to a set of ranks that save one model together. It has process groups with torch's gloo backend for
these ranks alone. Their time-out is long, so that a slow disk doesn't end the training. The Saver also has the thread
that writes asynchronous saves. "DCP" is torch.distributed.checkpoint, which reads and writes the files.
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

TIMEOUT = timedelta(minutes=30)  # how long a rank waits for another rank that writes or reads
LONGEST_LINE = 500  # how many letters of an error's text are shown
# The default process group -> {(ranks of a group, ranks of another group, …): Saver}. saver_of() adds the Savers. A key
# of the inner dict has a tuple of ranks for each process group over which a model is spread. The outer key is weak, so
# after destroy_process_group() the Savers are gone, too.
SAVERS = weakref.WeakKeyDictionary()


class CheckpointError(RuntimeError):
    """A checkpoint can't be written or loaded here. The message says why, in one line.

    All ranks raise an error of the same class.
    """


class DamagedCheckpoint(CheckpointError):
    """The checkpoint is incomplete, has changed since it was written, or is unreadable. An earlier one may be intact.
    """


class ForeignCheckpoint(CheckpointError):
    """The checkpoint is intact, but it is from another model or optimizer, or from another version of this program."""


class UnfitModel(CheckpointError, ValueError):
    """The model or its optimizer can't be saved in a checkpoint, or loaded from one."""


def rank_and_size(group) -> tuple[int, int]:
    """Return (rank of this process, number of ranks) in `group`. A program without process groups is rank 0 of 1."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def all_gather(value, group) -> list:
    """Return a list of the `value` of each rank, in rank order. Collective. `value`: an object that can be pickled."""
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def errors_on_all(error_prefix, group, as_checkpoint_error=lambda error: error):
    """Turn an error in the `with` block, on any rank, into a CheckpointError on all ranks.

    Collective: when the block ends, the ranks send each other their errors. If the block itself has a collective, it
    must be the first line of the block, because a rank that has failed in an earlier line would never call it.

    The message names the rank that has failed, unless all ranks have the same error. An interrupt by Ctrl-C stays an
    interrupt on the rank that was interrupted.

    as_checkpoint_error: a function of this rank's error. If it returns an error of a subclass of CheckpointError, all
        ranks raise that class; otherwise they raise CheckpointError.
    """
    own_error = None
    own_report = None  # what this rank tells the others: (class of the error, first line of its text)
    try:
        yield
    except BaseException as error:  # DCP's CheckpointException is no subclass of Exception
        own_error = error_of_this_rank(error, group)
        if own_error is not None:
            own_error = as_checkpoint_error(own_error)
            kind = type(own_error) if isinstance(own_error, CheckpointError) else CheckpointError
            own_report = kind, first_line(own_error)
    reports = all_gather(own_report, group)
    if own_error and not isinstance(own_error, Exception):  # for example an interrupt by Ctrl-C
        raise own_error from None
    are_different = len(set(reports)) > 1
    for rank, report in enumerate(reports):
        if report:
            kind, line = report
            of_rank = f"rank {rank}: " if are_different else ""
            raise kind(f"{error_prefix}: {of_rank}{line}") from None


def error_of_this_rank(error, group):
    """Return this rank's error: `error`, or what DCP reports for this rank if `error` is its report about all ranks.

    Returns None if DCP reports errors of other ranks only.
    """
    if not isinstance(error, CheckpointException):
        return error
    rank, _ = rank_and_size(group)
    # `failures` is a dict: rank that has failed -> (error, traceback).
    own_error, _ = error.failures.get(rank, (None, None))
    return own_error


def first_line(error) -> str:
    """Return the first line of the text of `error`, or the name of its class if it has no text.

    Control characters are escaped, because they could change the terminal, and a text may have names from a file.
    """
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror  # without the number of the error and the name of the file
    lines = text.strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    # A huge text is cut before its letters are escaped. What is left is still longer than LONGEST_LINE.
    letters = line[: 2 * LONGEST_LINE]
    line = "".join(letter if letter.isprintable() else repr(letter).strip("'") for letter in letters)
    return line if len(line) <= LONGEST_LINE else f"{line[:LONGEST_LINE]} …"


class Saving(Future):
    """The Future of an asynchronous save. `save` returns it, and the Saver's thread calls `run`."""

    was_asked = False  # whether a program has called result() since the save ended, and so has heard of its error

    def result(self, timeout=None):
        """Wait for the save to end. Raise its error. A program calls this method."""
        try:
            return super().result(timeout)
        finally:
            self.was_asked = self.done()

    def run(self, function, *args):
        """Call `function`, and note what it returns or raises. Print an error at once: nobody may ask for it later."""
        try:
            self.set_result(function(*args))
        except BaseException as error:
            print(f"error: {first_line(error)}", file=sys.stderr)
            self.set_exception(error.with_traceback(None))  # a traceback would keep the tensors in memory


class Saver:
    """The process groups, the thread and the last save of ranks that save and load together.

    Attributes:
        group: a gloo group of these ranks. `save` and `load` send their messages in it, and so does the thread, which
            writes a save. None in a program without process groups.
        state_group: a second gloo group of the same ranks. They send each other parts of an optimizer's state in it,
            also while the thread uses `group`.
        thread: a thread that writes asynchronous saves, one after the other.
        last: the Saving of the last asynchronous save. At first it is a Saving that has ended without an error.
    """

    def __init__(self, group, state_group):
        self.group = group
        self.state_group = state_group
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.last = Saving()
        self.last.set_result(None)

    def finish_last(self):
        """Wait for the last asynchronous save to end. Raise its error on every rank. Collective.

        But an error that Saving.result() has already raised on its rank isn't raised again.
        """
        error = self.last.exception()
        own_line = first_line(error) if error and not self.last.was_asked else None
        self.last.was_asked = True
        for line in all_gather(own_line, self.group):
            if line:
                raise CheckpointError(line)

    def in_background(self, function, *args) -> Saving:
        """Let the thread call `function`. Return the Saving that will have the result or the error."""
        self.last = Saving()
        self.thread.submit(self.last.run, function, *args)
        return self.last


ALONE = Saver(None, None)  # the Saver of a program without process groups


def saver_of(process_group, meshes=()) -> Saver:
    """Return the Saver of all ranks that share a model. Collective.

    They are the ranks of `process_group`, and the ranks of `meshes`, the device meshes of DTensors. A rank belongs to
    one process group in each dimension of a mesh, and at first knows only the ranks of its own groups. The ranks gather
    what they know over one group after the other, until each rank knows all ranks.

    The first message is always sent in `process_group`, which the program has made: if a rank is missing, the other
    ranks get an error after the time-out of this group.
    """
    if not dist.is_initialized():
        return ALONE
    if dist.get_rank(process_group) < 0:  # checkpoint.reshard() has moved the state to other ranks
        raise CheckpointError("this rank is in no process group since reshard(): the others save, and load")
    groups_of_meshes = [group for mesh in meshes for group in mesh.get_all_groups()]
    groups = [*dict.fromkeys([process_group or dist.group.WORLD, *groups_of_meshes])]  # each group once
    ranks_of_groups = tuple(tuple(dist.get_process_group_ranks(group)) for group in groups)
    savers = SAVERS.setdefault(dist.group.WORLD, {})  # {ranks_of_groups: Saver}, see SAVERS
    is_known = ranks_of_groups in savers
    token_of_rank = {dist.get_rank(): secrets.token_hex(8)}  # rank that this rank knows -> random text of that rank
    # If the Saver is known, the message in the first group only serves to notice that a rank is missing, see above.
    groups_to_hear = groups[:1] if is_known else groups
    for group in groups_to_hear:
        for tokens in all_gather(token_of_rank, group):
            token_of_rank = token_of_rank | tokens
    if not is_known:
        ranks = sorted(token_of_rank)
        name = token_of_rank[ranks[0]]  # the lowest rank's text, so that all ranks make groups of the same name
        savers[ranks_of_groups] = Saver(gloo_group(ranks, f"{name} files"), gloo_group(ranks, f"{name} states"))
    return savers[ranks_of_groups]


def gloo_group(ranks, name):
    """Return a gloo group of `ranks` with the `name`, which no group ever had. All of these ranks call this function.

    torch's new_group() would name the group after the number of groups that this rank is in. This number may differ
    between the ranks. Also, if torchrun has started the ranks again, its store still has the addresses of the members
    of an earlier group with this name.
    """
    # dist.new_group() takes no name. With use_local_synchronization=True it calls torch's function _hash_ranks_to_str()
    # to make a name. So replace that function for a moment.
    with mock.patch.object(dist.distributed_c10d, "_hash_ranks_to_str", lambda _: name):
        return dist.new_group(ranks, timeout=TIMEOUT, backend="gloo", use_local_synchronization=True)
