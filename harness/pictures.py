"""What was measured as pictures: SVG, text for the terminal, and a trace for Perfetto."""

import math
from html import escape

from harness import results as saved
from harness import rows as catalogue
from harness.results import MEMORY_PARTS, length, overlap, union
from harness.rows import DEFAULT_MB, ONE_PARAMETER, PEERS, SIZES, is_whole
from harness.rows import OVERLAP as STAGE_4
from harness.tables import NONE, Sheet, line_cells, rate_words

# ---------------------------------------------------------------------------------------------------------------- ticks
# Round numbers for axes.


def round_step(span, most_ticks=6):
    """The distance of ticks: 1, 2 or 5 times a power of ten, so that at most `most_ticks` lie in `span`."""
    power = 10 ** math.floor(math.log10(span / most_ticks))
    return next(factor * power for factor in (1, 2, 5, 10) if span / (factor * power) <= most_ticks)


# -------------------------------------------------------------------------------------------------------- state_picture
# What a parameter costs a rank in 16 bits, stacked: by formula, as chapter 3 spells it out.


D = 8  # ranks of the picture
PARTS = [("parameter", "#4a90d9"), ("gradient", "#3a9d5d"), ("main parameter", "#b04a9d"),
         ("main gradient", "#d9822b"), ("two moments", "#c9a227")]
# Bytes of each part: (on every rank, in shards).
BARS = [("DDP, bf16/bf16", [(2, 0), (2, 0), (4, 0), (4, 0), (8, 0)]),
        ("DDP, bf16/fp32", [(2, 0), (4, 0), (4, 0), (0, 0), (8, 0)]),
        ("stage 3, bf16/bf16", [(2, 0), (2, 0), (0, 4), (0, 4), (0, 8)]),
        ("stage 3, bf16/fp32", [(2, 0), (4, 0), (0, 4), (0, 0), (0, 8)])]
BARS_AT, UNIT, BAR, GAP = 136, 26, 18, 8  # pixels; a byte is UNIT wide


def state_picture():
    out = [f'<text y="14" class="title">Bytes of a parameter on each of {D} ranks</text>']
    for number, (name, parts) in enumerate(BARS):
        x, y = BARS_AT, 26 + number * (BAR + GAP)
        out.append(f'<text x="{BARS_AT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        for (whole, shared), (_, colour) in zip(parts, PARTS):
            wide = UNIT * (whole + shared / D)
            if wide:
                out.append(f'<rect x="{x:.1f}" y="{y}" width="{wide - 1:.1f}" height="{BAR}" style="fill:{colour}"/>')
            x += wide
        total = sum(whole + shared / D for whole, shared in parts)
        out.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{total:g}</text>')
    x, y = BARS_AT, 26 + len(BARS) * (BAR + GAP) + 8
    for name, colour in PARTS:
        out.append(f'<rect x="{x}" y="{y}" width="11" height="11" style="fill:{colour}"/>'
                   f'<text x="{x + 15}" y="{y + 10}">{name}</text>')
        x += 30 + 7 * len(name)
    size = f'viewBox="0 0 720 {y + 20}" width="720" height="{y + 20}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>16 bits as a sum</title>'
                      "<style>.title{font-weight:bold} text{font:12px sans-serif;fill:#777}</style>", *out, "</svg>\n"])


# ----------------------------------------------------------------------------------------------------------- step_trace
# A recorded step as a trace for https://ui.perfetto.dev and chrome://tracing.


def trace(rows):
    """The same as events of Chrome's trace format: a process a row, a thread a lane. Times in microseconds."""
    events = []
    for process, (name, step) in enumerate(rows):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        messages = [(message.start, message.end, f"{message.kind} {message.bytes} bytes", message.kind)
                    for message in step.communication]
        phases = [(start, end, phase, "phases") for phase, start, end in step.phases]
        computes = [(start, end, "computes", "computes") for start, end in step.busy]
        events += [{"ph": "C", "name": "memory", "pid": process, "ts": i / MEMORY_PARTS * step.seconds * 1e6,
                    "args": {"bytes": n_bytes}} for i, n_bytes in enumerate(step.memory)]
        threads = {}
        for start, end, what, lane in phases + computes + messages:
            thread = threads.setdefault(lane, len(threads))
            events.append({"ph": "X", "name": what, "pid": process, "tid": thread, "ts": start * 1e6,
                           "dur": (end - start) * 1e6})
        events += [{"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}}
                   for lane, thread in threads.items()]
    return {"traceEvents": events}


# --------------------------------------------------------------------------------------------------------- step_picture
# A recorded step as text for the terminal and as SVG: rank x time.


GRADIENTS = ("all_reduce", "reduce_scatter", "reduce", "send", "recv", "all_to_all")
PARAMETERS = ("all_gather", "broadcast")


def lanes(step):
    """A recorded step -> [("computes", spans), ("gradients", spans), ("parameters", spans)]."""
    computes = [(start, end, name) for name, *phase in step.phases for start, end in overlap([phase], step.busy)]
    return [("computes", computes), *((name, arrivals(step, kinds))
                                      for name, kinds in (("gradients", GRADIENTS), ("parameters", PARAMETERS)))]


def arrivals(step, kinds):
    """One span for each message that arrives: from its launch, or from when the one before it had arrived."""
    spans, before = [], 0.0
    for message in sorted(step.communication, key=lambda message: message.end):
        if message.kind in kinds:
            start = max(message.start, before)
            spans.append((start, max(message.end, start), "gradients" if kinds is GRADIENTS else "parameters"))
            before = max(message.end, start)
    return [span for span in spans if span[0] < step.seconds]


def peak(rows):
    """The most bytes that any row held: where the memory lanes end."""
    return max(max(step.memory, default=0) for _, step in rows)


def megabytes(step):
    return f"{max(step.memory) / 1e6:.0f} MB"


def said(step):
    """What a band shows, in a sentence."""
    travels = union((message.start, message.end) for message in step.communication)
    hidden = length(overlap(travels, step.busy))
    return (f"{step.seconds * 1000:.0f} ms; for {hidden * 1000:.0f} the network is busy while the rank computes, for "
            f"{step.exposed_seconds * 1000:.0f} while it waits")


LETTERS = {"forward": "F", "backward": "B", "step": "S", "gradients": "▒", "parameters": "▓"}
LEGEND = {"forward": "computes: forward", "backward": "backward", "step": "step", "gradients": "gradients travel",
          "parameters": "parameters travel", "memory": "memory held"}
HEIGHTS = " ▁▂▃▄▅▆▇█"


def text(rows, width=80):
    """`rows`: [(name, recorded step), …], on one axis -> text for the terminal; a letter: most of its moment."""
    longest, most_bytes = max(step.seconds for _, step in rows), peak(rows)
    out = []
    for name, step in rows:
        out.append(f"{name}: {said(step)}")
        for lane, spans in lanes(step):
            cells = []
            for i in range(width):
                moment = [(i * longest / width, (i + 1) * longest / width)]
                shares = {}
                for start, end, what in spans:
                    shares[what] = shares.get(what, 0) + length(overlap(moment, [(start, end)]))
                most = max(shares, key=shares.get, default=None)
                cells.append(LETTERS[most] if most and shares[most] > longest / width / 3 else "·")
            out.append(f"{lane:>10} {''.join(cells)}".replace("·" * width, "·"))
        if step.memory:
            cells = round(width * step.seconds / longest)
            parts = [step.memory[i * MEMORY_PARTS // cells:(i + 1) * MEMORY_PARTS // cells] for i in range(cells)]
            heights = "".join(HEIGHTS[round(max(part) / most_bytes * (len(HEIGHTS) - 1))] for part in parts)
            out.append(f"{'memory':>10} {heights} ≤ {megabytes(step)}")
    return "\n".join([*out, f"{'':>10} 0 ms{longest * 1000:>{width - 7}.0f} ms"])


def svg(rows, title):
    """The same picture: one band a row, a lane each for what computes and what travels, and memory below them.

    Readable on light and dark.
    """
    left, width, lane_height, curve_height, band = 96, 880, 14, 26, 110  # pixels
    longest, most_bytes = max(step.seconds for _, step in rows), peak(rows)
    out, y = [f'<text y="16" class="title">{escape(title)}</text>'], 28
    for name, step in rows:
        out.append(f'<text y="{y + 14}"><tspan class="title">{escape(name)}</tspan>: {said(step)}</text>')
        for i, (lane, spans) in enumerate(lanes(step)):
            top = y + 20 + i * (lane_height + 2)
            out.append(f'<text x="{left - 8}" y="{top + 11}" text-anchor="end">{lane}</text>')
            out.append(f'<rect x="{left}" y="{top}" width="{width * step.seconds / longest:.1f}" '
                       f'height="{lane_height}" class="nothing"/>')
            for start, end, what in spans:
                start, end = max(start, 0), min(end, step.seconds)
                x, wide = left + width * start / longest, width * (end - start) / longest
                out.append(f'<rect x="{x:.1f}" y="{top}" width="{max(wide - 0.4, 0.3):.1f}" height="{lane_height}" '
                           f'class="{what}"/>')
        if step.memory:
            bottom, wide = y + 20 + 3 * (lane_height + 2) + curve_height, width * step.seconds / longest
            heights = [f"{left + wide * (i + side) / MEMORY_PARTS:.1f},{bottom - curve_height * part / most_bytes:.1f}"
                       for i, part in enumerate(step.memory) for side in (0, 1)]
            points = " ".join([f"{left},{bottom}", *heights, f"{left + wide:.1f},{bottom}"])
            out.append(f'<text x="{left - 8}" y="{bottom - 14}" text-anchor="end">memory</text>'
                       f'<text x="{left - 8}" y="{bottom - 1}" text-anchor="end">≤ {megabytes(step)}</text>'
                       f'<polygon points="{points}" class="memory"/>')
        y += band
    step_ms = round_step(1000 * longest)
    for tick in range(int(1000 * longest / step_ms) + 1):
        x = left + width * tick * step_ms / (1000 * longest)
        anchor = "start" if tick == 0 else "end" if x > left + width - 20 else "middle"
        out.append(f'<text x="{x:.0f}" y="{y + 12}" text-anchor="{anchor}" class="tick">{tick * step_ms:g} ms</text>')
    x = left
    for what, words in LEGEND.items():
        out.append(f'<rect x="{x}" y="{y + 24}" width="12" height="12" class="{what}"/>'
                   f'<text x="{x + 17}" y="{y + 34}">{words}</text>')
        x += 28 + 7 * len(words)
    style = (".title{font-weight:bold} text{font:12px sans-serif;fill:#777} .nothing{fill:#8883} "
             ".forward{fill:#4a90d9} .backward{fill:#2a5f9e} .step{fill:#d9822b} .gradients{fill:#3a9d5d} "
             ".parameters{fill:#b04a9d} .memory{fill:#c9a227}")
    size = f'viewBox="0 0 {left + width + 8} {y + 44}" width="{left + width + 8}" height="{y + 44}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}><title>{escape(title)}</title>'
                      f"<style>{style}</style>", *out, "</svg>\n"])


def on_two_hosts(result):
    """The result of make network -> (rows, title) for `text` and `svg`: the ladder, on rank 0."""
    c = result.conditions
    ddp = catalogue.tuned(result, catalogue.REFERENCE)  # a peer counts at its best setting
    shown = [ddp if ddp and base == catalogue.REFERENCE else result.find(base) for base in catalogue.LADDER]
    rows = [(row.name, row.timeline[0]) for row in shown if row and row.timeline]
    return rows, f"One step on rank 0 of {c.hosts} hosts with a line of {rate_words(c.rate)}"


def two_hosts_picture(results):
    """Of results of make network at several rates -> that one's step which is to be drawn, as SVG; "" for none."""
    rows, title = on_two_hosts(drawn) if (drawn := saved.to_draw(results)) else ([], "")
    return svg(rows, title) if rows else ""


def planned_steps(result):
    """-> rows and title for timeline.svg and timeline.text: those that don't take four times as long as the fastest."""
    c, steps = result.conditions, {row.name: row.step for row in result.rows}
    longest = 4 * min(step.seconds for step in steps.values())
    return [(name, step) for name, step in steps.items() if step.seconds <= longest], (
        f"One step on rank 0 of {c.world}, modelled: {c.model}, {c.batch_size} x {c.sequence_length}")


# -------------------------------------------------------------------------------------------------------- sweep_picture
# Sweeps of bucket size as a picture: ms a step over size, a panel for each rate.


COLOURS = {STAGE_4: "#3a9d5d", **dict(zip(PEERS, ("#4a90d9", "#d9822b", "#9b59b6", "#999999")))}


def curves(rows):
    """Rows of a sweep -> {base: [(place of the size on the axis, ms), …]}; the axis has the places of SIZES."""
    found = {}
    for row in rows:
        if row.rounds_ms:
            place = SIZES.index(DEFAULT_MB if row.bucket_mb is None else row.bucket_mb)
            found.setdefault(row.base, []).append((place, row.median_ms))
    return {base: sorted(points) for base, points in found.items()}


def sweep_picture(results):
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


# ---------------------------------------------------------------------------------------------------------------- curve
# What overlap is worth at every line: time of a step over that of computing alone, by the rate of the line.


ALONE, TUNED = "compute only", "ddp, tuned"
# What is drawn, from the slowest to the fastest: name in the picture, row, colour on light and on dark.
CURVES = [("stage 2, all-gather", "stage 2 all-gather", "#b8860b", "#e0b040"),
          ("rung 0, no overlap", "rung 0 replicated", "#8a8a8a", "#a0a0a0"),
          ("stage 3, grad buffer", "stage 3 grad buffer", "#c05a1c", "#e8894a"),
          ("FSDP2", "fsdp2", "#8e44ad", "#c58fe0"),
          ("DDP, default buckets", "ddp", "#7fb0e6", "#5a86b8"),
          ("DDP, tuned buckets", TUNED, "#1f6fc4", "#6db3ff"),
          ("stage 4, overlap", catalogue.OVERLAP, "#1e8449", "#4fd08a"),
          ("floor", "floor", "#444444", "#cccccc")]


def row_of(result, base):
    return catalogue.tuned(result, "ddp") if base == TUNED else result.timed(base)


def over_computing(result, base):
    """-> the median of the ratios of a step's time to that of computing alone, round by round; None: not measured."""
    alone = result.timed(ALONE)
    if base == "floor":
        stage4 = result.find(catalogue.OVERLAP)
        return max(1.0, stage4.wire_bytes_theory * 8e3 / result.conditions.bits_per_second / alone.median_ms)
    row = row_of(result, base)
    return row.over(alone) if row else None


def sheet(results):
    """A column a rate, the slowest first."""
    results = sorted(results, key=lambda result: result.conditions.bits_per_second)

    def cells(base):
        return [NONE if (ratio := over_computing(result, base)) is None else f"{ratio:.2f}" for result in results]

    def drain(result):
        return line_cells(result, catalogue.OVERLAP).drain

    def over(result, base):
        stage4, row = result.timed(catalogue.OVERLAP), row_of(result, base)
        return f"{stage4.over(row):.2f}" if stage4 and row else NONE
    rows = [[name, *cells(base)] for name, base, *_ in CURVES]
    rows += [["stage 4 over tuned DDP", *(over(result, TUNED) for result in results)],
             ["stage 4 over the floor", *(line_cells(result, catalogue.OVERLAP).over_floor for result in results)],
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
    found = [(rate_words(result.conditions.rate), result.timed(catalogue.OVERLAP).over(row_of(result, TUNED)))
             for result in results if row_of(result, TUNED)]
    ratios = ", ".join(f"{ratio:.2f} at {words}" for words, ratio in found)
    best = min(found, key=lambda one: one[1])
    slower = next((words for words, ratio in found if ratio >= 1), None)
    ends = f"From {slower} on it is no faster." if slower else "At none of these is it slower."
    return [f"Stage 4 over tuned DDP: {ratios}. Most is won at {best[0]}. {ends}"]


# The picture: both axes in powers.
LEFT, WIDE, HIGH, TOP, RIGHT = 56, 520, 330, 44, 190
TICKS = (1, 1.5, 2, 3, 4, 6, 8, 10)


def curve_picture(results, lines):
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
