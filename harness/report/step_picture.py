"""A recorded step as text for the terminal and as SVG: rank x time.

A lane is (name, spans): spans are (start, end, what), in seconds from the start of the step.
"""

from html import escape

from harness.report.cells import rate_words
from harness.report.ticks import round_step
from harness.rows import bucket_sizes, catalogue, rates
from harness.rows.spans import MEMORY_PARTS, length, overlap, union

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
    ddp = bucket_sizes.tuned(result, catalogue.REFERENCE)  # a peer counts at its best setting
    shown = [ddp if ddp and base == catalogue.REFERENCE else result.find(base) for base in catalogue.LADDER]
    rows = [(row.name, row.timeline[0]) for row in shown if row and row.timeline]
    return rows, f"One step on rank 0 of {c.hosts} hosts with a line of {rate_words(c.rate)}"


def two_hosts_picture(results):
    """Of results of make network at several rates -> that one's step which is to be drawn, as SVG; "" for none."""
    rows, title = on_two_hosts(drawn) if (drawn := rates.to_draw(results)) else ([], "")
    return svg(rows, title) if rows else ""


def planned_steps(result):
    """-> rows and title for timeline.svg and timeline.text: those that don't take four times as long as the fastest."""
    c, steps = result.conditions, {row.name: row.step for row in result.rows}
    longest = 4 * min(step.seconds for step in steps.values())
    return [(name, step) for name, step in steps.items() if step.seconds <= longest], (
        f"One step on rank 0 of {c.world}, modelled: {c.model}, {c.batch_size} x {c.sequence_length}")
