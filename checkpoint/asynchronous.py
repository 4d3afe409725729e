"""Saves while training goes on: the thread that writes, its process group, and failures that nobody has read."""

import atexit
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import torch.distributed as dist

from .errors import CheckpointError
from .optimizers import all_params
from .ranks import all_gather, at_own_pace, first_line

WRITERS = weakref.WeakKeyDictionary()  # the group of all ranks, or optimizer if there is none -> see `writer_of`
UNTOLD = {}  # path of an asynchronous save that failed -> why; until somebody has got the error


class Saving(Future):
    """The Future of an asynchronous save."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def result(self, timeout=None):
        try:
            return super().result(timeout)
        finally:
            if self.done():
                UNTOLD.pop(self.path, None)


def write_behind(saving, write, *args):
    try:
        write(*args)
    except BaseException as error:
        UNTOLD[saving.path] = first_line(error)
        saving.set_exception(error)
    else:
        saving.set_result(None)


def tell_failures(what, group):
    """Raise, on every rank, failures of earlier saves whose futures nobody has asked. Collective."""
    with at_own_pace(what, group):
        lines = [UNTOLD.pop(path) for path in list(UNTOLD)]
    for line in filter(None, all_gather("; ".join(lines), group)):
        raise CheckpointError(line)


@atexit.register
def tell_at_the_end():
    for line in UNTOLD.values():
        print(f"error: {line}", file=sys.stderr)


def writer_of(optimizer, group):
    """-> a thread that writes one checkpoint after the other; its own process group, so that messages can't mix.

    A later process group of the same ranks, as after reshard(), gets the same, because torch never frees a group.
    """
    device, own_group, ranks, timeout = all_params(optimizer)[0].device, None, (), None
    if dist.is_initialized():
        training = group or dist.group.WORLD
        ranks, timeout = dist.get_process_group_ranks(training), training._get_backend(device).options._timeout
    writers = WRITERS.setdefault(dist.group.WORLD if dist.is_initialized() else optimizer, {})
    key = tuple(ranks), timeout
    if key not in writers:
        if dist.is_initialized():  # gloo, since everything is on the CPU
            is_everyone = len(ranks) == dist.get_world_size()  # if not, the others don't call this
            n_groups = all_gather(len(dist.distributed_c10d._world.pg_names), group)  # torch names it by that
            if not is_everyone and len(set(n_groups)) > 1:
                raise CheckpointError(f"the ranks are in {n_groups} process groups: save without asynchronous here")
            own_group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=not is_everyone)
        writers[key] = ThreadPoolExecutor(1), own_group
    return writers[key]
