"""The class to rely on: the core of optimizer.py, made robust by guard/, which all stages share, and by grads.py.

The core, the optimizer without checks, has one buffer (buffer.py) for the gradients of all parameters of one dtype. Its
attribute `holds` says what is in it now. The inner optimizer, torch's, steps *main parameters*: the ranges of
parameters that this rank owns, or fp32 copies of them if they have 16 bits. Guarded, the base class from guard/, has
the checks, and calls the methods that begin with an underscore. `super()` is the core, here and in Guarded.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from guard.guarded import Guarded
from guard.probe import check_elementwise

from .buffer import Holds
from .grads import GuardedBuffer
from .optimizer import ShardedOptimizer


class DistributedOptimizer(Guarded, ShardedOptimizer):
    """A torch optimizer whose state is spread over the d ranks of `process_group`, about 1/d on each.

    Use it in the same training loop as any torch optimizer; `step` averages the gradients over the ranks. The
    constructor broadcasts the parameters from rank 0, as DistributedDataParallel does, but not the model's buffers.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer; contiguous, one device.
        optimizer_cls: an element-wise torch optimizer class, which updates each element independently of all others.
        process_group: the ranks that share the work; None means all ranks.
        average_over: a number by which the sum of gradients is divided, or a process group whose size is this number.
            None means `process_group`. For experts, see docs/experts.md.
        grad_dtype: torch.float32 sums the gradients of 16-bit parameters in fp32, in `param.main_grad`; None keeps
            gradients in the dtype of their parameter, in `param.grad`. Both are views of the buffer.
        optimizer_kwargs: lr, weight_decay, fused and so on, for `optimizer_cls`.

    Raises:
        RuntimeError, TypeError, ValueError: see guard.refuse.checked_groups. Raised on every rank, before anything is
            changed.
        ValueError: `optimizer_cls` is not element-wise, so it would update shards differently; or the gradients of
            some parameters can't be kept in `grad_dtype`.
    """

    # Guarded and the core read these.
    _stage = 3  # for repr()
    buffer_class = GuardedBuffer
    _probe = staticmethod(check_elementwise)  # raises an error if `optimizer_cls` isn't element-wise

    def __init__(self, params: ParamsT, optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
                 process_group: dist.ProcessGroup | None = None, average_over: dist.ProcessGroup | float | None = None,
                 grad_dtype: torch.dtype | None = None, **optimizer_kwargs: Any) -> None:
        self.grad_dtype = grad_dtype
        # Guarded checks the arguments before the core's constructor, and notes afterwards what the core has made.
        groups = self._prepare(params, optimizer_cls, process_group, average_over, optimizer_kwargs,
                               grad_dtype=grad_dtype)
        super().__init__(groups, optimizer_cls, process_group=process_group, grad_dtype=grad_dtype, **optimizer_kwargs)
        self._note_shards()

    def _refuse(self, named):
        """Refuse a `grad_dtype` that a parameter can't have. Return `named`, a list of (name, parameter)."""
        for name, param in named:
            fp32_or_none = torch.float32 if param.dtype.itemsize <= 2 else None
            if self.grad_dtype not in (None, param.dtype, fp32_or_none):
                raise ValueError(f"parameter {name} is {param.dtype}: its gradients can't be kept in {self.grad_dtype}")
        return named

    @property
    def has_grads(self):
        """Return whether this rank is between backward() and step()."""
        return any(buffer.holds in (Holds.GRADS, Holds.GRAD_SHARD) for buffer in self.buffers)

    @property
    def _grads_elsewhere(self):
        """Return whether gradients are in `param.main_grad`, and not in `param.grad`."""
        return any(buffer.uses_param_main_grad for buffer in self.buffers)

    def _before_average(self, arguments):
        """Refuse gradients that come too late. Return whether the gradients aren't averaged yet.

        Guarded calls this method before a step, clip_grad_norm_() and finish_grad_sync(), with the arguments of that
        call, which this stage doesn't need.
        """
        for buffer in self.buffers:
            buffer.refuse_changes(self.param_groups)
        return not any(buffer.holds is Holds.GRAD_SHARD for buffer in self.buffers)

    def _take_model_changes(self):
        """Update main parameters if a program has written into the model's parameters."""
        for buffer in self.buffers:
            buffer.take_model_changes()

    def _owned_ranges(self):
        """Yield (parameter, start, stop, main): `main` is the main parameter of its elements from start to stop."""
        for buffer in self.buffers:
            for r, main in zip(buffer.ranges, buffer.main_params):
                yield buffer.params[r.index], r.start, r.stop, main

    def move_to(self, process_group):
        """Give up this rank's shards, and take the shards of its new rank in `process_group`, without state."""
        for buffer in self.buffers:
            buffer.let_go()  # removes the views of the buffer from `param.grad`
        self.buffers.clear()
        self._move_to(process_group)
