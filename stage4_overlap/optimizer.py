"""Stage 4, overlap: buckets of gradients leave during the backward pass, parameters come back during the next forward.

Unlike stage 3: there is a shard of every bucket, no gradient stays on a rank that doesn't step it, and what travels
does so behind computation.
Source of the idea: Megatron-LLaMA's OverlappedDistributedOptimizer and veScale's overlapped parameter gather.
"""

import contextlib
import functools
import itertools
import math
import weakref
from collections import deque

import torch
import torch.distributed as dist

from .buffer import Bucket, BucketBuffer, ParameterBuffer, bucket_layout
from .checks import all_params, checked_groups, local, named_params, param_ids, refuse_edited, spread_over
from .hooks import Awaited, BackwardPass, ModuleHook
from .inner import check_divisible, has_later_hooks, hook_gradient, optimizer_factory
from .pieces import ShardedOptimizer

# What can be wrong with a gradient, for `_agree_on_used`; 0: nothing. The ranks agree on the largest.
MISSING = 1
LATE = 2  # it was assigned when that of the backward pass had left
MOVED = 3  # its parameter has other memory than this optimizer steps

# Process group -> counter: the messages of each optimizer have a tag of their own, and not one that others might use
TAGS = weakref.WeakKeyDictionary()


class DistributedOptimizer(ShardedOptimizer):
    """A torch optimizer whose state is spread over the d ranks of `process_group`, about 1/d on each.

    The training loop is the one of any torch optimizer. Gradients are averaged over the ranks inside `step`; on
    construction the parameters are broadcast from rank 0, as DistributedDataParallel does, but not the model's buffers.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer; one device. Of a DTensor
            each rank shards what it has, over `process_group`, which must be another dimension of the mesh.
        optimizer_cls: an element-wise torch optimizer class, fused where torch has that, except SGD.
        process_group: the ranks that share the work; None is all of them.
        bucket_cap_mb: size at which a bucket is closed, in MiB; None is 2 on a CPU and 25 on a GPU.
        reduce_dtype: torch.float32 sums 16-bit gradients in fp32 and in rank order on NCCL too, which would sum them
            in 16 bits; on gloo that is so anyway.
        find_unused_parameters: False is an error, on every rank, that names the parameters that received no gradient
            on some rank. True counts them as zero, and skips those that received none on every rank. Which they are may
            depend on the rank and on the micro-batch. All ranks go backward equally often, each time through some.
        optimizer_kwargs: lr, weight_decay and so on, for `optimizer_cls`.

    Raises:
        RuntimeError, TypeError, ValueError: see `checks.checked_groups`; on every rank, before anything is changed.
        ValueError: `optimizer_cls` is not element-wise, so that shards would be stepped differently; or `bucket_cap_mb`
            or `reduce_dtype` is none of the values above.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, bucket_cap_mb=None,
                 reduce_dtype=None, find_unused_parameters=False, **optimizer_kwargs):
        error = None
        if reduce_dtype not in (None, torch.float32):
            error = ValueError(f"reduce_dtype is {reduce_dtype}: it must be torch.float32 or None")
        if bucket_cap_mb is not None and not bucket_cap_mb > 0:
            error = ValueError(f"bucket_cap_mb is {bucket_cap_mb}: it must be more than 0")
        settings = {"optimizer_cls": optimizer_cls, "bucket_cap_mb": bucket_cap_mb, "reduce_dtype": reduce_dtype,
                    "find_unused_parameters": find_unused_parameters, **optimizer_kwargs}
        groups = checked_groups(params, process_group, contiguous=True, dtensors=True, error=error, settings=settings)
        self.make_optimizer = optimizer_factory(optimizer_cls, local(groups[0]["params"][0]), optimizer_kwargs)
        check_divisible(self.make_optimizer, groups, elementwise=True)
        self.process_group = process_group
        self.bucket_cap_mb = bucket_cap_mb
        self.reduce_dtype = reduce_dtype
        self.find_unused_parameters = find_unused_parameters
        self.buckets = []  # in the order in which they leave
        self.hooks = []  # of the parameters
        self.idle, self.travelling = deque(), deque()  # the bucket buffers; those that are under way: the oldest first
        self.next_bucket = 0  # of this round; in a round every bucket leaves once
        self.ready = set()  # ids of the parameters whose gradient has come in this round
        self.accumulating = False  # inside no_sync
        self.prefetching = False
        self._start_accumulation()
        self.optimizer = self.make_optimizer([{"params": []}])  # steps what this rank owns
        super().__init__(groups, self.optimizer.defaults)  # calls add_param_group for each group
        self.move_to(process_group)

    def add_param_group(self, param_group):
        """Add a group with its own hyperparameters. Collective.

        Raises what the constructor raises, and RuntimeError where gradients have left and no step has followed.
        """
        error = None
        if self.n_rounds or self.in_round:
            error = RuntimeError("add_param_group() between backward() and step(): call step() or zero_grad() first")
        (param_group,) = checked_groups(
            [param_group], self.process_group, self.param_groups, contiguous=True, dtensors=True, error=error
        )
        check_divisible(self.make_optimizer, [param_group], elementwise=True)
        super().add_param_group(param_group)
        self.known_params = param_ids(self.param_groups)
        if self.buckets:  # not while the constructor runs: it puts all its groups into the same buckets
            self._shard(self.param_groups[-1:])

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        """Step this rank's shards as their gradients arrive, then all-gather the parameters. Collective.

        Returns the loss of `closure`, averaged over the ranks, or None. torch.amp.GradScaler.step passes itself in, as
        `grad_scaler`: an inf or nan on any rank makes every rank skip the step, and lower its scale. After
        `prefetch_params` it returns while the parameters are still on their way, otherwise when all have arrived.
        Gradients are gone afterwards: a second step without a backward pass in between lacks them.

        Raises:
            RuntimeError: a parameter received no gradient, or one was assigned when that of the backward pass had left,
                or its `data` was replaced; on every rank, except after `clip_grad_norm_`, when the ranks have agreed
                already: then on the rank where that is so. Or the parameters in `param_groups` are not those that were
                added; there too.
        """
        refuse_edited(self.param_groups, self.known_params)
        loss = self._closure_loss(closure)
        self._start_remaining_grad_syncs()
        if self._found_inf(grad_scaler, elsewhere=self.went_backward):
            self.zero_grad()  # model.zero_grad() knows nothing of the inf in the shards
            return loss
        self.pass_on_hyperparameters()
        self.finish_param_sync()  # of buckets that no forward pass has asked for
        for bucket in self.buckets:
            bucket.take_model_changes()
        self._step_arrived()
        while self.travelling:
            self._finish_oldest_grad_sync()
            self._step_arrived()
        self._take_back_hyperparameters()
        for bucket in reversed(self.buckets):  # the order of the forward pass
            bucket.start_param_sync(self.unused)
        if not self.prefetching:
            self.finish_param_sync()
        self._start_accumulation()
        return loss

    @torch.no_grad()
    def finish_grad_sync(self):
        """Average the gradients: each rank receives its shards. Idempotent; `clip_grad_norm_` calls it. Collective.

        Raises what `step` raises about gradients.
        """
        self._start_remaining_grad_syncs()
        self._finish_grad_syncs()
        for bucket in self.buckets:
            bucket.hand_out_grads(self.unused)

    def prefetch_params(self, model):
        """Let `step` return before the parameters arrive: each module of `model` waits for its own when called.

        Whoever else reads a parameter waits for it too. On a GPU it is the stream of the first reader that waits: if
        other streams read parameters, call `finish_param_sync()` right after `step`.

        Returns the handles of the hooks that it has made, for whoever must take them off again, before
        torch.jit.script() say: without them it is only the reading of a parameter that waits.

        Raises:
            TypeError: a module is of TorchScript, which calls no hooks and reads parameters past torch's functions.
        """
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise TypeError(f"module {name or 'model'} is of TorchScript, which can't wait: don't prefetch")
        self.prefetching = True
        handles = []
        for module in model.modules():
            hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, ModuleHook)]
            for hook in hooks:  # made for another optimizer, or earlier for this one
                hook.params = list(module.parameters())  # a layer may have been replaced since
            if not hooks:
                handles.append(module.register_forward_pre_hook(ModuleHook(module), prepend=True))
        return handles

    def finish_param_sync(self):
        """Wait until every parameter has arrived: before torch.tensor(param) say, which sees only memory."""
        for bucket in self.buckets:
            bucket.finish_param_sync()

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        """Forget the gradients, those that have left too, of which `model.zero_grad()` doesn't know.

        They become None, whatever `set_to_none` says: a bucket takes them out as it leaves. Collective after a backward
        pass, which every rank must have had then: what has begun must end, on all of them. A pass that failed before
        its first gradient is none: where that happens on some ranks only, the others wait for them.
        """
        if self.waiting or self.went_backward:
            self._agree_on_used()
        self._finish_grad_syncs()
        super().zero_grad()
        self._start_accumulation()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the averaged gradients of the whole model to a norm of at most `max_norm`. Returns that before, ()."""
        self.finish_grad_sync()
        total_norm = self._total_norm(norm_type)
        torch.nn.utils.clip_grads_with_norm_(all_params(self.optimizer), max_norm, total_norm)
        return total_norm

    @contextlib.contextmanager
    def no_sync(self):
        """Accumulate gradients without communication: whole, in `param.grad`, until a backward pass outside or `step`.

        Without it every micro-batch is reduced into the shards: less memory, more communication, the same result.
        """
        outside, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = outside

    @property
    def has_grads(self):
        """Whether this rank is between backward() and step()."""
        return bool(self.waiting or self.n_rounds or self.in_round)

    def move_to(self, process_group):
        """Give up this rank's shards, if it has any, and take those of its place in `process_group`, without state."""
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)  # -1: in none
        self.world_size = dist.get_world_size(process_group)
        self.optimizer.param_groups.clear()
        self.optimizer.state.clear()
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.buckets, self.idle = [], [], deque()
        self.main_param = {}  # parameter -> this rank's range of it
        if self.rank >= 0:
            self._shard(self.param_groups)

    @property
    def sharded_params(self):
        """Where this rank's part of the parameters is: objects like Bucket, for `pieces`."""
        self.finish_param_sync()
        return self.buckets

    @torch.no_grad()
    def _shard(self, groups):
        """Put the parameters of `groups` into buckets, and this rank's ranges of them into the inner optimizer."""
        params = [param for group in groups for param in group["params"]]
        for param in params:
            self.hooks.append(hook_gradient(param, self._on_grad_ready, takes=True))
            dist.broadcast(local(param), group=self.process_group, group_src=0)
        cap_mb = self.bucket_cap_mb or (25 if params[0].device.type == "cuda" else 2)
        # Of a DTensor the mean over the ranks: what they have of it may differ, and the layout may not.
        sizes = [param.nbytes // math.prod(map(dist.get_world_size, spread_over(param))) for param in params]
        layout = bucket_layout(sizes, [param.dtype for param in params], cap_mb * 2**20)
        buckets = [Bucket([params[i] for i in indices], self.process_group) for indices in layout]
        for dtype in dict.fromkeys(bucket.dtype for bucket in buckets):
            ParameterBuffer([bucket for bucket in buckets if bucket.dtype == dtype])  # they keep its parts
        for bucket in buckets:
            self.main_param.update((bucket.params[r.index], main) for r, main in zip(bucket.ranges, bucket.main_params))
        for group in groups:
            self._add_to_inner(group, [self.main_param[p] for p in group["params"] if p in self.main_param])
        self.buckets += buckets
        tag = next(TAGS.setdefault(self.process_group or dist.group.WORLD, itertools.count(2**30)))
        self.idle = deque(BucketBuffer(self.buckets, self.reduce_dtype, tag) for _ in range(2))

    @property
    def bucket_buffer_bytes(self):
        """Bytes of the buffers that gradients travel in."""
        return sum(buffer.nbytes for buffer in [*self.idle, *self.travelling])

    def _start_accumulation(self):
        """Begin anew with all that is counted between two steps. The sets hold ids of parameters."""
        self.n_rounds = 0  # in which every bucket has left
        self.in_round = False  # whether a backward pass has begun one that isn't finished
        self.went_backward = False  # whether a pass has begun a round since the last step; once agreed: on any rank
        self.backward_pass = None  # a weak reference to the one that is under way
        self.used = set()  # whose gradient, of this rank, has left
        self.waiting = set()  # whose gradient autograd has put into param.grad, and it has not left yet
        self.unused = set()  # which received a gradient on no rank: they are not stepped
        self.grads_synced = False  # whether the ranks have agreed on these, and everything has left
        for bucket in self.buckets:
            bucket.gradient.is_empty = True

    def _on_grad_ready(self, param):
        """The hook of each parameter: buckets leave when they are full, in the same order on every rank."""
        if isinstance(param, Awaited):
            self._raise_stale(param)
        self.grads_synced = False
        self.waiting.add(id(param))
        if self.accumulating:
            return
        if self.backward_pass is None or self.backward_pass() is None:  # this is the first gradient of a pass
            self._end_backward()  # of the one before, if that has failed
            self.backward_pass = weakref.ref(BackwardPass(self._end_backward))
            self.in_round = self.went_backward = True
        later_hooks = has_later_hooks(param)  # of the user's: they see this gradient now, and it leaves with the next
        if later_hooks and self.in_round:
            self.ready.discard(id(param))  # it may have come once before, with a re-entrant checkpoint
            self._start_full_buckets()
        if self.in_round:  # else every bucket has left: what is used again, by a checkpoint, waits for the next one
            self.ready.add(id(param))
            if not later_hooks:
                self._start_full_buckets()

    def _end_backward(self):
        """What a pass has left out leaves as zero, at once: another rank may have it, and wait for this one's."""
        self.backward_pass = None
        if self.in_round:
            self._start_full_buckets(finish_round=True)

    def _raise_stale(self, param):
        name = next(name for name, named in named_params(self.param_groups) if named is param)
        raise RuntimeError(
            f"a gradient has come for parameter {name}, which is still under way: it was read before the last step, or "
            "past torch's functions, by a TorchScript model say: call optimizer.finish_param_sync() after step()"
        )

    def _start_full_buckets(self, finish_round=False):
        """In order; with `finish_round` the rest of a round too, and what is missing counts as zero."""
        for bucket in self.buckets[self.next_bucket :]:
            if not (finish_round or bucket.is_full(self.ready)):
                return
            self._start_last_grad_sync()
            if not self.idle:
                self._finish_oldest_grad_sync()
            self.used.update(id(param) for param in bucket.params if param.grad is not None)
            self.waiting.difference_update(id(param) for param in bucket.params)
            self.idle[0].take_grads(bucket)
            self.travelling.append(self.idle.popleft())
            if bucket is not self.buckets[-1]:
                self.travelling[-1].start_grad_sync()
            self.next_bucket += 1
        self.ready.clear()
        self.next_bucket, self.in_round = 0, False
        self.n_rounds += 1

    def _start_last_grad_sync(self):
        """The last bucket of a round waits until the ranks have agreed to step, or until one of the next round leaves.

        If it left at once the agreement would queue behind it, and nothing could be stepped while it travels.
        """
        if self.travelling and self.travelling[-1].works is None:
            self.travelling[-1].start_grad_sync()

    def _start_remaining_grad_syncs(self):
        """Let every gradient leave. Raises what `step` says about gradients."""
        wrong = self._agree_on_used()
        worst = max(wrong)
        if not worst or worst == MISSING and self.find_unused_parameters:
            return
        self.zero_grad()
        names = [name for (name, _), what in zip(named_params(self.param_groups), wrong) if what == worst]
        if worst == MOVED:
            raise RuntimeError(
                f"the data of parameter {names[0]} was replaced, by model.to(), vector_to_parameters() or another "
                "optimizer, and this one steps the old: write into it with copy_(), or build the optimizer afterwards"
            )
        if worst == LATE:
            raise RuntimeError(
                f"the gradient of parameter {names[0]} was assigned after that of backward() had left: too late, go "
                "backward in no_sync(), and take DDP off the model"
            )
        raise RuntimeError(
            f"no gradient on some rank for parameter {', '.join(names[:9])}{' and others' * (len(names) > 9)}: "
            "call backward() before step(), use it in the loss, freeze it with requires_grad_(False), or pass "
            "find_unused_parameters=True"
        )

    def _agree_on_used(self):
        """Let every gradient leave, and finish as many rounds on each rank.

        -> for each parameter: 0, or MISSING on a rank that asks for a gradient, or LATE, or MOVED.
        """
        params = all_params(self)
        assigned = {id(p) for p in params if p.grad is not None and id(p) not in self.waiting}  # by a user
        wrong = dict.fromkeys(assigned if self.grads_synced else assigned & self.used, LATE)
        wrong.update((id(param), MOVED) for bucket in self.buckets for param in bucket.moved_params())
        if self.grads_synced:  # the other ranks have gone on: there is nobody to agree with
            return [wrong.get(id(param), 0) for param in params]
        if self.rank < 0:
            raise RuntimeError("this rank is in no process group since reshard(): it has nothing to step")
        if self.in_round or not self.n_rounds:
            self._start_full_buckets(finish_round=True)
        kept = any(param.grad is not None for param in params)  # by no_sync, say: it leaves in a round of its own
        used = [id(param) in self.used or param.grad is not None for param in params]
        missing = [MISSING if param.requires_grad and not is_used else 0 for param, is_used in zip(params, used)]
        wrong = [wrong.get(id(param), otherwise) for param, otherwise in zip(params, missing)]
        report = torch.tensor([*used, *wrong, self.went_backward, self.n_rounds + kept], dtype=torch.int32)
        report = report.to(params[0].device)
        dist.all_reduce(report, dist.ReduceOp.MAX, group=self.process_group)
        *report, self.went_backward, n_rounds = report.tolist()
        while self.n_rounds < n_rounds:
            self._start_full_buckets(finish_round=True)
        self._start_last_grad_sync()
        used, wrong = report[: len(params)], report[len(params) :]
        self.unused = {id(param) for param, use in zip(params, used) if not use}
        self.grads_synced = True
        return wrong

    def _finish_oldest_grad_sync(self):
        self.idle.append(self.travelling.popleft())
        self.idle[-1].finish_grad_sync()

    def _finish_grad_syncs(self):
        while self.travelling:
            self._finish_oldest_grad_sync()

    def _step_arrived(self):
        """Step the buckets of which nothing is under way any more."""
        travelling = [buffer.bucket for buffer in self.travelling]
        arrived = [bucket for bucket in self.buckets if not bucket.gradient.is_empty and bucket not in travelling]
        self.optimizer.zero_grad()  # what finish_grad_sync, or the call before this one, has handed out is not stepped
        for bucket in arrived:
            bucket.hand_out_grads(self.unused)
            bucket.gradient.is_empty = True
        self.optimizer.step()

    def _total_norm(self, norm_type):
        """The norm over the gradients of all shards: that of the norms of all ranks, each element counted once."""
        device = self.buckets[0].gradient.shard.device
        dtype = functools.reduce(torch.promote_types, [bucket.gradient.shard.dtype for bucket in self.buckets])
        grads = {spread_over(param): [] for param in all_params(self)}  # by process groups; the same on every rank
        for param, main_param in self.main_param.items():
            if main_param.grad is not None:
                grads[spread_over(param)].append(main_param.grad)
        norms = []
        for tensor_parallel, part in grads.items():
            norm = torch.nn.utils.get_total_norm(part, norm_type).to(device, dtype)
            for group in (self.process_group, *tensor_parallel):  # a DTensor's elements are on the ranks of these too
                norm = torch.linalg.vector_norm(gather_scalar(norm, group), float(norm_type))
            norms.append(norm)
        norm = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        for group in dict.fromkeys(group for tensor_parallel in grads for group in tensor_parallel):
            norm = gather_scalar(norm, group).max()  # shards of unlike sizes round otherwise: copies would drift apart
        return norm


def gather_scalar(scalar, group):
    """-> that of each rank, (d,). Not reduced on the way: a collective's MAX may lose a nan."""
    everyone = scalar.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(everyone, scalar.view(1), group=group)
    return everyone
