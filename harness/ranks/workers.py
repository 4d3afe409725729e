"""Starts ranks from a process, many times and quickly: for tests, bench.py, two hosts."""

import contextlib
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from harness.ranks.forkserver import start_forkserver
from harness.ranks.meeting import disconnect, join


class WorkerError(RuntimeError):
    """One line that names the rank: "rank 1: ValueError: …". `details` has the tracebacks of all ranks that failed."""

    def __init__(self, line, details=""):
        super().__init__(line)
        self.details = details


class Message(NamedTuple):
    """What a rank sends to the process that has started it.

    `kind` says what `value` is. "event": what the rank has passed to `event()`. "result": what the function returned.
    "failure": a Failure.
    """
    kind: str
    value: object


class Failure(NamedTuple):
    """Why a rank has no result. `traceback` is Python's; "" if the process has died, and can't send a traceback."""
    line: str
    traceback: str


class Workers(contextlib.AbstractContextManager):
    """Starts `world_size` processes on this machine once, in one process group, and runs functions on them.

        with Workers(2) as workers:
            answers = workers.run(function, 3, name="x")    # [function(rank, 3, name="x") of rank 0, of rank 1]

    `function(rank: Rank, *args, **kwargs)` must be importable (defined at the top of a module), and its arguments and
    result must pickle. A collective that waits longer than `timeout_s` seconds fails, and so does a run of `limit_s`
    (default: the same). After a failure all processes have been ended, and the next `run` starts new ones.
    `enter(rank: int)` is called in each process before the ranks meet. Use Workers from the main thread, from a script
    whose work stands below `if __name__ == "__main__":`. Raises WorkerError when a rank fails.
    """

    def __init__(self, world_size, timeout_s=120, limit_s=None, enter=None):
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.limit_s = limit_s
        self.enter = enter
        self.processes = []  # by rank
        self.pipes = []  # this process's ends, by rank
        self._start()

    def __exit__(self, *exception):
        self.close()

    def run(self, function, *args, on_event=None, **kwargs):
        """Run `function(rank, *args, **kwargs)` on every rank. Returns the list of results, by rank.

        `on_event(rank: int, obj)` is called in this process for each `event(obj)` that a rank sends meanwhile.
        """
        if not self.processes:
            self._start()
        try:  # sys.path goes first: a rank needs it to unpack the function
            self._send(pickle.dumps((sys.path, pickle.dumps((function, args, kwargs)))))
            return self._collect(on_event)
        except BaseException:  # a failed rank, a time-out, Ctrl-C: others may wait in a collective, for ever
            self.kill()
            raise

    def close(self):
        """Let all ranks leave the process group together and end; kill those that have not ended after 10 seconds."""
        self._send(b"")
        deadline = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        self.kill()

    def kill(self):
        """End all ranks at once. The next call starts new ones."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        self.processes = []
        self.pipes = []
        self.store = None
        self.folder.cleanup()

    def _start(self):
        start_forkserver()
        context = multiprocessing.get_context("forkserver")
        self.folder = tempfile.TemporaryDirectory()
        if self.enter:
            place = str(Path(self.folder.name, "store"))  # where they meet: hosts that share no network share files
        else:  # a file would grow with every message, until a disk is full
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any free one
            place = self.store.port
        for rank in range(self.world_size):
            pipe, pipe_of_rank = context.Pipe()
            process = context.Process(target=_worker, name=f"rank {rank}", daemon=True, args=(
                place, rank, self.world_size, self.timeout_s, pipe_of_rank, self.enter))
            process.start()
            pipe_of_rank.close()
            self.processes.append(process)
            self.pipes.append(pipe)

    def _send(self, message):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a dead rank: whoever waits for its answer says how it died
                pipe.send_bytes(message)

    def _collect(self, on_event):
        """Wait for all answers and return them. After a failure, other ranks have a moment to report the cause."""
        results = {}  # by rank
        failures = {}  # Failures, by rank
        limit_s = self.limit_s or self.timeout_s
        deadline = time.monotonic() + limit_s
        missing = list(range(self.world_size))
        while missing:
            ready = self._ranks_with_news(missing, max(0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in ready:
                kind, value = self._receive(rank)
                if kind == "result":
                    results[rank] = value
                elif kind == "failure":
                    failures[rank] = value
                elif on_event is not None:
                    on_event(rank, value)
            if failures:  # a rank that only lost its neighbour often reports before the death of that neighbour is seen
                deadline = min(deadline, time.monotonic() + 0.5)
            missing = [rank for rank in missing if rank not in results and rank not in failures]
        if failures:
            raise _error_of([failures[rank] for rank in sorted(failures)])
        if missing:
            raise WorkerError(f"no answer from rank {', '.join(map(str, missing))} after {limit_s} seconds")
        return [results[rank] for rank in range(self.world_size)]

    def _ranks_with_news(self, ranks, timeout_s):
        """Wait until some of `ranks` have sent a message or died. Returns these; none after `timeout_s`."""
        rank_of = {}  # pipe, or what becomes ready when the process ends -> rank
        for rank in ranks:
            rank_of[self.pipes[rank]] = rank
            rank_of[self.processes[rank].sentinel] = rank
        return sorted({rank_of[source] for source in wait(rank_of, timeout_s)})

    def _receive(self, rank):
        """Return one Message of a rank that has sent a message, or has died."""
        try:
            if self.pipes[rank].poll():
                return Message(*pickle.loads(self.pipes[rank].recv_bytes()))
        except (EOFError, OSError):
            self.processes[rank].join(5)  # the pipe closes a moment before the exit code is known
        code = self.processes[rank].exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return Message("failure", Failure(f"rank {rank} {how}", ""))


def _error_of(failures):
    """Make a WorkerError of Failures, which are in order of ranks.

    Its line is that of the first rank that has died, if there is one: other ranks only report that they miss it.
    """
    dead = [failure for failure in failures if not failure.traceback]
    first = dead[0] if dead else failures[0]
    return WorkerError(first.line, "\n".join(failure.traceback or failure.line for failure in failures))


_to_parent = None  # in a worker: its end of the pipe


def event(obj):
    """Send a small object (progress) from a worker to the `on_event` of its run; elsewhere do nothing."""
    if _to_parent is not None:
        _to_parent.send_bytes(pickle.dumps(("event", obj)))


def _worker(place, rank, world_size, timeout_s, pipe, enter):
    """Be one rank: connect, then run functions until an empty message. An exception is sent, and doesn't end it."""
    global _to_parent
    _to_parent = pipe
    # What was imported before the fork stays: a garbage collection that looks at it takes 0.15 s, and copies pages.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(pipe, jobs), daemon=True).start()
    me = None
    while job := jobs.get():
        try:
            if me is None:
                me = _meet(place, rank, world_size, timeout_s, enter)
            path, call = pickle.loads(job)
            sys.path[:] = path
            function, args, kwargs = pickle.loads(call)
            answer = pickle.dumps(("result", function(me, *args, **kwargs)))
        except BaseException as error:  # SystemExit too: the parent reports it in one line
            first_line, *_ = [*str(error).strip().splitlines(), ""]
            line = f"rank {rank}: {type(error).__name__}: {first_line}"
            answer = pickle.dumps(("failure", Failure(line, f"rank {rank}: {traceback.format_exc()}")))
        pipe.send_bytes(answer)
    if me is not None:
        disconnect()


def _meet(place, rank, world_size, timeout_s, enter):
    """Join the other workers at `place`, a file if there is `enter`, or else a port. Returns a Rank."""
    if enter:
        enter(rank)
        store = dist.FileStore(place, world_size)
    else:
        store = dist.TCPStore("127.0.0.1", place, is_master=False, timeout=timedelta(seconds=timeout_s))
    return join(rank, world_size, rank, world_size, timeout_s, store)


def _read_jobs(pipe, jobs):
    """Hand on what the parent sends, in a thread of each worker. Without a parent, end the worker at once."""
    while True:
        try:
            jobs.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def on_rank_0(workers, function, *args):
    """Run a function on every rank and return the result of rank 0."""
    return workers.run(function, *args)[0]
