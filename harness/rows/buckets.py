"""Bucket sizes: which are tried of which rows, which was the best, and what was found as a table and as a picture.

Input: rows as measure.measure makes them. A row with buckets of another size than its default has the size in its name,
see peers.find.
"""

import math
import re
import statistics
from html import escape

from harness.rows import peers

PEERS = [peers.REFERENCE, "ddp + stage 1", "ddp + stage 2", "ddp + torch ZeRO"]  # each is swept, for a size of its own
PEER_SIZES = [0.25, 1, 2, 4, 8]  # MiB; the default is 25
STAGE_4 = "stage 4 overlap"
SIZES = [peers.ONE_PARAMETER, 0.25, 1, 2, 4, 8, 25, 100]


def names(text=""):
    """The rows of a sweep whose name holds `text`, and the reference."""
    swept = [name for base in PEERS for name in (base, *(peers.sized_name(base, size) for size in PEER_SIZES))]
    swept += [peers.sized_name(STAGE_4, size) for size in SIZES]
    return [name for name in swept if text in name or name == peers.REFERENCE]


def base_of(name):
    """"ddp, 2 MB buckets" -> "ddp"."""
    return name.rsplit(", ", 1)[0]


def size_of(name):
    """"ddp, 2 MB buckets" -> "2 MB"; "ddp" -> "default"."""
    return match[1] if (match := re.search(r", (\S+(?: MB)?) buckets$", name)) else "default"


def cap_mb_of(name):
    """"ddp, 2 MB buckets" -> 2.0; "ddp" -> None."""
    size = size_of(name)
    return float(size.removesuffix(" MB")) if " " in size else {"one-parameter": peers.ONE_PARAMETER}.get(size)


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


# ---------------------------------------------------------------------------------------------------------------------
# The picture: ms a step over bucket size, a panel for each rate

COLOURS = {STAGE_4: "#3a9d5d", **dict(zip(PEERS, ("#4a90d9", "#d9822b", "#9b59b6", "#999999")))}


def round_step(span, most_ticks=6):
    """The distance of ticks: 1, 2 or 5 times a power of ten, so that at most `most_ticks` lie in `span`."""
    power = 10 ** math.floor(math.log10(span / most_ticks))
    return next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= most_ticks)


def curves(rows):
    """Rows of a sweep -> {base: [(place of the size on the axis, ms), …]}; the axis has the places of SIZES."""
    places = {size_of(peers.sized_name(STAGE_4, size)): place for place, size in enumerate(SIZES)}
    places["default"] = places["25 MB"]  # of DDP
    found = {}
    for row in rows:
        if row.get("step_ms"):
            found.setdefault(base_of(row["name"]), []).append((places[size_of(row["name"])], median(row)))
    return {base: sorted(points) for base, points in found.items()}


def picture(results):
    """Results of make network at several rates -> SVG of their sweeps, "" where there is none."""
    swept = sorted((result for result in results if "sweep" in result),
                   key=lambda result: result["conditions"]["bits_per_second"])
    out, left, wide, high, panel = [], 60, 380, 220, 500
    for number, result in enumerate(swept):
        found = curves(result["sweep"]["rows"])
        most = 1.05 * max(ms for points in found.values() for _, ms in points)
        x0, step = left + number * panel, round_step(most)
        out.append(f'<text x="{x0}" y="16" class="title">{escape(result["conditions"]["rate"])}: ms a step, by size of '
                   "bucket</text>")
        for tick in range(int(most / step) + 1):
            y = 30 + high - high * tick * step / most
            out.append(f'<path d="M{x0} {y:.1f}h{wide}" class="grid"/><text x="{x0 - 6}" y="{y + 4:.1f}" '
                       f'text-anchor="end">{tick * step:g}</text>')
        for place, size in enumerate(SIZES):
            label = "1 par." if size == peers.ONE_PARAMETER else f"{size:g}"
            out.append(f'<text x="{x0 + wide * place / (len(SIZES) - 1):.0f}" y="{48 + high}" text-anchor="middle">'
                       f"{label}</text>")
        out.append(f'<text x="{x0 + wide}" y="{64 + high}" text-anchor="end">MiB</text>')
        for row, (base, points) in enumerate(found.items()):
            xy = [(x0 + wide * place / (len(SIZES) - 1), 30 + high - high * ms / most) for place, ms in points]
            line, colour = " ".join(f"{x:.1f},{y:.1f}" for x, y in xy), COLOURS[base]
            out.append(f'<polyline points="{line}" style="stroke:{colour}"/>')
            out += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" style="fill:{colour}"/>' for x, y in xy]
            out.append(f'<rect x="{x0 + 130 * (row % 3)}" y="{72 + high + 18 * (row // 3)}" width="12" height="12" '
                       f'style="fill:{colour}"/><text x="{x0 + 17 + 130 * (row % 3)}" '
                       f'y="{82 + high + 18 * (row // 3)}">{escape(base)}</text>')
    if not out:
        return ""
    style = (".title{font-weight:bold} text{font:12px sans-serif;fill:#777} .grid{stroke:#8884} "
             "polyline{fill:none;stroke-width:2}")
    size = f'viewBox="0 0 {panel * len(swept)} {high + 114}" width="{panel * len(swept)}" height="{high + 114}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>ms a step by size of bucket</title>'
                      f"<style>{style}</style>", *out, "</svg>\n"])
