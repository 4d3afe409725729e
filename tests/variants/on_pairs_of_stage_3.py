"""variants/hybrid.py of stage 3, as on_pairs has it of stage 4."""

import torch

import stage3_gradbuffer
from tests.variants.on_pairs import mesh
from variants import hybrid


class OnPairs(hybrid.OnMesh):
    def __init__(self, params, optimizer_cls=torch.optim.AdamW, **kwargs):
        kwargs.setdefault("mesh", mesh())
        super().__init__(params, optimizer_cls, **kwargs)


class ShardedOptimizer(OnPairs, hybrid.ReplicasOfStage3):
    pass


class DistributedOptimizer(OnPairs, stage3_gradbuffer.DistributedOptimizer, hybrid.ReplicasOfStage3):
    pass
