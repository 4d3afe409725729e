"""The class to rely on: the core of optimizer.py, and around it what users meet: guard/, and grads.py here."""

from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from guard.amp import Scaled
from guard.clip import Clipped
from guard.modes import Modes
from guard.pieces import StateOfPieces
from guard.probe import check_elementwise
from guard.refuse import not_contiguous, refuse_dtensors
from guard.wrap import Wrapper

from .grads import AnyGrads
from .optimizer import ShardedOptimizer


class DistributedOptimizer(AnyGrads, Clipped, Scaled, Modes, StateOfPieces, Wrapper, ShardedOptimizer):
    """A torch optimizer whose state is spread over the d ranks of `process_group`, about 1/d on each.

    The training loop is the one of any torch optimizer. Gradients are averaged over the ranks inside `step`; on
    construction the parameters are broadcast from rank 0, as DistributedDataParallel does, but not the model's buffers.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer; contiguous, one device.
        optimizer_cls: an element-wise torch optimizer class.
        process_group: the ranks that share the work; None is all of them.
        grad_dtype: torch.float32 sums the gradients of 16-bit parameters in fp32, in `param.main_grad`; None keeps
            them in the dtype of their parameter, in `param.grad`. Either is a view of the buffer.
        optimizer_kwargs: lr, weight_decay, fused and so on, for `optimizer_cls`.

    Raises:
        RuntimeError, TypeError, ValueError: see guard.refuse.checked_groups; on every rank, before anything is changed.
        ValueError: `optimizer_cls` is not element-wise, so that shards would be stepped differently; or the gradients
            of some parameters can't be kept in `grad_dtype`.
    """

    _probe = staticmethod(check_elementwise)

    def __init__(self, params: ParamsT, optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
                 process_group: dist.ProcessGroup | None = None, grad_dtype: torch.dtype | None = None,
                 **optimizer_kwargs: Any) -> None:
        self.grad_dtype = grad_dtype
        groups = self._prepare(params, optimizer_cls, process_group, optimizer_kwargs, grad_dtype=grad_dtype)
        super().__init__(groups, optimizer_cls, process_group=process_group, grad_dtype=grad_dtype, **optimizer_kwargs)

    def _refuse(self, named):
        """What the buffer can't hold, gradients and parameters in turn, or main parameters can't take. -> `named`"""
        refuse_dtensors(named)
        for name, param in named:
            if not param.is_contiguous():
                raise not_contiguous(name, param)
            if self.grad_dtype not in (None, param.dtype, torch.float32 if param.dtype.itemsize <= 2 else None):
                raise ValueError(f"parameter {name} is {param.dtype}: its gradients can't be kept in {self.grad_dtype}")
        return named
