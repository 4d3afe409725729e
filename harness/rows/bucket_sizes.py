"""Bucket sizes: which are tried of which rows, and which was the best."""

import math
import re
import statistics

from harness.rows import catalogue

PEERS = [catalogue.REFERENCE, "ddp + stage 1", "ddp + stage 2", "ddp + torch ZeRO"]  # each is swept
PEER_SIZES = [0.25, 1, 2, 4, 8]  # MiB; the default is 25
STAGE_4 = "stage 4 overlap"
SIZES = [catalogue.ONE_PARAMETER, 0.25, 1, 2, 4, 8, 25, 100]


def names(text=""):
    """The rows of a sweep whose name holds `text`, and the reference."""
    swept = [name for base in PEERS for name in (base, *(catalogue.sized_name(base, size) for size in PEER_SIZES))]
    swept += [catalogue.sized_name(STAGE_4, size) for size in SIZES]
    return [name for name in swept if text in name or name == catalogue.REFERENCE]


def base_of(name):
    """"ddp, 2 MB buckets" -> "ddp"."""
    return name.rsplit(", ", 1)[0]


def size_of(name):
    """"ddp, 2 MB buckets" -> "2 MB"; "ddp" -> "default"."""
    return match[1] if (match := re.search(r", (\S+(?: MB)?) buckets$", name)) else "default"


def cap_mb_of(name):
    """"ddp, 2 MB buckets" -> 2.0; "ddp" -> None."""
    size = size_of(name)
    return float(size.removesuffix(" MB")) if " " in size else {"one-parameter": catalogue.ONE_PARAMETER}.get(size)


def median(row):
    return row["step_ms"]["median"] if row.get("step_ms") else math.inf


def best(rows):
    """Of a sweep: the name of each of PEERS with the size with which it is fastest; not of one whose default is that.

    Stage 4 keeps its default.
    """
    found = []
    for base in PEERS:
        fastest = min((row for row in rows if base_of(row["name"]) == base), key=median, default=None)
        if fastest is not None and fastest["name"] != base and median(fastest) < math.inf:
            found.append(fastest["name"])
    return found


def beside(names, tuned):
    """`names`, with each of `tuned` behind the row that it is a variant of, or else at the end."""
    listed = []
    for name in names:
        listed += [name, *(one for one in tuned if base_of(one) == name)]
    return listed + [one for one in tuned if one not in listed]


def tuned(result, base):
    """A result of make network -> the row `base` with the buckets that the sweep found best; None: not measured.

    Where the default was the best of those tried, the row itself.
    """
    rows = [row for row in result["rows"] if base_of(row["name"]) == base and row.get("step_ms")]
    is_default_best = "sweep" in result and not any(
        base_of(name) == base for name in best(result["sweep"]["rows"]))
    sized = [row for row in rows if row["name"] != base]
    if sized:
        return min(sized, key=median)
    return next((row for row in rows if row["name"] == base), None) if is_default_best else None


def ratio(one, other):
    """Of two rows, of the times of a step: the median of the ratios round by round."""
    pairs = zip(one["step_ms"]["rounds"], other["step_ms"]["rounds"])
    return statistics.median(mine / others for mine, others in pairs)
