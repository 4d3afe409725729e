"""Keeps messages of several optimizers apart, and finishes those of one that is dropped in the middle of a step.

Shown by tests/stages/test_models.py, and tests/stages/test_overlap.py, `test_gradients_keep_out_of_other_messages` and
`test_an_optimizer_that_is_dropped_waits_for_its_parameters`.
"""

import itertools
import sys
import warnings
import weakref

import torch.distributed as dist

# Process group -> counter. Each optimizer tags its messages with a number of its own, large enough that no user has it.
TAGS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
UNDER_WAY: list = []  # (works, sent, received) of gradients that were in flight when their optimizer was dropped


def next_tag(process_group):
    return next(TAGS.setdefault(process_group or dist.group.WORLD, itertools.count(2**30)))


def forget_arrived():
    UNDER_WAY[:] = [message for message in UNDER_WAY if not all(work.is_completed() for work in message[0])]


def keep_under_way(travelling, buckets):
    """Keep gradients in flight alive when an optimizer is dropped, and wait for its parameters.

    A parameter in flight would keep the model alive until Python collects garbage.
    """
    if sys.is_finalizing():
        return
    UNDER_WAY.extend((buffer.works, buffer.sent, buffer.received) for buffer in travelling)
    try:
        for bucket in buckets:
            bucket.finish_param_sync()
    except RuntimeError as failure:  # a rank is gone
        warnings.warn(f"an optimizer was dropped while its parameters were under way ({failure}): call "
                      "finish_param_sync() before, or load a checkpoint", stacklevel=2)
