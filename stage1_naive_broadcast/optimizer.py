"""Stage 1, naive broadcast: every parameter has one owner, which steps it and broadcasts the result.

Unlike plain data parallelism: the optimizer's state exists once, not once a rank.
Source of the idea: ZeRO-1 (Rajbhandari et al. 2020, arXiv:1910.02054), in the form of fairscale's OSS.
"""

import contextlib

import torch
import torch.distributed as dist

from .checks import all_params, checked_groups, param_ids, refuse_edited
from .inner import OptimizerWrapper, check_divisible, hook_gradient, optimizer_factory


class DistributedOptimizer(OptimizerWrapper):
    """A torch optimizer whose state is spread over the d ranks of `process_group`, 1/d on average.

    The training loop is the one of any torch optimizer. Gradients are averaged over the ranks inside `step`; on
    construction the parameters are broadcast from rank 0, as DistributedDataParallel does, but not the model's buffers.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer; one device, one dtype.
        optimizer_cls: any torch optimizer class, fused where torch has that, except SGD.
        process_group: the ranks that share the work; None is all of them.
        average_gradients: False beneath DistributedDataParallel, which has averaged the gradients already.
        optimizer_kwargs: lr, weight_decay and so on, for `optimizer_cls`.

    Raises:
        RuntimeError, TypeError, ValueError: see `checks.checked_groups`; on every rank, before anything is changed.
        ValueError: `optimizer_cls` steps all tensors together, as L-BFGS does: those of a rank would step differently.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, average_gradients=True,
                 **optimizer_kwargs):
        settings = {"optimizer_cls": optimizer_cls, "average_gradients": average_gradients, **optimizer_kwargs}
        groups = checked_groups(params, process_group, one_dtype=True, settings=settings)
        self.make_optimizer = optimizer_factory(optimizer_cls, groups[0]["params"][0], optimizer_kwargs)
        check_divisible(self.make_optimizer, groups, elementwise=False)
        self.process_group = process_group
        self.rank = dist.get_rank(process_group)
        self.world_size = dist.get_world_size(process_group)
        self.average_gradients = average_gradients
        self.grads_synced = False
        self.shards = [[] for _ in range(self.world_size)]  # shards[r]: the parameters that rank r owns
        self.optimizer = self.make_optimizer([{"params": []}])  # steps what this rank owns
        self.optimizer.param_groups.clear()
        super().__init__(groups, self.optimizer.defaults)  # calls add_param_group for each group

    @torch.no_grad()
    def add_param_group(self, param_group):
        """Add a group with its own hyperparameters. Collective; raises what the constructor raises."""
        (param_group,) = checked_groups([param_group], self.process_group, self.param_groups, one_dtype=True)
        check_divisible(self.make_optimizer, [param_group], elementwise=False)
        super().add_param_group(param_group)
        self.known_params = param_ids(self.param_groups)
        self.grads_synced = False  # what the new ones have in param.grad is local
        params = self.param_groups[-1]["params"]
        for param in params:
            self._broadcast([param], src=0)
            hook_gradient(param, self._on_grad_ready)
        numels = [sum(param.numel() for param in shard) for shard in self.shards]
        for param in sorted(params, key=torch.Tensor.numel, reverse=True):
            owner = numels.index(min(numels))
            self.shards[owner].append(param)
            numels[owner] += param.numel()
        owned = {id(param) for param in self.shards[self.rank]}
        self._add_to_inner(self.param_groups[-1], [param for param in params if id(param) in owned])

    @torch.no_grad()
    def step(self, closure=None, *, grad_scaler=None):
        """Average the gradients, step the parameters that this rank owns, broadcast every rank's. Collective.

        Returns the loss of `closure`, averaged over the ranks, or None. torch.amp.GradScaler.step passes itself in, as
        `grad_scaler`: an inf or nan on any rank makes every rank skip the step, and lower its scale.

        Raises:
            RuntimeError: the parameters in `param_groups` are not those that were added.
        """
        refuse_edited(self.param_groups, self.known_params)
        loss = self._closure_loss(closure)
        self.finish_grad_sync()
        if self._found_inf(grad_scaler):
            self.grads_synced = False
            return loss
        self.pass_on_hyperparameters()
        self.optimizer.step()
        self._take_back_hyperparameters()
        for rank, shard in enumerate(self.shards):
            self._broadcast(shard, src=rank)
        self.grads_synced = False
        return loss

    @torch.no_grad()
    def finish_grad_sync(self):
        """Average the gradients over the ranks, in place. Idempotent; `step` and `clip_grad_norm_` call it. Collective.

        A gradient that is missing on some ranks counts as zero there; one that is missing on all of them stays None.
        Sparse gradients become dense.
        """
        if self.grads_synced or not self.average_gradients:
            return
        params = all_params(self)  # frozen ones too: maybe only here
        grads = [dense_grad(param) for param in params]
        used = torch.tensor([param.grad is not None for param in params])
        flat = torch.cat([*(grad.reshape(-1) for grad in grads), used.to(grads[0])])  # (numel + one flag a parameter,)
        flat[: -len(params)] /= self.world_size  # before the sum, which might be too large for 16 bits
        dist.all_reduce(flat, group=self.process_group)
        flat, used = flat.split([flat.numel() - len(params), len(params)])
        for param, grad, mean, n_users in zip(params, grads, split_like(flat, params), used.tolist()):
            if n_users:
                param.grad = grad.copy_(mean)
        self.grads_synced = True

    def zero_grad(self, set_to_none=True):
        """Forget the gradients, averaged or not.

        After `clip_grad_norm_`, `model.zero_grad()` isn't enough: gradients that are assigned by hand then are not
        averaged, and where a backward pass follows on some ranks only, they wait for the others.
        """
        super().zero_grad(set_to_none)
        self.grads_synced = False

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Scale the averaged gradients of the whole model to a norm of at most `max_norm`. Returns that before, ()."""
        self.finish_grad_sync()
        return torch.nn.utils.clip_grad_norm_(all_params(self), max_norm, norm_type)

    def no_sync(self):
        """Accumulate gradients without communication: here nothing travels before `step` anyway."""
        return contextlib.nullcontext()

    def state_dict(self):
        """This rank's part of the state, without communication: to be loaded on the same rank of as many.

        Raises:
            ValueError: somebody has put into `state` what is of no tensor that this rank steps.
        """
        return {**self._inner_state_dict(), "rank": self.rank, "world_size": self.world_size}

    def load_state_dict(self, state_dict):
        """Take over what `state_dict` returned on this rank, without communication.

        Raises:
            ValueError: it was made by another rank, or on another number of ranks.
        """
        made_by, here = (state_dict.get("rank"), state_dict.get("world_size")), (self.rank, self.world_size)
        if made_by != here:
            raise ValueError(f"this state_dict is of (rank, world size) {made_by}, this is {here}")
        self.optimizer.load_state_dict(state_dict)
        self._take_back_hyperparameters()

    def _broadcast(self, params, src):
        """Replace `params` by those of rank `src`: flatten, broadcast, copy back."""
        if params:
            flat = torch.cat([param.reshape(-1) for param in params])
            dist.broadcast(flat, group=self.process_group, group_src=src)
            for param, piece in zip(params, split_like(flat, params)):
                param.copy_(piece)

    def _on_grad_ready(self, param):
        self.grads_synced = False  # a backward pass after finish_grad_sync: what it added is local


def dense_grad(param):
    """The gradient of `param`, or zeros, in the layout of `param`: fused kernels don't look at strides."""
    if param.grad is None:
        return torch.zeros_like(param)
    grad = param.grad.to_dense()  # itself unless it is sparse
    alike = grad.stride() == param.stride() and grad.dtype == param.dtype
    return grad if alike else torch.empty_like(param).copy_(grad)


def split_like(flat, params):
    """Cut `flat`, (sum of numels,), into views shaped like `params`."""
    pieces = flat.split([param.numel() for param in params])
    return [piece.view(param.shape) for piece, param in zip(pieces, params)]
