"""A torch that is newer than this code: one warning says that nobody has tried it.

Shown by tests/stages/test_tried.py.
"""

import functools
import os
import warnings

import torch

NEWEST = "2.14.1"  # all tests passed on it


@functools.cache
def warn_of_an_untried_torch(version=str(torch.__version__)):
    """Once in a process, and under torchrun on rank 0 only. Releases that mend this one count as tried."""
    minor, tried = (tuple(map(int, release.split(".")[:2])) for release in (version, NEWEST))
    if minor > tried and os.environ.get("RANK", "0") == "0":
        warnings.warn(f"torch {version} is newer than {NEWEST}, the newest that DistributedOptimizer was tried with",
                      stacklevel=2)
