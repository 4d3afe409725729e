"""Messages of several optimizers, and of one that is dropped in the middle of a step, which other ranks expect.

Shown by tests/stages/test_models.py, and tests/stages/test_overlap.py, `test_gradients_keep_out_of_other_messages`.
"""

import itertools
import sys
import weakref

import torch.distributed as dist

# Process group -> counter: the messages of each optimizer have a tag of their own, and not one that others might use
TAGS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
UNDER_WAY: list = []  # (works, sent, received): what had left when its optimizer was dropped


def next_tag(process_group):
    return next(TAGS.setdefault(process_group or dist.group.WORLD, itertools.count(2**30)))


def forget_arrived():
    UNDER_WAY[:] = [message for message in UNDER_WAY if not all(work.is_completed() for work in message[0])]


def keep_under_way(travelling, buckets):
    """Of an optimizer that is dropped. What is under way would keep the model until Python collects garbage."""
    if sys.is_finalizing():
        return
    UNDER_WAY.extend((buffer.works, buffer.sent, buffer.received) for buffer in travelling)
    for bucket in buckets:
        try:
            bucket.finish_param_sync()
        except Exception:
            return  # a rank is gone: whoever still uses the model has been told, or will build another optimizer
