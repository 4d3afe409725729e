"""For whoever writes into the model between steps, has odd gradients, other messages, or a second optimizer.

What load_state_dict() has written is what is stepped next. A gradient may be sparse, or missing. The messages of each
optimizer have a tag of their own. Shown by tests/stages/test_models.py, tests/stages/test_hostile.py, and
tests/stages/test_overlap.py, `test_gradients_keep_out_of_other_messages`.
"""

import itertools
import weakref
from collections import deque

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors as flatten

from ..buffer import ALIGNMENT, BucketBuffer
from .hooks import hook_gradient

# Process group -> counter: the messages of each optimizer have a tag of their own, and not one that others might use
TAGS = weakref.WeakKeyDictionary()
SMALL = 1 << 13  # elements a parameter, on average
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
        handle = hook_gradient(param, self.on_grad_ready, takes=True)
        self.hooks[id(param)] = handle, param._post_accumulate_grad_hooks

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
        for handle, _ in self.hooks.values():
            handle.remove()
        self.hooks, self.buckets, self.bucket_of, self.idle = {}, [], {}, deque()

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
        self.zero = self.flat_params.new_zeros(())
        self.stepped = self.params
        self.note_new_params()

    def grads(self):
        return [grad if type(grad) is torch.Tensor and grad.layout is torch.strided else self.dense(grad, param)
                for grad, param in zip(super().grads(), self.params)]

    def dense(self, grad, param):
        """A missing gradient is zero, without any memory."""
        return self.zero.expand_as(self.tensor_of(param)) if grad is None else grad.to_dense()

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
    """Attributes:
        gaps: bucket -> for each parameter zeros, as many as there are elements between its gradient and the next.
    """

    def __init__(self, buckets, transport):
        super().__init__(buckets, transport)
        self.nbytes = self.sent.nbytes + (self.received.nbytes if self.received is not self.sent else 0)
        self.gaps = {bucket: self.gaps_of(bucket) for bucket in buckets}

    def gaps_of(self, bucket):
        ends = [start + tensor.numel() for start, tensor in zip(bucket.starts, bucket.tensors)]
        zeros = bucket.flat_params.new_zeros(ALIGNMENT)
        return [zeros[: next_start - end] for end, next_start in zip(ends, [*bucket.starts[1:], ends[-1]])]

    def copy_scaled(self, grads, slots):
        """Nobody reads what lies between gradients, but nothing of another bucket is to leave with this one."""
        gaps, flat = self.gaps[self.bucket], self.places[self.bucket][1].view(-1)
        end = self.bucket.starts[-1] + slots[-1].numel()
        flat[end:].zero_()
        if end <= SMALL * len(slots):  # one call for all: a call for each would take longer than the copy
            pieces = [piece for pair in zip(grads, gaps) for piece in pair if piece.numel()]
            if pieces:
                torch.div(flatten(pieces), self.transport.world_size, out=flat[:end])
        else:
            super().copy_scaled(grads, slots)
            for start, slot, gap in zip(self.bucket.starts, slots, gaps):
                if gap.numel():
                    flat[start + slot.numel() :][: gap.numel()].copy_(gap)

    def start_grad_sync(self, bucket):
        super().start_grad_sync(bucket)
        self.under_way = self.sent, self.received, *self.works
        UNDER_WAY.add(self.under_way)

    def finish_grad_sync(self):
        super().finish_grad_sync()
        UNDER_WAY.remove(self.under_way)
