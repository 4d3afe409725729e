"""Stage 4, overlap: buckets of gradients leave during the backward pass, parameters come back during the next forward.

A bucket is a list of parameters whose gradients are sent together, from a BucketBuffer. Each rank owns 1/d of every
bucket, its shard. The parameters of all buckets lie in a ParameterBuffer. A transport is the way in which messages are
sent. The inner optimizer is a usual torch optimizer, which updates only the main parameters of this rank: the ranges of
parameters that lie in its shards, or fp32 copies of them if they have 16 bits.
Unlike stage 3 (stage3_gradbuffer/), which cuts one buffer of all parameters into shards: each bucket is cut into
shards, a rank keeps no gradient that it doesn't need, and communication is hidden behind computation.
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
        optimizer_cls: an element-wise torch optimizer class, which updates each element independently of all others.
        process_group: the d ranks that share the work; None means all ranks.
        bucket_cap_mb: size at which a bucket is closed, in MiB; None is a twentieth of the parameters, from 1 to 25.
        reduce_dtype: torch.float32 sums 16-bit gradients in fp32 and in rank order. This matters on NCCL, which would
            sum them in 16 bits. gloo's sums are in fp32 anyway.
        optimizer_kwargs: lr, weight_decay and so on, for `optimizer_cls`.

    Attributes:
        buckets: all buckets, in the order in which gradients are sent. Parameters are sent in the reverse order.
        bucket_of: parameter -> its bucket.
        queue: buckets that this backward pass has not sent yet.
        idle: BucketBuffers that are free.
        travelling: BucketBuffers whose gradients are in flight, the oldest first.
        prefetching: whether `step` returns before the updated parameters have arrived.

    distributed.py adds, from guard/, what is missing here: parameters that a backward pass doesn't use, accumulation
    without communication, code that reads a parameter outside its module, clipping, loss scaling, groups added later,
    saving, and errors that say what is wrong.
    """

    # Subclasses replace these: distributed.py replaces the first, the variants in variants/ all three.
    bucket_class, bucket_buffer_class, transport_for = Bucket, BucketBuffer, staticmethod(transport_for)

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, bucket_cap_mb=None,
                 reduce_dtype=None, **optimizer_kwargs):
        self.process_group = process_group
        self.bucket_cap_mb, self.reduce_dtype = bucket_cap_mb, reduce_dtype
        self.buckets, self.bucket_of, self.queue = [], {}, deque()
        self.idle, self.travelling = deque(), deque()
        self.prefetching = False
        # This optimizer has no parameters: it is made only to learn which defaults `optimizer_cls` adds.
        defaults = optimizer_cls([{"params": []}], **optimizer_kwargs).defaults  # lr and so on
        super().__init__(params, defaults)
        self.optimizer = optimizer_cls(self.shard(self.param_groups), **optimizer_kwargs)  # updates what this rank owns

    @torch.no_grad()
    def shard(self, groups):
        """Put the parameters of `groups`, with rank 0's values, into buckets, and watch for their gradients.

        Returns the parameter groups of the inner optimizer: each of `groups`, with this rank's main parameters only.
        """
        params = [param for group in groups for param in group["params"]]
        transport = self.transport_for(self.process_group, params[0].device, self.reduce_dtype)
        nbytes = [param.nbytes for param in params]
        # The two BucketBuffers are as large as the largest bucket, so a twentieth keeps them small. In messages below
        # 1 MiB latency dominates. Buckets above 25 MiB are faster only on hundreds of ranks.
        cap_mb = self.bucket_cap_mb or min(25, max(1, sum(nbytes) / 20 / 2**20))
        layout = bucket_layout(nbytes, [param.dtype for param in params], cap_mb * 2**20)
        buckets = [self.bucket_class([params[index] for index in indices], transport) for indices in layout]
        for dtype in dict.fromkeys(param.dtype for param in params):
            # The constructor broadcasts rank 0's parameters, and makes the model's parameters views of the new buffer.
            ParameterBuffer([bucket for bucket in buckets if bucket.params[0].dtype == dtype])
        self.buckets += buckets
        self.queue += buckets
        self.bucket_of.update((param, bucket) for bucket in buckets for param in bucket.params)
        # A BucketBuffer has a place for every bucket, so both are made anew when a group is added later.
        self.idle = deque(self.bucket_buffer_class(self.buckets, transport) for _ in range(2))
        # parameter -> its main parameter, if this rank owns elements of it
        main_param = {param: main for bucket in buckets for param, main in bucket.main_params.items()}
        for param in params:
            self.watch(param)
        own_groups = []
        for group in groups:
            owned = [main_param[param] for param in group["params"] if param in main_param]
            own_groups.append({**hyperparameters(group), "params": owned})
        return own_groups

    def sync_grads(self):
        """Wait for the buckets that are still in flight. Most buckets have arrived during the backward pass."""
        while self.travelling:
            self.receive_oldest()

    def step_own(self):
        """Update the main parameters, with the lr and so on that schedulers have written into our groups."""
        self.finish_param_sync()  # some may still be in flight, and their memory is updated now
        for group, own in zip(self.param_groups, self.optimizer.param_groups):  # own: of the inner optimizer
            own.update(hyperparameters(group))
        self.optimizer.step()

    def sync_params(self):
        """Send this rank's shards to all ranks. The parameters that the forward pass reads first are sent first."""
        for bucket in reversed(self.buckets):
            bucket.gradient.is_empty = True  # the next gradients replace these gradients, and aren't added to them
            bucket.start_param_sync()
        if not self.prefetching:
            self.finish_param_sync()

    @torch.no_grad()
    def step(self):
        """Average the gradients, update all parameters, and drop the gradients. Collective: every rank must call it.

        After `prefetch_params` was called, `step` returns while parameters are still in flight.
        """
        self.sync_grads()
        self.step_own()
        self.sync_params()

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        """Drop the gradients, also those already sent. Gradients in flight must arrive first, on every rank."""
        while self.travelling:
            self.receive_oldest()
        for bucket in self.buckets:
            bucket.gradient.is_empty = True  # the next gradients replace these gradients
        super().zero_grad()

    def on_grad_ready(self, param):
        """Send the bucket of `param` if it is full now. Autograd calls this method when the gradient is complete."""
        self.bucket_of[param].ready.add(param)
        self.send_full_buckets()

    def send_full_buckets(self):
        """Send full buckets in the order of `buckets`, the same on every rank. A bucket waits for those before."""
        while self.queue and self.queue[0].is_full():
            self.send_grads(self.queue.popleft())
        if not self.queue:
            self.queue.extend(self.buckets)  # the next gradient comes in another backward pass

    @torch.no_grad()
    def send_grads(self, bucket):
        """Send the gradients of a bucket. If both BucketBuffers are in flight, wait for the older one before."""
        if not self.idle:
            self.receive_oldest()
        self.idle[0].start_grad_sync(bucket)  # after an error here the buffer is still in `idle`
        self.travelling.append(self.idle.popleft())

    def receive_oldest(self):
        """Wait for the bucket that was sent first, and add its gradients to this rank's shard."""
        self.travelling[0].finish_grad_sync()
        self.idle.append(self.travelling.popleft())

    def prefetch_params(self, model):
        """Let `step` return before parameters arrive. Each module of `model` waits for its parameters when called."""
        self.prefetching = True
        for module in model.modules():
            module.register_forward_pre_hook(self.wait_for_own_params)

    def wait_for_own_params(self, module, _):
        """Wait for the parameters of a module, but not of modules in it. torch calls this method before the module."""
        for param in module._parameters.values():  # the same as module.parameters(recurse=False), which is slower
            if param in self.bucket_of:
                self.bucket_of[param].finish_param_sync()

    def finish_param_sync(self):
        """Wait until every parameter has arrived. After `prefetch_params`, call this before a save, for example."""
        for bucket in self.buckets:
            bucket.finish_param_sync()

    def watch(self, param):
        """Let autograd call `on_grad_ready` when the gradient of `param` is complete."""
        param.register_post_accumulate_grad_hook(self.on_grad_ready)


def hyperparameters(group):
    """Return the entries of a parameter group other than its parameters: lr, betas and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
