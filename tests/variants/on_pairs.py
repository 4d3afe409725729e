"""variants/hybrid.py as a stage has it, for tests that know of no mesh: pairs, where ranks are even."""

import torch
import torch.distributed as dist

from tests import common
from variants import hybrid


def mesh_of(n_groups):
    return common.mesh_of("cpu", (n_groups, dist.get_world_size() // n_groups))


def mesh():
    """Return a mesh of the shape (2, 2) on four ranks, (2, 1) on two, and (3, 1) on three."""
    world_size = dist.get_world_size()
    return mesh_of(world_size // 2 if world_size == 4 else world_size)


class OnPairs(hybrid.OnMesh):
    def __init__(self, params, optimizer_cls=torch.optim.AdamW, *, bucket_cap_mb=None, **kwargs):
        kwargs.setdefault("mesh", mesh())
        super().__init__(params, optimizer_cls, bucket_cap_mb=bucket_cap_mb, **kwargs)


class ShardedOptimizer(OnPairs, hybrid.ShardedOptimizer):
    pass


class DistributedOptimizer(OnPairs, hybrid.DistributedOptimizer):
    pass
