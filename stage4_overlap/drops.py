"""Keeps the messages of several optimizers apart, and finishes the messages of an optimizer that a program drops.

Stage 4 sends gradients from buffers while the model computes. So a buffer may be in use when its optimizer is dropped.
Shown by tests/stages/test_models.py, and tests/stages/test_overlap.py, `test_gradients_keep_out_of_other_messages` and
`test_an_optimizer_that_is_dropped_waits_for_its_parameters`.
"""

import itertools
import sys
import warnings
import weakref

import torch.distributed as dist

# Process group -> the tags of its next optimizers. Each optimizer tags its messages with another number. Tags begin at
# 2**30, so that no program has the same tags for its own messages.
TAGS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# Gradients that were in flight when their optimizer was dropped: (works, tensors that the works read or write). A work
# is what an asynchronous collective of torch returns.
UNDER_WAY: list = []


def next_tag(process_group):
    """Return a tag for the messages of a new optimizer. All ranks make the same optimizers, so they get the same."""
    return next(TAGS.setdefault(process_group or dist.group.WORLD, itertools.count(2**30)))


def forget_arrived():
    """Remove from UNDER_WAY the messages that have arrived. The optimizer's constructor calls this function."""
    UNDER_WAY[:] = [(works, tensors) for works, tensors in UNDER_WAY if not all(work.is_completed() for work in works)]


def keep_under_way(travelling, buckets):
    """Keep the tensors of gradients that are in flight when an optimizer is dropped, and wait for its parameters.

    It waits, because parameters in flight would keep the model alive until Python collects garbage.

    travelling: the buffers with gradients in flight.
    buckets: the optimizer's buckets, lists of parameters that are sent together. Parameters may be in flight, too.
    """
    if sys.is_finalizing():
        return
    for buffer in travelling:
        UNDER_WAY.append((buffer.works, [buffer.sent, buffer.received]))
    try:
        for bucket in buckets:
            bucket.finish_param_sync()
    except RuntimeError as failure:  # because another rank has ended
        warnings.warn(f"an optimizer was dropped while its parameters were under way ({failure}): call "
                      "finish_param_sync() before, or load a checkpoint", stacklevel=2)
