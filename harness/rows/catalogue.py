"""The rows: each way to train by its name, with what it must agree with, send and hold."""

import contextlib
import functools

from harness.rows.choice import Choice
from harness.rows.formulas import (
    replicated,
    replicated_and_two_pieces,
    sharded_all,
    sharded_by_owner,
    sharded_gradients,
    sharded_moments,
    travels,
)
from harness.rows.more_rows import PLANNED, VARIANTS, rows_of_16_bits
from harness.rows.taken_apart import leaves_late, whole_messages
from harness.rows.way import Way
from harness.rows.ways import (
    STAGE_1,
    STAGE_2,
    STAGE_3,
    STAGE_4,
    ComputeAndBytes,
    beneath_ddp,
    compute_only,
    ddp,
    ddp_and_zero,
    fsdp2,
    owner_reduce,
    stage,
    stage_with_prefetch,
)


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
    Way("stage 2, gloo's own", "stage", stage(STAGE_2), travels(3), sharded_moments,
        inside=contextlib.nullcontext),
    Way("stage 3, gloo's own", "stage", stage(STAGE_3), travels(2), sharded_moments,
        inside=contextlib.nullcontext),
    Way("fsdp2, gloo's own", "peer", fsdp2(reshard_after_forward=False), travels(2), sharded_all, starts_apart=False,
        inside=contextlib.nullcontext),
    Way("ddp again", "noise", ddp, travels(2), replicated),
    *rows_of_16_bits("bfloat16", "bf16"),
    *rows_of_16_bits("float16", "fp16"),
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
# What of stage 4 is tuning, and no idea, left out. A row of make network, too.
UNTUNED = [
    Way("stage 4, whole messages", "stage", stage_with_prefetch(STAGE_4), travels(2), sharded_gradients,
        inside=whole_messages),
]


def find(base, bucket_mb=None):
    """The row of that name -> Way, with buckets of `bucket_mb` MiB; None: of its default size."""
    way = next((way for way in [*ROWS, *APART, *UNTUNED, *PLANNED, *VARIANTS] if way.name == base), None)
    if way is None or bucket_mb is not None and way.sized is None:
        raise LookupError(f"there is no row {Choice(base, bucket_mb).name!r}")
    if bucket_mb is None:
        return way
    kind = "peer" if way.kind == "reference" else way.kind
    return way._replace(kind=kind, build=way.sized(bucket_mb))


def in_its_context(measure):
    """For a function (rank, settings, base, bucket_mb) that measures a row: it runs inside of its context."""
    @functools.wraps(measure)
    def measured(rank, settings, base, bucket_mb=None):
        with find(base, bucket_mb).inside():
            return measure(rank, settings, base, bucket_mb)
    return measured
