"""Keeps the messages of several optimizers apart, and finishes the messages of an optimizer that a program drops.

Shown by tests/stages/test_models.py, and tests/stages/test_overlap.py, `test_gradients_keep_out_of_other_messages` and
`test_an_optimizer_that_is_dropped_waits_for_its_parameters`.
"""

import itertools
import sys
import warnings
import weakref
from typing import Any, NamedTuple

import torch.distributed as dist

# Process group -> counter. Each optimizer tags its messages with a number of its own: so large that no user has it.
TAGS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
UNDER_WAY: list = []  # Messages that were in flight when their optimizer was dropped


class Message(NamedTuple):
    """Keeps the tensors of gradients in flight alive."""
    works: list
    sent: Any
    received: Any


def next_tag(process_group):
    """Return a tag for the messages of one optimizer, the same on every rank."""
    return next(TAGS.setdefault(process_group or dist.group.WORLD, itertools.count(2**30)))


def forget_arrived():
    """Drop the messages of UNDER_WAY that have arrived."""
    UNDER_WAY[:] = [message for message in UNDER_WAY if not all(work.is_completed() for work in message.works)]


def keep_under_way(travelling, buckets):
    """Keep gradients that are in flight when an optimizer is dropped, and wait for its parameters.

    The wait is because a parameter in flight would keep the model alive until Python collects garbage.
    """
    if sys.is_finalizing():
        return
    UNDER_WAY.extend(Message(buffer.works, buffer.sent, buffer.received) for buffer in travelling)
    try:
        for bucket in buckets:
            bucket.finish_param_sync()
    except RuntimeError as failure:  # another rank has ended
        warnings.warn(f"an optimizer was dropped while its parameters were under way ({failure}): call "
                      "finish_param_sync() before, or load a checkpoint", stacklevel=2)
