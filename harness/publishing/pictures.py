"""Draws recorded steps: as text for the terminal, and as SVG by matplotlib."""

import collections
import importlib.util
import io
import re

from harness.publishing.results import MEMORY_PARTS, length, overlap, union

# Text stays text; the same data give the same file.
RC = {"svg.fonttype": "none", "svg.hashsalt": "results", "font.sans-serif": ["DejaVu Sans", "sans-serif"],
      "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False,
      "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": False,
      "grid.color": "#888888", "grid.alpha": 0.25, "xtick.color": "#888888", "ytick.color": "#888888",
      "figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False,
      "figure.constrained_layout.use": True}
STYLE = "<style>text{fill:#444!important} @media (prefers-color-scheme:dark){text{fill:#bbb!important}}</style>"


def can_draw():
    """Return whether matplotlib is installed; without it there are tables, and text for the terminal."""
    return importlib.util.find_spec("matplotlib") is not None


def panels(n_rows, n_columns, inches):
    """Make a figure; return it, and its panels in a list."""
    import matplotlib
    from matplotlib.figure import Figure  # a program that only measures doesn't need it: see `can_draw`
    matplotlib.rcParams.update(RC)
    figure = Figure(figsize=inches)
    return figure, list(figure.subplots(n_rows, n_columns, sharex=n_rows > 1, squeeze=False).flat)


def drawn(figure):
    """Return a figure as SVG, readable on light and dark."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", file.getvalue())  # a hundredth is invisible
    text = re.sub(r"\n(?=[MLCQz\"])", " ", text).replace("<defs>", f"{STYLE}<defs>", 1)  # a path is one line
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


PARAMETERS = ("all_gather", "broadcast")
EXCHANGED = ("send", "recv")  # gradients or parameters, in the exchange that replaces collectives: exchange.py


def lanes(step):
    """Return [("computes", spans), ("gradients", spans), ("parameters", spans)] of a recorded step.

    A span is (start, end, the phase or the lane). That of a message starts when it was launched, or when the message
    before it in the lane had arrived, if that is later.
    """
    computes = [(start, end, name) for name, *phase in step.phases for start, end in overlap([phase], step.busy)]
    messages = {"gradients": [], "parameters": []}
    last_end = collections.Counter()
    for message in sorted(step.communication, key=lambda message: message.end):
        lane = carries(step, message)
        start = max(message.start, last_end[lane])
        last_end[lane] = max(message.end, start)
        if start < step.seconds:
            messages[lane].append((start, last_end[lane], lane))
    return [("computes", computes), *messages.items()]


def carries(step, message):
    """Return "parameters" or "gradients".

    A send or recv carries parameters in the forward pass, and after the inner optimizer's update. That is taken to be
    the longest span of computing in the phase "step", before the last launch.
    """
    if message.kind not in EXCHANGED:
        return "parameters" if message.kind in PARAMETERS else "gradients"
    phases = {name: (start, end) for name, start, end in step.phases}
    last_launch = max(sent.start for sent in step.communication)
    computed = [(start, end) for start, end in overlap([phases["step"]], step.busy) if start < last_launch]
    update_start, _ = max(computed, key=lambda span: span[1] - span[0], default=phases["step"])
    forward_start, forward_end = phases["forward"]
    is_forward = forward_start <= message.start < forward_end
    return "parameters" if is_forward or message.start >= update_start else "gradients"


def scales(rows):
    """Return where lanes end: the longest step, and the most bytes that any row held, or 1."""
    return max(step.seconds for _, step in rows), max(max(step.memory, default=0) for _, step in rows) or 1


def caption(step):
    """Say in a sentence what a band shows."""
    sent = union((message.start, message.end) for message in step.communication)
    hidden = length(overlap(sent, step.busy))
    return (f"{step.seconds * 1000:.0f} ms; for {hidden * 1000:.0f} the network is busy while the rank computes, for "
            f"{step.exposed_seconds * 1000:.0f} while it waits")


LETTERS = {"forward": "F", "backward": "B", "step": "S", "gradients": "▒", "parameters": "▓"}
HEIGHTS = " ▁▂▃▄▅▆▇█"


def text(rows, width=80):
    """Draw `rows`, [(name, recorded step), …], on one axis for the terminal. A letter shows what fills its moment."""
    longest, most_bytes = scales(rows)
    lines = []
    for name, step in rows:
        lines.append(f"{name}: {caption(step)}")
        for lane, spans in lanes(step):
            cells = "".join(_letter(spans, i * longest / width, (i + 1) * longest / width) for i in range(width))
            lines.append(f"{lane:>10} {cells}".replace("·" * width, "·"))
        if step.memory:
            n_cells = round(width * step.seconds / longest)
            edges = [i * MEMORY_PARTS // n_cells for i in range(n_cells + 1)]
            parts = [max(step.memory[start:end]) for start, end in zip(edges, edges[1:])]
            heights = "".join(HEIGHTS[round(part / most_bytes * (len(HEIGHTS) - 1))] for part in parts)
            lines.append(f"{'memory':>10} {heights} ≤ {max(step.memory) / 1e6:.0f} MB")
    return "\n".join([*lines, f"{'':>10} 0 ms{longest * 1000:>{width - 7}.0f} ms"])


def _letter(spans, start, end):
    """Return the letter of the phase or lane that fills most of a moment, or a dot where that is less than a third."""
    shares = collections.Counter()
    for span_start, span_end, name in spans:
        shares[name] += length(overlap([(start, end)], [(span_start, span_end)]))
    ((name, share),) = shares.most_common(1) or [("", 0)]
    return LETTERS[name] if share > (end - start) / 3 else "·"


COLOURS = {"forward": "#4a90d9", "backward": "#2a5f9e", "step": "#d9822b", "gradients": "#3a9d5d",
           "parameters": "#b04a9d", "memory": "#c9a227"}
WORDS = {"forward": "computes: forward", "gradients": "gradients travel", "parameters": "parameters travel",
         "memory": "memory held"}


def svg(rows, title):
    """Draw the same as SVG: a panel for each row, a lane each for computing and messages, and memory below them."""
    longest, most_bytes = scales(rows)
    figure, axes = panels(len(rows), 1, (9.6, 0.9 + 1.15 * len(rows)))
    for axis, (name, step) in zip(axes, rows):
        axis.set_title(f"{name}: {caption(step)}")
        for place, (_, spans) in enumerate(lanes(step)):
            for kind, colour in COLOURS.items():
                # Spans with less between them than a picture shows become one bar.
                bars = union((max(start, 0), min(end, step.seconds) + longest / 2000)
                             for start, end, name in spans if name == kind)
                axis.broken_barh([(1e3 * start, 1e3 * (end - start)) for start, end in bars], (3 - place, 0.85),
                                 facecolors=colour)
        if step.memory:
            edges = [1e3 * step.seconds * i / MEMORY_PARTS for i in range(len(step.memory) + 1)]
            axis.stairs([0.85 * part / most_bytes for part in step.memory], edges, fill=True, color=COLOURS["memory"])
        axis.set_yticks([3.4, 2.4, 1.4, 0.4], ["computes", "gradients", "parameters",
                                              f"memory ≤ {max(step.memory) / 1e6:.0f} MB" if step.memory else ""])
        axis.set(xlim=(0, 1e3 * longest), ylim=(0, 3.9))
    axes[-1].set_xlabel("ms")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10)
    handles = [axes[0].broken_barh([], (0, 1), facecolors=colour) for colour in COLOURS.values()]
    figure.legend(handles, [WORDS.get(kind, kind) for kind in COLOURS], ncols=6, loc="outside lower left")
    return drawn(figure)
