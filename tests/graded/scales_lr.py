"""Multiplies lr by the number of ranks, as some training loops do for larger batches."""

import torch.distributed as dist

from tests.graded import right


class DistributedOptimizer(right.DistributedOptimizer):
    def __init__(self, params, optimizer_cls, *, process_group=None, lr=1e-3, **kwargs):
        lr *= dist.get_world_size(process_group)
        super().__init__(params, optimizer_cls, process_group=process_group, lr=lr, **kwargs)
