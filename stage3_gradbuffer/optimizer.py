"""Stage 3, grad buffer: gradients and parameters take turns in one flat buffer, of which every rank owns 1/d.

Unlike stage 2: shards ignore parameter boundaries, a rank receives only the gradients that it steps, and after
the first a step allocates no buffer.
Source of the idea: the distributed optimizer of Megatron-LM.
"""

import contextlib
import functools

import torch
import torch.distributed as dist

from .buffer import GradBuffer, Holds
from .checks import all_params, checked_groups, named_params, param_ids, refuse_edited
from .inner import check_divisible, optimizer_factory
from .pieces import ShardedOptimizer


class DistributedOptimizer(ShardedOptimizer):
    """A torch optimizer whose state is spread over the d ranks of `process_group`, about 1/d on each.

    The training loop is the one of any torch optimizer. Gradients are averaged over the ranks inside `step`; on
    construction the parameters are broadcast from rank 0, as DistributedDataParallel does, but not the model's buffers.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer; one device.
        optimizer_cls: an element-wise torch optimizer class, fused where torch has that, except SGD.
        process_group: the ranks that share the work; None is all of them.
        grad_dtype: torch.float32 sums the gradients of 16-bit parameters in fp32, in `param.main_grad`; None keeps
            them in the dtype of their parameter, in `param.grad`. Either is a view of the buffer.
        optimizer_kwargs: lr, weight_decay and so on, for `optimizer_cls`.

    Raises:
        RuntimeError, TypeError, ValueError: see `checks.checked_groups`; on every rank, before anything is changed.
        ValueError: `optimizer_cls` is not element-wise, so that shards would be stepped differently; or the gradients
            of some parameters can't be kept in `grad_dtype`.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, grad_dtype=None,
                 **optimizer_kwargs):
        settings = {"optimizer_cls": optimizer_cls, "grad_dtype": grad_dtype, **optimizer_kwargs}
        groups = checked_groups(params, process_group, contiguous=True, settings=settings)
        check_grad_dtype(groups, grad_dtype)
        self.make_optimizer = optimizer_factory(optimizer_cls, groups[0]["params"][0], optimizer_kwargs)
        check_divisible(self.make_optimizer, groups, elementwise=True)
        self.process_group = process_group
        self.grad_dtype = grad_dtype
        self.buffers = []  # one for each dtype of parameters, and more after add_param_group
        self.optimizer = self.make_optimizer([{"params": []}])  # steps what this rank owns
        super().__init__(groups, self.optimizer.defaults)  # calls add_param_group for each group
        self.move_to(process_group)

    def add_param_group(self, param_group):
        """Add a group with its own hyperparameters. Collective; raises what the constructor raises."""
        (param_group,) = checked_groups([param_group], self.process_group, self.param_groups, contiguous=True)
        check_grad_dtype([*self.param_groups, param_group], self.grad_dtype)
        check_divisible(self.make_optimizer, [param_group], elementwise=True)
        super().add_param_group(param_group)
        self.known_params = param_ids(self.param_groups)
        if self.buffers:  # not while the constructor runs: it puts all its groups into the same buffers
            self._shard(self.param_groups[-1:])

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        """Reduce-scatter the gradients, step this rank's shard, all-gather the parameters. Collective.

        Returns the loss of `closure`, averaged over the ranks, or None. torch.amp.GradScaler.step passes itself in, as
        `grad_scaler`: an inf or nan on any rank makes every rank skip the step, and lower its scale. Gradients are zero
        afterwards: without a backward pass in between, a second step is one with gradients of zero.

        Raises:
            RuntimeError: the parameters in `param_groups` are not those that were added, or the `data` or `main_grad`
                of one was replaced; on the rank where that is so. Or what `finish_grad_sync` raises.
        """
        refuse_edited(self.param_groups, self.known_params)
        loss = self._closure_loss(closure)
        self.finish_grad_sync()
        if self._found_inf(grad_scaler, elsewhere=any(buffer.in_main_grad for buffer in self.buffers)):
            self.zero_grad()  # model.zero_grad() knows nothing of the inf in the shard
            return loss
        self.pass_on_hyperparameters()
        for buffer in self.buffers:
            buffer.take_model_changes()
        self.optimizer.step()
        self._take_back_hyperparameters()
        for buffer in self.buffers:
            buffer.take_main_params()
            buffer.all_gather_params()
            buffer.copy_params_to_model()
            buffer.zero()
        return loss

    @torch.no_grad()
    def finish_grad_sync(self):
        """Average the gradients: each rank receives its shard. Idempotent; `step` calls it too. Collective.

        `param.grad` is not the gradient any more, from here until `step` or `zero_grad`: to assign one, or to go
        backward, is a RuntimeError. A parameter that received no gradient has a gradient of zero. Whether a frozen
        one is stepped each owner decides by the gradients that it had itself: freeze a layer on all ranks or on none,
        and before backward(). GradScaler.unscale_() must come before this.
        """
        if self.rank < 0:
            raise RuntimeError("this rank is in no process group since reshard(): it has nothing to step")
        for buffer in self.buffers:
            buffer.refuse_new_data(self.param_groups)
        for buffer in self.buffers:
            if buffer.holds in (Holds.ZEROS, Holds.GRADS):
                buffer.collect_grads()
                buffer.reduce_scatter_grads()
                buffer.hand_out_main_grads()
            else:
                buffer.refuse_new_grads(self.param_groups)

    @torch.no_grad()
    def zero_grad(self, set_to_none=True):
        """Set the buffer to zero. Gradients stay views of it, whatever `set_to_none` says.

        `model.zero_grad()` is no substitute after `clip_grad_norm_`, or with `grad_dtype`: it knows nothing of the
        shard, nor of `param.main_grad`.
        """
        for buffer in self.buffers:
            buffer.zero()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the averaged gradients of the whole model to a norm of at most `max_norm`. Returns that before, ()."""
        self.finish_grad_sync()
        total_norm = self._total_norm(norm_type)
        torch.nn.utils.clip_grads_with_norm_(all_params(self.optimizer), max_norm, total_norm)
        return total_norm

    def no_sync(self):
        """Accumulate gradients without communication: here nothing travels before `step` anyway."""
        return contextlib.nullcontext()

    @property
    def has_grads(self):
        """Whether this rank is between backward() and step()."""
        return any(buffer.holds in (Holds.GRADS, Holds.GRAD_SHARD) for buffer in self.buffers)

    def move_to(self, process_group):
        """Give up this rank's shards, if it has any, and take those of its place in `process_group`, without state."""
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)  # -1: in none
        self.world_size = dist.get_world_size(process_group)
        self.optimizer.param_groups.clear()
        self.optimizer.state.clear()
        for buffer in self.buffers:
            buffer.let_go()
        self.buffers = []
        self.main_param = {}  # parameter -> this rank's range of it
        if self.rank >= 0:
            self._shard(self.param_groups)

    @property
    def sharded_params(self):
        """Where this rank's part of the parameters is: objects like GradBuffer, for `pieces`."""
        return self.buffers

    @torch.no_grad()
    def _shard(self, groups):
        """Put the parameters of `groups` into buffers, and this rank's ranges of them into the inner optimizer."""
        params = [param for group in groups for param in group["params"]]
        for param in params:
            dist.broadcast(param, group=self.process_group, group_src=0)
        torch.autograd.graph.increment_version(params)  # autograd saw nothing: a graph that has read the old is refused
        for dtype in dict.fromkeys(param.dtype for param in params):
            same = [param for param in params if param.dtype == dtype]
            buffer = GradBuffer(same, self.grad_dtype or dtype, self.process_group)
            self.main_param.update((same[r.index], main) for r, main in zip(buffer.ranges, buffer.main_params))
            self.buffers.append(buffer)
        for group in groups:
            self._add_to_inner(group, [self.main_param[p] for p in group["params"] if p in self.main_param])

    def _total_norm(self, norm_type):
        """The norm over the gradients of all shards: that of the norms of all ranks."""
        grads = [param.grad for param in all_params(self.optimizer) if param.grad is not None]
        dtype = functools.reduce(torch.promote_types, [buffer.flat.dtype for buffer in self.buffers], torch.float32)
        norm = torch.nn.utils.get_total_norm(grads, norm_type).to(self.buffers[0].flat.device, dtype)
        return torch.linalg.vector_norm(gather_scalar(norm, self.process_group), float(norm_type))


def check_grad_dtype(groups, grad_dtype):
    """Refuse what the buffer can't hold, gradients and parameters in turn, and what main parameters can't take."""
    for name, param in named_params(groups):
        if grad_dtype not in (None, param.dtype) and (grad_dtype is not torch.float32 or param.dtype.itemsize > 2):
            raise ValueError(f"parameter {name} is {param.dtype}: its gradients can't be kept in {grad_dtype}")


def gather_scalar(scalar, group):
    """-> that of each rank, (d,). Not reduced on the way: a collective's MAX may lose a nan."""
    everyone = scalar.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(everyone, scalar.view(1), group=group)
    return everyone
