"""One process plays rank 0 of d: torch's fake process group sends nothing."""

import contextlib
import sys

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg as fake_pg  # makes the backend "fake" known


@contextlib.contextmanager
def rank_0_of(d):
    """While it is entered this process plays rank 0 of d: torch's fake process group sends nothing."""
    hook = sys.excepthook
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=d)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # which init_process_group wraps, each time once more
