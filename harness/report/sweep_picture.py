"""Sweeps of bucket size as a picture: ms a step over size, a panel for each rate."""

from html import escape

from harness.report.cells import rate_words
from harness.report.ticks import round_step
from harness.rows.bucket_sizes import DEFAULT_MB, PEERS, SIZES, STAGE_4, is_whole
from harness.rows.choice import ONE_PARAMETER

COLOURS = {STAGE_4: "#3a9d5d", **dict(zip(PEERS, ("#4a90d9", "#d9822b", "#9b59b6", "#999999")))}


def curves(rows):
    """Rows of a sweep -> {base: [(place of the size on the axis, ms), …]}; the axis has the places of SIZES."""
    found = {}
    for row in rows:
        if row.rounds_ms:
            place = SIZES.index(DEFAULT_MB if row.bucket_mb is None else row.bucket_mb)
            found.setdefault(row.base, []).append((place, row.median_ms))
    return {base: sorted(points) for base, points in found.items()}


def picture(results):
    """Results of make network at several rates -> SVG of their sweeps, "" where there is none."""
    swept = sorted((result for result in results if is_whole(result.sweep)),
                   key=lambda result: result.conditions.bits_per_second)
    out, left, wide, high, panel = [], 60, 380, 220, 500
    for number, result in enumerate(swept):
        found = curves(result.sweep.rows)
        most = 1.05 * max(ms for points in found.values() for _, ms in points)
        x0, step = left + number * panel, round_step(most)
        rate = escape(rate_words(result.conditions.rate))
        out.append(f'<text x="{x0}" y="16" class="title">{rate}: ms a step, by size of bucket</text>')
        for tick in range(int(most / step) + 1):
            y = 30 + high - high * tick * step / most
            out.append(f'<path d="M{x0} {y:.1f}h{wide}" class="grid"/><text x="{x0 - 6}" y="{y + 4:.1f}" '
                       f'text-anchor="end">{tick * step:g}</text>')
        for place, size in enumerate(SIZES):
            label = "1 par." if size == ONE_PARAMETER else f"{size:g}"
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
