"""Draws recorded steps, and curves, from raw numbers: as SVG, by matplotlib.

Only this file reads raw numbers of a Report; everything else that pages show is a finished table.
"""

import importlib.util
import io
import itertools
import re
from typing import NamedTuple

# --------------------------------------------------------------------------------------- A recorded step, spans of time


class Message(NamedTuple):
    """A collective, or one side of a send. `bytes` of the full tensor; times in seconds from the start of the step."""
    kind: str
    bytes: int
    start: float
    end: float


class RecordedStep(NamedTuple):
    """One step on one rank. A span is (start, end), in seconds from the start of the step."""
    exposed_seconds: float  # in which messages are in flight, and the rank doesn't compute
    seconds: float
    phases: list  # of (name, start, end)
    busy: list  # spans in which the rank computes
    communication: list  # of Messages
    memory: list = ()  # the most bytes that were alive in each of MEMORY_PARTS equal parts


def read_steps(drawn):
    """Return ([(name, RecordedStep)], title) from what `to_draw` has saved."""
    steps = []
    for name, fields in drawn["steps"].items():
        step = RecordedStep(*fields)
        messages = [Message(*message) for message in step.communication]
        steps.append((name, step._replace(communication=messages)))
    return steps, drawn["title"]


def to_draw(steps, title):
    """Return the dict that a Report saves, as `drawn`, for a picture of [(name, RecordedStep)] under `title`."""
    return {"steps": dict(steps), "title": title}


MEMORY_PARTS = 200  # equal parts of a step; each keeps its largest value, so a picture never loses a peak


def most_alive(live, start, end):
    """Return the most bytes alive in each of MEMORY_PARTS equal parts of a step.

    live: [(time, bytes alive from then on), …]. start, end: times of the step.
    """
    def part_at(time):
        return int((time - start) / (end - start) * MEMORY_PARTS)

    parts = [0] * MEMORY_PARTS
    for (since, n_bytes), (until, _) in itertools.pairwise([*live, (end, 0)]):
        if since < end and until > start:
            first = max(part_at(since), 0)
            last = min(part_at(until), MEMORY_PARTS - 1)
            for i in range(first, last + 1):
                parts[i] = max(parts[i], n_bytes)
    return parts


def union(spans):
    """Merge spans, (start, end) each, that overlap; return disjoint ones in order."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def overlap(spans, other_spans):
    """Return the spans that lie in both lists of disjoint spans."""
    common = ((max(start, other_start), min(end, other_end))
              for start, end in spans for other_start, other_end in other_spans)
    return [(start, end) for start, end in common if start < end]


def length(spans):
    """Add up the lengths of disjoint spans."""
    return sum(end - start for start, end in spans)


# ------------------------------------------------------------------------------------------------------------ Pictures


# For matplotlib: an SVG keeps text as text, and the same data give the same file.
RC = {"svg.fonttype": "none", "svg.hashsalt": "results", "font.sans-serif": ["DejaVu Sans", "sans-serif"],
      "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False,
      "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": False,
      "grid.color": "#888888", "grid.alpha": 0.25, "xtick.color": "#888888", "ytick.color": "#888888",
      "figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False,
      "figure.constrained_layout.use": True}
# Ending of a file's name -> its style. GitHub's theme needn't be the system's, so a page's <picture> names both files.
STYLES = {"": "<style>text{fill:#444!important}</style>", "_dark": "<style>text{fill:#bbb!important}</style>"}


def can_draw():
    """Return whether matplotlib is installed; without it there are tables alone."""
    return importlib.util.find_spec("matplotlib") is not None


def panels(n_rows, n_columns, inches):
    """Make a figure; return it, and its panels in a list."""
    import matplotlib
    from matplotlib.figure import Figure  # a program that only measures doesn't need it: see `can_draw`
    matplotlib.rcParams.update(RC)
    figure = Figure(figsize=inches)
    return figure, list(figure.subplots(n_rows, n_columns, sharex=n_rows > 1, squeeze=False).flat)


def drawn_as_svg(figure):
    """Return a figure as SVG, for a light page."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", file.getvalue())  # a hundredth is invisible
    text = re.sub(r"\n(?=[MLCQz\"])", " ", text)  # puts each path on one line
    text = text.replace("<defs>", f"{STYLES['']}<defs>", 1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def in_dark(svg):
    """Return a picture of `drawn_as_svg` for a dark page."""
    return svg.replace(STYLES[""], STYLES["_dark"])


PARAMETERS = ("all_gather", "broadcast")
EXCHANGED = ("send", "recv")  # gradients or parameters, in the exchange that replaces collectives: exchange.py


def lanes(step):
    """Return the spans to draw: [("computes", spans), ("gradients", spans), ("parameters", spans)].

    A span is (start, end, name of the colour: the phase or the lane). A message's span starts when the message was
    launched, or when the message before it in the lane had arrived, if that is later.
    """
    computes = []
    for phase, phase_start, phase_end in step.phases:
        computes += [(start, end, phase) for start, end in overlap([(phase_start, phase_end)], step.busy)]
    messages = {"gradients": [], "parameters": []}
    free_at = {"gradients": 0, "parameters": 0}  # when the last message in the lane has arrived
    for message in sorted(step.communication, key=lambda message: message.end):
        lane = carries(step, message)
        start = max(message.start, free_at[lane])
        free_at[lane] = max(message.end, start)
        if start < step.seconds:  # a message may arrive in the next step
            messages[lane].append((start, free_at[lane], lane))
    return [("computes", computes), *messages.items()]


def carries(step, message):
    """Return "parameters" or "gradients".

    A send or recv carries parameters in the forward pass, and after the inner optimizer's update. No record marks the
    update; it is taken to be the longest span of computing in the phase "step" that starts before the last launch.
    """
    if message.kind not in EXCHANGED:
        return "parameters" if message.kind in PARAMETERS else "gradients"
    phases = {name: (start, end) for name, start, end in step.phases}
    last_launch = max(sent.start for sent in step.communication)
    computed = [(start, end) for start, end in overlap([phases["step"]], step.busy) if start < last_launch]
    update_start, _ = max(computed, key=lambda span: length([span]), default=phases["step"])
    forward_start, forward_end = phases["forward"]
    is_forward = forward_start <= message.start < forward_end
    return "parameters" if is_forward or message.start >= update_start else "gradients"


def scales(rows):
    """Return the longest step in seconds, and the most bytes that any row held (1 if none has memory)."""
    longest = max(step.seconds for _, step in rows)
    most_bytes = max(max(step.memory, default=0) for _, step in rows)
    return longest, most_bytes or 1


def caption(step):
    """Say in a sentence what a row's picture shows."""
    sent = union((message.start, message.end) for message in step.communication)
    hidden = length(overlap(sent, step.busy))
    return (f"{step.seconds * 1000:.0f} ms; for {hidden * 1000:.0f} the network is busy while the rank computes, for "
            f"{step.exposed_seconds * 1000:.0f} while it waits")


COLOURS = {"forward": "#4a90d9", "backward": "#2a5f9e", "step": "#d9822b", "gradients": "#3a9d5d",
           "parameters": "#b04a9d", "memory": "#c9a227"}
WORDS = {"forward": "computes: forward", "gradients": "gradients travel", "parameters": "parameters travel",
         "memory": "memory held"}


def svg(rows, title):
    """Draw `rows`, [(name, RecordedStep), …], as SVG.

    Each row has a panel: a lane for computing, one for gradients, one for parameters, and memory below them.
    """
    longest, most_bytes = scales(rows)
    figure, axes = panels(len(rows), 1, (9.6, 0.9 + 1.15 * len(rows)))
    for axis, (name, step) in zip(axes, rows):
        axis.set_title(f"{name}: {caption(step)}")
        for y, (_, spans) in zip((3, 2, 1), lanes(step)):
            for kind, colour in COLOURS.items():
                # Spans with less between them than a picture shows become one bar.
                bars = union((max(start, 0), min(end, step.seconds) + longest / 2000)
                             for start, end, span_kind in spans if span_kind == kind)
                axis.broken_barh([(1e3 * start, 1e3 * (end - start)) for start, end in bars], (y, 0.85),
                                 facecolors=colour)
        memory_in_words = ""
        if step.memory:
            edges = [1e3 * step.seconds * i / MEMORY_PARTS for i in range(len(step.memory) + 1)]
            axis.stairs([0.85 * part / most_bytes for part in step.memory], edges, fill=True, color=COLOURS["memory"])
            memory_in_words = f"memory ≤ {max(step.memory) / 1e6:.0f} MB"
        axis.set_yticks([3.4, 2.4, 1.4, 0.4], ["computes", "gradients", "parameters", memory_in_words])
        axis.set(xlim=(0, 1e3 * longest), ylim=(0, 3.9))
    axes[-1].set_xlabel("ms")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10)
    handles = [axes[0].broken_barh([], (0, 1), facecolors=colour) for colour in COLOURS.values()]
    figure.legend(handles, [WORDS.get(kind, kind) for kind in COLOURS], ncols=6, loc="outside lower left")
    return drawn_as_svg(figure)


# ------------------------------------------------------------------------- Curves, from what Reports have under `drawn`


CURVE_COLOURS = ("#c0921c", "#8a8a8a", "#d06a2c", "#a060c0", "#7fa8d6", "#2f7fd4", "#2e9a58", "#888888")


# of_links: what the Report on each link has under `drawn`, the slowest link first. It is a dict of rate (in words),
# bits_per_second, curve ({method: time per step / time of computing alone, or None}), sizes (of buckets, in words) and
# sweep ({method: [(index of the size, ms per step), …]}).


def curve(of_links):
    """Draw the time per step of each method, by the rate of the link."""
    figure, (axis,) = panels(1, 1, (7.6, 4.2))
    rates = [drawn["bits_per_second"] for drawn in of_links]
    for name, colour in zip(of_links[0]["curve"], CURVE_COLOURS):
        points = {rate: drawn["curve"][name] for rate, drawn in zip(rates, of_links)
                  if drawn["curve"][name] is not None}
        style = {"linestyle": "-", "marker": "o", "markersize": 4, "linewidth": 1.5, "alpha": 1}
        if name == "floor":
            style |= {"linestyle": "--", "marker": ""}
        if name == "replicated":  # stage 3's line lies on it
            style |= {"markersize": 9, "linewidth": 5, "alpha": 0.5}
        axis.plot(list(points), list(points.values()), color=colour, label=name, **style)
    axis.set(xscale="log", yscale="log", xlim=(rates[0] / 1.05, rates[-1] * 1.05),
             title="What communication adds to a step, on two hosts", xlabel="rate of the link",
             ylabel="time per step / time of computing alone")
    axis.set_xticks(rates, [drawn["rate"].replace(" ", "\n") for drawn in of_links])
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 10) if tick <= axis.get_ylim()[1]]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(True)
    figure.legend(loc="outside right upper")
    return drawn_as_svg(figure)


def sweeps(of_links):
    """Draw ms per step by size of bucket, a panel for each link."""
    figure, axes = panels(1, len(of_links), (5 * len(of_links), 3.4))
    for axis, drawn in zip(axes, of_links):
        for (name, points), colour in zip(drawn["sweep"].items(), ("#3a9d5d", "#4a90d9")):
            x, y = zip(*points)
            axis.plot(x, y, "o-", color=colour, label=name, markersize=4)
        axis.set_xticks(range(len(drawn["sizes"])), drawn["sizes"])
        axis.set(title=f"{drawn['rate']}: ms a step, by size of bucket", xlabel="MiB", ylim=0)
        axis.grid(axis="y")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=5, loc="outside lower left")
    return drawn_as_svg(figure)


METHOD_COLOURS = {"DDP": "#4a90d9", "stage 4": "#3a9d5d", "same_bits": "#d06a2c"}
LINE_STYLES = {"2 ranks": "-", "4 ranks": "--", "8 ranks": ":"}


def differences(by_name):
    """Draw the largest difference of a parameter from the run on one rank, by step.

    by_name: {"DDP, 2 ranks": [difference after each step, …]}. A difference of 0 is drawn below all others.
    """
    figure, (axis,) = panels(1, 1, (7.6, 3.6))
    not_zero = [difference for by_step in by_name.values() for difference in by_step if difference]
    least = min(not_zero) / 10
    for name, by_step in by_name.items():
        method, ranks = name.split(", ")
        axis.plot(range(1, len(by_step) + 1), [max(difference, least) for difference in by_step], label=name,
                  color=METHOD_COLOURS[method], linestyle=LINE_STYLES[ranks])
    axis.set(yscale="log", title="Largest difference of a parameter from the run on one rank", xlabel="step")
    powers = [10.0**exponent for exponent in range(-9, 1) if 2 * least < 10.0**exponent < 2 * max(not_zero)]
    axis.set_yticks([least, *powers], ["0", *(f"{power:.0e}" for power in powers)])
    axis.minorticks_off()
    axis.grid(True)
    figure.legend(loc="outside right upper")
    return drawn_as_svg(figure)
