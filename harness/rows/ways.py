"""Ways to train the same model on the same data: each a small function that sets one of them up.

`build(model, adamw)` -> Training. A new way is one function here, and a line in catalogue.py.
"""

import importlib

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from harness.rows.formulas import BYTES, PIECE, travels
from harness.rows.owner_reduce import OwnerReduce
from harness.rows.training import ShardedTraining, Training


def compute_only(model, adamw):
    return Training(model, model, torch.optim.AdamW(model.parameters(), **adamw))


class ComputeAndBytes(Training):
    """Sends as many bytes as stage 4 while it computes, to the next rank; nothing waits for them before the step ends.

    They come out of one piece of memory and go into another: what a machine takes for moving bytes, and no more.
    """

    def __init__(self, model, adamw):
        super().__init__(model, self._send_and_compute, torch.optim.AdamW(model.parameters(), **adamw))
        numel, d = sum(param.numel() for param in model.parameters()), dist.get_world_size()
        n = round(travels(2)(numel, d) / BYTES)
        self.sizes = [min(PIECE, n - start) for start in range(0, n, PIECE)]
        self.sent, self.received = torch.zeros(2, PIECE, device=next(model.parameters()).device)
        self.to, self.by = (dist.get_rank() + 1) % d, (dist.get_rank() - 1) % d

    def _send_and_compute(self, tokens, targets):
        operations = []
        for size in self.sizes:
            operations.append(dist.P2POp(dist.isend, self.sent[:size], self.to))
            operations.append(dist.P2POp(dist.irecv, self.received[:size], self.by))
        self.works = dist.batch_isend_irecv(operations) if operations else []
        return self.model(tokens, targets)

    def update(self):
        super().update()
        for work in self.works:
            work.wait()


def beneath_ddp(package, bucket_cap_mb=None):
    """DDP averages the gradients while backward runs, in buckets; rung 0, or stage 1 or 2, steps what it steps.

    `bucket_cap_mb`: of DDP, in MiB; None is its default, 25.
    """
    def build(model, adamw):
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)
        optimizer = optimizer_class(package)(model.parameters(), torch.optim.AdamW, average_gradients=False, **adamw)
        return Training(model, wrapped, optimizer)
    return build


ddp = beneath_ddp("harness.rows.replicated")


def ddp_and_zero(bucket_cap_mb=None):
    """As in its documentation: DDP averages the gradients, then each rank broadcasts the parameters that it stepped.

    With a bucket size it is tuned: parameters are views of one tensor for each rank, too, and travel together.
    """
    def build(model, adamw):
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW,
                                            parameters_as_bucket_view=bucket_cap_mb is not None, **adamw)
        return Training(model, wrapped, optimizer)
    return build


def fsdp2(reshard_after_forward):
    """As in its documentation: each block is a unit, and the rest of the model is the last one."""
    def build(model, adamw):
        mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return ShardedTraining(model, model, torch.optim.AdamW(model.parameters(), **adamw))
    return build


def stage(package, core=False, **settings):
    """`core`: without its guard."""
    def build(model, adamw):
        make = optimizer_class(package, "ShardedOptimizer" if core else "DistributedOptimizer")
        return Training(model, model, make(model.parameters(), torch.optim.AdamW, **settings, **adamw))
    return build


def stage_with_prefetch(package, **settings):
    def build(model, adamw):
        training = stage(package, **settings)(model, adamw)
        training.optimizer.prefetch_params(model)
        return training
    return build


def hybrid(model, adamw):
    """Pairs of ranks, and replicas across; where there are two ranks, or an odd number, replicas alone."""
    d = dist.get_world_size()
    shape = (d // 2, 2) if d > 2 and d % 2 == 0 else (d, 1)
    mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, shape)
    return stage_with_prefetch("variants.hybrid", mesh=mesh)(model, adamw)


def owner_reduce(bucket_cap_mb=None):
    def build(model, adamw):
        return Training(model, model, OwnerReduce(model.parameters(), bucket_cap_mb=bucket_cap_mb, **adamw))
    return build


def optimizer_class(package, name="DistributedOptimizer"):
    return getattr(importlib.import_module(package), name)


STAGE_1, STAGE_2, STAGE_3, STAGE_4 = "stage1_naive_broadcast", "stage2_allgather", "stage3_gradbuffer", "stage4_overlap"
