"""Lets ranks find each other on a device and backend that work, leave together, and report a rank that is lost.

    rank         one of the processes that train together
    store        a small table of texts that one process keeps and all ranks read and write; so ranks find each other
    gloo, NCCL   torch's backends for CPUs, and for GPUs
    Collective   said of a function that every rank must call, because each rank waits there for the others
"""

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
import torch.distributed.nn.functional  # imported later, its default arguments would hold, and keep alive, a group

from guard.refuse import silence_torch
from harness.ranks import command_line


class Rank(NamedTuple):
    """Says which of the `world_size` ranks this process is, counted from 0, and where it trains.

    `backend` is "nccl" or "gloo". All tensors of this rank should be on `device`.
    """
    number: int
    world_size: int
    device: torch.device
    backend: str


# ------------------------------------------------------------------------------------------------------------- Meeting


def connect(timeout_s=120):
    """Join the process group of all ranks. torchrun's environment variables say where they meet. Returns a Rank.

    A program that was started without torchrun is the only rank. A collective raises an error if it waits longer than
    `timeout_s` seconds for another rank.
    """
    command_line.begin()  # Ctrl-C then ends the program with one word
    sys.excepthook = report_lost_rank  # Python calls it for an error that nothing has caught
    silence_torch()  # DistributedOptimizers silence torch's warnings, too; other optimizers don't
    if "RANK" not in os.environ:
        return join(0, 1, 0, 1, timeout_s, dist.HashStore())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # the parent is torchrun, which can't end its ranks if it is killed
    try:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    except ValueError as error:
        command_line.fail(Path(sys.argv[0]).name, f"{error}: see torchrun")
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    # When torchrun starts all ranks anew because a rank has failed, the store still has the addresses of the old ranks.
    # So the keys of each attempt begin with a prefix of its own.
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    me = join(rank, world_size, local_rank, local_world_size, timeout_s, store)
    # Set again, because init_process_group has replaced it by a hook of torch, which collects what this hook prints.
    sys.excepthook = report_lost_rank
    return me


def join(rank, world_size, local_rank, local_world_size, timeout_s, store):
    """Form a process group of all ranks that call this with the same `store`. Returns a Rank. Collective.

    The group uses the first of the possible backends and devices that works on every rank. `local_rank` is this rank's
    number among the `local_world_size` ranks of this host.
    """
    possible = choices(local_rank, local_world_size)
    for number, (backend, device) in enumerate(possible):
        is_last = number == len(possible) - 1
        # `choices` returns another choice after NCCL only where ranks share a GPU.
        shares_gpu = backend == "nccl" and not is_last
        if shares_gpu:
            # NCCL refuses two ranks on one GPU of one host. So each rank says that it is a host of its own, and NCCL
            # lets them talk through sockets.
            os.environ["NCCL_HOSTID"] = f"{platform.node()} rank {local_rank}"
        old_threads = own_threads()  # gloo hasn't started its threads yet
        substore = store if is_last else dist.PrefixStore(f"choice {number}", store)
        prepare(device)
        # With a device_id, torch lets NCCL connect at once. That may fail where ranks share a GPU, so there NCCL
        # connects later: in `can_communicate`, which catches the error.
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
    """Return [(backend, device), …], which `join` tries in this order. No other code chooses a backend or a device.

    - With a GPU for each rank of this host, each rank uses its GPU.
    - With fewer GPUs than ranks, ranks share a GPU if that works; otherwise they take the CPU. With SHARE_GPU=no in the
      environment they don't try.
    - Without GPUs all ranks are on the CPU.
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
    # With more than one thread each, ranks on the same machine would fight for its cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))


WORKS = "works"  # what a rank writes into the store if it can communicate; otherwise it writes an error


def can_communicate(me, store):
    """Try the collectives that the optimizers of this repository call. Return whether all of them work. Collective.

    All ranks return the same, because each writes its own result into `store` and reads what the others have written.
    """
    try:
        all_ones = torch.ones(me.world_size, device=me.device)
        n_ranks = torch.ones(1, device=me.device)
        dist.all_reduce(all_ones)
        dist.broadcast(all_ones, src=0)
        dist.all_gather_into_tensor(all_ones, n_ranks)  # n_ranks is still 1 on every rank, so all_ones is ones again
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
    # get() waits until the other rank has set its answer.
    return all(store.get(str(rank)).decode() == WORKS for rank in range(me.world_size))


def side_group(timeout_s):
    """Return a new gloo group of all ranks, for small messages. Collective.

    In the default group they would queue behind large messages, such as gradients.
    """
    old_threads = own_threads()
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    let_computing_go_first(own_threads() - old_threads)
    return group


@contextlib.contextmanager
def rank_0_of(d):
    """Within this context this process plays rank 0 of d ranks. The other ranks don't exist.

    The process group has torch's fake backend: a collective sends nothing and returns at once.
    """
    from torch.testing._internal.distributed import fake_pg as fake_pg  # this import registers the backend "fake"

    excepthook_before = sys.excepthook
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=d)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook_before  # init_process_group has replaced it by a hook that calls it


# --------------------------------------------------------------------------- A rank that has lost another rank says so


def report_lost_rank(kind, error, trace):
    """Print an error that nothing has caught. It is a sys.excepthook: the arguments are class, error and traceback.

    If a collective has failed because another rank is gone or late, print one line that names the lost rank, and end
    this process at once. Other errors are printed as usual.
    """
    first_line = (str(error).strip().splitlines() or [""])[0]
    is_lost_rank = isinstance(error, dist.DistError) or "gloo" in first_line  # gloo's errors name its source files
    if not is_lost_rank:
        return command_line.say_interrupted(kind, error, trace)
    sys.stdout.flush()
    missing = ", ".join(map(str, _missing_ranks()))
    lost = f"lost rank {missing}: {first_line}" if missing else f"lost another rank: {first_line}"
    print(f"{Path(sys.argv[0]).name}: error: rank {os.environ.get('RANK', 0)} {lost}", file=sys.stderr, flush=True)
    os._exit(1)  # sys.exit() would leave the process group first, and so wait for the other ranks


MISSING_S = 3  # how many seconds a rank that has lost another rank waits for the other ranks' reports


def _missing_ranks():
    """Return the numbers of the ranks that don't report a loss, because they are dead, stopped or busy.

    Returns [] if the store doesn't answer.
    """
    # _silent_ranks runs in a thread, because a store whose process is stopped never answers.
    silent = concurrent.futures.ThreadPoolExecutor(1).submit(_silent_ranks)
    try:
        return silent.result(MISSING_S + 2)  # 2 more seconds for the calls to the store
    except (concurrent.futures.TimeoutError, ValueError, RuntimeError):  # the ranks never met, or the store has gone
        return []


def _silent_ranks():
    """Report in the store that this rank has lost another rank. Return the ranks that don't report this themselves.

    At least one rank is lost. So if only one rank hasn't reported yet, that rank is returned without a further wait.
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


groups_until_exit = []  # `disconnect` puts process groups here, so that they stay alive until just before Python ends


def disconnect():
    """Leave the process group together with all other ranks. Collective.

    The barrier is needed because gloo aborts a rank if it ends while another rank still talks to it.
    """
    dist.barrier()
    # A group ends when the last reference to it is dropped. The thread that drops it waits for gloo's threads, which
    # may be waiting for the GIL, to release a tensor. Two things went wrong:
    # - A DDP model that outlived this call dropped the last reference while it held the GIL. On a busy machine 1 run of
    #   7 hung.
    # - While Python is ending, it kills threads that ask for the GIL. When gloo's threads were late, 1 run of 25
    #   aborted.
    # So references are kept here, and atexit drops the last one: before Python ends, and without the GIL.
    groups_until_exit.extend(dist.distributed_c10d._world.pg_map)  # private: a dict whose keys are all groups
    atexit.register(groups_until_exit.clear)
    dist.destroy_process_group()


def leave(code):
    """Leave the process group, if there is one, and end this process with the exit code. Never returns. Collective."""
    if dist.is_initialized():
        disconnect()
    sys.exit(code)


def is_rank_0():
    """Return whether this is rank 0, or a process without a process group."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_all_ranks(function, mistakes=ValueError):
    """Call function() on every rank, and return what it returns. Collective if there is a process group.

    If it raises one of the exceptions `mistakes` on any rank, rank 0 prints one line, and every rank ends with exit
    code 2. torchrun ends all ranks as soon as one has ended, so all ranks first learn of each other's errors.
    """
    result = None
    error = None
    try:
        result = function()
    except mistakes as mistake:
        error = str(mistake)
    errors = [error]  # of each rank; a process without a process group is the only rank
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


# -------------------------------------------------------------------------- Requests to Linux and to the C library


def end_with_parent():
    """Ask Linux to send this process a SIGTERM when the parent process dies.

    The parent is torchrun, which ends its ranks when it ends, but not when it is killed by SIGKILL.
    """
    PR_SET_PDEATHSIG = 1  # of the system call prctl
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # only Linux has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def keep_freed_memory():
    """Let glibc keep the memory of freed tensors for later tensors, as torch's allocator for CUDA does.

    By default glibc gives large blocks back to Linux. Linux hands them out again page by page, and zeroes each page.
    With the model "tiny" up to 35,000 page faults a step were counted, but not in every run of the same program.
    """
    M_TRIM_THRESHOLD = -1  # the number of free bytes at which glibc gives memory back to Linux
    M_MMAP_THRESHOLD = -3  # the size from which on a block comes from Linux, and is given back when it is freed
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not every C library has it
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**30)


def let_computing_go_first(threads):
    """Keep gloo's threads from interrupting a thread that computes. `threads`: ids of gloo's threads in this process.

    Linux prefers a thread that has just woken up, and gloo's threads wake up for each 64 kB that arrive, also in the
    middle of a matrix product. So they get a low priority: they run when no thread computes.

    With many more ranks than cores some rank always computes, and gloo's threads would never get a core. For such a
    machine GLOO_PRIORITY=normal in the environment turns this function off.
    """
    if os.environ.get("GLOO_PRIORITY") == "normal":
        return
    for thread in threads:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)
        except OSError:
            continue  # the thread has ended, or the system doesn't allow the change


def own_threads():
    """Return the set of ids of this process's threads. The set is empty on a system without /proc."""
    threads = Path("/proc/self/task")
    return {int(thread.name) for thread in threads.iterdir()} if threads.exists() else set()
