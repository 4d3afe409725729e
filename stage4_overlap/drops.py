"""Keeps the messages of several optimizers apart, and finishes the messages of an optimizer that is dropped.

Stage 4 sends gradients from buffers while the model computes. So a buffer may be in use when its optimizer is
dropped: when Python deletes it, because nothing refers to it any more. Shown by tests/stages/test_models.py, and in
tests/stages/test_overlap.py by `test_gradients_keep_out_of_other_messages` and
`test_an_optimizer_that_is_dropped_waits_for_its_parameters`.
"""

import itertools
import sys
import warnings
import weakref

import torch.distributed as dist

# Process group -> a counter, which gives each new optimizer of the group a tag of its own, a number for its messages.
# Tags begin at 2**30, so that no program has the same tags for its own messages.
TAGS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
# Gradients that were in flight when their optimizer was dropped: (works, tensors that the works read or write). A work
# is what an asynchronous collective of torch returns.
UNDER_WAY: list = []


def next_tag(process_group):
    """Return a tag for the messages of a new optimizer. All ranks make the same optimizers, so they get the same."""
    # setdefault makes the counter for the group's first optimizer, and else returns it; next takes a number from it.
    return next(TAGS.setdefault(process_group or dist.group.WORLD, itertools.count(2**30)))


def forget_arrived():
    """Remove from UNDER_WAY the messages that have arrived. The optimizer's constructor calls this function."""
    UNDER_WAY[:] = [(works, tensors) for works, tensors in UNDER_WAY if not all(work.is_completed() for work in works)]


def keep_under_way(buffers_in_flight, buckets):
    """Keep the tensors of gradients that are in flight when an optimizer is dropped, and wait for its parameters.

    It waits, because the class of a parameter in flight refers to the parameter's bucket, and so to the model
    (awaited.py). Python classes are in reference cycles, so the model would live until Python collects garbage.

    buffers_in_flight: the buffers with gradients in flight.
    buckets: the optimizer's Buckets (buffer.py). Each sends some parameters together, and may have them in flight.
    """
    if sys.is_finalizing():
        return
    for buffer in buffers_in_flight:
        UNDER_WAY.append((buffer.works, [buffer.sent, buffer.received]))
    try:
        for bucket in buckets:
            bucket.finish_param_sync()
    # Another rank has ended. The parameters are now incomplete, which finish_param_sync() before the drop would have
    # shown as an error; a checkpoint has complete ones.
    except RuntimeError as failure:
        warnings.warn(f"an optimizer was dropped while its parameters were under way ({failure}): call "
                      "finish_param_sync() before, or load a checkpoint", stacklevel=2)
