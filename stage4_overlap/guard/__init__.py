"""What makes the core an optimizer that one can rely on, one file a concern. The idea is in ../optimizer.py."""

import functools

import torch

from ..buffer import Bucket
from ..optimizer import ShardedOptimizer
from .amp import Scaled
from .awaited import AwaitedBucket, AwaitsReaders
from .buckets import SafeBucket, SafeBuckets
from .clip import Clipped
from .dtensor import LocalBucket, TensorParallel, local_parts
from .modes import Modes
from .pieces import StateOfPieces
from .probe import check_elementwise
from .refuse import checked_groups, not_contiguous
from .rounds import Rounds
from .unscale import RefusesUnscale
from .wrap import Wrapper


class GuardedBucket(AwaitedBucket, LocalBucket, SafeBucket, Bucket):
    pass


class DistributedOptimizer(AwaitsReaders, TensorParallel, Rounds, SafeBuckets, Clipped, RefusesUnscale, Scaled,
                           Modes, StateOfPieces, Wrapper, ShardedOptimizer):
    """A torch optimizer whose state is spread over the d ranks of `process_group`, about 1/d on each.

    The training loop is the one of any torch optimizer. Gradients are averaged over the ranks inside `step`; on
    construction the parameters are broadcast from rank 0, as DistributedDataParallel does, but not the model's buffers.

    Args:
        params: tensors, (name, tensor) pairs or parameter groups, as for any torch optimizer; contiguous, one device.
            Of a DTensor each rank shards what it has, over `process_group`, which must be another dimension of the
            mesh.
        optimizer_cls: an element-wise torch optimizer class.
        process_group: the ranks that share the work; None is all of them.
        bucket_cap_mb: size at which a bucket is closed, in MiB; None is a twentieth of the parameters, from 1 to 25.
        reduce_dtype: torch.float32 sums 16-bit gradients in fp32 and in rank order on NCCL too, which would sum them
            in 16 bits; on gloo that is so anyway.
        find_unused_parameters: False is an error, on every rank, that names the parameters that received no gradient
            on some rank. True counts them as zero, and skips those that received none on every rank. Which they are may
            depend on the rank and on the micro-batch. All ranks go backward equally often, each time through some.
        optimizer_kwargs: lr, weight_decay, fused and so on, for `optimizer_cls`.

    Raises:
        RuntimeError, TypeError, ValueError: see `refuse.checked_groups`; on every rank, before anything is changed.
        ValueError: `optimizer_cls` is not element-wise, so that shards would be stepped differently; or `bucket_cap_mb`
            or `reduce_dtype` is none of the values above.
    """

    bucket_class = GuardedBucket

    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, process_group=None, bucket_cap_mb=None,
                 reduce_dtype=None, find_unused_parameters=False, **optimizer_kwargs):
        self.make_optimizer = functools.partial(optimizer_cls, **optimizer_kwargs)
        self.process_group, self.find_unused_parameters = process_group, find_unused_parameters
        of_core = {"bucket_cap_mb": bucket_cap_mb, "reduce_dtype": reduce_dtype, **optimizer_kwargs}
        settings = {"optimizer_cls": optimizer_cls, "find_unused_parameters": find_unused_parameters, **of_core}
        groups = self.checked(params, settings=settings, error=refusal_of(bucket_cap_mb, reduce_dtype))
        self.join(process_group)
        super().__init__(groups, optimizer_cls, process_group=process_group, **of_core)

    def checked(self, params, existing=(), settings=None, error=None):
        if existing and self.has_rounds:
            error = RuntimeError("add_param_group() between backward() and step(): call step() or zero_grad() first")
        groups = checked_groups(params, self.process_group, existing, refuse=self.refuse, error=error,
                                settings=settings)
        check_elementwise(self.make_optimizer, groups)
        return groups

    def refuse(self, named):
        """Buckets view parameters as flat. -> what of each is on this rank"""
        here = local_parts(named, self.process_group)
        for name, tensor in here:
            if not tensor.is_contiguous():
                raise not_contiguous(name, tensor)
        return here


def refusal_of(bucket_cap_mb, reduce_dtype):
    if reduce_dtype not in (None, torch.float32):
        return ValueError(f"reduce_dtype is {reduce_dtype}: it must be torch.float32 or None")
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        return ValueError(f"bucket_cap_mb is {bucket_cap_mb}: it must be more than 0")
