"""What makes the core an optimizer that one can rely on, one file a concern. The idea is in ../optimizer.py."""

import functools

import torch

from ..optimizer import ShardedOptimizer
from .amp import Scaled
from .carried import ComparesSettings
from .clip import Clipped
from .dtensor import refuse_dtensors
from .grads import AnyGrads
from .modes import Modes
from .pieces import StateOfPieces
from .probe import check_elementwise
from .refuse import checked_groups, not_contiguous
from .unscale import RefusesUnscale
from .wrap import Wrapper


class DistributedOptimizer(ComparesSettings, AnyGrads, Clipped, RefusesUnscale, Scaled, Modes, StateOfPieces, Wrapper,
                           ShardedOptimizer):
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
        RuntimeError, TypeError, ValueError: see `refuse.checked_groups`; on every rank, before anything is changed.
        ValueError: `optimizer_cls` is not element-wise, so that shards would be stepped differently; or the gradients
            of some parameters can't be kept in `grad_dtype`.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, grad_dtype=None,
                 **optimizer_kwargs):
        self.make_optimizer = functools.partial(optimizer_cls, **optimizer_kwargs)
        self.process_group, self.grad_dtype = process_group, grad_dtype
        settings = {"optimizer_cls": optimizer_cls, "grad_dtype": grad_dtype, **optimizer_kwargs}
        groups = self.checked(params, settings=settings)
        self.join(process_group)
        super().__init__(groups, optimizer_cls, process_group=process_group, grad_dtype=grad_dtype, **optimizer_kwargs)

    def checked(self, params, existing=(), settings=None):
        groups = checked_groups(params, self.process_group, existing, refuse=self.refuse, settings=settings)
        check_elementwise(self.make_optimizer, groups)
        return groups

    def refuse(self, named):
        """What the buffer can't hold, gradients and parameters in turn, or main parameters can't take. -> `named`"""
        refuse_dtensors(named)
        for name, param in named:
            if not param.is_contiguous():
                raise not_contiguous(name, param)
            if self.grad_dtype not in (None, param.dtype) and (
                self.grad_dtype is not torch.float32 or param.dtype.itemsize > 2
            ):
                raise ValueError(f"parameter {name} is {param.dtype}: its gradients can't be kept in {self.grad_dtype}")
        return named
