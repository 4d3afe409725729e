"""Bucket sizes: which are tried of which rows, and which was the best."""

from harness.rows import catalogue
from harness.rows.choice import ONE_PARAMETER, Choice

PEERS = [catalogue.REFERENCE, "ddp + stage 1", "ddp + stage 2", "ddp + torch ZeRO"]  # each is swept
PEER_SIZES = [0.25, 1, 2, 4, 8]  # MiB
DEFAULT_MB = 25  # of DDP
STAGE_4 = "stage 4 overlap"
SIZES = [ONE_PARAMETER, 0.25, 1, 2, 4, 8, 25, 100]


def choices(text=""):
    """The rows of a sweep whose name holds `text`, and the reference -> list of Choices."""
    swept = [Choice(base, size) for base in PEERS for size in (None, *PEER_SIZES)]
    swept += [Choice(STAGE_4, size) for size in SIZES]
    return [one for one in swept if text in one.name or one == (catalogue.REFERENCE, None)]


def of_ddp():
    return [Choice(catalogue.REFERENCE, size) for size in (None, *PEER_SIZES)]


def is_whole(sweep):
    """Whether there is one, of more than DDP: to be shown."""
    return sweep is not None and any(row.base == STAGE_4 for row in sweep.rows)


def best(rows):
    """Of a sweep: each of PEERS with the size with which it is fastest; not one whose default is that -> Choices.

    Stage 4 keeps its default.
    """
    found = []
    for base in PEERS:
        fastest = min((row for row in rows if row.base == base), key=lambda row: row.median_ms, default=None)
        if fastest is not None and fastest.bucket_mb is not None and fastest.rounds_ms:
            found.append(fastest.choice)
    return found


def beside(choices, tuned):
    """`choices`, with each of `tuned` behind the row that it is a variant of, or else at the end."""
    listed = []
    for choice in choices:
        listed += [choice, *(one for one in tuned if one.base == choice.base and choice.bucket_mb is None)]
    return listed + [one for one in tuned if one not in listed]


def tuned(result, base):
    """A result of make network -> the row `base` with the buckets that the sweep found best; None: not measured.

    Where the default was the best of those tried, the row itself.
    """
    sized = [row for row in result.rows if row.base == base and row.bucket_mb is not None and row.rounds_ms]
    if sized:
        return min(sized, key=lambda row: row.median_ms)
    is_default_best = result.sweep is not None and all(one.base != base for one in best(result.sweep.rows))
    return result.timed(base) if is_default_best else None
