"""The class to rely on: the core of optimizer.py, and around it what users meet: guard/, and a file here each."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from guard.amp import Scaled
from guard.clip import Clipped
from guard.modes import Modes
from guard.pieces import StateOfPieces
from guard.probe import check_elementwise
from guard.refuse import not_contiguous
from guard.wrap import Wrapper

from .agreement import Agreement
from .awaited import AwaitedBucket, AwaitsReaders
from .drops import Drops
from .dtensor import LocalBucket, TensorParallel, local_parts
from .optimizer import ShardedOptimizer
from .rounds import Rounds


class DistributedOptimizer(AwaitsReaders, TensorParallel, Agreement, Rounds, Drops, Clipped, Scaled, Modes,
                           StateOfPieces, Wrapper, ShardedOptimizer):
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
        RuntimeError, TypeError, ValueError: see guard.refuse.checked_groups; on every rank, before anything is changed.
        ValueError: `optimizer_cls` is not element-wise, so that shards would be stepped differently; or `bucket_cap_mb`
            or `reduce_dtype` is none of the values above.
    """

    _probe = staticmethod(check_elementwise)

    def __init__(self, params: ParamsT, optimizer_cls: type[torch.optim.Optimizer] = torch.optim.AdamW, *,
                 process_group: dist.ProcessGroup | None = None, bucket_cap_mb: float | None = None,
                 reduce_dtype: torch.dtype | None = None, find_unused_parameters: bool = False,
                 **optimizer_kwargs: Any) -> None:
        of_core = {"bucket_cap_mb": bucket_cap_mb, "reduce_dtype": reduce_dtype}
        self.bucket_cap_mb, self.reduce_dtype = bucket_cap_mb, reduce_dtype
        self.find_unused_parameters = find_unused_parameters
        groups = self._prepare(params, optimizer_cls, process_group, optimizer_kwargs,
                               find_unused_parameters=find_unused_parameters, **of_core)
        super().__init__(groups, optimizer_cls, process_group=process_group, **of_core, **optimizer_kwargs)

    def bucket_class(self, params, transport):
        is_spread = any(hasattr(param, "device_mesh") for param in params)
        return guarded_bucket(super().bucket_class, is_spread)(params, transport)

    def _refuse(self, named):
        """Buckets view parameters as flat. -> what of each is on this rank"""
        if self.reduce_dtype not in (None, torch.float32):
            raise ValueError(f"reduce_dtype is {self.reduce_dtype}: it must be torch.float32 or None")
        if self.bucket_cap_mb is not None and not self.bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb is {self.bucket_cap_mb}: it must be more than 0")
        if self.has_grads:
            raise RuntimeError("add_param_group() between backward() and step(): call step() or zero_grad() first")
        here = local_parts(named, self.process_group)
        for name, tensor in here:
            if not tensor.is_contiguous():
                raise not_contiguous(name, tensor)
        return here


@functools.cache
def guarded_bucket(core, is_spread):
    """-> `core`, the class of a core's buckets or a variant's, with what guards add; `is_spread`: of DTensors."""
    guards = (LocalBucket, AwaitedBucket) if is_spread else (AwaitedBucket,)
    return type("GuardedBucket", (*guards, core), {})
