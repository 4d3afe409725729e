"""Keeps the messages of several optimizers apart, and finishes the messages of an optimizer that a program drops.

Shown by tests/stages/test_models.py, and tests/stages/test_overlap.py, `test_gradients_keep_out_of_other_messages` and
`test_an_optimizer_that_is_dropped_waits_for_its_parameters`.
"""

import itertools
import sys
import warnings
import weakref

import torch.distributed as dist

# Process group -> counter of its optimizers. Each of them tags its messages with a number of its own: so large that no
# user has it.
TAGS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# Gradients that were in flight when their optimizer was dropped: (works to wait for, tensors that these read or write).
UNDER_WAY: list = []


def next_tag(process_group):
    """Return a tag for the messages of one optimizer, the same on every rank."""
    return next(TAGS.setdefault(process_group or dist.group.WORLD, itertools.count(2**30)))


def forget_arrived():
    """Let go, in UNDER_WAY, of messages that have arrived."""
    UNDER_WAY[:] = [(works, tensors) for works, tensors in UNDER_WAY if not all(work.is_completed() for work in works)]


def keep_under_way(travelling, buckets):
    """Keep the tensors of gradients that are in flight when an optimizer is dropped, and wait for its parameters.

    travelling: buffers with gradients in flight. buckets: of parameters, which may be in flight, too. A parameter in
    flight would keep the model alive until Python collects garbage, so this function waits for parameters.
    """
    if sys.is_finalizing():
        return
    for buffer in travelling:
        UNDER_WAY.append((buffer.works, [buffer.sent, buffer.received]))
    try:
        for bucket in buckets:
            bucket.finish_param_sync()
    except RuntimeError as failure:  # another rank has ended
        warnings.warn(f"an optimizer was dropped while its parameters were under way ({failure}): call "
                      "finish_param_sync() before, or load a checkpoint", stacklevel=2)
