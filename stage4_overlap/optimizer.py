"""Stage 4, overlap: buckets of gradients leave during the backward pass, parameters come back during the next forward.

Unlike stage 3: there is a shard of every bucket, a rank keeps no gradient that it doesn't need, and communication
is hidden behind computation.
Source of the idea: Megatron-LLaMA's OverlappedDistributedOptimizer and veScale's overlapped parameter gather.
"""

from collections import deque

import torch

from .buffer import Bucket, BucketBuffer, ParameterBuffer, bucket_layout
from .transport import transport_for


class ShardedOptimizer(torch.optim.Optimizer):
    """A torch optimizer that averages gradients over d ranks, and whose state is spread over them, 1/d on each.

    Args:
        params: dense, contiguous tensors on one device, or parameter groups. Rank 0's values are broadcast.
        optimizer_cls: an element-wise torch optimizer class: it updates a piece of a tensor as within the whole.
        process_group: the d ranks; None is all of them.
        bucket_cap_mb: size at which a bucket is closed, in MiB; None is a twentieth of the parameters, from 1 to 25.
        reduce_dtype: torch.float32 sums 16-bit gradients in fp32 and in rank order, on NCCL too; on gloo that is so
            anyway.
        optimizer_kwargs: lr, weight_decay and so on, for `optimizer_cls`.

    Attributes:
        buckets: in the order in which their gradients leave; parameters come back in the reverse order.
        queue: buckets that this backward pass has not sent yet.
        idle, travelling: bucket buffers that are free; those with gradients in flight, the oldest first.

    Left to guard/: parameters that a backward pass doesn't use, accumulation without communication, code that reads a
    parameter outside its module, clipping, loss scaling, groups added later, saving, errors that say what is wrong.
    """

    bucket_class, bucket_buffer_class, transport_for = Bucket, BucketBuffer, staticmethod(transport_for)

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, bucket_cap_mb=None,
                 reduce_dtype=None, **optimizer_kwargs):
        self.process_group = process_group
        self.bucket_cap_mb, self.reduce_dtype = bucket_cap_mb, reduce_dtype
        self.buckets, self.bucket_of, self.queue = [], {}, deque()
        self.idle, self.travelling = deque(), deque()
        self.prefetching = False
        defaults = optimizer_cls([{"params": []}], **optimizer_kwargs).defaults  # lr and so on
        super().__init__(params, defaults)
        self.optimizer = optimizer_cls(self.shard(self.param_groups), **optimizer_kwargs)  # updates what this rank owns

    @torch.no_grad()
    def shard(self, groups):
        """Put the parameters of `groups` into buckets.

        Returns what this rank owns of them, a group for each of `groups`: the inner optimizer's, which updates it.
        """
        params = [param for group in groups for param in group["params"]]
        transport = self.transport_for(self.process_group, params[0].device, self.reduce_dtype)
        nbytes = [param.nbytes for param in params]
        # Two buckets are held: little of the model. Below 1 MiB latency counts; above 25, on hundreds of ranks alone.
        cap_mb = self.bucket_cap_mb or min(25, max(1, sum(nbytes) / 20 / 2**20))
        layout = bucket_layout(nbytes, [param.dtype for param in params], cap_mb * 2**20)
        buckets = [self.bucket_class([params[index] for index in indices], transport) for indices in layout]
        for dtype in dict.fromkeys(param.dtype for param in params):
            ParameterBuffer([bucket for bucket in buckets if bucket.params[0].dtype == dtype])
        self.buckets += buckets
        self.queue += buckets
        self.bucket_of.update((param, bucket) for bucket in buckets for param in bucket.params)
        self.idle = deque(self.bucket_buffer_class(self.buckets, transport) for _ in range(2))
        main_param = {param: main for bucket in buckets for param, main in bucket.main_params.items()}
        for param in params:
            self.watch(param)
        own_groups = []
        for group in groups:
            owned = [main_param[param] for param in group["params"] if param in main_param]
            own_groups.append({**hyperparameters(group), "params": owned})
        return own_groups

    def sync_grads(self):
        """Most buckets have arrived during the backward pass; wait for those still in flight."""
        while self.travelling:
            self.receive_oldest()

    def step_own(self):
        """Update the owned ranges with the current hyperparameters: schedulers write into our groups."""
        self.finish_param_sync()  # parameters that no forward pass has read: their memory is about to be updated
        for group, own in zip(self.param_groups, self.optimizer.param_groups):
            own.update(hyperparameters(group))
        self.optimizer.step()

    def sync_params(self):
        """Send this rank's parameters to all, in the order of the forward pass: what it reads first leaves first."""
        for bucket in reversed(self.buckets):
            bucket.gradient.is_empty = True
            bucket.start_param_sync()
        if not self.prefetching:
            self.finish_param_sync()

    @torch.no_grad()
    def step(self):
        """Collective: every rank calls it. Gradients are gone afterwards.

        With `prefetch_params` it returns while parameters are still in flight.
        """
        self.sync_grads()
        self.step_own()
        self.sync_params()

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        """Drop the gradients, also those already sent. What is in flight must arrive first, on every rank."""
        while self.travelling:
            self.receive_oldest()
        for bucket in self.buckets:
            bucket.gradient.is_empty = True
        super().zero_grad()

    def on_grad_ready(self, param):
        """Called by autograd when the gradient of `param` is complete, in whatever order they come."""
        self.bucket_of[param].ready.add(param)
        self.send_full_buckets()

    def send_full_buckets(self):
        """In bucket order, the same on every rank: a bucket that is full early waits for those before it."""
        while self.queue and self.queue[0].is_full():
            self.send_grads(self.queue.popleft())
        if not self.queue:
            self.queue.extend(self.buckets)  # the next gradient is of another micro-batch, or comes after the step

    @torch.no_grad()
    def send_grads(self, bucket):
        """Two buffers bound the memory: a third bucket, and the backward pass with it, waits until one has arrived."""
        if not self.idle:
            self.receive_oldest()
        self.idle[0].start_grad_sync(bucket)
        self.travelling.append(self.idle.popleft())

    def receive_oldest(self):
        self.travelling[0].finish_grad_sync()
        self.idle.append(self.travelling.popleft())

    def prefetch_params(self, model):
        """Let `step` return before the parameters arrive: each module of `model` waits for its own when called."""
        self.prefetching = True
        for module in model.modules():
            module.register_forward_pre_hook(self.wait_for_own_params)

    def wait_for_own_params(self, module, _):
        for param in module._parameters.values():  # its own: as parameters(recurse=False), which is slow
            if param in self.bucket_of:
                self.bucket_of[param].finish_param_sync()

    def finish_param_sync(self):
        """Wait until every parameter has arrived: before a save, say, where parameters are prefetched."""
        for bucket in self.buckets:
            bucket.finish_param_sync()

    def watch(self, param):
        param.register_post_accumulate_grad_hook(self.on_grad_ready)


def hyperparameters(group):
    """What a parameter group holds beside its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
