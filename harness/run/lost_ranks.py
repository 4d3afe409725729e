"""A rank that loses another one says which, in one line, and ends: nothing waits without a limit."""

import os
import sys
import threading
import time
from pathlib import Path

import torch.distributed as dist

from harness.run import signals


def report_lost_rank(kind, error, trace):
    """Ends this rank when a collective has failed, because another rank is gone or came too late: one line, no wait."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    if not (isinstance(error, dist.DistError) or "gloo" in first_line):
        return signals.say_interrupted(kind, error, trace)
    sys.stdout.flush()
    missing = ", ".join(map(str, _missing_ranks()))
    lost = f"lost rank {missing}: {first_line}" if missing else f"lost another rank: {first_line}"
    print(f"{Path(sys.argv[0]).name}: error: rank {os.environ.get('RANK', 0)} {lost}", file=sys.stderr, flush=True)
    os._exit(1)  # without leaving the process group, which would wait for the others


met = []  # where the ranks met: (store, rank, world_size)
MISSING_S = 3  # that ranks which have lost another one wait for each other's word


def _missing_ranks():
    """Each rank that has lost another one says so in the store -> those that don't: dead, stopped or still busy.

    Somebody is missing: whoever is the only one left is it at once. [] if the store doesn't answer.
    """
    missing = []

    def ask():
        store, rank, world_size = met[-1]
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
