"""What overlap is worth at every line: time of a step over that of computing alone, by the rate of the line."""

import math
from html import escape

from harness.report.cells import rate_words
from harness.report.line_tables import line_cells
from harness.report.sheet import NONE, Sheet
from harness.rows import bucket_sizes

ALONE, TUNED = "compute only", "ddp, tuned"
# What is drawn, from the slowest to the fastest: name in the picture, row, colour on light and on dark.
CURVES = [("stage 2, all-gather", "stage 2 all-gather", "#b8860b", "#e0b040"),
          ("rung 0, no overlap", "rung 0 replicated", "#8a8a8a", "#a0a0a0"),
          ("stage 3, grad buffer", "stage 3 grad buffer", "#c05a1c", "#e8894a"),
          ("FSDP2", "fsdp2", "#8e44ad", "#c58fe0"),
          ("DDP, default buckets", "ddp", "#7fb0e6", "#5a86b8"),
          ("DDP, tuned buckets", TUNED, "#1f6fc4", "#6db3ff"),
          ("stage 4, overlap", bucket_sizes.STAGE_4, "#1e8449", "#4fd08a"),
          ("floor", "floor", "#444444", "#cccccc")]


def row_of(result, base):
    return bucket_sizes.tuned(result, "ddp") if base == TUNED else result.timed(base)


def over_computing(result, base):
    """-> the median of the ratios of a step's time to that of computing alone, round by round; None: not measured."""
    alone = result.timed(ALONE)
    if base == "floor":
        stage4 = result.find(bucket_sizes.STAGE_4)
        return max(1.0, stage4.wire_bytes_theory * 8e3 / result.conditions.bits_per_second / alone.median_ms)
    row = row_of(result, base)
    return row.over(alone) if row else None


def sheet(results):
    """A column a rate, the slowest first."""
    results = sorted(results, key=lambda result: result.conditions.bits_per_second)

    def cells(base):
        return [NONE if (ratio := over_computing(result, base)) is None else f"{ratio:.2f}" for result in results]

    def drain(result):
        return line_cells(result, bucket_sizes.STAGE_4).drain

    def over(result, base):
        stage4, row = result.timed(bucket_sizes.STAGE_4), row_of(result, base)
        return f"{stage4.over(row):.2f}" if stage4 and row else NONE
    rows = [[name, *cells(base)] for name, base, *_ in CURVES]
    rows += [["stage 4 over tuned DDP", *(over(result, TUNED) for result in results)],
             ["stage 4 over the floor", *(line_cells(result, bucket_sizes.STAGE_4).over_floor for result in results)],
             ["DDP's best buckets", *(tuned.size if (tuned := row_of(result, TUNED)) else NONE for result in results)],
             ["compute only, ms", *(f"{result.timed(ALONE).median_ms:.0f}" for result in results)],
             ["stage 4's drain, ms", *map(drain, results)]]
    return Sheet(
        "The curve: a step over computing alone",
        [("", ""), *((rate_words(result.conditions.rate).replace(" ", "\n"), "measured") for result in results)], rows,
        ["Medians of the ratios round by round. Floor: the larger of computing alone and the line's time, by the "
         "formula. Tuned: with the size of buckets that was best at this rate.", *map(condition, results)])


def condition(result):
    c = result.conditions
    return f"{rate_words(c.rate)}: {c.machine}, {c.rounds} rounds of {c.steps} steps, {c.date}, commit {c.commit}."


def sentences(results):
    """Where stage 4 leads, and by how much."""
    results = sorted(results, key=lambda result: result.conditions.bits_per_second)
    found = [(rate_words(result.conditions.rate), result.timed(bucket_sizes.STAGE_4).over(row_of(result, TUNED)))
             for result in results if row_of(result, TUNED)]
    ratios = ", ".join(f"{ratio:.2f} at {words}" for words, ratio in found)
    best = min(found, key=lambda one: one[1])
    slower = next((words for words, ratio in found if ratio >= 1), None)
    ends = f"From {slower} on it is no faster." if slower else "At none of these is it slower."
    return [f"Stage 4 over tuned DDP: {ratios}. Most is won at {best[0]}. {ends}"]


# The picture: both axes in powers.
LEFT, WIDE, HIGH, TOP, RIGHT = 56, 520, 330, 44, 190
TICKS = (1, 1.5, 2, 3, 4, 6, 8, 10)


def picture(results, lines):
    """`lines`: of make plan, plan_results.CurveLine; points are measured -> SVG, for light and dark."""
    results = sorted(results, key=lambda result: result.conditions.bits_per_second)
    rates = [result.conditions.bits_per_second for result in results]
    points = {base: [(rate, ratio) for rate, result in zip(rates, results)
                     if (ratio := over_computing(result, base)) is not None] for _, base, *_ in CURVES}
    drawn = {line.base: line.points for line in lines}
    most = 1.06 * max(ratio for found in points.values() for _, ratio in found)

    def at(rate, ratio):
        x = LEFT + WIDE * math.log(rate / rates[0]) / math.log(rates[-1] / rates[0])
        return x, TOP + HIGH - HIGH * math.log(max(ratio, 0.97) / 0.97) / math.log(most / 0.97)
    out = [f'<text x="{LEFT}" y="16" class="title">Time of a step over computing alone, by the line between two '
           "hosts</text>", f'<text x="{LEFT}" y="32">points: measured · lines: modelled by make plan</text>']
    for tick in TICKS:
        if tick <= most:
            _, y = at(rates[0], tick)
            out.append(f'<path d="M{LEFT} {y:.1f}h{WIDE}" class="grid"/><text x="{LEFT - 8}" y="{y + 4:.1f}" '
                       f'text-anchor="end">{tick:g}</text>')
    for result, rate in zip(results, rates):
        x, _ = at(rate, 1)
        out.append(f'<path d="M{x:.1f} {TOP}v{HIGH}" class="grid"/><text x="{x:.1f}" y="{TOP + HIGH + 18}" '
                   f'text-anchor="middle">{escape(rate_words(result.conditions.rate))}</text>')
    labels = []
    for number, (name, base, *_) in enumerate(CURVES):
        line = drawn.get(base) or (points[base] if base != "floor" else [])
        path = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in line if rates[0] <= point[0] <= rates[-1])
        out.append(f'<polyline points="{path}" class="line c{number}{" dash" * (base == "floor")}"/>')
        if base != "floor":
            out += ['<circle cx="{:.1f}" cy="{:.1f}" r="3.5" class="point c{}"/>'.format(*at(*point), number)
                    for point in points[base]]
        labels.append((at(*points[base][0])[1], number, name))
    for number, name, y in spread(labels):
        out.append(f'<text x="{LEFT + WIDE + 34}" y="{y + 4:.1f}" class="label c{number}">{escape(name)}</text>'
                   f'<path d="M{LEFT + WIDE + 12} {y:.1f}h16" class="line c{number}{" dash" * (name == "floor")}"/>')
    across, down = LEFT + WIDE + RIGHT, TOP + HIGH + 34
    size = f'viewBox="0 0 {across} {down}" width="{across}" height="{down}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>The curve</title>',
                      f"<style>{style()}</style>", *out, "</svg>\n"])


def spread(labels):
    """In the order of the curves' left ends -> (number, name, y), a line each."""
    return [(number, name, TOP + 12 + 22 * place) for place, (_, number, name) in enumerate(sorted(labels))]


def style():
    def colours(which):
        return " ".join(f".line.c{n}{{stroke:{one[which]}}} .point.c{n},.label.c{n}{{fill:{one[which]}}}"
                        for n, one in enumerate(CURVES))
    return ("text{font:12px sans-serif;fill:#777} .title{font-weight:bold} .grid{stroke:#8884;fill:none} "
            f".line{{fill:none;stroke-width:2}} .dash{{stroke-dasharray:5 4}} {colours(2)} "
            f"@media (prefers-color-scheme:dark){{{colours(3)}}}")
