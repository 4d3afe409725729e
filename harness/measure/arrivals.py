"""When messages arrive that tell nobody: a thread waits for them, in place of whoever started them."""

import queue
import threading
import time

import torch.distributed as dist


class Watcher:
    """A thread that waits for one Work after the other, in the order in which messages arrive."""

    def __init__(self):
        self.works = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def watch(self, work, entry):
        """-> a Work to wait for in place of `work`."""
        watched = WatchedWork(work, entry)
        self.works.put(watched)
        return watched

    def end(self):
        self.works.put(None)
        self.thread.join()

    def _run(self):
        while (watched := self.works.get()) is not None:
            watched.finish()


class WatchedWork(dist.Work):
    """A Work that somebody else waits for: gloo's own may be waited for only once."""

    def __init__(self, work, entry):
        super().__init__()
        self.work, self.entry = work, entry
        self.ended, self.error = threading.Event(), None

    def finish(self):
        try:
            self.work.wait()
        except RuntimeError as error:
            self.error = error
        self.work = None  # which holds what has arrived
        self.entry.completed_at = time.perf_counter()
        self.ended.set()

    def wait(self, timeout=None):
        self.ended.wait()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self):
        return self.ended.is_set()
