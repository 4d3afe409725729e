"""Draws SVG pictures by matplotlib: when a rank computes and sends during a training step, and curves of measurements.

A program that measures saves a Report in results/. Its field `drawn` has raw numbers, which only this file reads.

    ddp         torch's DistributedDataParallel
    stage 1 to 4    the optimizers of this repository
    bucket      a group of parameters whose gradients travel in one message
    link        the network between two emulated hosts, at one of several rates
"""

import importlib.util
import io
import re
from typing import NamedTuple

# -------------------------------------------------------------------------------------- Recorded steps, spans of time


class Message(NamedTuple):
    """A collective as one rank sees it, or a send to another rank, or a receive from another rank."""
    kind: str  # name of the collective, such as "all_gather", or "send" or "recv"
    bytes: int  # size of the full tensor
    start: float  # when the rank launched the message, in seconds from the start of the step
    end: float  # when the message had arrived, in seconds from the start of the step


class RecordedStep(NamedTuple):
    """A training step, as recorded on one rank. A span is (start, end), in seconds from the start of the step."""
    exposed_seconds: float  # total time in which messages are in flight and the rank doesn't compute
    seconds: float  # how long the step took
    phases: list  # [(name, start, end), …] of the phases "forward", "backward" and "step", the optimizer's step()
    busy: list  # spans in which the rank computes, disjoint and in order
    communication: list  # of Messages


def read_steps(drawn):
    """Return ([(name, RecordedStep), …], title) from `drawn`, which `to_draw` made and json has turned into lists."""
    steps = []
    for name, fields in drawn["steps"].items():
        step = RecordedStep(*fields)
        messages = [Message(*message) for message in step.communication]
        steps.append((name, step._replace(communication=messages)))
    return steps, drawn["title"]


def to_draw(steps, title):
    """Return what a Report saves under `drawn`. `steps`: [(name, RecordedStep), …] for a picture with that title."""
    return {"steps": dict(steps), "title": title}


def union(spans):
    """Merge the spans (start, end) that overlap. Returns disjoint spans, each a list [start, end], in order."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def overlap(spans, other_spans):
    """Return the spans of time that lie in both of two lists of disjoint spans."""
    common = []
    for start, end in spans:
        for other_start, other_end in other_spans:
            common.append((max(start, other_start), min(end, other_end)))
    return [(start, end) for start, end in common if start < end]


def length(spans):
    """Add up the lengths of disjoint spans."""
    return sum(end - start for start, end in spans)


# ------------------------------------------------------------------------------------------------------------ Pictures


# Settings of matplotlib. The first keeps text as text in an SVG. With the second the same data give the same file.
RC = {"svg.fonttype": "none", "svg.hashsalt": "results", "font.sans-serif": ["DejaVu Sans", "sans-serif"],
      "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.spines.top": False,
      "axes.spines.right": False, "axes.edgecolor": "#888888", "axes.grid": False,
      "grid.color": "#888888", "grid.alpha": 0.25, "xtick.color": "#888888", "ytick.color": "#888888",
      "figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False,
      "figure.constrained_layout.use": True}
# Every picture has a file for light pages and one for dark pages, with text of another colour.
LIGHT_STYLE = "<style>text{fill:#444!important}</style>"
DARK_STYLE = "<style>text{fill:#bbb!important}</style>"


def can_draw():
    """Return whether matplotlib is installed. Programs that only measure don't need it."""
    return importlib.util.find_spec("matplotlib") is not None


def panels(n_rows, n_columns, inches):
    """Return (figure, list of its panels). A panel is what matplotlib calls axes. `inches`: (width, height)."""
    # Imported here, because a program that only measures imports this file too, and may run without matplotlib.
    import matplotlib
    from matplotlib.figure import Figure
    matplotlib.rcParams.update(RC)
    figure = Figure(figsize=inches)
    table_of_panels = figure.subplots(n_rows, n_columns, sharex=n_rows > 1, squeeze=False)
    return figure, list(table_of_panels.flat)


def drawn_as_svg(figure):
    """Return a figure as the text of an SVG, in the colours for a light page."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = re.sub(r"\d+\.\d{3,}", with_two_decimals, file.getvalue())
    text = re.sub(r"\n(?=[MLCQz\"])", " ", text)  # puts each path on one line
    text = text.replace("<defs>", f"{LIGHT_STYLE}<defs>", 1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def with_two_decimals(match):
    """Return the number that a regular expression has matched, rounded, because a hundredth of a point is invisible."""
    return f"{float(match[0]):.2f}"


def in_dark(svg):
    """Return an SVG that `drawn_as_svg` has made, in the colours for a dark page."""
    return svg.replace(LIGHT_STYLE, DARK_STYLE)


# Kinds of messages. All other kinds carry gradients. On CPUs sends and receives replace gloo's collectives.
CARRY_PARAMETERS = ("all_gather", "broadcast")
CARRY_EITHER = ("send", "recv")


def lanes(step):
    """Return {lane: bars} for the three lanes of a step's picture: "computes", "gradients", "parameters".

    A bar is (start, end, colour), where `colour` is a key of COLOURS. A message's bar starts when the message was
    launched, or when the message before it in the lane had arrived, if that is later.
    """
    bars = {"computes": [], "gradients": [], "parameters": []}
    for phase, phase_start, phase_end in step.phases:
        for start, end in overlap([(phase_start, phase_end)], step.busy):
            bars["computes"].append((start, end, phase))
    free_at = {"gradients": 0, "parameters": 0}  # when the last message so far in the lane has arrived
    for message in sorted(step.communication, key=lambda message: message.end):
        lane = carried_by(message, step)
        start = max(message.start, free_at[lane])
        free_at[lane] = max(message.end, start)
        if start < step.seconds:  # not so if the message waited in its lane until the next step
            bars[lane].append((start, free_at[lane], lane))
    return bars


def carried_by(message, step):
    """Return what a message of a step carries: "parameters" or "gradients".

    The kind of a collective says that. A send or recv carries parameters if it was launched in the forward pass or
    after AdamW's update has begun. The update isn't recorded. It is assumed to be the longest span of computing in the
    phase "step" that starts before the last message was launched.
    """
    if message.kind not in CARRY_EITHER:
        return "parameters" if message.kind in CARRY_PARAMETERS else "gradients"
    phases = {name: (start, end) for name, start, end in step.phases}
    forward_start, forward_end = phases["forward"]
    if forward_start <= message.start < forward_end:
        return "parameters"
    last_launch = max(message.start for message in step.communication)
    computed = [(start, end) for start, end in overlap([phases["step"]], step.busy) if start < last_launch]
    # The longest span, or the whole phase if the rank computed nothing in it.
    update_start, _ = max(computed, key=lambda span: span[1] - span[0], default=phases["step"])
    return "parameters" if message.start >= update_start else "gradients"


def caption(step):
    """Return a sentence that says how long a step took, and how much of its communication was hidden."""
    in_flight = union((message.start, message.end) for message in step.communication)
    hidden = length(overlap(in_flight, step.busy))
    return (f"{step.seconds * 1000:.0f} ms; for {hidden * 1000:.0f} the network is busy while the rank computes, for "
            f"{step.exposed_seconds * 1000:.0f} while it waits")


# Colour of a bar, and words in the legend: of each phase in which a rank computes, and of each thing that travels.
COLOURS = {"forward": "#4a90d9", "backward": "#2a5f9e", "step": "#d9822b", "gradients": "#3a9d5d",
           "parameters": "#b04a9d"}
WORDS = {"forward": "computes: forward", "backward": "backward", "step": "step", "gradients": "gradients travel",
         "parameters": "parameters travel"}
LANE_HEIGHT = 0.85  # the distance from lane to lane is 1


def svg(steps, title):
    """Draw `steps`, [(name, RecordedStep), …], one below the other, in lanes. Returns the text of an SVG."""
    longest = max(step.seconds for _, step in steps)
    invisible = longest / 2000  # bars of a colour become one bar if the gap between them is as short as this
    figure, axes = panels(len(steps), 1, (9.6, 0.9 + 0.9 * len(steps)))
    for axis, (name, step) in zip(axes, steps):
        axis.set_title(f"{name}: {caption(step)}")
        bars_of_lane = lanes(step)
        heights = range(len(bars_of_lane))[::-1]  # the first lane is the highest
        for y, bars in zip(heights, bars_of_lane.values()):
            for colour, code in COLOURS.items():
                # Each bar is made longer by what is invisible, so that `union` closes a gap of that length.
                joined = union((max(start, 0), min(end, step.seconds) + invisible)
                               for start, end, bar_colour in bars if bar_colour == colour)
                in_ms = [(1000 * start, 1000 * (end - start)) for start, end in joined]
                axis.broken_barh(in_ms, (y, LANE_HEIGHT), facecolors=code)
        axis.set_yticks([y + LANE_HEIGHT / 2 for y in heights], list(bars_of_lane))
        axis.set(xlim=(0, 1000 * longest), ylim=(0, len(bars_of_lane) - 0.1))
    axes[-1].set_xlabel("ms")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=10)
    # For the legend: empty bars in each of the colours.
    handles = [axes[0].broken_barh([], (0, 1), facecolors=code) for code in COLOURS.values()]
    figure.legend(handles, [WORDS[colour] for colour in COLOURS], ncols=5, loc="outside lower left")
    return drawn_as_svg(figure)


# ----------------------------------------------------------------------------------------------------------- Curves


# Colours of the methods of a curve, in their order.
CURVE_COLOURS = ("#c0921c", "#8a8a8a", "#d06a2c", "#a060c0", "#7fa8d6", "#2f7fd4", "#2e9a58", "#888888")


# The next two functions get a list of links, the slowest first. A link is a dict, the `drawn` of a Report that was
# measured on the link. A method is a name of a way to train, as the picture shows it.
#   "rate": the rate in words;  "bits_per_second": the rate as a number
#   "curve": {method: time per step / time of computing alone, or None if it wasn't measured on this link}
#   "sizes": the sizes of buckets that were tried, in words, from small to large
#   "sweep": {method: [(index of a size in "sizes", ms per step with buckets of that size), …]}


def curve(links):
    """Draw the time per step against the rate of the link, with a line for each method. Returns the text of an SVG."""
    figure, (axis,) = panels(1, 1, (7.6, 4.2))
    for method, colour in zip(links[0]["curve"], CURVE_COLOURS):
        measured = [link for link in links if link["curve"][method] is not None]
        style = {"linestyle": "-", "marker": "o", "markersize": 4, "linewidth": 1.5, "alpha": 1}
        if method == "floor":  # calculated: no step is quicker than its computing alone, or its sending alone
            style |= {"linestyle": "--", "marker": ""}
        if method == "replicated":  # drawn broad and pale, because stage 3's line lies on this line
            style |= {"markersize": 9, "linewidth": 5, "alpha": 0.5}
        axis.plot([link["bits_per_second"] for link in measured], [link["curve"][method] for link in measured],
                  color=colour, label=method, **style)
    rates = [link["bits_per_second"] for link in links]
    axis.set(xscale="log", yscale="log", xlim=(rates[0] / 1.05, rates[-1] * 1.05),
             title="What communication adds to a step, on two hosts", xlabel="rate of the link",
             ylabel="time per step / time of computing alone")
    axis.set_xticks(rates, [link["rate"].replace(" ", "\n") for link in links])
    _, highest = axis.get_ylim()
    ticks = [tick for tick in (1, 1.5, 2, 3, 4, 6, 8, 10) if tick <= highest]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(True)
    figure.legend(loc="outside right upper")
    return drawn_as_svg(figure)


def sweeps(links):
    """Draw ms per step against the size of buckets, with a panel for each link. Returns the text of an SVG."""
    figure, axes = panels(1, len(links), (5 * len(links), 3.4))
    for axis, link in zip(axes, links):
        # At most two methods were swept. Each gets a colour.
        for (method, points), colour in zip(link["sweep"].items(), ("#3a9d5d", "#4a90d9")):
            indices, ms = zip(*points)  # indices of sizes, and milliseconds
            axis.plot(indices, ms, "o-", color=colour, label=method, markersize=4)
        axis.set_xticks(range(len(link["sizes"])), link["sizes"])
        axis.set(title=f"{link['rate']}: ms a step, by size of bucket", xlabel="MiB", ylim=0)
        axis.grid(axis="y")
    figure.legend(*axes[0].get_legend_handles_labels(), ncols=5, loc="outside lower left")
    return drawn_as_svg(figure)


# For the next function: colours of methods, and styles of lines for numbers of ranks.
METHOD_COLOURS = {"DDP": "#4a90d9", "stage 4": "#3a9d5d", "same_bits": "#d06a2c"}
LINE_STYLES = {"2 ranks": "-", "4 ranks": "--", "8 ranks": ":"}


def differences(by_name):
    """Draw how far training on several ranks departs from training on one rank, step by step.

    by_name: {"DDP, 2 ranks": [difference after each step, …]}. A difference is the largest of any element of any
    parameter. A 0 is drawn below all other differences. Returns the text of an SVG.
    """
    figure, (axis,) = panels(1, 1, (7.6, 3.6))
    not_zero = [difference for by_step in by_name.values() for difference in by_step if difference]
    drawn_zero = min(not_zero) / 10  # where a logarithmic axis shows 0
    for name, by_step in by_name.items():
        method, ranks = name.split(", ")
        steps = range(1, len(by_step) + 1)
        axis.plot(steps, [max(difference, drawn_zero) for difference in by_step], label=name,
                  color=METHOD_COLOURS[method], linestyle=LINE_STYLES[ranks])
    axis.set(yscale="log", title="Largest difference of a parameter from the run on one rank", xlabel="step")
    powers = [10.0**exponent for exponent in range(-9, 1)]
    # Only powers within the picture, with room between the lowest one and the 0 below it.
    powers = [power for power in powers if 2 * drawn_zero < power < 2 * max(not_zero)]
    axis.set_yticks([drawn_zero, *powers], ["0", *(f"{power:.0e}" for power in powers)])
    axis.minorticks_off()
    axis.grid(True)
    figure.legend(loc="outside right upper")
    return drawn_as_svg(figure)
