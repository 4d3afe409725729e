"""How ranks find each other, and leave together. `connect()` is for a process that torchrun started (train.py)."""

import atexit
import functools
import os
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: as a default of its functions that would never end

from harness.run import command_line, signals
from harness.run.devices import choices, prepare, works
from harness.run.lost_ranks import met, report_lost_rank
from harness.run.processor import let_computing_go_first, own_threads


class Rank(NamedTuple):
    """Who this process is. `backend` is "nccl" or "gloo"; every tensor of this rank belongs on `device`."""
    rank: int
    world_size: int
    device: torch.device
    backend: str


def connect(timeout_s=120):
    """Joins the process group that torchrun's environment describes -> Rank. Without that environment: one rank.

    A collective that waits longer than `timeout_s` seconds raises, instead of waiting for a rank that has died.
    """
    sys.excepthook = report_lost_rank
    if "RANK" not in os.environ:
        return join(0, 1, 0, 1, timeout_s, dist.HashStore())
    check_environment()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        signals.end_with_parent()  # torchrun, which may be killed and can't end its ranks then
    # When torchrun starts ranks anew, its store still has the addresses of those before: each attempt gets a corner.
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    me = join(rank, world_size, local_rank, local_world_size, timeout_s, store)
    sys.excepthook = report_lost_rank  # again: init_process_group wraps it, and collects what it prints
    met.append((store, rank, world_size))
    return me


def check_environment():
    """One line, and exit code 2, where a launcher has set what can't be."""
    fail = functools.partial(command_line.fail, Path(sys.argv[0]).name)
    lowest = {"WORLD_SIZE": 1, "RANK": 0, "MASTER_PORT": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0}
    for name in lowest:
        text = os.environ.get(name, str(lowest[name]) if name.startswith("LOCAL") else "")
        if not re.fullmatch("[0-9]{1,8}", text) or int(text) < lowest[name]:
            fail(f"{name}={text:.40} in the environment: it must be a number from {lowest[name]} on, see torchrun")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if size in os.environ and int(os.environ.get(rank, 0)) >= int(os.environ[size]):
            fail(f"{rank}={os.environ[rank]} in the environment: it must be below {size}={os.environ[size]}")


def join(rank, world_size, local_rank, local_world_size, timeout_s, store):
    """`store` is where ranks find each other. Of several choices it takes the first that works on every rank."""
    def join(backend, device, store, device_id=None):
        prepare(device)
        before = own_threads()
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), store=store, rank=rank,
                                world_size=world_size, device_id=device_id)
        if backend == "gloo":
            let_computing_go_first(own_threads() - before)

    *others, (backend, device) = choices(local_rank, local_world_size)
    for number, other in enumerate(others):
        corner = dist.PrefixStore(f"choice {number}", store)
        join(*other, corner)
        if works(other[1], dist.PrefixStore("works", corner)):
            return Rank(rank, world_size, other[1], other[0])
        dist.destroy_process_group()
    join(backend, device, store, device if backend == "nccl" else None)
    return Rank(rank, world_size, device, backend)


_beside = []  # the group of `beside`, once there is one
_left = []  # process groups until just before Python ends


def beside(timeout_s):
    """A gloo group of all ranks for small messages, which don't queue behind what the default group sends.

    The first call makes it, and is collective.
    """
    if not _beside:
        before = own_threads()
        _beside.append(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
        let_computing_go_first(own_threads() - before)
    return _beside[0]


def disconnect():
    """Leaves the process group together with all others: gloo aborts ranks that end while another talks to them."""
    dist.barrier()
    # Who takes the group down waits for gloo's threads, which may be waiting for the GIL to let go of a tensor. A DDP
    # model that outlives this call would hold the GIL: on a busy machine 1 run of 7 hung. And Python ends threads that
    # ask for it while it ends: 1 run of 25 aborted, with such threads delayed. So it is done in between, without it.
    _left.extend([dist.group.WORLD, *_beside])
    _beside.clear()
    atexit.register(_left.clear)
    dist.destroy_process_group()
