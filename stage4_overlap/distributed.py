"""The class to rely on: the core of optimizer.py, made robust by guard/ and by the other files here.

The *core* is the optimizer without checks; `super()` is the core. Guarded, the base class from guard/, has the checks,
and calls the methods here that begin with an underscore; guard/guarded.py says when.

- A *bucket* is a list of parameters whose gradients are sent together.
- The *inner optimizer*, torch's, steps *main parameters*: the parts of parameters that this rank owns, or fp32 copies
  of them if they have 16 bits.
- In a *round* every bucket is sent once. Each backward pass is a round. If the pass doesn't compute a gradient, zeros
  are sent when the pass ends. Inside no_sync() gradients stay in `param.grad` and are sent in a later round.

Before a step the ranks agree on which parameters were used and on the number of rounds. If other code has written into
parameters, as load_state_dict() does, the next step starts from the new values. Each parameter has its own storage,
because safetensors, accelerate and pickle treat views of one storage as one tensor.

Shown by tests/stages/test_rounds.py, tests/stages/test_overlap.py, tests/stages/test_hostile.py, and
tests/stages/test_models.py, `test_each_parameter_has_a_storage_of_its_own`.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from guard.groups import InnerTensors, all_params, error_if_settings_differ, settings_of
from guard.guarded import Guarded, profiler_range
from guard.hooks import hook_gradient
from guard.probe import check_elementwise
from guard.states import update_main_param

from .awaited import BUCKETS, awaited, wait_for_own
from .buffer import Bucket
from .drops import forget_arrived, keep_under_way, next_tag
from .dtensor import local, local_parts
from .optimizer import ShardedOptimizer
from .rounds import BackwardPass, Rounds, agree_on_rounds, error_of, what_is_wrong


class GuardedBucket(Bucket):
    """A bucket that notices what other code does to its parameters, and gives main parameters their memory again.

    Attributes of the core's Bucket:
        params, tensors: the parameters, and for each the tensor to store: itself, or the local part of a DTensor.
        flat_params, views: the memory of all `tensors`, and for each tensor a view of it.
        main_params: parameter -> main parameter.

    Attributes beside these:
        main_grads: parameter -> the gradient of its main parameter.
        inner_tensors: gives main parameters their memory again if the inner optimizer has replaced it.
        zero: a zero without dimensions, in the dtype of the parameters.
        addresses: the memory address of each tensor in `tensors`.
        writable_tensors: all tensors that other code may write into: each parameter, and the local tensor of a DTensor.
        versions: autograd's version counter of each tensor in `writable_tensors`; a later write changes it.
        kinds: class of parameters -> their class while they are in flight.
        name: the bucket's name in torch.profiler. The optimizer sets it, in `_watch_shards`.
    """

    tensor_of = staticmethod(local)

    def partition(self):
        """Make main parameters as the core does, and note what the other methods compare with later."""
        flat = self.flat_params
        if not flat.is_meta:  # tensors on the device "meta" have no memory
            for tensor, view in zip(self.tensors, self.views):
                tensor.data = torch.from_dlpack(view)  # a new storage of the same memory; it keeps the memory alive
        super().partition()
        self.main_grads = {param: main.grad for param, main in self.main_params.items()}
        self.inner_tensors = InnerTensors(self.main_params.values())
        self.zero = flat.new_zeros(())
        self.addresses = [view.data_ptr() for view in self.views]
        BUCKETS[self] = None  # awaited.py may have to wait for all buckets
        self.kinds = {kind: awaited(kind) for kind in set(map(type, self.params))}
        self.writable_tensors = list(dict.fromkeys([*self.params, *self.tensors]))
        self.note_new_params()

    def grads(self):
        """Return the gradients as dense local tensors. A missing gradient is `zero`, expanded without new memory."""
        grads = super().grads()
        for index, grad in enumerate(grads):
            if grad is None:
                grads[index] = self.zero.expand_as(self.tensors[index])
            elif type(grad) is not torch.Tensor or grad.layout is not torch.strided:
                if hasattr(self.params[index], "placements"):  # a DTensor: redistribute() adds up partial sums
                    grad = local(grad.redistribute(placements=self.params[index].placements))
                grads[index] = grad.to_dense()
        return grads

    def note_new_params(self):
        """Tell autograd that an all-gather changes the parameters, so that it refuses graphs with the old ones."""
        torch.autograd.graph.increment_version(self.writable_tensors)
        self.versions = [tensor._version for tensor in self.writable_tensors]

    def take_model_changes(self):
        """Update the main parameters if other code has written into the parameters."""
        if self.versions != [tensor._version for tensor in self.writable_tensors]:
            update_main_param(self.parameter.main_shard, self.parameter.shard)

    def moved_params(self):
        """Return parameters whose `data` was replaced, so that they are no longer views of `flat_params`."""
        # This quick comparison is usually enough.
        if list(map(torch.Tensor.data_ptr, self.tensors)) == self.addresses:
            return []
        return [param for param, tensor, address in zip(self.params, self.tensors, self.addresses)
                if tensor.data_ptr() != address]

    def start_param_sync(self):
        """Change the class of the parameters, and send them. From now on, whoever reads a parameter waits for it."""
        self.inner_tensors.take_back()  # main parameters have their memory again
        self.note_new_params()
        for kind in self.kinds.values():
            kind.bucket = self
        for param in self.params:
            param.__class__ = self.kinds[type(param)]
        with profiler_range(f"{self.name}: all-gather"):
            super().start_param_sync()

    def finish_param_sync(self):
        """Wait until the parameters have arrived, and give them their class again."""
        was_in_flight = self.param_sync is not None
        # Without DisableTorchFunctionSubclass, reading a parameter in flight here would call this method again.
        with torch._C.DisableTorchFunctionSubclass(), profiler_range(f"{self.name}: wait"):
            super().finish_param_sync()
        if was_in_flight:
            for param in self.params:
                param.__class__ = type(param).kind  # the class that it had before it was in flight
            for kind in self.kinds.values():
                kind.bucket = None


@functools.cache
def guarded(bucket_class):
    """Return a subclass of GuardedBucket and `bucket_class`, the core's class of buckets or the class of a variant."""
    return type(f"Guarded{bucket_class.__name__}", (GuardedBucket, bucket_class), {})


class DistributedOptimizer(Guarded, ShardedOptimizer):
    """A torch optimizer whose state is spread over the d ranks of `process_group`, about 1/d on each.

    Use it in the same training loop as any torch optimizer; `step` averages the gradients over the ranks. The
    constructor broadcasts the parameters from rank 0, as DistributedDataParallel does, but not the model's buffers.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer; contiguous, on one
            device. For a DTensor, each rank's local part is sharded over `process_group`, which must be another
            dimension of the mesh.
        optimizer_cls: an element-wise torch optimizer class, which updates each element independently of all others.
        process_group: the ranks that share the work; None means all ranks.
        average_over: a number by which the sum of gradients is divided, or a process group whose size is this number.
            None means `process_group`. For experts, see docs/experts.md.
        bucket_cap_mb: size at which a bucket is closed, in MiB; None means a twentieth of the parameters, from 1 to 25.
        reduce_dtype: torch.float32 sums 16-bit gradients in fp32 and in rank order. This matters on NCCL, which would
            sum them in 16 bits. gloo's sums are in fp32 anyway.
        find_unused_parameters: False raises an error on every rank that names the parameters without a gradient on
            some rank. True counts a missing gradient as zero, and skips parameters without a gradient on all ranks.
            Unused parameters may differ by rank and micro-batch. All ranks must run equally many backward passes, each
            of which computes at least one gradient.
        optimizer_kwargs: lr, weight_decay, fused and so on, for `optimizer_cls`.

    Raises:
        RuntimeError, TypeError, ValueError: see guard.refuse.checked_groups. Raised on every rank, before anything is
            changed.
        ValueError: `optimizer_cls` is not element-wise, so it would update shards differently; or `bucket_cap_mb` or
            `reduce_dtype` is not one of the values above.
    """

    # guard/ reads these.
    _stage = 4  # for repr()
    _probe = staticmethod(check_elementwise)  # raises an error if `optimizer_cls` isn't element-wise
    _takes_dtensors = True  # parameters may be DTensors
    _param_grad_holds = "nothing"  # what torch's clipping finds in `param.grad`, if nothing waits since no_sync()

    def __init__(self, params: ParamsT, optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
                 process_group: dist.ProcessGroup | None = None, average_over: dist.ProcessGroup | float | None = None,
                 bucket_cap_mb: float | None = None, reduce_dtype: torch.dtype | None = None,
                 find_unused_parameters: bool = False, **optimizer_kwargs: Any) -> None:
        core_arguments = {"bucket_cap_mb": bucket_cap_mb, "reduce_dtype": reduce_dtype}
        self.bucket_cap_mb = bucket_cap_mb
        self.reduce_dtype = reduce_dtype
        self.find_unused_parameters = find_unused_parameters
        self._rounds = Rounds()  # counts the rounds since the last step
        self.bucket_class = guarded(self.bucket_class)
        self._watched: dict = {}  # id of a parameter -> (handle of our hook, torch's dict of all its hooks)
        forget_arrived()  # messages of optimizers that were dropped
        groups = self._prepare(params, optimizer_cls, process_group, average_over, optimizer_kwargs,
                               find_unused_parameters=find_unused_parameters, **core_arguments)
        super().__init__(groups, optimizer_cls, process_group=process_group, **core_arguments, **optimizer_kwargs)
        self._note_shards()

    def _refuse(self, named):
        """Refuse arguments of this stage. Return [(name, local tensor), …] for `named`, [(name, parameter), …]."""
        if self.reduce_dtype not in (None, torch.float32):
            raise ValueError(f"reduce_dtype is {self.reduce_dtype}: it must be torch.float32 or None")
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {self.bucket_cap_mb}: it must be more than 0")
        if self.has_grads:
            raise RuntimeError("add_param_group() between backward() and step(): call step() or zero_grad() first")
        return local_parts(named, self.process_group)

    def _watch_shards(self, groups):
        """Name the buckets, and give the messages a tag. Guarded calls this when the core has made buckets."""
        for number, bucket in enumerate(self.buckets):
            bucket.name = f"bucket {number}"
        self.idle[0].transport.tag = next_tag(self.process_group)  # both buffers have this transport

    def watch(self, param):
        """Let autograd call `on_grad_ready` when the gradient of `param` is complete. The core calls this method."""
        handle = hook_gradient(param, self.on_grad_ready, takes_gradient=True)
        self._watched[id(param)] = handle, param._post_accumulate_grad_hooks

    # ------------------------------------------------------------------------------------------- in the backward pass

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate whole gradients in `param.grad`, unsent until `step` or a backward pass outside of this context.

        Outside of this context every micro-batch is reduced into the shards: less memory, more communication. 16-bit
        gradients add up in fp32 there, and in 16 bits inside, so that each micro-batch is rounded.
        """
        was_accumulating = self._rounds.is_accumulating
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(not was_accumulating)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Accumulate from now on as `no_sync` does (False), or end that (True). FSDP2 has a method of this name."""
        self._rounds.is_accumulating = not requires_gradient_sync

    def on_grad_ready(self, param):
        """Send the bucket of `param` if it is full now. Autograd calls this method when the gradient is complete."""
        rounds = self._rounds
        if rounds.is_synced:
            self._refuse_late_backward()  # of Guarded: raises an error if gradients were scaled by average_over
        rounds.is_synced = False
        if not rounds.is_accumulating and rounds.backward_pass() is None:  # this is the first gradient of a pass
            self._begin_round()
        # A pass may compute a gradient after its round has sent all buckets, with a re-entrant checkpoint for example.
        # Such a gradient waits for the next round.
        if rounds.is_accumulating or not rounds.is_open:
            rounds.ids_waiting.add(id(param))
            return
        handle, all_hooks = self._watched[id(param)]
        if len(all_hooks) > 1 and next(reversed(all_hooks)) != handle.id:  # a hook of the user is the last
            # The user's hooks run after our hook, and must find this gradient in `param.grad`. So its bucket isn't sent
            # now. The parameter becomes ready after `send_full_buckets`, and the next gradient sends its bucket.
            bucket = self.bucket_of[param]
            bucket.ready.discard(param)  # a re-entrant checkpoint may have made it ready before
            self.send_full_buckets()
            if rounds.is_open:
                bucket.ready.add(param)
        else:
            super().on_grad_ready(param)

    def _begin_round(self):
        """Begin a round for the backward pass that computes its first gradient now."""
        rounds = self._rounds
        self._end_backward()  # because a pass that failed has left its round open
        # torch's engine keeps the BackwardPass alive until the pass ends.
        rounds.backward_pass = weakref.ref(BackwardPass(self._end_backward))
        rounds.is_open = rounds.went_backward = True
        for bucket in self.buckets:  # a frozen parameter will get no gradient, so it is ready
            bucket.ready.update([param for param in bucket.params if not param.requires_grad])

    def _end_backward(self):
        """Send zeros for gradients that the pass didn't compute: another rank may have sent them, and wait."""
        self._rounds.backward_pass = lambda: None
        if self._rounds.is_open:
            self._finish_round()

    def _finish_round(self):
        """Send all buckets of the round that weren't sent, with zeros in place of missing gradients."""
        for bucket in self.queue:
            bucket.ready.update(bucket.params)
        self.send_full_buckets()

    def send_grads(self, bucket):
        """Send a bucket as the core does, and note which gradients were sent. The core calls this in bucket order."""
        rounds = self._rounds
        new_ids = [id(param) for param in bucket.params if param.grad is not None]
        with profiler_range(f"{bucket.name}: reduce-scatter"):
            super().send_grads(bucket)
        rounds.ids_sent.update(new_ids)
        rounds.ids_waiting.difference_update(new_ids)
        if not self.queue:  # this was the last bucket
            rounds.is_open = False
            rounds.n_ended += 1

    # ---------------------------------------------------------------------------------------------------- in the step

    @property
    def has_grads(self):
        """Return whether this rank is between backward() and step()."""
        rounds = self._rounds
        return bool(rounds.ids_waiting or rounds.n_ended > rounds.n_dropped or rounds.is_open)

    @property
    def _grads_elsewhere(self):
        """Return whether gradients of this step were sent, and so taken out of `param.grad`."""
        return self._rounds.went_backward

    def _before_average(self, arguments):
        """Agree with the other ranks, and send every gradient that hasn't been sent. Raise an error if a rank has one.

        Returns False if the ranks had agreed before, in this step.

        arguments: the arguments of clip_grad_norm_() or scale_grads_(), which must be equal on all ranks.
        """
        was_synced = self._rounds.is_synced
        error = error_of(self._agree(arguments), self.param_groups, self.find_unused_parameters)
        if self._rounds.settings_differ:
            error = error_if_settings_differ(self._rounds.settings, self._agreement_group) or error
        if error:
            self.zero_grad()
            raise error
        return not was_synced

    def _agree(self, arguments):
        """Send every gradient, and finish the same number of rounds on each rank.

        Returns for each parameter the worst fault of its gradient on any rank, a number of rounds.py, or 0.
        """
        rounds = self._rounds
        params = self._params
        faults = what_is_wrong(rounds, params, self.buckets)
        if rounds.is_synced:  # the ranks have agreed before in this step, so other ranks would not answer
            return [faults.get(id(param), 0) for param in params]
        if rounds.is_open or rounds.n_ended == 0:  # a pass has failed, or there was no round since the last step
            self._finish_round()
        arguments = {"backward passes dropped by model.zero_grad()": rounds.n_dropped, **arguments}
        rounds.settings = settings_of(self.param_groups, arguments)
        agreement = agree_on_rounds(rounds, params, faults, self._agreement_group)
        # If no_sync() has kept gradients on any rank, this rank sends its own gradients, or zeros.
        while rounds.n_ended < agreement.n_rounds:
            self._finish_round()
        unused = set()  # on all ranks
        for param, is_used in zip(params, agreement.are_used):
            if not is_used and id(param) not in rounds.ids_with_zeros:
                unused.add(param)
        # A parameter that no rank has used isn't updated, because its main parameter has no gradient.
        for param in rounds.unused_params | unused:
            bucket = self.bucket_of[param]
            if param in bucket.main_params:
                bucket.main_params[param].grad = None if param in unused else bucket.main_grads[param]
        rounds.unused_params = unused
        rounds.is_synced = True
        if self.find_unused_parameters:
            rounds.ids_with_grad.update(id(param) for param in params if param not in unused)
        return agreement.worst_faults

    def _take_model_changes(self):
        """Wait for the parameters, and update main parameters if other code has written into the model."""
        for bucket in self.buckets:
            bucket.finish_param_sync()
            bucket.take_model_changes()

    def sync_params(self):
        """Send the updated parameters as the core does, and count rounds anew."""
        super().sync_params()
        self._rounds.start()

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        """Drop the gradients, including those already sent.

        Gradients become None, whatever `set_to_none` says. As in torch, `set_to_none` matters for a parameter that is
        unused in the next step: True skips the parameter, False updates it by a gradient of zeros.

        Collective after a backward pass, because messages that were sent must be received. If a rank has run no
        backward pass, or if its pass has failed before the first gradient, the other ranks wait for this rank.
        """
        rounds = self._rounds
        if rounds.ids_waiting or rounds.went_backward:
            self._agree({})  # so that every rank sends, and receives, the same rounds
        rounds.start()
        rounds.zero(rounds.ids_with_grad, set_to_none)
        with torch._C.DisableTorchFunctionSubclass():  # zero_grad() reads no element, so it needn't wait
            super().zero_grad(set_to_none)

    @torch.no_grad()
    def _drop_grads(self, params, set_to_none):
        """Drop the gradients that were sent, if `model.zero_grad()` was called for all of them. Else note them as lost.

        guard/dropping.py calls this method with the module's parameters. The method waits for gradients in flight. In
        the next step the ranks compare how many rounds were dropped.
        """
        rounds = self._rounds
        ids = set(map(id, params))
        rounds.zero(ids, set_to_none)
        others_have_grads = any(param.grad is not None for param in all_params(self) if id(param) not in ids)
        if others_have_grads or rounds.ids_sent - ids:  # gradients of parameters outside of `params` must stay
            rounds.ids_lost |= rounds.ids_sent & ids
        elif rounds.ids_sent or rounds.is_open:
            if rounds.is_open:  # a pass that failed
                self._finish_round()
            rounds.drop()
            super().zero_grad()
            for bucket in self.buckets:  # a step may follow without another round, and must find zeros
                bucket.gradient.shard.zero_()

    # ----------------------------------------------------------------------------------------- parameters, and the end

    def _is_moved(self, param):
        """Return whether other code has replaced the parameter's data. guard/scaling.py calls this method."""
        return any(param is moved for moved in self.bucket_of[param].moved_params())

    def prefetch_params(self, model: torch.nn.Module) -> list:
        """Let `step` return before the parameters arrive. A module of `model` waits for its parameters when called.

        Other code that reads a parameter waits for it too. On a GPU only the stream of the first reader waits: if
        other streams read parameters, call `finish_param_sync()` right after `step`.

        Returns the handles of the new hooks. To undo this, call remove() of each handle.
        """
        self.prefetching = True
        return [module.register_forward_pre_hook(wait_for_own, prepend=True) for module in model.modules()
                if wait_for_own not in module._forward_pre_hooks.values()]

    def _owned_ranges(self):
        """Yield (parameter, start, stop, main): `main` is the main parameter of its elements from start to stop."""
        for bucket in self.buckets:
            # Ranges and main parameters are in the same order.
            for r, (param, main) in zip(bucket.ranges, bucket.main_params.items()):
                yield param, r.start, r.stop, main

    def _buffers_in_words(self):
        """Return a text for repr()."""
        return f"; buckets: {len(self.buckets)}, with buffers of {self.bucket_buffer_bytes:,} bytes"

    @property
    def bucket_buffer_bytes(self):
        """Return the bytes of the buffers in which gradients are sent and received."""
        buffers = [*self.idle, *self.travelling]
        # A set, because a buffer may receive where it has sent.
        memories = {memory for buffer in buffers for memory in (buffer.sent, buffer.received)}
        return sum(memory.nbytes for memory in memories)

    def move_to(self, process_group):
        """Give up this rank's shards, and take the shards of its new rank in `process_group`, without state."""
        for handle, _ in self._watched.values():  # values: (handle of our hook, torch's dict of hooks)
            handle.remove()
        for collection in (self._watched, self.bucket_of, self.buckets, self.queue, self.idle):
            collection.clear()
        self._move_to(process_group)

    def __del__(self):
        """Finish what is in flight, so that a program may drop the optimizer at any time."""
        if "buckets" in self.__dict__:  # the constructor got so far
            keep_under_way(self.travelling, self.buckets)
