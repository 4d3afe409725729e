"""An SVG that plays as an image, without a script: words, bars and cells, and the seconds in which each is seen.

Where motion is off, the picture stands still at the second `still`. An image can't know which theme GitHub shows, so
there are two files of each: light and dark. Colours, stripes and cells.css are the page's, too.
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
STRIPES = {  # of a kind of cell: size, turn and width in pixels; opacity of what is between them
    "gradient": (5, 45, 2.5, 0.3), "share": (3, 45, 0.7, 0.12), "moment": (4, 90, 1.5, 0.25)}
KINDS = {"gradient": "gradient", "share": "gradient ÷ 4", "average": "average", "old": "old", "stale": "awaited",
         "new": "new", "moment": "moment", "garbage": "garbage", "padding": "padding"}  # in the legend
SENT_DIRECTLY = "Drawn as direct sends, one by one. NCCL's ring sends as many bytes."
HIDDEN, SEEN = "opacity:0", "opacity:1"
LEAVES = f"{SEEN};transform:none;animation-timing-function:ease-in-out"
LANDS = f"{SEEN};transform:translate(var(--x),var(--y))"


class Cell(NamedTuple):
    """Gradients and moments are striped, averages solid; new parameters are solid, with a border."""
    kind: str
    owner: int  # -1: every rank
    x: int
    y: int
    width: int
    height: int
    words: str = ""


class Picture:
    """What is added is seen from one second to another, and perhaps again; and always where none is given."""

    def __init__(self, title, width, seconds, still):
        self.title = title
        self.width = width
        self.height = 0
        self.seconds = seconds
        self.still = still
        self.spans = {}  # text of a shape, or Cell -> (from, to), …
        self.flights = {}  # seconds from, to, and seen until; x and y of the way -> Cells

    def add(self, shape, start=0, stop=None):
        spans = self.spans.setdefault(shape, [])
        if spans and spans[-1][1] == start:
            start, _ = spans.pop()
        spans.append((start, self.seconds if stop is None else stop))

    def text(self, x, y, words, kind="", *span):
        self.add(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>', *span)

    def rect(self, x, y, width, height, kind, *span):
        self.add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>', *span)

    def fly(self, cell, dx, dy, start, stop, until=None):
        """Add a cell that moves by (dx, dy) from where it is drawn, and is seen on its way, and there `until` later."""
        self.flights.setdefault((start, stop, until or stop, dx, dy), []).append(cell)

    def legend(self, x, y):
        """Draw an example of each kind of cell, and end the picture."""
        kinds = {shape.kind for shape in self.spans if isinstance(shape, Cell)}
        for kind in filter(kinds.__contains__, KINDS):
            width = 29 + sum(9 if letter in "mw" else 6 for letter in KINDS[kind])
            if x + width > self.width:
                x, y = 8, y + 17
            self.add(Cell(kind, 0, x, y, 16, 13))
            self.text(x + 19, y + 10, KINDS[kind], "soft")
            x += width
        self.text(8, y + 28, SENT_DIRECTLY, "soft")
        self.height = y + 36

    def keyframes(self, name, steps):
        """Return the rule of what changes at once. steps: {second: how it is from then on}."""
        frames = "".join(f"{100 * second / self.seconds:.4g}%{{{style}}}" for second, style in steps.items())
        return f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {self.seconds:g}s step-end infinite}}"

    def svg(self, theme):
        groups, rules, body = {}, {}, []
        for shape, spans in self.spans.items():
            groups.setdefault((str(shape).startswith("<text"), *spans), []).append(shape)
        for (_, *spans), shapes in sorted(groups.items(), key=lambda group: group[0][0]):  # words on top of all else
            name = f"s{len(rules)}"
            is_still = any(start <= self.still < stop for start, stop in spans)
            rules[name] = {0: HIDDEN} | {second: style for span in spans for second, style in zip(span, (SEEN, HIDDEN))}
            body.append(f'<g class="{name}" opacity="{is_still:d}">{drawn(shapes)}</g>')
        for (start, stop, until, dx, dy), cells in self.flights.items():
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
    """Return (what, from, to) of each part. history: (second, what there is from then on), …"""
    return [(part, start, stop) for (start, part), (stop, _) in pairwise([*history, (end, None)])]


def drawn(shapes):
    """Return shapes as text; of Cells that look alike one path, and their words."""
    looks = {}
    for shape in shapes:
        looks.setdefault((shape.kind, shape.owner) if isinstance(shape, Cell) else None, []).append(shape)
    groups = ["".join(looks.pop(None, []))]
    for (kind, owner), cells in looks.items():
        words = "".join(f'<text x="{cell.x + cell.width // 2}" y="{cell.y + cell.height - 5}">{cell.words}</text>'
                        for cell in cells if cell.words)
        outlines = "".join(f"M{cell.x} {cell.y}h{cell.width - 1}v{cell.height - 1}h{1 - cell.width}z" for cell in cells)
        groups.append(f'<g class="cell {kind} o{owner}" fill="url(#{kind}{owner})"><path d="{outlines}"/>{words}</g>')
    return "".join(groups)


def patterns(n_owners=4):
    """Return the stripes, in the colour of each owner."""
    return "<defs>" + "".join(
        f'<pattern id="{kind}{owner}" class="o{owner}" width="{size}" height="{size}" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate({turn})"><path d="M0 0h9v9h-9z" class="paper"/><path d="M0 0h9v9h-9z" class="own" '
        f'fill-opacity="{below}"/><path d="M0 0h{wide}v9h-{wide}z" class="own"/></pattern>'
        for owner in range(-1, n_owners) for kind, (size, turn, wide, below) in STRIPES.items()) + "</defs>"
