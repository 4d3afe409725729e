"""Ranks for a process that starts them itself, many times and quickly: tests, bench.py."""

import collections
import contextlib
import gc
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch.distributed as dist

from harness.meeting import disconnect, join


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
    `if __name__ == "__main__":`. Raises WorkerError when a rank fails.
    """

    def __init__(self, world_size, timeout_s=120):
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
        return self.run_job(job_of(function, *args, **kwargs), on_event)

    def run_job(self, job, on_event=None):
        """The same for what `job_of` has packed, here or in another process."""
        if not self.processes:
            self._start()
        try:
            self._send(job)
            return self._collect(on_event)
        except BaseException:  # a failed rank, a time-out, Ctrl-C: others may wait in a collective, for ever
            self.kill()
            raise

    def close(self):
        """Lets all ranks leave the process group together and end; kills those that have not ended after 10 seconds."""
        self._send(b"")
        deadline = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        self.kill()

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

    def _send(self, message):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a dead rank: whoever waits for its answer says how it died
                pipe.send_bytes(message)

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
            # The cause is a rank that died, if one did: the others then say no more than that they miss it. Of several
            # alike it is the lowest, not the one that was first to say so.
            told = [failures[rank] for rank in sorted(failures)]
            line = next((line for line, details in told if not details), told[0][0])
            raise WorkerError(line, "\n".join(details or line for line, details in told))
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

    def kill(self):
        """Ends all ranks at once. The next call starts new ones."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes, self.store = [], [], None


def job_of(function, *args, **kwargs):
    """-> bytes: a call, and where its function is found; a rank unpacks both."""
    return pickle.dumps((sys.path, pickle.dumps((function, args, kwargs))))


RENEWED_AFTER = 100  # calls: each process group that one leaves has threads, which look for messages


class Pools:
    """`Workers` by world size, each started when it is first asked for, and kept: the ranks of a whole test session.

        pools.run(2, function, 3)    # as Workers(2).run(function, 3)

    With `serve`, other processes ask for the same ranks through `PoolsElsewhere`: pytest-xdist's workers share them.
    A world size runs one call at a time.
    """

    def __init__(self, timeout_s=300):
        self.timeout_s, self.started, self.locks = timeout_s, {}, collections.defaultdict(threading.Lock)
        self.n_calls = collections.Counter()
        self.listener = None

    def run(self, world_size, function, *args, **kwargs):
        return self.run_job(world_size, job_of(function, *args, **kwargs))

    def run_job(self, world_size, job):
        with self.locks[world_size]:
            if world_size not in self.started:
                self.started[world_size] = Workers(world_size, self.timeout_s)
            self.n_calls[world_size] += 1
            if self.n_calls[world_size] % RENEWED_AFTER == 0:
                self.started[world_size].kill()
            return self.started[world_size].run_job(job)

    def close(self, but=()):
        """Ends the ranks of all world sizes but these."""
        for world_size in set(self.started) - set(but):
            self.started.pop(world_size).close()

    def serve(self):
        """-> the address for PoolsElsewhere. Answers from threads, as long as this process lives."""
        start_forkserver()  # in the main thread: it sets a signal for a moment
        self.listener = multiprocessing.connection.Listener(family="AF_UNIX")
        threading.Thread(target=self._accept, daemon=True).start()
        return self.listener.address

    def _accept(self):
        while True:
            threading.Thread(target=self._answer, args=(self.listener.accept(),), daemon=True).start()

    def _answer(self, connection):
        with contextlib.suppress(EOFError, OSError):  # whoever asked has ended
            while True:
                try:
                    answer = self.run_job(*connection.recv()), None
                except Exception as error:
                    answer = None, (str(error), getattr(error, "details", traceback.format_exc()))
                connection.send_bytes(pickle.dumps(answer))  # `send` would share the memory of tensors


class PoolsElsewhere:
    """The Pools of another process, which has called `serve`."""

    def __init__(self, address):
        self.connection = multiprocessing.connection.Client(address, family="AF_UNIX")

    def run(self, world_size, function, *args, **kwargs):
        self.connection.send((world_size, job_of(function, *args, **kwargs)))
        results, failure = pickle.loads(self.connection.recv_bytes())
        if failure:
            raise WorkerError(*failure)
        return results

    def close(self, but=()):
        self.connection.close()


def start_forkserver():
    """Starts, once, the process that imports torch and forks a worker on demand: a worker then costs milliseconds.

    It starts while Ctrl-C is ignored, and its children inherit that: Ctrl-C reaches the parent alone, which ends them.
    """
    # torch.optim imports torch._dynamo in the first step: 1.5 seconds, which would pass in every worker.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
    if threading.current_thread() is not threading.main_thread():  # `Pools.serve` has been here before
        return multiprocessing.forkserver.ensure_running()
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
    # What was imported before the fork is here for good: a collection that looks at it takes 0.15 s, and copies pages.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(pipe, jobs), daemon=True).start()
    me = None
    while job := jobs.get():
        try:
            if me is None:
                store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=timeout_s))
                me = join(rank, world_size, rank, world_size, timeout_s, store)
            sys.path[:], call = pickle.loads(job)
            function, args, kwargs = pickle.loads(call)
            answer = pickle.dumps(("result", function(me, *args, **kwargs)))
        except BaseException as error:  # whatever it is, SystemExit too: the parent reports it in one line
            line = f"rank {rank}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
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


def on_rank_0(workers, function, *args):
    return workers.run(function, *args)[0]
