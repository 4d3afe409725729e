"""The class to rely on: the core of optimizer.py, and around it what users meet: guard/."""

from guard.whole_params import OfWholeParams

from .optimizer import ShardedOptimizer


class DistributedOptimizer(OfWholeParams, ShardedOptimizer):
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
        RuntimeError, TypeError, ValueError: see guard.refuse.checked_groups; on every rank, before anything is changed.
        ValueError: `optimizer_cls` steps all tensors together, as L-BFGS does: those of a rank would step differently.
    """
