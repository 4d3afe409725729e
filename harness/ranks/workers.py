"""Starts ranks quickly, lets them run functions, and collects the results. Tests use it, and programs that measure.

A rank is a process of a group of processes that train together. Here a rank is also called a worker, and the process
that has started it is its parent. Parent and worker talk through a pipe, by pickles. The forkserver is a process that
has loaded torch already, and from which a worker is forked within milliseconds.
"""

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
    """Says in one line which rank has failed and why: "rank 1: ValueError: …".

    `details` has the tracebacks of all ranks that failed.
    """

    def __init__(self, line, details=""):
        super().__init__(line)
        self.details = details


class Message(NamedTuple):
    """What a rank sends to its parent.

    `kind` says what `value` is:
    - "event": an object that the rank has passed to the function `event`;
    - "result": what the function that the rank has run returned;
    - "failure": a Failure.
    """
    kind: str
    value: object


class Failure(NamedTuple):
    """Why a rank has no result."""
    line: str  # that names the rank and the error
    traceback: str  # Python's; "" if the process has died, so that the parent only knows its exit code


class Workers(contextlib.AbstractContextManager):
    """Starts `world_size` processes on this machine once, in one process group, and runs functions on them.

        with Workers(2) as workers:
            answers = workers.run(function, 3, name="x")    # [function(rank, 3, name="x") of rank 0, of rank 1]

    `function` gets a Rank (harness/ranks/meeting.py) first. It must be defined at the top of a module, so that the
    processes can import it, and its arguments and its result must pickle. If a rank fails, `run` raises WorkerError.
    Then all processes have been ended, and the next `run` starts new ones.

    Use Workers from the main thread, and from a script whose work stands below `if __name__ == "__main__":`.

    Args:
        timeout_s: how many seconds a collective waits for another rank before it fails.
        limit_s: how many seconds a `run` may take before it fails; by default `timeout_s`.
        enter: enter(rank: int) is called in each process before the ranks meet. For example, it moves the process to
            the network of an emulated host.
    """

    def __init__(self, world_size, timeout_s=120, limit_s=None, enter=None):
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.limit_s = limit_s
        self.enter = enter
        self.processes = []  # of rank 0, of rank 1, …; empty after `kill`, until the next `run`
        self.pipes = []  # the parent's end of the pipe to rank 0, to rank 1, …
        self._start()

    def __exit__(self, *exception):  # at the end of a `with`, also after an error
        self.close()

    def run(self, function, *args, on_event=None, **kwargs):
        """Run `function(rank, *args, **kwargs)` on every rank. Returns the list of results, in the order of ranks.

        If the function calls `event(obj)` on a rank, then `on_event(rank: int, obj)` is called here, in the parent.
        """
        if not self.processes:
            self._start()
        try:
            # The job is a pickle in a pickle: a rank first sets sys.path, and can then import and unpack the function.
            self._send(pickle.dumps((sys.path, pickle.dumps((function, args, kwargs)))))
            return self._collect(on_event)
        except BaseException:  # a rank failed, or took too long, or Ctrl-C: other ranks may be waiting in a collective
            self.kill()
            raise

    def close(self):
        """Let all ranks leave the process group together, and end. Kill the ranks that still run after 10 seconds."""
        self._send(b"")  # an empty job tells a rank to end
        deadline = time.monotonic() + 10
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        self.kill()

    def kill(self):
        """End all ranks at once, without a goodbye. The next `run` starts new ranks."""
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
        """Start a process for each rank, and tell each where the ranks meet."""
        start_forkserver()
        context = multiprocessing.get_context("forkserver")
        self.folder = tempfile.TemporaryDirectory()  # for the store, if it is a file; `kill` removes the folder
        # Ranks meet in a store, a small table that all of them read and write: in a file, or at a port of the parent.
        if self.enter:
            place = str(Path(self.folder.name, "store"))  # emulated hosts share the parent's files, but not its network
        else:  # a port, because the file would grow with each message, until the disk is full
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
        """Send the same bytes to every rank."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # the rank is dead; `_receive`, which waits for its answer, says how
                pipe.send_bytes(message)

    def _collect(self, on_event):
        """Wait for the result of every rank, and return the list of results. Raises WorkerError if a rank fails.

        After the first failure the other ranks get half a second to fail, too, since one of them may know the cause.
        """
        results = {}  # rank -> what its function returned
        failures = {}  # rank -> Failure
        limit_s = self.limit_s or self.timeout_s
        deadline = time.monotonic() + limit_s
        missing = list(range(self.world_size))  # ranks of which neither a result nor a failure has come
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
            # When a rank dies, another rank often reports a lost rank before the death is seen here.
            if failures:
                deadline = min(deadline, time.monotonic() + 0.5)
            missing = [rank for rank in missing if rank not in results and rank not in failures]
        if failures:
            raise _error_of([failures[rank] for rank in sorted(failures)])
        if missing:
            raise WorkerError(f"no answer from rank {', '.join(map(str, missing))} after {limit_s} seconds")
        return [results[rank] for rank in range(self.world_size)]

    def _ranks_with_news(self, ranks, timeout_s):
        """Wait until at least one of `ranks` has sent a message or died. Return all ranks that have.

        Returns [] if none of them has after `timeout_s` seconds.
        """
        rank_of = {}  # pipe of a rank -> rank; a process's sentinel, which is ready when the process has ended -> rank
        for rank in ranks:
            rank_of[self.pipes[rank]] = rank
            rank_of[self.processes[rank].sentinel] = rank
        # multiprocessing's wait() returns the keys that are ready. Both keys of a rank may be ready.
        return sorted({rank_of[source] for source in wait(rank_of, timeout_s)})

    def _receive(self, rank):
        """Return the next Message of a rank that has sent a message. For a rank that has died, return a failure."""
        try:
            if self.pipes[rank].poll():
                return Message(*pickle.loads(self.pipes[rank].recv_bytes()))
        except (EOFError, OSError):
            self.processes[rank].join(5)  # the pipe closes a moment before the exit code is known
        code = self.processes[rank].exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        return Message("failure", Failure(f"rank {rank} {how}", ""))


def _error_of(failures):
    """Return the WorkerError for a list of Failures, which is in the order of ranks.

    If a rank has died, its line becomes the error's message, because the other ranks only say that they miss that rank.
    Otherwise the message is the line of the first rank that has failed.
    """
    dead = [failure for failure in failures if not failure.traceback]
    first = dead[0] if dead else failures[0]
    return WorkerError(first.line, "\n".join(failure.traceback or failure.line for failure in failures))


_to_parent = None  # in a worker, which sets it in _worker(): its end of the pipe. In any other process: None


def event(obj):
    """Send a small object, which tells of progress, from a worker to the `on_event` of its `run`.

    In a process that is no worker this does nothing.
    """
    if _to_parent is not None:
        _to_parent.send_bytes(pickle.dumps(("event", obj)))


def _worker(place, rank, world_size, timeout_s, pipe, enter):
    """Be a rank: this is the main function of a worker's process. Run functions until an empty job comes.

    The first job makes the ranks meet. An exception in a function is sent to the parent, and doesn't end the process.
    """
    global _to_parent
    _to_parent = pipe
    # Garbage collections then leave the forkserver's modules out. To look at them takes 0.15 s, and copies memory.
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets Ctrl-C, too, and ends the workers
    jobs = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(pipe, jobs), daemon=True).start()
    me = None  # a Rank, once this rank has met the others
    while job := jobs.get():
        try:
            if me is None:
                me = _meet(place, rank, world_size, timeout_s, enter)
            path, call = pickle.loads(job)
            sys.path[:] = path
            function, args, kwargs = pickle.loads(call)
            answer = pickle.dumps(("result", function(me, *args, **kwargs)))
        except BaseException as error:  # SystemExit too: the parent reports it in one line
            first_line, *_ = [*str(error).strip().splitlines(), ""]  # "" if the error has no message
            line = f"rank {rank}: {type(error).__name__}: {first_line}"
            answer = pickle.dumps(("failure", Failure(line, f"rank {rank}: {traceback.format_exc()}")))
        pipe.send_bytes(answer)
    if me is not None:
        disconnect()


def _meet(place, rank, world_size, timeout_s, enter):
    """Join the other workers in the store at `place`. Returns a Rank. Collective: every worker calls it.

    `place` is the path of a file if there is a function `enter`, and otherwise the number of a port of this machine.
    """
    if enter:
        enter(rank)
        store = dist.FileStore(place, world_size)
    else:
        store = dist.TCPStore("127.0.0.1", place, is_master=False, timeout=timedelta(seconds=timeout_s))
    return join(rank, world_size, rank, world_size, timeout_s, store)


def _read_jobs(pipe, jobs):
    """Put each job that the parent sends into the queue `jobs`. Each worker runs this in a thread of its own.

    When the parent has ended, however it ended, the pipe is closed, and this function ends the worker at once.
    """
    while True:
        try:
            jobs.put(pipe.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)


def on_rank_0(workers, function, *args):
    """Run a function on every rank of `workers`, a Workers, and return the result of rank 0."""
    return workers.run(function, *args)[0]
