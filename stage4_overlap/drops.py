"""For whoever builds a second optimizer over the same parameters, drops one, has messages of their own, or saves.

The messages of each optimizer have a tag of their own. An optimizer that is dropped in the middle of a step must not
take its messages with it, which other ranks expect. Shown by tests/stages/test_models.py, and
tests/stages/test_overlap.py, `test_gradients_keep_out_of_other_messages`.
"""

import itertools
import sys
import weakref

import torch
import torch.distributed as dist

from guard.hooks import hook_gradient

# Process group -> counter: the messages of each optimizer have a tag of their own, and not one that others might use
TAGS = weakref.WeakKeyDictionary()
UNDER_WAY = []  # (works, sent, received): what had left when its optimizer was dropped


class Drops:
    def _prepare(self, *args, **kwargs):
        self._hooks = {}  # id of a parameter -> the handle of our hook, and the dict of all its hooks
        UNDER_WAY[:] = [message for message in UNDER_WAY if not all(work.is_completed() for work in message[0])]
        return super()._prepare(*args, **kwargs)

    def __del__(self):
        if sys.is_finalizing() or "buckets" not in self.__dict__:
            return
        UNDER_WAY.extend((buffer.works, buffer.sent, buffer.received) for buffer in self.travelling)
        for bucket in self.buckets:  # what is under way would keep the model until Python collects garbage
            try:
                bucket.finish_param_sync()
            except Exception:
                return  # a rank is gone: whoever still uses the model has been told, or will build another optimizer

    @torch.no_grad()
    def shard(self, groups):
        super().shard(groups)
        tags = TAGS.setdefault(self.process_group or dist.group.WORLD, itertools.count(2**30))
        self.idle[0].transport.tag = next(tags)  # of both buffers

    def watch(self, param):
        handle = hook_gradient(param, self.on_grad_ready, takes=True)
        self._hooks[id(param)] = handle, param._post_accumulate_grad_hooks

    def _take_model_changes(self):
        for bucket in self.buckets:
            bucket.finish_param_sync()
            bucket.take_model_changes()

    def _owned_ranges(self):
        for bucket in self.buckets:
            for r in bucket.ranges:
                param = bucket.params[r.index]
                yield param, r.start, r.stop, bucket.main_params[param]

    def _let_go(self):
        for handle, _ in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        self.bucket_of.clear()
        for queue in (self.buckets, self.queue, self.idle):
            queue.clear()

    @property
    def bucket_buffer_bytes(self):
        """Bytes of the buffers that gradients travel in."""
        buffers = [*self.idle, *self.travelling]
        return sum(memory.nbytes for buffer in buffers for memory in {buffer.sent, buffer.received})
