"""Rows that are asked for: 16 bits by --dtype, variants by --rows, and those of make plan."""

import functools

import torch

from harness.rows.formulas import (
    on_two_lines,
    replicated,
    replicated_main_params,
    replicated_pairs,
    sharded_16bit_grads,
    sharded_main_grads,
    sharded_main_params,
    travels,
)
from harness.rows.groups import RANKS, hybrid_of_groups, ranks_of_group
from harness.rows.rounded import ddp_summed_in_bf16, rounded_gradients, rounded_moments, rounded_ties, summed_in_bf16
from harness.rows.sixteen_bits import compute_only_16bit, ddp_16bit, replicated_16bit, summed_in_16_bits, summed_in_fp32
from harness.rows.way import Way
from harness.rows.ways import STAGE_1, STAGE_2, STAGE_3, STAGE_4, ddp, hybrid, owner_reduce, stage, stage_with_prefetch


def rows_of_16_bits(dtype, short):
    """Parameters in 16 bits, AdamW on fp32 copies. Each row divides and sums as its reference does."""
    stage_3 = functools.partial(stage, STAGE_3)
    return [
        Way(f"compute only {short}", "floor", compute_only_16bit, travels(0), replicated_main_params,
            starts_apart=False, dtype=dtype, reference=replicated_16bit),
        Way(f"stage 3 {short}/fp32", "stage", stage_3(grad_dtype=torch.float32), travels(1.5), sharded_main_grads,
            dtype=dtype, reference=summed_in_fp32),
        Way(f"stage 3 {short}/{short}", "stage", stage_3(), travels(1), sharded_16bit_grads, dtype=dtype,
            reference=summed_in_16_bits),
        Way(f"stage 4 overlap {short}", "stage", stage_with_prefetch(STAGE_4, reduce_dtype=torch.float32), travels(1),
            sharded_main_params, dtype=dtype, reference=replicated_16bit),  # NCCL alone would sum in 16 bits
    ]


def variant(name, build=None, wire=8, whole=4, shared=12, reference=ddp, dtype="float32"):
    """A row of a file of variants/: a parameter takes `wire` bytes of the line, `whole` + `shared` / d of the rank, and
    its share of buffers."""
    return Way(f"variants {name}", "stage", build or stage_with_prefetch(f"variants.{name}"),
               lambda numel, d: wire * numel * (d - 1) / d, lambda numel, d, optimizer:
               whole + shared / d + getattr(optimizer, "bucket_buffer_bytes", 0) / numel,
               reference=reference, dtype=dtype)


# Shown where --rows asks for them. whole_matrices sends, and holds, its padding besides.
VARIANTS = [
    variant("per_parameter", stage("variants.per_parameter"), whole=8, shared=8),
    variant("whole_matrices"),
    Way("variants hybrid", "stage", hybrid, on_two_lines, replicated_pairs),
    variant("wire16", wire=6, reference=rounded_gradients),
    variant("moments16", shared=8, reference=rounded_moments),
    variant("finite"),
    variant("blocks"),
    variant("offload", shared=16),
    variant("remainder16", wire=4, whole=2, shared=14, reference=rounded_ties, dtype="bfloat16"),
    Way("ddp summed in bf16", "peer", ddp_summed_in_bf16, travels(1), replicated, reference=summed_in_bf16),
]


def planned(name, make, whole, shared, among=lambda d: d, **settings):
    """A row of make plan: after a step a parameter takes `whole` + `shared` / d bytes, and its share of buffers.

    `among`: how many of d ranks share."""
    return Way(name, "stage", make(**settings), travels(1), lambda numel, d, optimizer:
               whole + shared / among(d) + optimizer.bucket_buffer_bytes / numel, dtype="bfloat16",
               sized=lambda cap_mb: make(bucket_cap_mb=cap_mb))


# With 16-bit parameters, for GPUs.
PLANNED = [
    planned("ddp bf16", ddp_16bit, 20, 0),
    planned("owner reduce bf16", owner_reduce, 2, 6),
    planned("stage 1 bf16", functools.partial(stage, STAGE_1), 4, 4),
    planned("stage 2 bf16", functools.partial(stage, STAGE_2), 4, 4),
    *rows_of_16_bits("bfloat16", "bf16")[1:3],
    planned("stage 4 bf16", functools.partial(stage_with_prefetch, STAGE_4), 2, 16),
    planned(f"hybrid of {RANKS} bf16", hybrid_of_groups, 2, 16, ranks_of_group),
]
