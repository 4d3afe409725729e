"""The rows: each way to train by its name, with what it must agree with, send and hold."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from harness.rows.choice import Choice
from harness.rows.formulas import (
    on_two_lines,
    replicated,
    replicated_and_two_pieces,
    replicated_main_params,
    replicated_pairs,
    sharded_all,
    sharded_by_owner,
    sharded_gradients,
    sharded_main_params,
    sharded_moments,
    travels,
)
from harness.rows.ways import (
    STAGE_1,
    STAGE_2,
    STAGE_3,
    STAGE_4,
    ComputeAndBytes,
    beneath_ddp,
    compute_only,
    compute_only_16bit,
    ddp,
    ddp_16bit,
    ddp_and_zero,
    fsdp2,
    hybrid,
    leaves_late,
    owner_reduce,
    replicated_16bit,
    rounded_gradients,
    rounded_moments,
    stage,
    stage_with_prefetch,
)


class Way(NamedTuple):
    """`kind`: floor (learns nothing of other ranks), reference (what all are compared with), stage (of this tutorial),
    peer, or noise (the reference once more: how far apart two timings of the same thing are).

    `wire_bytes(numel, d)`: what a rank should send in a step. `bytes_per_param(numel, d, optimizer)`: what it should
    hold for a parameter after a step, its gradient included. `starts_apart`: the constructor broadcasts the weights
    from rank 0, which is tried by starting with other ones elsewhere. `dtype`: of the parameters; `reference` builds
    what a row of this dtype must agree with. `sized(bucket_cap_mb)` -> build, where a row has buckets.
    """
    name: str
    kind: str
    build: Callable
    wire_bytes: Callable
    bytes_per_param: Callable
    starts_apart: bool = True
    dtype: str = "float32"
    reference: Callable = ddp
    sized: Callable | None = None


def row_of_stage_4(name, make):
    """`make(bucket_cap_mb=None)` -> build."""
    return Way(name, "stage", make(), travels(2), sharded_gradients, sized=lambda mb: make(bucket_cap_mb=mb))


# The shortest names that say what a row is: the table has to fit a terminal.
ROWS = [
    Way("compute only", "floor", compute_only, travels(0), replicated, starts_apart=False),
    Way("compute + bytes", "floor", ComputeAndBytes, travels(2), replicated_and_two_pieces, starts_apart=False),
    Way("ddp", "reference", ddp, travels(2), replicated,
        sized=functools.partial(beneath_ddp, "harness.rows.replicated")),
    Way("ddp + stage 1", "stage", beneath_ddp(STAGE_1), travels(3), sharded_moments,
        sized=functools.partial(beneath_ddp, STAGE_1)),
    Way("ddp + stage 2", "stage", beneath_ddp(STAGE_2), travels(3), sharded_moments,
        sized=functools.partial(beneath_ddp, STAGE_2)),
    Way("rung 0 replicated", "stage", stage("harness.rows.replicated"), travels(2), replicated),
    Way("stage 1 naive broadcast", "stage", stage(STAGE_1), travels(3), sharded_moments),
    Way("stage 2 all-gather", "stage", stage(STAGE_2), travels(3), sharded_moments),
    Way("stage 3 grad buffer", "stage", stage(STAGE_3), travels(2), sharded_moments),
    row_of_stage_4("stage 4 overlap", functools.partial(stage_with_prefetch, STAGE_4)),
    Way("ddp + torch ZeRO", "peer", ddp_and_zero(), travels(3), sharded_moments, sized=ddp_and_zero),
    Way("owner reduce", "peer", owner_reduce(), travels(2), sharded_by_owner, sized=owner_reduce),
    Way("fsdp2", "peer", fsdp2(reshard_after_forward=False), travels(2), sharded_all, starts_apart=False),
    Way("fsdp2 reshard", "peer", fsdp2(reshard_after_forward=True), travels(3), sharded_all, starts_apart=False),
    Way("ddp again", "noise", ddp, travels(2), replicated),
    Way("compute only bf16", "floor", compute_only_16bit, travels(0), replicated_main_params, starts_apart=False,
        dtype="bfloat16", reference=replicated_16bit),
    Way("stage 4 overlap bf16", "stage", stage_with_prefetch(STAGE_4, reduce_dtype=torch.float32), travels(1),
        sharded_main_params, dtype="bfloat16", reference=replicated_16bit),  # NCCL alone would sum in 16 bits
]
REFERENCE = next(row.name for row in ROWS if row.kind == "reference")
# The reference and the four stages by themselves: what one picture shows.
LADDER = [REFERENCE, "stage 1 naive broadcast", "stage 2 all-gather", "stage 3 grad buffer", "stage 4 overlap"]
# What each half of stage 4's overlap buys: rows of make network.
APART = [
    row_of_stage_4("stage 4 neither", functools.partial(leaves_late, False)),
    row_of_stage_4("stage 4 only gradients", functools.partial(stage, STAGE_4)),
    row_of_stage_4("stage 4 only parameters", functools.partial(leaves_late, True)),
]


def variant(name, build=None, wire=8, whole=4, shared=12, reference=ddp):
    """A row of a file of variants/: a parameter takes `wire` bytes of the line, `whole` + `shared` / d of the rank, and
    its share of buffers."""
    return Way(f"variants {name}", "stage", build or stage_with_prefetch(f"variants.{name}"),
               lambda numel, d: wire * numel * (d - 1) / d, lambda numel, d, optimizer:
               whole + shared / d + getattr(optimizer, "bucket_buffer_bytes", 0) / numel, reference=reference)


# Shown where --rows asks for them. whole_matrices sends, and holds, its padding besides. remainder16 is no row: its
# parameters differ from the reference's at ties.
VARIANTS = [
    variant("per_parameter", stage("variants.per_parameter"), whole=8, shared=8),
    variant("whole_matrices"),
    Way("variants hybrid", "stage", hybrid, on_two_lines, replicated_pairs),
    variant("wire16", wire=6, reference=rounded_gradients),
    variant("moments16", shared=8, reference=rounded_moments),
    variant("finite"),
    variant("blocks"),
    variant("offload", shared=16),
]


def planned(name, make, whole, shared, **settings):
    """A row of make plan: after a step a parameter takes `whole` + `shared` / d bytes, and its share of buffers."""
    return Way(name, "stage", make(**settings), travels(1), lambda numel, d, optimizer:
               whole + shared / d + optimizer.bucket_buffer_bytes / numel, dtype="bfloat16",
               sized=lambda cap_mb: make(bucket_cap_mb=cap_mb))


# With 16-bit parameters, for GPUs: nobody has measured these here.
PLANNED = [
    planned("ddp bf16", ddp_16bit, 20, 0),
    planned("owner reduce bf16", owner_reduce, 2, 6),
    planned("stage 1 bf16", functools.partial(stage, STAGE_1), 4, 4),
    planned("stage 2 bf16", functools.partial(stage, STAGE_2), 4, 4),
    planned("stage 3 bf16/fp32", functools.partial(stage, STAGE_3), 6, 12, grad_dtype=torch.float32),
    planned("stage 3 bf16/bf16", functools.partial(stage, STAGE_3), 4, 16),
    planned("stage 4 bf16", functools.partial(stage_with_prefetch, STAGE_4), 2, 16),
]


def find(base, bucket_mb=None):
    """The row of that name -> Way, with buckets of `bucket_mb` MiB; None: of its default size."""
    way = next((way for way in [*ROWS, *APART, *PLANNED, *VARIANTS] if way.name == base), None)
    if way is None or bucket_mb is not None and way.sized is None:
        raise LookupError(f"there is no row {Choice(base, bucket_mb).name!r}")
    if bucket_mb is None:
        return way
    kind = "peer" if way.kind == "reference" else way.kind
    return way._replace(kind=kind, build=way.sized(bucket_mb))
