"""What was measured as pictures: text for the terminal, a trace for Perfetto, and SVG, drawn by matplotlib."""

import collections
import importlib.util
import io
import re
from types import SimpleNamespace

from harness import results as saved
from harness import rows as catalogue
from harness.results import MEMORY_PARTS, length, overlap, union
from harness.rows import DEFAULT_MB, ONE_PARAMETER, REFERENCE, SIZES, is_whole
from harness.rows import OVERLAP as STAGE_4
from harness.tables import CURVES, over_computing, rate_words

# Text stays text; the same data give the same file.
RC = {"svg.fonttype": "none", "svg.hashsalt": "results", "font.sans-serif": ["DejaVu Sans", "sans-serif"],
      "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False,
      "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": False,
      "grid.color": "#888888", "grid.alpha": 0.25, "xtick.color": "#888888", "ytick.color": "#888888",
      "figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False,
      "figure.constrained_layout.use": True}
STYLE = "<style>text{fill:#444!important} @media (prefers-color-scheme:dark){text{fill:#bbb!important}}</style>"


def can_draw():
    """Whether matplotlib is there; who measures without it has tables, and text for the terminal."""
    return importlib.util.find_spec("matplotlib") is not None


def panels(n_rows, n_columns, inches):
    """-> a figure of so many panels, and these in a list."""
    import matplotlib
    from matplotlib.figure import Figure  # here: who only measures doesn't need it, see `can_draw`
    matplotlib.rcParams.update(RC)
    figure = Figure(figsize=inches)
    return figure, list(figure.subplots(n_rows, n_columns, sharex=n_rows > 1, squeeze=False).flat)


def drawn(figure):
    """-> SVG, readable on light and dark."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}", file.getvalue())  # a hundredth is invisible
    text = re.sub(r"\n(?=[MLCQz\"])", " ", text).replace("<defs>", f"{STYLE}<defs>", 1)  # a path is one line
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def trace(rows):
    """A recorded step as events of Chrome's trace format, for https://ui.perfetto.dev: a process a row, a thread
    a lane. Times in microseconds."""
    events = []
    for process, (name, step) in enumerate(rows):
        spans = [(phase, "phases", start, end) for phase, start, end in step.phases]
        spans += [("computes", "computes", start, end) for start, end in step.busy]
        spans += [(f"{one.kind} {one.bytes} bytes", one.kind, one.start, one.end) for one in step.communication]
        threads = {lane: thread for thread, lane in enumerate(dict.fromkeys(lane for _, lane, *_ in spans))}
        events += [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}]
        events += [{"ph": "C", "name": "memory", "pid": process, "ts": i / MEMORY_PARTS * step.seconds * 1e6,
                    "args": {"bytes": n_bytes}} for i, n_bytes in enumerate(step.memory)]
        events += [{"ph": "X", "name": what, "pid": process, "tid": threads[lane], "ts": start * 1e6,
                    "dur": (end - start) * 1e6} for what, lane, start, end in spans]
        events += [{"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": lane}}
                   for lane, thread in threads.items()]
    return {"traceEvents": events}


PARAMETERS = ("all_gather", "broadcast")
EXCHANGED = ("send", "recv")  # either, where collectives are exchanged in pieces: see exchange.py


def lanes(step):
    """A recorded step -> [("computes", spans), ("gradients", spans), ("parameters", spans)]. A message has one span
    when it arrives: from its launch, or from when the one before it in its lane had arrived."""
    computes = [(start, end, name) for name, *phase in step.phases for start, end in overlap([phase], step.busy)]
    arrive, before = {"gradients": [], "parameters": []}, collections.Counter()
    for message in sorted(step.communication, key=lambda message: message.end):
        lane = carries(step, message)
        start = max(message.start, before[lane])
        before[lane] = max(message.end, start)
        if start < step.seconds:
            arrive[lane].append((start, before[lane], lane))
    return [("computes", computes), *arrive.items()]


def carries(step, message):
    """-> "parameters" or "gradients". What is exchanged in the forward pass is the former; so is what follows the
    optimizer's step, the longest that is computed between messages there."""
    if message.kind not in EXCHANGED:
        return "parameters" if message.kind in PARAMETERS else "gradients"
    of, last = {name: (start, end) for name, start, end in step.phases}, max(one.start for one in step.communication)
    between = [span for span in overlap([of["step"]], step.busy) if span[0] < last]
    stepped_at = max(between, key=lambda span: span[1] - span[0], default=of["step"])[0]
    is_forward = of["forward"][0] <= message.start < of["forward"][1]
    return "parameters" if is_forward or message.start >= stepped_at else "gradients"


def scales(rows):
    """-> the longest step, and the most bytes that any row held, or 1: where lanes end."""
    return max(step.seconds for _, step in rows), max(max(step.memory, default=0) for _, step in rows) or 1


def said(step):
    """What a band shows, in a sentence."""
    travels = union((message.start, message.end) for message in step.communication)
    hidden = length(overlap(travels, step.busy))
    return (f"{step.seconds * 1000:.0f} ms; for {hidden * 1000:.0f} the network is busy while the rank computes, for "
            f"{step.exposed_seconds * 1000:.0f} while it waits")


LETTERS = {"forward": "F", "backward": "B", "step": "S", "gradients": "▒", "parameters": "▓"}
HEIGHTS = " ▁▂▃▄▅▆▇█"


def text(rows, width=80):
    """`rows`: [(name, recorded step), …], on one axis -> text for the terminal; a letter: most of its moment."""
    (longest, most_bytes), out = scales(rows), []
    for name, step in rows:
        out.append(f"{name}: {said(step)}")
        for lane, spans in lanes(step):
            cells = ""
            for i in range(width):
                moment, shares = [(i * longest / width, (i + 1) * longest / width)], collections.Counter()
                for start, end, what in spans:
                    shares[what] += length(overlap(moment, [(start, end)]))
                ((most, share),) = shares.most_common(1) or [("", 0)]
                cells += LETTERS[most] if share > longest / width / 3 else "·"
            out.append(f"{lane:>10} {cells}".replace("·" * width, "·"))
        if step.memory:
            cells = round(width * step.seconds / longest)
            parts = [max(step.memory[i * MEMORY_PARTS // cells:(i + 1) * MEMORY_PARTS // cells]) for i in range(cells)]
            heights = "".join(HEIGHTS[round(part / most_bytes * (len(HEIGHTS) - 1))] for part in parts)
            out.append(f"{'memory':>10} {heights} ≤ {max(step.memory) / 1e6:.0f} MB")
    return "\n".join([*out, f"{'':>10} 0 ms{longest * 1000:>{width - 7}.0f} ms"])


COLOURS = {"forward": "#4a90d9", "backward": "#2a5f9e", "step": "#d9822b", "gradients": "#3a9d5d",
           "parameters": "#b04a9d", "memory": "#c9a227"}
WORDS = {"forward": "computes: forward", "gradients": "gradients travel", "parameters": "parameters travel",
         "memory": "memory held"}


def svg(rows, title):
    """The same picture: one panel a row, a lane each for what computes and what travels, and memory below them."""
    longest, most_bytes = scales(rows)
    figure, axes = panels(len(rows), 1, (9.6, 0.9 + 1.15 * len(rows)))
    for axis, (name, step) in zip(axes, rows):
        axis.set_title(f"{name}: {said(step)}")
        for place, (_, spans) in enumerate(lanes(step)):
            for what in COLOURS:
                # Spans with less between them than a picture shows are one.
                near = union((max(start, 0), min(end, step.seconds) + longest / 2000)
                             for start, end, kind in spans if kind == what)
                axis.broken_barh([(1e3 * start, 1e3 * (end - start)) for start, end in near], (3 - place, 0.85),
                                 facecolors=COLOURS[what])
        if step.memory:
            edges = [1e3 * step.seconds * i / MEMORY_PARTS for i in range(len(step.memory) + 1)]
            axis.stairs([0.85 * part / most_bytes for part in step.memory], edges, fill=True, color=COLOURS["memory"])
        axis.set_yticks([3.4, 2.4, 1.4, 0.4], ["computes", "gradients", "parameters",
                                              f"memory ≤ {max(step.memory) / 1e6:.0f} MB" if step.memory else ""])
        axis.set(xlim=(0, 1e3 * longest), ylim=(0, 3.9))
    axes[-1].set_xlabel("ms")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10)
    handles = [axes[0].broken_barh([], (0, 1), facecolors=colour) for colour in COLOURS.values()]
    figure.legend(handles, [WORDS.get(what, what) for what in COLOURS], ncols=6, loc="outside lower left")
    return drawn(figure)


def on_two_hosts(result):
    """The result of two hosts -> (rows, title) for `text` and `svg`: the ladder, on rank 0."""
    c = result.conditions
    ddp = catalogue.tuned(result, catalogue.REFERENCE)  # a peer counts at its best setting
    shown = [ddp if ddp and base == catalogue.REFERENCE else result.find(base) for base in catalogue.LADDER]
    rows = [(row.name, row.timeline[0]) for row in shown if row and row.timeline]
    return rows, (f"One recorded step on rank 0 of {c.hosts} hosts with a link of {rate_words(c.rate)}; the table has "
                  "medians of others")


def two_hosts_picture(results):
    """Of results of two hosts at several rates -> that one's step which is to be drawn, as SVG; "" for none."""
    rows, title = on_two_hosts(drawn) if (drawn := saved.to_draw(results)) else ([], "")
    return svg(rows, title) if rows else ""


def planned_steps(result):
    """-> rows and title for svg and text: those that don't take four times as long as the fastest."""
    c, steps = SimpleNamespace(**result.conditions), {row.name: row.step for row in result.rows}
    longest = 4 * min(step.seconds for step in steps.values())
    return [(name, step) for name, step in steps.items() if step.seconds <= longest], (
        f"One step on rank 0 of {c.world}, modelled: {c.model}, {c.batch_size} x {c.sequence_length}")


def curve(rows, base):
    """Rows of a sweep -> [(place of the size on the axis, ms), …] of one; the axis has the places of SIZES."""
    return sorted((SIZES.index(DEFAULT_MB if row.bucket_mb is None else row.bucket_mb), row.median_ms)
                  for row in rows if row.base == base and row.rounds_ms)


def sweep_picture(results):
    """Results of two hosts at several rates, the slowest first -> SVG of their sweeps, "" where there is none."""
    swept = [result for result in results if is_whole(result.sweep)]
    if not swept:
        return ""
    figure, axes = panels(1, len(swept), (5 * len(swept), 3.4))
    for axis, result in zip(axes, swept):
        for base, colour in ((STAGE_4, "#3a9d5d"), (REFERENCE, "#4a90d9")):
            axis.plot(*zip(*curve(result.sweep.rows, base)), "o-", color=colour, label=base, markersize=4)
        axis.set_xticks(range(len(SIZES)), ["1 par." if size == ONE_PARAMETER else f"{size:g}" for size in SIZES])
        axis.set(title=f"{rate_words(result.conditions.rate)}: ms a step, by size of bucket", xlabel="MiB", ylim=0)
        axis.grid(axis="y")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=5, loc="outside lower left")
    return drawn(figure)


CURVE_COLOURS = ("#c0921c", "#8a8a8a", "#d06a2c", "#a060c0", "#7fa8d6", "#2f7fd4", "#2e9a58", "#888888")


def curve_picture(results):
    """What overlap is worth at every line, the slowest first: time of a step over that of computing alone."""
    figure, (axis,) = panels(1, 1, (7.6, 4.2))
    rates = [result.conditions.bits_per_second for result in results]
    for (name, base), colour in zip(CURVES.items(), CURVE_COLOURS):
        points = [(rate, ratio) for rate, result in zip(rates, results)
                  if (ratio := over_computing(result, base)) is not None]
        wide = base == "rung 0 replicated"  # another line lies on it
        axis.plot(*zip(*points), "--" if base == "floor" else "o-", color=colour, label=name,
                  markersize=9 if wide else 4, linewidth=5 if wide else 1.5, alpha=0.5 if wide else 1)
    axis.set(xscale="log", yscale="log", xlim=(rates[0] / 1.05, rates[-1] * 1.05),
             title="What communication adds to a step, on two hosts", xlabel="rate of the link",
             ylabel="time per step / time of computing alone")
    axis.set_xticks(rates, [rate_words(result.conditions.rate).replace(" ", "\n") for result in results])
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 10) if tick <= axis.get_ylim()[1]]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(True)
    figure.legend(loc="outside right upper")
    return drawn(figure)
