"""Draws an SVG that plays as an image, without a script: words, bars and cells, each visible for some seconds.

Times are seconds; a span is (start, stop). If a reader's system has motion off, the picture shows the second `still`.
An image can't know which theme GitHub shows, so each picture has two files, light and dark. The page uses the same
colours, stripes and cells.css.
"""

from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

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
EIGHTHS = "⅛¼⅜½⅝¾⅞"  # an average over 2, 4 or 8 ranks has them
NUMBER_LENGTH = 4  # characters of a number in a cell, at most
# Styles of a shape at a moment of its animation, in CSS.
HIDDEN = "opacity:0"
SEEN = "opacity:1"
LEAVES = f"{SEEN};transform:none;animation-timing-function:ease-in-out"
LANDS = f"{SEEN};transform:translate(var(--x),var(--y))"


def page_file(name):
    """Return the text of a file of show/page/."""
    return Path(__file__).with_name("page").joinpath(name).read_text(encoding="utf-8").strip()


class Tile(NamedTuple):
    """A cell of memory, drawn by its kind: gradients and moments have stripes, new parameters a border."""
    kind: str
    owner: int  # -1: every rank
    x: int
    y: int
    width: int
    height: int
    words: str = ""


class Picture:
    """Holds shapes, each with the spans in which it is visible. A shape without a span is always visible."""

    def __init__(self, title, width, seconds, still):
        self.title = title
        self.width = width
        self.height = 0  # set by `legend`
        self.seconds = seconds  # how long the picture plays before it begins anew
        self.still = still  # the second that is seen where motion is off
        self.shapes = {}  # Tile, or the SVG of a bar -> [(start, stop), …]
        self.texts = {}  # SVG -> [(start, stop), …]
        self.flights = {}  # (start, stop, until, dx, dy), see `fly` -> the Tiles that fly so

    def text(self, x, y, words, kind="", *span):
        """Add words. kind: classes of show/page/cells.css, here and in `rect`."""
        svg = f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'
        self.texts[svg] = self.prolonged(self.texts.get(svg, []), *span)

    def rect(self, x, y, width, height, kind, *span):
        self.add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>', *span)

    def add(self, shape, *span):
        """Add a Tile, or the SVG of another shape."""
        self.shapes[shape] = self.prolonged(self.shapes.get(shape, []), *span)

    def prolonged(self, spans, start=0, stop=None):
        """Return the spans with (start, stop) too: the last span is prolonged if it ends at `start`."""
        if stop is None:
            stop = self.seconds
        if spans:
            *spans_before, (last_start, last_stop) = spans
            if last_stop == start:
                return [*spans_before, (last_start, stop)]
        return [*spans, (start, stop)]

    def fly(self, tile, dx, dy, start, stop, until):
        """Add a tile that moves by (dx, dy) from second `start` to `stop`, and is visible from `start` to `until`."""
        self.flights.setdefault((start, stop, until, dx, dy), []).append(tile)

    def legend(self, x, y):
        """Draw an example of each kind of cell, and set the height of the picture, whose last lines these are."""
        kinds_drawn = {shape.kind for shape in self.shapes if isinstance(shape, Tile)}
        for kind, words in KINDS.items():
            if kind not in kinds_drawn:
                continue
            width = 29 + sum(9 if letter in "mw" else 6 for letter in words)  # an estimate
            if x + width > self.width:
                x = 8
                y += 17
            self.add(Tile(kind, owner=0, x=x, y=y, width=16, height=13))
            self.text(x + 19, y + 10, words, "soft")
            x += width
        self.text(8, y + 28, SENT_DIRECTLY, "soft")
        self.height = y + 36

    def keyframes(self, name, steps):
        """Return the CSS of an animation, whose style jumps from step to step. steps: {second: style from then on}."""
        frames = "".join(f"{100 * second / self.seconds:.4g}%{{{style}}}" for second, style in steps.items())
        return f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {self.seconds:g}s step-end infinite}}"

    def svg(self, theme):
        """Return the text of the SVG. theme: a key of THEMES."""
        rules = {}  # name of an animation -> its steps
        body = []
        groups = [*in_groups(self.shapes), *in_groups(self.texts)]  # texts last: they lie on top
        for number, (spans, shapes) in enumerate(groups):
            steps = {0: HIDDEN}
            for start, stop in spans:
                steps |= {start: SEEN, stop: HIDDEN}
            rules[f"s{number}"] = steps
            is_still = any(start <= self.still < stop for start, stop in spans)
            body.append(f'<g class="s{number}" opacity="{is_still:d}">{drawn(shapes)}</g>')
        for (start, stop, until, dx, dy), tiles in self.flights.items():
            # Flights at the same seconds share a rule, in which dx and dy are variables.
            name = f"f{1000 * start:.0f}-{1000 * stop:.0f}-{1000 * until:.0f}"
            rules[name] = {0: HIDDEN, start: LEAVES, stop: LANDS, until + 0.01: HIDDEN}
            followed = " followed" if any(tile.words for tile in tiles) else ""
            body.append(f'<g class="{name}{followed}" opacity="0" style="--x:{dx}px;--y:{dy}px">{drawn(tiles)}</g>')
        motion = "".join(self.keyframes(name, steps) for name, steps in rules.items())
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="'
                f'{self.width * 1.4:g}" role="img"><title>{escape(self.title)}</title><style>svg{{{THEMES[theme]}}}'
                f'{page_file("cells.css")}\n@media(prefers-reduced-motion:no-preference){{{motion}}}</style>{patterns()}'
                '<rect width="100%" height="100%" class="paper"/>\n' + "\n".join(body) + "\n</svg>\n")


def in_groups(spans_of_shapes):
    """Return (spans, shapes that are visible in them), … spans_of_shapes: {shape: its spans}."""
    groups = {}
    for shape, spans in spans_of_shapes.items():
        groups.setdefault(tuple(spans), []).append(shape)
    return groups.items()


def spans(history, end):
    """Return [(part, start, stop), …]. history: [(start, part), …], where each part lasts until the next, or `end`."""
    return [(part, start, stop) for (start, part), (stop, _) in pairwise([*history, (end, None)])]


def drawn(shapes):
    """Return the SVG of shapes: first of shapes that are SVG already, then of Tiles, a path for all that look alike."""
    svg = []
    tiles_by_look = {}
    for shape in shapes:
        if isinstance(shape, Tile):
            tiles_by_look.setdefault((shape.kind, shape.owner), []).append(shape)
        else:
            svg.append(shape)
    for (kind, owner), tiles in tiles_by_look.items():
        outlines = "".join(f"M{tile.x} {tile.y}h{tile.width - 1}v{tile.height - 1}h{1 - tile.width}z" for tile in tiles)
        words = "".join(f'<text x="{tile.x + tile.width // 2}" y="{tile.y + tile.height - 5}">{tile.words}</text>'
                        for tile in tiles if tile.words)
        svg.append(f'<g class="cell {kind} o{owner}" fill="url(#{kind}{owner})"><path d="{outlines}"/>{words}</g>')
    return "".join(svg)


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


def short_number(value):
    """Write a number in at most NUMBER_LENGTH characters: eighths as such, of others as many digits as fit."""
    if value is None:
        return "?"
    eighths = 8 * (abs(value) % 1)
    if eighths in range(1, 8) and abs(value) < 1000:
        sign = "-" if value < 0 else ""
        return f"{sign}{int(abs(value)) or ''}{EIGHTHS[int(eighths) - 1]}"
    for digits in range(NUMBER_LENGTH, 0, -1):
        text = f"{value:.{digits}g}"
        if len(text) <= NUMBER_LENGTH:
            return text
    return "…"
