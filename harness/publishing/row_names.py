"""Names the rows that several files read, and their bucket sizes. It imports no torch: reading results is quick."""

import collections

# They are short, because the table has to fit a terminal.
COMPUTE_ONLY = "compute only"
REFERENCE = "ddp"
REPLICATED = "replicated"
NAIVE_BROADCAST = "stage 1 naive broadcast"
ALL_GATHER = "stage 2 all-gather"
GRAD_BUFFER = "stage 3 grad buffer"
OVERLAP = "stage 4 overlap"
OVERLAP_BF16 = "stage 4 overlap bf16"
FSDP2 = "fsdp2"
ZERO = "ddp + torch ZeRO"
DDP_BF16_SUM = "ddp summed in bf16"
HALF_OVERLAPS = [f"stage 4 {half}" for half in ("neither", "only gradients", "only parameters")]
# Of make plan.
HYBRID_RANKS = 64  # that share the state: on eight nodes of eight, 1/64 is nearly all that sharding saves
STAGE_4_BF16 = "stage 4 bf16"
HYBRID_BF16 = f"hybrid of {HYBRID_RANKS} bf16"
# The reference and the stages: what one picture shows.
LADDER = [REFERENCE, NAIVE_BROADCAST, ALL_GATHER, GRAD_BUFFER, OVERLAP]
# What the variants are compared with: --rows variants measures these, too.
BASES_OF_VARIANTS = GRAD_BUFFER, OVERLAP, OVERLAP_BF16, DDP_BF16_SUM
ONE_PARAMETER = 1e-6  # MiB: a bucket is closed by the first parameter in it


def is_asked(text, name):
    """Return whether --rows `text`, parts of names with commas between them, asks for the row of that name."""
    return any(part in name for part in text.split(",")) or (text == "variants" and name in BASES_OF_VARIANTS)


class HasRowId:
    """Gives a class with the fields `base` and `bucket_mb` a name to show, such as "ddp, 2 MiB buckets"."""

    row_id = property(lambda self: RowId(self.base, self.bucket_mb))

    @property
    def name(self):
        return self.base if self.bucket_mb is None else f"{self.base}, {self.size} buckets"

    @property
    def size(self):
        if self.bucket_mb is None:
            return "default"
        return "one-parameter" if self.bucket_mb == ONE_PARAMETER else f"{self.bucket_mb:g} MiB"


class RowId(HasRowId, collections.namedtuple("RowId", "base bucket_mb", defaults=[None])):
    """Names a row of the catalogue, with buckets of `bucket_mb` MiB; None: of its default size."""


# -------------------------------------------------- Bucket sizes: which are tried of which rows, and which was the best


TUNED = [REFERENCE, ZERO]  # these rows are also measured with the bucket size that is DDP's best
DEFAULT_MB = 25  # of DDP
SIZES = [ONE_PARAMETER, 0.25, 1, 2, 4, 8, 25, 100]  # MiB
# The rows of a sweep; of the curve's sweep at each rate DDP alone, with fewer sizes.
SWEPT = [*(RowId(REFERENCE, size) for size in (None, 0.25, 1, 2, 4, 8)), *(RowId(OVERLAP, size) for size in SIZES)]
SWEPT_FOR_CURVE = [RowId(REFERENCE, size) for size in (None, 0.25, 1, 4)]


def is_whole(sweep):
    """Return whether `sweep` isn't None and has more than DDP, which is all that the curve's sweeps have."""
    return sweep is not None and any(row.base == OVERLAP for row in sweep.rows)


def tuned_row_ids(rows):
    """Return RowIds of TUNED with the bucket size that was DDP's fastest in a sweep; [] where that is its default."""
    fastest = min((row for row in rows if row.base == REFERENCE), key=lambda row: row.median_ms, default=None)
    if fastest is None or fastest.bucket_mb is None or not fastest.rounds_ms:
        return []
    return [RowId(base, fastest.bucket_mb) for base in TUNED]


def with_tuned(row_ids, tuned_ids):
    """List `row_ids`, with each of `tuned_ids` behind the row of the same base with default buckets, or at the end."""
    listed = []
    for row_id in row_ids:
        listed.append(row_id)
        if row_id.bucket_mb is None:
            listed += [tuned_id for tuned_id in tuned_ids if tuned_id.base == row_id.base]
    return listed + [tuned_id for tuned_id in tuned_ids if tuned_id not in listed]


def tuned_row(result, base):
    """Return the row `base` of two hosts with the sweep's best bucket size, maybe the default; None: not measured."""
    with_size = [row for row in result.rows if row.base == base and row.bucket_mb is not None and row.rounds_ms]
    if with_size:
        return min(with_size, key=lambda row: row.median_ms)
    has_sweep = result.sweep is not None
    is_default_best = has_sweep and all(row_id.base != base for row_id in tuned_row_ids(result.sweep.rows))
    return result.timed(base) if is_default_best else None
