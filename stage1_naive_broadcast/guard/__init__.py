"""What makes the core an optimizer that one can rely on, one file a concern. The idea is in ../optimizer.py."""

import functools

import torch

from ..optimizer import ShardedOptimizer
from .amp import Scaled
from .dtensor import refuse_dtensors
from .grads import AnyGrads
from .modes import Modes
from .pieces import WholeState
from .probe import check_divisible
from .refuse import checked_groups
from .strides import Restrided
from .wrap import Wrapper


class DistributedOptimizer(Restrided, AnyGrads, Scaled, Modes, WholeState, Wrapper, ShardedOptimizer):
    """A torch optimizer whose state is spread over the d ranks of `process_group`, 1/d on average.

    The training loop is the one of any torch optimizer. Gradients are averaged over the ranks inside `step`; on
    construction the parameters are broadcast from rank 0, as DistributedDataParallel does, but not the model's buffers.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer; one device, one dtype.
        optimizer_cls: any torch optimizer class that steps each tensor by itself.
        process_group: the ranks that share the work; None is all of them.
        average_gradients: False beneath DistributedDataParallel, which has averaged the gradients already.
        optimizer_kwargs: lr, weight_decay, fused and so on, for `optimizer_cls`.

    Raises:
        RuntimeError, TypeError, ValueError: see `refuse.checked_groups`; on every rank, before anything is changed.
        ValueError: `optimizer_cls` steps all tensors together, as L-BFGS does: those of a rank would step differently.
    """

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, average_gradients=True,
                 **optimizer_kwargs):
        self.make_optimizer = functools.partial(optimizer_cls, **optimizer_kwargs)
        self.process_group, self.average_gradients = process_group, average_gradients
        settings = {"optimizer_cls": optimizer_cls, "average_gradients": average_gradients, **optimizer_kwargs}
        groups = self.checked(params, settings=settings)
        super().__init__(groups, optimizer_cls, process_group=process_group, **optimizer_kwargs)

    def checked(self, params, existing=(), settings=None):
        groups = checked_groups(params, self.process_group, existing, refuse=refuse_unlike, settings=settings)
        check_divisible(self.make_optimizer, groups)
        return groups


def refuse_unlike(named):
    """One flat tensor holds all gradients. -> `named`"""
    refuse_dtensors(named)
    first_name, first = named[0]
    for name, param in named:
        if param.dtype != first.dtype:
            raise ValueError(f"parameter {name} is {param.dtype}, {first_name} is {first.dtype}: use one dtype")
    return named
