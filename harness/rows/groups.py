"""Stage 4 in groups of ranks, replicated across them: a row of make plan."""

import math

import torch.distributed as dist

from harness.rows.ways import stage_with_prefetch

RANKS = 64  # of a group: eight nodes of eight hold 1/64 of the state each, nearly all that sharding saves


def ranks_of_group(d):
    return RANKS if math.isinf(d) else math.gcd(d, RANKS)


def hybrid_of_groups(bucket_cap_mb=None):
    """Neighbours are a group."""
    def build(model, adamw):
        d = dist.get_world_size()
        mesh = dist.init_device_mesh(next(model.parameters()).device.type, (d // ranks_of_group(d), ranks_of_group(d)))
        return stage_with_prefetch("variants.hybrid", mesh=mesh, bucket_cap_mb=bucket_cap_mb)(model, adamw)
    return build
