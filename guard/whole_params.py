"""What the optimizers of stages 1 and 2 do around their cores: the two stages in which a rank updates whole parameters.

A *stage* is a version of the distributed optimizer, in a folder stage*/. Its *core*, a class with the algorithm alone,
averages the gradients, updates the parameters that this rank owns by an *inner optimizer* such as torch's AdamW, and
sends them to all ranks. `Guarded` in guarded.py, the base class here, calls the core's methods, and the methods of this
class; its docstring says what `_refuse`, `_watch_shards` and so on are for.

Gradients may be missing on some ranks, may be sparse, or may have other strides than their parameters. If the model is
in DDP, gradients are averaged already. A gradient that is missing on some ranks counts as zero there. If a gradient is
missing on all ranks, it stays None, and the parameter isn't updated. Shown by
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
    """A base class of the DistributedOptimizers of stages 1 and 2. Their second base class is the core.

    average_gradients: False if gradients are averaged already, because the model is in DDP.
    """

    _probe = staticmethod(check_one_by_one)
    has_grads = _grads_elsewhere = False  # because all gradients are in param.grad
    _takes_channels_last = True
    _grads_synced = False  # whether every param.grad is an average now

    def __init__(self, params: ParamsT, optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
                 process_group: dist.ProcessGroup | None = None, average_over: dist.ProcessGroup | float | None = None,
                 average_gradients: bool = True, **optimizer_kwargs: Any) -> None:
        self.average_gradients = average_gradients
        groups = self._prepare(params, optimizer_cls, process_group, average_over, optimizer_kwargs,
                               average_gradients=average_gradients)
        super().__init__(groups, optimizer_cls, process_group=process_group, **optimizer_kwargs)
        self._note_shards()

    def _refuse(self, named):
        """Refuse several dtypes, because the core copies all gradients into one flat tensor. Return `named`.

        named: [(name, parameter), …]
        """
        if self._grads_synced:  # a group is added, and all gradients will be averaged, also those that are averages now
            self._refuse_late_backward()
        if self.average_over is not None and not self.average_gradients:
            raise ValueError("average_over is for average_gradients=True: DDP has divided the gradients already")
        first_name, first = named[0]
        for name, param in named:
            if param.dtype != first.dtype:
                raise ValueError(f"parameter {name} is {param.dtype}, {first_name} is {first.dtype}: use one dtype")
        return named

    def _watch_shards(self, groups):
        """Hook the gradients of the parameters of new groups."""
        self._grads_synced = False  # the gradients of new parameters are this rank's own
        for group in groups:
            for param in group["params"]:
                hook_gradient(param, self._on_grad_ready)

    def _on_grad_ready(self, param):
        """Note that gradients aren't averages any more. autograd calls this when `param.grad` is complete."""
        if self._grads_synced:
            self._refuse_late_backward()
        self._grads_synced = False  # a backward pass after the average has added gradients of this rank

    @property
    def _param_grad_holds(self):
        """Return what is in `param.grad`: "averages", or "own" gradients of this rank. scaling.py reads it."""
        return "averages" if self._grads_synced or not self.average_gradients else "own"

    def _before_average(self, arguments):
        """Return whether gradients have to be averaged, because neither DDP nor `average` has averaged them."""
        return self.average_gradients and not self._grads_synced

    def average(self, present_grads):
        """Average the gradients of all parameters. A gradient that is missing on all ranks stays None.

        The core's `sync_grads` calls this method, with the gradients that this rank has. They are not enough here: a
        rank on which a gradient is missing must send zeros for it.
        """
        if self._grads_synced or not self.average_gradients:
            return
        params = all_params(self)  # frozen parameters, too: other ranks may not have frozen them
        grads = [dense_grad(param) for param in params]
        # A flag for each parameter, a number in the dtype of gradients: 1 if this rank has a gradient of the parameter.
        # After the average a flag above 0 says that at least one rank has a gradient of it.
        flags = torch.tensor([param.grad is not None for param in params]).to(grads[0])
        super().average([*grads, flags])  # writes the averages into these tensors
        for param, grad, flag in zip(params, grads, flags.tolist()):
            if flag > 0:
                param.grad = grad
        self._grads_synced = True

    def _total_norm(self, norm_type):
        """Return the norm of all gradients. It needs no communication, because each rank has all averaged gradients."""
        grads = [param.grad for param in all_params(self) if param.grad is not None]
        return torch.nn.utils.get_total_norm(grads, norm_type)

    _averaged_params = all_params  # a method: all parameters of `self`

    def _take_model_changes(self):
        """Do nothing: the optimizer updates the model's own parameters, so there are no copies."""

    def sync_params(self):
        """Send updated parameters as the core does. Then the step is over, and the next gradients won't be averages.

        `_leaves_grads`: whether the class of the inner optimizer leaves gradients as they are. refuse.py sets it.
        """
        super().sync_params()
        if self._leaves_grads:
            self._grads_synced = False
        else:  # the class has dropped the gradients of the parameters that this rank owns: drop all others, too
            self.zero_grad()

    def zero_grad(self, set_to_none=True):
        """Drop the gradients, whether they are averaged or not."""
        super().zero_grad(set_to_none)
        self._grads_synced = False

    def _drop_grads(self, params, set_to_none):
        """Note, if no gradient is left, that the next gradients won't be averages.

        model.zero_grad() calls this after it has dropped the gradients of `params`.
        """
        if all(param.grad is None for param in all_params(self)):
            self._grads_synced = False

    def _stepped_as(self, param):
        """Return the (shape, dtype) that schema.py steps on trial in place of `param`: its own."""
        return param.shape, param.dtype

    def _owned_ranges(self):
        """Return [(param, start, stop, main), …]: this rank updates elements start:stop of flat `param`, as `main`.

        Here these are all elements of the parameters that this rank owns. `shards` is the core's list, by rank.
        """
        return [(param, 0, param.numel(), param) for param in self.shards[self.rank]]


def dense_grad(param):
    """Return the gradient of `param`, dense and with the strides of `param`, or zeros if there is no gradient.

    A fused kernel ignores strides, so with other strides it would combine elements with other elements' gradients.
    """
    if param.grad is None:
        return torch.zeros_like(param)
    grad = param.grad.to_dense()  # the gradient itself, unless it is sparse
    is_alike = grad.stride() == param.stride() and grad.dtype == param.dtype
    return grad if is_alike else torch.empty_like(param).copy_(grad)
