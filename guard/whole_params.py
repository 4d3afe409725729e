"""The guard of stages 1 and 2, in which each rank updates whole parameters.

Gradients may be missing on some ranks, sparse, or have other strides. Beneath DDP they are averaged already. A gradient
that is missing on some ranks counts as zero there. If a gradient is missing on all ranks, it stays None, and the
parameter isn't updated. Shown by
tests/stages/test_stages.py, `test_unused_parameters_as_in_ddp_with_find_unused_parameters`,
tests/stages/test_wrappers.py, `test_the_table_of_ddp_around_the_model_says_what_is_so`, and
tests/stages/test_hostile.py, `test_gradients_assigned_by_hand_in_any_layout`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from .groups import all_params
from .guarded import Guarded
from .hooks import hook_gradient
from .probe import check_one_by_one


class OfWholeParams(Guarded):
    _probe = staticmethod(check_one_by_one)
    has_grads = _grads_elsewhere = False  # nothing that param.grad doesn't show
    _takes_channels_last = True
    _grads_synced = False  # whether param.grad holds the average already

    def __init__(self, params: ParamsT, optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
                 process_group: dist.ProcessGroup | None = None, average_over: dist.ProcessGroup | float | None = None,
                 average_gradients: bool = True, **optimizer_kwargs: Any) -> None:
        self.average_gradients = average_gradients
        groups = self._prepare(params, optimizer_cls, process_group, average_over, optimizer_kwargs,
                               average_gradients=average_gradients)
        super().__init__(groups, optimizer_cls, process_group=process_group, **optimizer_kwargs)
        self._note_shards()

    def _refuse(self, named):
        """Refuse several dtypes, because one flat tensor holds all gradients. Return `named`."""
        if self._grads_synced:  # after adding a group, all gradients are averaged again
            self._refuse_late_backward()
        if self.average_over is not None and not self.average_gradients:
            raise ValueError("average_over is for average_gradients=True: DDP has divided the gradients already")
        first_name, first = named[0]
        for name, param in named:
            if param.dtype != first.dtype:
                raise ValueError(f"parameter {name} is {param.dtype}, {first_name} is {first.dtype}: use one dtype")
        return named

    def _watch_shards(self, groups):
        self._grads_synced = False  # gradients of the new parameters are local
        for group in groups:
            for param in group["params"]:
                hook_gradient(param, self._on_grad_ready)

    def _on_grad_ready(self, param):
        if self._grads_synced:
            self._refuse_late_backward()
        self._grads_synced = False  # a backward pass after finish_grad_sync has added local gradients

    @property
    def _param_grad_holds(self):
        return "averages" if self._grads_synced or not self.average_gradients else "own"

    def _before_average(self, arguments):
        return self.average_gradients and not self._grads_synced

    def average(self, present_grads):
        """Average gradients in place, as the core does. A gradient that is missing on all ranks stays None."""
        if self._grads_synced or not self.average_gradients:
            return
        params = all_params(self)  # frozen parameters, too: other ranks may not have frozen them
        grads = [dense_grad(param) for param in params]
        flags = torch.tensor([param.grad is not None for param in params]).to(grads[0])  # 1.0: this rank has a gradient
        super().average([*grads, flags])  # in place; then a flag above 0 says that some rank has a gradient
        for param, grad, flag in zip(params, grads, flags.tolist()):
            if flag > 0:
                param.grad = grad
        self._grads_synced = True

    def _total_norm(self, norm_type):
        """Return the norm without communication, because each rank has all averaged gradients."""
        grads = [param.grad for param in all_params(self) if param.grad is not None]
        return torch.nn.utils.get_total_norm(grads, norm_type)

    _averaged_params = all_params  # a method: all parameters of `self`

    def _take_model_changes(self):
        """Do nothing: the optimizer updates the model's own parameters."""

    def sync_params(self):
        super().sync_params()
        if self._leaves_grads:
            self._grads_synced = False
        else:  # the class drops the gradients of its own parameters: so drop those of the other ranks' parameters
            self.zero_grad()

    def zero_grad(self, set_to_none=True):
        """Drop the gradients, averaged or not."""
        super().zero_grad(set_to_none)
        self._grads_synced = False

    def _drop_grads(self, params, set_to_none):
        """Note that `model.zero_grad()` has dropped all averages: the next gradients aren't averaged."""
        if all(param.grad is None for param in all_params(self)):
            self._grads_synced = False

    def _stepped_as(self, param):
        return param.shape, param.dtype

    def _owned_ranges(self):
        return [(param, 0, param.numel(), param) for param in self.shards[self.rank]]


def dense_grad(param):
    """Return the gradient of `param`, or zeros, with the strides of `param`, because fused kernels ignore strides."""
    if param.grad is None:
        return torch.zeros_like(param)
    grad = param.grad.to_dense()  # returns the tensor itself unless it is sparse
    is_alike = grad.stride() == param.stride() and grad.dtype == param.dtype
    return grad if is_alike else torch.empty_like(param).copy_(grad)
