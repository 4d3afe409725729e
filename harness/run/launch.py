"""Ranks: how they are started, how they find each other, and how they end. Nothing here waits without a limit.

Two ways in. `connect()` is for a process that torchrun started (train.py). `Workers` is for a process that wants to
start ranks itself, many times and quickly (tests, bench.py): it keeps a process a rank alive, and hands it functions.
"""

import atexit
import ctypes
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import platform
import queue
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # before there is a group: as a default of its functions that would never end

from harness.run import cli


class Rank(NamedTuple):
    """Who this process is. `backend` is "nccl" or "gloo"; every tensor of this rank belongs on `device`."""
    rank: int
    world_size: int
    device: torch.device
    backend: str


def choices(local_rank, local_world_size):
    """The one place where backend and device are chosen -> [(backend, device), …], to be tried in this order.

    One GPU a rank with NCCL, or everything on the CPU. With fewer GPUs than ranks, these share them if that works:
    NCCL refuses two ranks on one GPU of one host, but not if each says, by NCCL_HOSTID, that it is a host of its own;
    they then talk through sockets. gloo has collectives for CUDA tensors, in some releases all that are needed here.
    SHARE_GPU=no in the environment leaves the GPUs alone unless there is one for each rank.
    """
    n_gpus, cpu = torch.cuda.device_count() if torch.cuda.is_available() else 0, ("gloo", torch.device("cpu"))
    if n_gpus >= local_world_size and dist.is_nccl_available():
        return [("nccl", torch.device("cuda", local_rank))]
    if not n_gpus or os.environ.get("SHARE_GPU") == "no":
        return [cpu]
    os.environ["NCCL_HOSTID"] = f"{platform.node()} rank {local_rank}"
    shared = torch.device("cuda", local_rank % n_gpus)
    return [*[("nccl", shared)] * dist.is_nccl_available(), ("gloo", shared), cpu]


def prepare(device):
    """Settings of this process for tensors on `device`."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return
    keep_freed_memory()
    # More threads than one would make ranks on the same machine fight for its cores.
    n_threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]  # a list is of nested levels
    torch.set_num_threads(int(n_threads) if n_threads.isdecimal() and int(n_threads) else 1)


def works(device, store):
    """Whether what the stages call works on `device` in the default group, on every rank; they tell by `store`."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    try:
        ones, one = torch.ones(world_size, device=device), torch.ones(1, device=device)
        dist.all_reduce(ones)
        dist.broadcast(ones, src=0)
        dist.all_gather_into_tensor(ones, one)
        dist.reduce_scatter_tensor(one, ones)
        neighbours = [(dist.isend, ones, (rank + 1) % world_size), (dist.irecv, ones.clone(), (rank - 1) % world_size)]
        operations = [dist.P2POp(*neighbour) for neighbour in neighbours if world_size > 1]  # nobody sends to itself
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        answer = str(one.item())
    except RuntimeError as refusal:
        answer = str(refusal)
    store.set(str(rank), answer)
    return all(store.get(str(other)).decode() == str(float(world_size)) for other in range(world_size))


def keep_freed_memory():
    """Let glibc keep what is freed for the next tensor of that size, as torch's allocator for CUDA does.

    By default it gives large blocks back to Linux, which hands them out again page by page, each one zeroed: up to
    35,000 page faults a step were counted with the tiny model, and not in each run of the same program.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # not on every libc
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(M_MMAP_THRESHOLD, 2**30)


def let_computing_go_first(threads):
    """Let `threads`, ids of this process, wait where one that computes has the core, instead of interrupting it.

    Linux prefers who wakes up, and gloo's threads do at each 64 kB that arrive: in the midst of a matrix product. (Here
    those of the default group; a group that is made later has threads of its own.)
    """
    for thread in threads:
        try:
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + 10)
        except OSError:
            continue  # it has ended, or may not be told


def own_threads():
    """-> set of the ids of this process's threads; empty where there is no /proc."""
    tasks = Path("/proc/self/task")
    return {int(task.name) for task in tasks.iterdir()} if tasks.exists() else set()


def connect(timeout_s=120):
    """Joins the process group that torchrun's environment describes -> Rank. Without that environment: one rank.

    A collective that waits longer than `timeout_s` seconds raises, instead of waiting for a rank that has died.
    """
    sys.excepthook = _report_lost_rank
    if "RANK" not in os.environ:
        return _connect(0, 1, 0, 1, timeout_s, dist.HashStore())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        cli.end_with_parent()  # torchrun, which may be killed and can't end its ranks then
    # When torchrun starts ranks anew, its store still has the addresses of those before: each attempt gets a corner.
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    me = _connect(rank, world_size, local_rank, local_world_size, timeout_s, store)
    sys.excepthook = _report_lost_rank  # again: init_process_group wraps it, and collects what it prints
    _met.append((store, rank, world_size))
    return me


def _report_lost_rank(kind, error, trace):
    """Ends this rank when a collective has failed, because another rank is gone or came too late: one line, no wait."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    if not (isinstance(error, dist.DistError) or "gloo" in first_line):
        return cli.say_interrupted(kind, error, trace)
    sys.stdout.flush()
    missing = ", ".join(map(str, _missing_ranks()))
    lost = f"lost rank {missing}: {first_line}" if missing else f"lost another rank: {first_line}"
    print(f"{Path(sys.argv[0]).name}: error: rank {os.environ.get('RANK', 0)} {lost}", file=sys.stderr, flush=True)
    os._exit(1)  # without leaving the process group, which would wait for the others


_met = []  # where the ranks met: (store, rank, world_size)
MISSING_S = 3  # that ranks which have lost another one wait for each other's word


def _missing_ranks():
    """Each rank that has lost another one says so in the store -> those that don't: dead, stopped or still busy.

    Somebody is missing: whoever is the only one left is it at once. [] if the store doesn't answer.
    """
    missing = []

    def ask():
        store, rank, world_size = _met[-1]
        store.set(f"lost another: {rank}", "")
        others, deadline = [other for other in range(world_size) if other != rank], time.monotonic() + MISSING_S
        while len(others) > 1 and time.monotonic() < deadline:
            time.sleep(0.05)
            others = [other for other in others if not store.check([f"lost another: {other}"])]
        missing.extend(others)

    def try_to_ask():
        try:
            ask()
        except (LookupError, RuntimeError):  # it was never reached, or has gone
            return
    thread = threading.Thread(target=try_to_ask, daemon=True)  # a store whose process is stopped never answers
    thread.start()
    thread.join(MISSING_S + 2)
    return missing


def _connect(rank, world_size, local_rank, local_world_size, timeout_s, store):
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


class WorkerError(RuntimeError):
    """One line that names the rank: "rank 1: ValueError: …". `details` holds the tracebacks of those that failed."""

    def __init__(self, line, details=""):
        super().__init__(line)
        self.details = details


class Workers:
    """`world_size` processes on this machine, in one process group, started once, that run what they are given.

        with Workers(2) as workers:
            answers = workers.run(function, 3, name="x")    # [function(rank, 3, name="x") of rank 0, of rank 1]

    `function(rank: Rank, *args, **kwargs)` must be importable (defined at the top of a module), and its arguments and
    result must pickle. A run longer than `timeout_s` seconds fails. After a failure all processes have been ended,
    and the next `run` starts new ones. Use it from the main thread, from a script whose work stands below
    `if __name__ == "__main__":`. Raises ValueError for fewer than one rank, WorkerError when a rank fails.
    """

    def __init__(self, world_size, timeout_s=120):
        if world_size < 1:
            raise ValueError(f"the number of ranks is {world_size}: it must be at least 1")
        self.world_size, self.timeout_s = world_size, timeout_s
        self.processes, self.pipes = [], []
        self._start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def run(self, function, *args, on_event=None, **kwargs):
        """Runs `function(rank, *args, **kwargs)` on every rank -> list of results, by rank.

        `on_event(rank: int, obj)` is called here for each `event(obj)` that a rank sends meanwhile.
        """
        if not self.processes:
            self._start()
        try:
            job = pickle.dumps((sys.path, pickle.dumps((function, args, kwargs))))
            for pipe in self.pipes:
                self._send(pipe, job)
            return self._collect(on_event)
        except BaseException:  # a failed rank, a time-out, Ctrl-C: others may wait in a collective, for ever
            self._kill()
            raise

    def close(self):
        """Lets all ranks leave the process group together and end; kills those that have not ended after 10 seconds."""
        for pipe in self.pipes:
            self._send(pipe, b"")
        deadline = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        self._kill()

    def _start(self):
        start_forkserver()
        context = multiprocessing.get_context("forkserver")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any free one
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world_size, self.store.port, self.timeout_s, theirs)
            process = context.Process(target=_worker, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def _send(self, pipe, message):
        try:
            pipe.send_bytes(message)
        except OSError:
            return  # this rank is dead: whoever waits for its answer finds that out, and says how it died

    def _collect(self, on_event):
        """Waits for all answers -> list of results. After the first failure, others get a moment to tell the cause."""
        results, failures = {}, {}  # rank -> result; rank -> (line, traceback)
        deadline = time.monotonic() + self.timeout_s
        while len(results) + len(failures) < self.world_size:
            missing = [rank for rank in range(self.world_size) if rank not in results and rank not in failures]
            sources = {source: rank for rank in missing
                       for source in (self.pipes[rank], self.processes[rank].sentinel)}
            ready = {sources[source] for source in wait(sources, max(0, deadline - time.monotonic()))}
            if not ready:
                break
            for rank in sorted(ready):
                kind, value = self._receive(rank)
                if kind == "event" and on_event is not None:
                    on_event(rank, value)
                elif kind == "result":
                    results[rank] = value
                elif kind == "failure":
                    failures[rank] = value
            if failures:  # a rank that only lost its neighbour often reports before the death of that neighbour is seen
                deadline = min(deadline, time.monotonic() + 0.5)
        if failures:
            self._raise(failures)
        if len(results) < self.world_size:
            names = ", ".join(str(rank) for rank in missing)
            raise WorkerError(f"no answer from rank {names} after {self.timeout_s} seconds")
        return [results[rank] for rank in range(self.world_size)]

    def _receive(self, rank):
        """One message of a rank that has sent one, or has died -> (kind, value)."""
        try:
            if self.pipes[rank].poll():
                return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self.processes[rank].join(5)  # the pipe closes a moment before the exit code is known
        code = self.processes[rank].exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return "failure", (f"rank {rank} {how}", "")

    def _raise(self, failures):
        """The cause is a rank that died, if one did: what the others say then is only that they miss it."""
        deaths = [line for line, details in failures.values() if not details]
        lines = deaths or [line for line, _ in failures.values()]
        raise WorkerError(lines[0], "\n".join(details or line for line, details in failures.values()))

    def _kill(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes, self.store = [], [], None


def start_forkserver():
    """Starts, once, the process that imports torch and forks a worker on demand: a worker then costs milliseconds.

    It starts while Ctrl-C is ignored, and its children inherit that: Ctrl-C reaches the parent alone, which ends them.
    """
    # torch.optim imports torch._dynamo in the first step: 1.5 seconds, which would pass in every worker.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    multiprocessing.forkserver.ensure_running()
    signal.signal(signal.SIGINT, before)


_to_parent = None  # in a worker: its end of the pipe


def event(obj):
    """Sends a small object (progress) from a worker to the `on_event` of its run; elsewhere it does nothing."""
    if _to_parent is not None:
        _to_parent.send_bytes(pickle.dumps(("event", obj)))


def _worker(rank, world_size, port, timeout_s, pipe):
    """The life of one rank: connect, then functions until an empty message. An exception is sent, and not the end."""
    global _to_parent
    _to_parent = pipe
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(pipe, jobs), daemon=True).start()
    me = None
    while job := jobs.get():
        try:
            if me is None:
                store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
                me = _connect(rank, world_size, rank, world_size, timeout_s, store)
            sys.path[:], call = pickle.loads(job)
            function, args, kwargs = pickle.loads(call)
            answer = pickle.dumps(("result", function(me, *args, **kwargs)))
        except BaseException as error:  # whatever it is, SystemExit too: the parent reports it in one line
            message = str(error).strip().splitlines() or [""]
            line = f"rank {rank}: {type(error).__name__}: {message[0]}"
            answer = pickle.dumps(("failure", (line, f"rank {rank}: {traceback.format_exc()}")))
        pipe.send_bytes(answer)
    if me is not None:
        disconnect()


def _read_jobs(pipe, jobs):
    """Runs in a thread of each worker: hands on what the parent sends. No parent any more: the worker ends at once."""
    while True:
        try:
            jobs.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)
