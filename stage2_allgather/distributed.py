"""The class to rely on: the core of optimizer.py, made robust by guard/, the checks that all stages share."""

from guard.whole_params import OfWholeParams

from .optimizer import ShardedOptimizer


class DistributedOptimizer(OfWholeParams, ShardedOptimizer):
    """A torch optimizer whose state is spread over the d ranks of `process_group`, 1/d on average.

    Use it in the same training loop as any torch optimizer; `step` averages the gradients over the ranks. The
    constructor broadcasts the parameters from rank 0, as DistributedDataParallel does, but not the model's buffers.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer; one device, one dtype.
        optimizer_cls: any torch optimizer class that updates each tensor by itself.
        process_group: the ranks that share the work; None means all ranks.
        average_over: a number by which the sum of gradients is divided, or a process group whose size is this number.
            None means `process_group`. For experts, see docs/experts.md.
        average_gradients: False beneath DistributedDataParallel, which has averaged the gradients already.
        optimizer_kwargs: lr, weight_decay, fused and so on, for `optimizer_cls`.

    Raises:
        RuntimeError, TypeError, ValueError: see guard.refuse.checked_groups. Raised on every rank, before anything is
            changed.
        ValueError: `optimizer_cls` updates all tensors together, as L-BFGS does, so it would update a rank's share of
            them differently.
    """

    _stage = 2  # for repr()
