"""Lets ranks find each other, on a device and backend that work, leave together, and report a lost rank."""

import atexit
import concurrent.futures
import contextlib
import ctypes
import os
import platform
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group, or its default arguments would keep the group alive

from guard.refuse import silence_torch
from harness.ranks import command_line


class Rank(NamedTuple):
    """Names this process among all. `backend` is "nccl" or "gloo"; every tensor of this rank belongs on `device`."""
    number: int
    world_size: int
    device: torch.device
    backend: str


# ------------------------------------------------------------------------------------------------------------- Meeting


def connect(timeout_s=120):
    """Join the process group that torchrun's environment describes. Returns a Rank; without torchrun there is one rank.

    A collective that waits longer than `timeout_s` seconds raises, instead of waiting for a rank that has died.
    """
    command_line.begin()
    sys.excepthook = report_lost_rank
    silence_torch()  # a stage's guard silences torch's warnings, too, but a bare core doesn't
    if "RANK" not in os.environ:
        return join(0, 1, 0, 1, timeout_s, dist.HashStore())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # torchrun, which may be killed and can't end its ranks then
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except ValueError as error:
        command_line.fail(Path(sys.argv[0]).name, f"{error}: see torchrun")
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    # When torchrun starts ranks anew, its store still has the addresses of the ranks before: each attempt has a prefix.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    me = join(rank, world_size, local_rank, local_world_size, timeout_s, store)
    sys.excepthook = report_lost_rank  # again: init_process_group wraps it, and collects what it prints
    return me


def join(rank, world_size, local_rank, local_world_size, timeout_s, store):
    """Join the ranks that meet in `store`, by the first backend and device that work on every rank. Returns a Rank.

    `local_rank` numbers the ranks of this host, which has `local_world_size`.
    """
    possible = choices(local_rank, local_world_size)
    for number, (backend, device) in enumerate(possible):
        is_last = number == len(possible) - 1
        shares_gpu = backend == "nccl" and not is_last
        if shares_gpu:
            # NCCL refuses two ranks on one GPU of one host. So each says that it is a host of its own, and they talk
            # through sockets.
            os.environ["NCCL_HOSTID"] = f"{platform.node()} rank {local_rank}"
        old_threads = own_threads()
        substore = store if is_last else dist.PrefixStore(f"choice {number}", store)
        prepare(device)
        own_gpu = device if backend == "nccl" and not shares_gpu else None
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), store=substore, rank=rank,
                                world_size=world_size, device_id=own_gpu)
        if backend == "gloo":
            let_computing_go_first(own_threads() - old_threads)
        me = Rank(rank, world_size, device, backend)
        if is_last or can_communicate(me, dist.PrefixStore("works", substore)):
            return me
        dist.destroy_process_group()


def choices(local_rank, local_world_size):
    """Return [(backend, device), …], to be tried in this order. Backend and device are chosen nowhere else.

    A rank has one GPU, with NCCL, or everything is on the CPU. With fewer GPUs than ranks, ranks share GPUs if that
    works. SHARE_GPU=no in the environment leaves the GPUs alone unless there is a GPU for each rank.
    """
    has_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    n_gpus = torch.cuda.device_count() if has_gpus else 0
    on_cpu = ("gloo", torch.device("cpu"))
    if n_gpus == 0:
        return [on_cpu]
    if n_gpus >= local_world_size:
        return [("nccl", torch.device("cuda", local_rank))]
    if os.environ.get("SHARE_GPU") == "no":
        return [on_cpu]
    return [("nccl", torch.device("cuda", local_rank % n_gpus)), on_cpu]


def prepare(device):
    """Set this process up for tensors on `device`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return
    keep_freed_memory()
    # More threads than one would make ranks on the same machine fight for its cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))


WORKS = "works"  # what a rank writes into the store when it can communicate; otherwise it writes the error


def can_communicate(me, store):
    """Return whether what the stages call works on every rank's device in the default group. Ranks agree by `store`."""
    try:
        all_ones = torch.ones(me.world_size, device=me.device)
        n_ranks = torch.ones(1, device=me.device)
        dist.all_reduce(all_ones)
        dist.broadcast(all_ones, src=0)
        dist.all_gather_into_tensor(all_ones, n_ranks)
        dist.reduce_scatter_tensor(n_ranks, all_ones)
        if me.world_size > 1:  # no rank sends to itself
            next_rank = (me.number + 1) % me.world_size
            previous_rank = (me.number - 1) % me.world_size
            works = dist.batch_isend_irecv([dist.P2POp(dist.isend, all_ones, next_rank),
                                            dist.P2POp(dist.irecv, all_ones.clone(), previous_rank)])
            for work in works:
                work.wait()
        answer = WORKS if n_ranks.item() == me.world_size else f"a sum of ones is {n_ranks.item()}"
    except RuntimeError as refusal:
        answer = str(refusal)
    store.set(str(me.number), answer)
    return all(store.get(str(rank)).decode() == WORKS for rank in range(me.world_size))


def side_group(timeout_s):
    """Make a gloo group of all ranks for small messages, which don't queue behind what the default group sends."""
    old_threads = own_threads()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    let_computing_go_first(own_threads() - old_threads)
    return group


@contextlib.contextmanager
def rank_0_of(d):
    """Let this process play rank 0 of d while entered: torch's fake process group sends nothing."""
    from torch.testing._internal.distributed import fake_pg as fake_pg  # makes the backend "fake" known

    excepthook_before = sys.excepthook
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=d)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook_before  # init_process_group wraps it, each time once more


# ------------------------- A rank that loses another rank names it in one line, and ends: nothing waits without a limit


def report_lost_rank(kind, error, trace):
    """End this rank when a collective has failed because another rank is gone or late: one line, and no wait."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    is_lost_rank = isinstance(error, dist.DistError) or "gloo" in first_line  # gloo's errors name its source files
    if not is_lost_rank:
        return command_line.say_interrupted(kind, error, trace)
    sys.stdout.flush()
    missing = ", ".join(map(str, _missing_ranks()))
    lost = f"lost rank {missing}: {first_line}" if missing else f"lost another rank: {first_line}"
    print(f"{Path(sys.argv[0]).name}: error: rank {os.environ.get('RANK', 0)} {lost}", file=sys.stderr, flush=True)
    os._exit(1)  # without leaving the process group, which would wait for the others


MISSING_S = 3  # so long a rank that has lost another rank waits for the other ranks to report the same


def _missing_ranks():
    """Return the ranks that don't report in the store: dead, stopped or busy. [] if the store doesn't answer."""
    # In a thread, because a store whose process is stopped never answers.
    silent = concurrent.futures.ThreadPoolExecutor(1).submit(_silent_ranks)
    try:
        return silent.result(MISSING_S + 2)  # time for the calls to the store, too
    except (concurrent.futures.TimeoutError, ValueError, RuntimeError):  # the ranks never met, or the store has gone
        return []


def _silent_ranks():
    """Report in the store that this rank has lost another rank, and return the ranks that don't report.

    At least one rank is missing. So as soon as all other ranks but one have reported, that one is returned.
    """
    store = dist.distributed_c10d._get_default_store()
    store.set(f"lost another: {dist.get_rank()}", "")
    silent = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    deadline = time.monotonic() + MISSING_S
    while len(silent) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
        silent = [rank for rank in silent if not store.check([f"lost another: {rank}"])]
    return silent


# ------------------------------------------------------------------------------------------------------------- Leaving


groups_until_exit = []  # references that keep process groups alive until just before Python ends


def disconnect():
    """Leave the process group together with all ranks: gloo aborts a rank that ends while another talks to it."""
    dist.barrier()
    # Whoever drops the last reference to a group waits for gloo's threads, and such a thread may wait for the GIL, to
    # release a tensor. A DDP model that outlives this call would drop the reference while it holds the GIL: on a busy
    # machine 1 run of 7 hung. And Python, once it is ending, kills threads that ask for the GIL: 1 run of 25 aborted,
    # with such threads delayed. So atexit drops the last reference, before Python ends, and without the GIL.
    groups_until_exit.extend(dist.distributed_c10d._world.pg_map)
    atexit.register(groups_until_exit.clear)
    dist.destroy_process_group()


def leave(code):
    """End this rank with an exit code, after it has left the process group if there is one."""
    if dist.is_initialized():
        disconnect()
    sys.exit(code)


def is_rank_0():
    return not dist.is_initialized() or dist.get_rank() == 0


def on_all_ranks(function, mistakes=ValueError):
    """Return function(). If it raises one of `mistakes` on any rank: one line from rank 0, and every rank exits with 2.

    The ranks agree first, because torchrun ends all of them as soon as one has ended: rank 0 must have printed by then.
    """
    result = None
    error = None
    try:
        result = function()
    except mistakes as mistake:
        error = str(mistake)
    errors = [error]  # by rank
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    failed_ranks = [rank for rank, error in enumerate(errors) if error is not None]
    if not failed_ranks:
        return result
    if is_rank_0():
        first = failed_ranks[0]
        where = "" if len(failed_ranks) == len(errors) else f"rank {first}: "
        print(f"{Path(sys.argv[0]).name}: error: {where}{errors[first]}", file=sys.stderr, flush=True)
    leave(2)


# ------------------------------------------------------------------------------------ What a process asks of the system


def end_with_parent():
    """Ask Linux, in a child, for a SIGTERM when the parent dies, even of SIGKILL. torchrun then ends its ranks."""
    PR_SET_PDEATHSIG = 1
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def keep_freed_memory():
    """Let glibc keep what is freed for the next tensor of that size, as torch's allocator for CUDA does.

    By default glibc gives large blocks back to Linux, which hands them out again page by page, each page zeroed: up to
    35,000 page faults a step were counted with the tiny model, and not in each run of the same program.
    """
    M_TRIM_THRESHOLD = -1
    M_MMAP_THRESHOLD = -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not on every libc
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**30)


def let_computing_go_first(threads):
    """Let gloo's `threads`, ids of this process, wait while a computing thread has the core, and not interrupt it.

    Linux prefers a thread that wakes up, and gloo's threads wake up at each 64 kB that arrive, amid a matrix product.
    GLOO_PRIORITY=normal in the environment leaves the threads as they are, for a machine with many more ranks than
    cores. There gloo's threads would get no core while any rank computes, and other ranks wait for what they send.
    """
    if os.environ.get("GLOO_PRIORITY") == "normal":
        return
    for thread in threads:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)
        except OSError:
            continue  # it has ended, or this isn't allowed


def own_threads():
    """Return the set of ids of this process's threads; empty where there is no /proc."""
    threads = Path("/proc/self/task")
    return {int(thread.name) for thread in threads.iterdir()} if threads.exists() else set()
