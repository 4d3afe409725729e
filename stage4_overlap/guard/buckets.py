"""For whoever writes into the model between steps, has odd gradients, other messages, or a second optimizer.

What load_state_dict() has written is what is stepped next. A gradient may be sparse, or missing. The messages of each
optimizer have a tag of their own. Shown by tests/test_models.py, tests/test_hostile.py, and tests/test_overlap.py,
`test_gradients_keep_out_of_other_messages`.
"""

import itertools
import weakref
from collections import deque

import torch
import torch.distributed as dist

from ..buffer import BucketBuffer
from .hooks import hook_gradient

# Process group -> counter: the messages of each optimizer have a tag of their own, and not one that others might use
TAGS = weakref.WeakKeyDictionary()
UNDER_WAY = set()  # what travels: an optimizer that is gone must not take its messages with it, others expect them


class SafeBuckets:
    @property
    def bucket_buffer_class(self):
        return SafeBucketBuffer

    @torch.no_grad()
    def shard(self, groups):
        super().shard(groups)
        tags = TAGS.setdefault(self.process_group or dist.group.WORLD, itertools.count(2**30))
        self.idle[0].transport.tag = next(tags)  # of both buffers

    def watch(self, param):
        self.hooks.append(hook_gradient(param, self.on_grad_ready, takes=True))

    def step_own(self):
        self.take_model_changes()
        super().step_own()

    def take_model_changes(self):
        self.finish_param_sync()
        for bucket in self.buckets:
            bucket.take_model_changes()

    def owned_ranges(self):
        for bucket in self.buckets:
            for r in bucket.ranges:
                param = bucket.params[r.index]
                yield param, r.start, r.stop, bucket.main_params[param]

    def let_go(self):
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.buckets, self.bucket_of, self.idle = [], [], {}, deque()

    @property
    def bucket_buffer_bytes(self):
        """Bytes of the buffers that gradients travel in."""
        return sum(buffer.nbytes for buffer in [*self.idle, *self.travelling])


class SafeBucket:
    """Attributes:
        main_grads: parameter -> the gradient of its main parameter.
        stepped: the parameters that the last step has changed: graphs that have read others may live on.
        versions: autograd's counts of the writes into each parameter, to see later ones.
    """

    def partition(self):
        super().partition()
        self.main_grads = {param: main.grad for param, main in self.main_params.items()}
        self.stepped = self.params
        self.note_new_params()

    def take_grad(self, param, slot):
        if param.grad is None:
            slot.zero_()
        else:
            super().take_grad(param, slot)

    def grad_of(self, param):
        return super().grad_of(param).to_dense()  # itself unless it is sparse

    def start_param_sync(self):
        super().start_param_sync()
        self.note_new_params()

    def finish_param_sync(self):
        if self.param_sync is not None:
            super().finish_param_sync()
            self.note_new_params()

    def note_new_params(self):
        """Tell autograd, which saw nothing, that these are new: a graph that has read the old ones is refused."""
        torch.autograd.graph.increment_version([*self.stepped, *map(self.tensor_of, self.stepped)])
        self.versions = list(map(self.version_of, self.params))

    def version_of(self, param):
        return param._version

    def take_model_changes(self):
        """Where somebody has written into the parameters, main_shard follows.

        An element that is still what main_shard rounds to keeps its fp32 value.
        """
        if self.versions != list(map(self.version_of, self.params)):
            shard, main_shard = self.parameter.shard, self.parameter.main_shard
            main_shard.copy_(torch.where(shard != main_shard.to(shard.dtype), shard, main_shard))

    def moved_params(self):
        """Those whose `data` somebody has replaced: they are no views of `flat_params` any more."""
        return [param for param, view in zip(self.params, self.views)
                if self.tensor_of(param).data_ptr() != view.data_ptr()]


class SafeBucketBuffer(BucketBuffer):
    def __init__(self, buckets, transport):
        super().__init__(buckets, transport)
        self.nbytes = self.sent.nbytes + (self.received.nbytes if self.received is not self.sent else 0)
        self.padding = {bucket: self.padding_of(bucket) for bucket in buckets}

    def padding_of(self, bucket):
        """-> views of what lies between and after the gradients of `bucket`."""
        _, sent, _ = self.places[bucket]
        ends = [start + tensor.numel() for start, tensor in zip(bucket.starts, bucket.tensors)]
        return [sent.view(-1)[end:next_start] for end, next_start in zip(ends, [*bucket.starts[1:], bucket.numel])
                if end < next_start]

    def start_grad_sync(self, bucket):
        for padding in self.padding[bucket]:
            padding.zero_()  # nobody reads it, but nothing of another bucket is to leave with this one
        super().start_grad_sync(bucket)
        self.under_way = self.sent, self.received, *self.works
        UNDER_WAY.add(self.under_way)

    def finish_grad_sync(self):
        super().finish_grad_sync()
        UNDER_WAY.remove(self.under_way)
