"""Communication between the ranks of a process group that ends in one error on all ranks, and not in a hang."""

import contextlib
import hashlib
import itertools
import threading
import time
import weakref
from unittest import mock

import torch.distributed as dist

from .errors import CheckpointError

BEAT_S = 1.0
LONGEST = 500  # letters of a line
SILENT_S = 30  # a working rank that is silent for this long is considered dead
MEETINGS = weakref.WeakKeyDictionary()  # process group -> how often its ranks have waited for each other
GROUPS = weakref.WeakKeyDictionary()  # the group of all ranks -> see `group_among`


def rank_and_size(group) -> tuple[int, int]:
    """Without a process group a program is rank 0 of 1."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def rank_in(group) -> tuple[int, int]:
    rank, world_size = rank_and_size(group)
    if rank < 0:
        raise CheckpointError("this rank is in no process group since reshard(): the others save, and load")
    return rank, world_size


def all_gather(what, group) -> list:
    """-> `what` of each rank, in rank order. Collective; an object that pickle can send."""
    everyone = [what]
    if dist.is_initialized():
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, what, group=group)
    return everyone


def group_among(ranks, **options):
    """-> a process group of some `ranks`, which are the ones that call this: the same again, as torch never frees it.
    torch would name it after the number of groups that a rank is in too, which may differ between ranks."""
    groups, key = GROUPS.setdefault(dist.group.WORLD, {}), (tuple(ranks), *options.values())
    if key not in groups:
        said = f"{__name__} {ranks} {sum(key[0] == its[0] for its in groups)}"  # a taken copy has names of its own
        name = hashlib.sha1(said.encode(), usedforsecurity=False).hexdigest()  # short: it is part of a store's keys
        with mock.patch.object(dist.distributed_c10d, "_hash_ranks_to_str", lambda _: name, create=True):
            groups[key] = dist.new_group(ranks, use_local_synchronization=True, **options)
    return groups[key]


@contextlib.contextmanager
def at_own_pace(what, group):
    """For work that takes some ranks longer, such as reading a large file. Ranks wait for each other after. Collective.
    No collective is waiting meanwhile, so none can time out: a rank that works writes to the group's store each second.
    Raises dist.DistError if it is silent for SILENT_S, or doesn't arrive within the timeout of a collective."""
    rank, world_size = rank_and_size(group)
    if world_size == 1:
        yield
        return
    group = group or dist.group.WORLD
    number = MEETINGS[group] = MEETINGS.get(group, 0) + 1
    store = dist.PrefixStore("checkpoint", dist.distributed_c10d._get_process_group_store(group))
    is_done = threading.Event()

    def say(word):
        with contextlib.suppress(dist.DistError):  # the launcher is gone: collectives can still tell who is there
            store.set(str(rank), f"{number} {word}")

    def beat():
        beats = itertools.count()
        while not is_done.wait(BEAT_S):
            say(f"works {next(beats)}")  # a new value is the sign of life

    say("works")
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()
        say("waits")
    timeout = group._get_backend(group._device_types[0]).options._timeout.total_seconds()
    late, pause = {str(rank): ("", time.monotonic()) for rank in range(world_size)}, 0.001
    while late:
        for rank, (heard, when) in list(late.items()):
            try:
                said = store.get(rank).decode() if store.check([rank]) else ""
            except dist.DistError:
                return
            is_at_work = said.startswith(f"{number} works")
            limit = min(timeout, SILENT_S) if is_at_work else timeout
            if said != heard:
                late[rank] = said, time.monotonic()
            elif time.monotonic() - when > limit:
                raise dist.DistError(f"{what}: rank {rank} is missing: nothing was heard of it for {limit:.0f} s")
            if said and int(said.split()[0]) >= number and not is_at_work:
                del late[rank]
        time.sleep(pause)
        pause = min(1.2 * pause, 0.1)  # a sixth of what has been waited


@contextlib.contextmanager
def errors_on_all(what, group, is_named=True):
    """Turn any error inside, on any rank, into a CheckpointError on all; one that is one keeps its class. Collective.
    Ctrl-C stays what it is on its rank. `is_named`: the message names the rank, unless all have the same error."""
    caught = mine = None
    with at_own_pace(what, group):
        try:
            yield
        except BaseException as error:  # whatever an optimizer says of its hyperparameters, say, or too little memory
            caught = error
            mine = type(error) if isinstance(error, CheckpointError) else CheckpointError, first_line(error)
    errors = all_gather(mine, group)
    if caught and not isinstance(caught, Exception):
        raise caught from None
    for rank, theirs in enumerate(errors):
        if theirs:
            kind, line = theirs
            raise kind(f"{what}: " + (f"rank {rank}: {line}" if is_named and len(set(errors)) > 1 else line))


def first_line(error) -> str:
    """-> the first line of a message, safe for a terminal: names from a file may contain control characters."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    line = (text.strip().splitlines() or [type(error).__name__])[0]
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line[: 2 * LONGEST])
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"
