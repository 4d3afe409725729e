"""Draws an SVG that plays as an image, without a script: words, bars and cells, each visible for some seconds.

If a reader's system has motion off, the picture shows the second `still`. An image can't know which theme GitHub shows,
so each picture has two files, light and dark. The page uses the same colours, stripes and cells.css.
"""

from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

CSS = Path(__file__).with_name("page").joinpath("cells.css").read_text(encoding="utf-8").strip()
THEMES = {
    "": "--paper:#fff;--ink:#1c1e21;--soft:#565c66;--line:#d5d9df;--garbage:#d3d7dd;--bad:#c4001a;--grads:#0a7d4f;"
        "--params:#7b3fb5",
    "_dark": "--paper:#0d1117;--ink:#e8eaed;--soft:#a9afb9;--line:#3a3f47;--garbage:#3d434c;--bad:#ff7b86;"
             "--grads:#4fd39a;--params:#c59af2"}
STRIPES = {  # kind of cell -> (pixels from stripe to stripe, degrees, pixels of a stripe, opacity between stripes)
    "gradient": (5, 45, 2.5, 0.3), "share": (3, 45, 0.7, 0.12), "moment": (4, 90, 1.5, 0.25)}
KINDS = {  # kind of cell -> its words in the legend
    "gradient": "gradient", "share": "gradient ÷ 4", "average": "average", "old": "old", "stale": "awaited",
    "new": "new", "moment": "moment", "garbage": "garbage", "padding": "padding"}
SENT_DIRECTLY = "Drawn as direct sends, one by one. NCCL's ring sends as many bytes."
HIDDEN = "opacity:0"  # this style and the next three are steps of keyframes
SEEN = "opacity:1"
LEAVES = f"{SEEN};transform:none;animation-timing-function:ease-in-out"
LANDS = f"{SEEN};transform:translate(var(--x),var(--y))"


class Cell(NamedTuple):
    """A cell of memory, drawn by its kind: gradients and moments have stripes, new parameters a border."""
    kind: str
    owner: int  # -1: every rank
    x: int
    y: int
    width: int
    height: int
    words: str = ""


class Picture:
    """Holds shapes, each with the spans of seconds in which it is visible. A shape without a span is always visible."""

    def __init__(self, title, width, seconds, still):
        self.title = title
        self.width = width
        self.height = 0
        self.seconds = seconds
        self.still = still
        self.spans = {}  # shape (text of SVG, or a Cell) -> [(start, stop), …]
        self.flights = {}  # (start, stop, until, dx, dy), as in fly() -> Cells

    def add(self, shape, start=0, stop=None):
        """Add a shape that is visible from second `start` to `stop`. A span from the last one's end on prolongs it."""
        spans = self.spans.setdefault(shape, [])
        if spans and spans[-1][1] == start:
            start, _ = spans.pop()
        spans.append((start, self.seconds if stop is None else stop))

    def text(self, x, y, words, kind="", *span):
        self.add(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>', *span)

    def rect(self, x, y, width, height, kind, *span):
        self.add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>', *span)

    def fly(self, cell, dx, dy, start, stop, until=None):
        """Add a cell that moves by (dx, dy) from second `start` to `stop`, and is visible from `start` to `until`."""
        self.flights.setdefault((start, stop, until or stop, dx, dy), []).append(cell)

    def legend(self, x, y):
        """Draw an example of each kind of cell, and set the height of the picture, whose last lines these are."""
        kinds_drawn = {shape.kind for shape in self.spans if isinstance(shape, Cell)}
        for kind in [kind for kind in KINDS if kind in kinds_drawn]:
            words_width = sum(9 if letter in "mw" else 6 for letter in KINDS[kind])  # an estimate
            width = words_width + 29
            if x + width > self.width:
                x = 8
                y += 17
            self.add(Cell(kind, 0, x, y, 16, 13))
            self.text(x + 19, y + 10, KINDS[kind], "soft")
            x += width
        self.text(8, y + 28, SENT_DIRECTLY, "soft")
        self.height = y + 36

    def keyframes(self, name, steps):
        """Return the CSS of an animation whose style changes at once. steps: {second: style from then on}."""
        frames = "".join(f"{100 * second / self.seconds:.4g}%{{{style}}}" for second, style in steps.items())
        return f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {self.seconds:g}s step-end infinite}}"

    def svg(self, theme):
        groups = {}  # (whether they are texts, *spans) -> shapes
        rules = {}  # name of an animation -> its steps
        body = []
        for shape, spans in self.spans.items():
            is_text = str(shape).startswith("<text")
            groups.setdefault((is_text, *spans), []).append(shape)
        for (_, *spans), shapes in sorted(groups.items(), key=lambda group: group[0][0]):  # texts last: they lie on top
            name = f"s{len(rules)}"
            is_still = any(start <= self.still < stop for start, stop in spans)
            rules[name] = {0: HIDDEN}
            for start, stop in spans:
                rules[name] |= {start: SEEN, stop: HIDDEN}
            body.append(f'<g class="{name}" opacity="{is_still:d}">{drawn(shapes)}</g>')
        for (start, stop, until, dx, dy), cells in self.flights.items():  # flights at the same seconds share a rule
            name = f"f{1000 * start:.0f}-{1000 * stop:.0f}-{1000 * until:.0f}"
            rules[name] = {0: HIDDEN, start: LEAVES, stop: LANDS, until + 0.01: HIDDEN}
            followed = " followed" if any(cell.words for cell in cells) else ""
            body.append(f'<g class="{name}{followed}" opacity="0" style="--x:{dx}px;--y:{dy}px">{drawn(cells)}</g>')
        motion = "".join(self.keyframes(name, steps) for name, steps in rules.items())
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="'
                f'{self.width * 1.4:g}" role="img"><title>{escape(self.title)}</title><style>svg{{{THEMES[theme]}}}'
                f'{CSS}\n@media(prefers-reduced-motion:no-preference){{{motion}}}</style>{patterns()}'
                '<rect width="100%" height="100%" class="paper"/>\n' + "\n".join(body) + "\n</svg>\n")


def spans(history, end):
    """Return [(part, start, stop), …]. history: [(start, part), …], where each part lasts until the next, or `end`."""
    return [(part, start, stop) for (start, part), (stop, _) in pairwise([*history, (end, None)])]


def drawn(shapes):
    """Return shapes as SVG: first those that are text, then for Cells that look alike one path and their words."""
    groups = [shape for shape in shapes if isinstance(shape, str)]
    looks = {}
    for cell in shapes:
        if isinstance(cell, Cell):
            looks.setdefault((cell.kind, cell.owner), []).append(cell)
    for (kind, owner), cells in looks.items():
        words = "".join(f'<text x="{cell.x + cell.width // 2}" y="{cell.y + cell.height - 5}">{cell.words}</text>'
                        for cell in cells if cell.words)
        outlines = "".join(f"M{cell.x} {cell.y}h{cell.width - 1}v{cell.height - 1}h{1 - cell.width}z" for cell in cells)
        groups.append(f'<g class="cell {kind} o{owner}" fill="url(#{kind}{owner})"><path d="{outlines}"/>{words}</g>')
    return "".join(groups)


def patterns(n_owners=4):
    """Return the stripes of each kind of cell, in the colour of each owner."""
    stripes = []
    for owner in range(-1, n_owners):
        for kind, (size, degrees, width, opacity) in STRIPES.items():
            stripes.append(
                f'<pattern id="{kind}{owner}" class="o{owner}" width="{size}" height="{size}" patternUnits='
                f'"userSpaceOnUse" patternTransform="rotate({degrees})"><path d="M0 0h9v9h-9z" class="paper"/><path d="'
                f'M0 0h9v9h-9z" class="own" fill-opacity="{opacity}"/><path d="M0 0h{width}v9h-{width}z" class="own"/>'
                '</pattern>')
    return f"<defs>{''.join(stripes)}</defs>"
