"""Training with 16-bit parameters, in full on every rank: what rows in 16 bits must agree with, summed alike."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from harness.rows.training import MainParamsTraining


def replicated_16bit(model, adamw):
    """The reference of rows with 16-bit parameters: gradients summed in fp32, AdamW on fp32 copies, on every rank."""
    return MainParamsTraining(model, adamw, dist.get_world_size())


def summed_in_fp32(model, adamw):
    """As stage 3 with fp32 gradients: they are fp32 when they are divided."""
    return MainParamsTraining(model, adamw, dist.get_world_size(), divided_in=torch.float32)


def summed_in_16_bits(model, adamw):
    """As stage 3 with 16-bit gradients."""
    return MainParamsTraining(model, adamw, dist.get_world_size(), summed_in=None)


def compute_only_16bit(model, adamw):
    return MainParamsTraining(model, adamw, world_size=1)


def ddp_16bit(bucket_cap_mb=None):
    """DDP averages 16-bit gradients while backward runs, and AdamW steps fp32 copies on every rank."""
    def build(model, adamw):
        training = compute_only_16bit(model, adamw)
        training.forward = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_cap_mb)
        return training
    return build
