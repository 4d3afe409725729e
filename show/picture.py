"""Draws an animated SVG out of words, bars and cells. Each of them is visible for some seconds of the animation.

The animation is CSS without a script, so that a browser plays the SVG also as an image, inside <img>. An image can't
know which theme GitHub shows. Therefore each picture is written to two files, a light one and a dark one. If a reader
has turned off motion, the picture stands still, and shows what is visible at its second `still`. The page
docs/watch.html (show/page.py) has the same colours and stripes, and the same rules of show/page/cells.css.

    cell    the memory of one number, drawn as a small rectangle, which may have the number in it: a Tile
    kind    what a cell holds, such as a gradient: a key of KINDS. show/labels.py describes all kinds
    owner   the rank that updates the element of the model that a cell holds: it gives a cell its colour
    shape   a Tile, or the SVG of a bar
    span    (start, stop): the seconds at which a shape or a text appears and vanishes
"""

from collections import defaultdict
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

THEMES = {  # what a picture's file name ends with -> the values of the CSS variables that cells.css uses
    "": "--paper:#fff;--ink:#1c1e21;--soft:#565c66;--line:#d5d9df;--garbage:#d3d7dd;--bad:#c4001a;--grads:#0a7d4f;"
        "--params:#7b3fb5",
    "_dark": "--paper:#0d1117;--ink:#e8eaed;--soft:#a9afb9;--line:#3a3f47;--garbage:#3d434c;--bad:#ff7b86;"
             "--grads:#4fd39a;--params:#c59af2"}
STRIPES = {  # kind of cell -> (pixels from stripe to stripe, degrees, pixels of a stripe, opacity between stripes)
    "gradient": (5, 45, 2.5, 0.3), "share": (3, 45, 0.7, 0.12), "moment": (4, 90, 1.5, 0.25)}
KINDS = {  # kind of cell -> its words in the legend
    "gradient": "gradient",  # of one rank, from its own batch
    "share": "gradient ÷ 4",  # the gradient, divided by the number of ranks, which is 4 in all pictures
    "average": "average",  # of the gradients of all ranks
    "old": "old",  # a parameter before it is updated
    # A stale parameter is still old in the next forward pass, because the new value is on its way.
    "stale": "awaited",
    "new": "new",  # a parameter after it was updated
    "moment": "moment",  # of AdamW
    "garbage": "garbage",  # a value that nobody reads any more
    "padding": "padding"}  # makes a buffer longer, and belongs to no element of the model
SENT_DIRECTLY = "Drawn as direct sends, one by one. NCCL's ring sends as many bytes."
EIGHTHS = "⅛¼⅜½⅝¾⅞"  # an average over 2, 4 or 8 ranks has these fractions
NUMBER_LENGTH = 4  # a number in a cell has this many characters at most
# Styles of a shape at a moment of the animation, in CSS. From LEAVES a shape glides to the next style; from any other
# style it jumps.
HIDDEN = "opacity:0"
SEEN = "opacity:1"
LEAVES = f"{SEEN};transform:none;animation-timing-function:ease-in-out"
LANDS = f"{SEEN};transform:translate(var(--x),var(--y))"


def page_file(name):
    """Return the text of a file in the folder show/page/."""
    return Path(__file__).with_name("page").joinpath(name).read_text(encoding="utf-8").strip()


class Tile(NamedTuple):
    """A cell to be drawn: cells.css gives each kind its look, for example a border to new parameters."""
    kind: str
    owner: int  # a rank; -1: every rank updates the element
    x: int
    y: int
    width: int
    height: int
    words: str = ""  # what is written in the cell: its number


class Picture:
    """Holds shapes and texts, each with the spans in which it is visible."""

    def __init__(self, title, width, seconds, still):
        self.title = title
        self.width = width
        self.height = 0  # set by `legend`
        self.seconds = seconds  # how long the picture plays before it begins anew
        self.still = still  # where motion is off, the picture shows this second
        self.shapes = defaultdict(list)  # shape -> its spans
        self.texts = defaultdict(list)  # SVG of a text -> its spans
        self.flights = {}  # (start, stop, until, dx, dy), see `fly` -> the Tiles that fly in this way

    def text(self, x, y, words, css_class="", start=0, stop=None):
        """Add words. css_class: classes of cells.css, separated by blanks. stop: by default the picture's end."""
        svg = f'<text x="{x:g}" y="{y:g}" class="{css_class}">{escape(words)}</text>'
        self.texts[svg].append((start, stop or self.seconds))

    def rect(self, x, y, width, height, css_class, start=0, stop=None):
        """Add a bar. css_class and stop: see `text`."""
        svg = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{css_class}"/>'
        self.add(svg, start, stop)

    def add(self, shape, start=0, stop=None):
        """Make a shape visible from second `start` to `stop`, which is by default the picture's end."""
        self.shapes[shape].append((start, stop or self.seconds))

    def fly(self, tile, dx, dy, start, stop, until):
        """Add a tile that moves by (dx, dy) from second `start` to `stop`, and is visible from `start` to `until`."""
        self.flights.setdefault((start, stop, until, dx, dy), []).append(tile)

    def legend(self, x, y):
        """Draw an example of each kind of cell in the picture, from (x, y) on.

        The legend is the last part of a picture, and sets the picture's height.
        """
        kinds_drawn = {shape.kind for shape in self.shapes if isinstance(shape, Tile)}
        for kind, words in KINDS.items():
            if kind not in kinds_drawn:
                continue
            width = 29 + sum(9 if letter in "mw" else 6 for letter in words)  # estimated: pixels of the cell and words
            if x + width > self.width:
                x = 8
                y += 17
            self.add(Tile(kind, owner=0, x=x, y=y, width=16, height=13))
            self.text(x + 19, y + 10, words, "soft")
            x += width
        self.text(8, y + 28, SENT_DIRECTLY, "soft")
        self.height = y + 36

    def keyframes(self, name, steps):
        """Return the CSS of an animation from style to style. steps: {second: style from then on}."""
        # A frame is, for example, 25%{opacity:1}. Doubled braces in an f-string are the braces of CSS. step-end: jump,
        # except from LEAVES, which has another timing function.
        frames = "".join(f"{100 * second / self.seconds:.4g}%{{{style}}}" for second, style in steps.items())
        return f"@keyframes {name}{{{frames}}}.{name}{{animation:{name} {self.seconds:g}s step-end infinite}}"

    def svg(self, theme):
        """Return the text of the SVG. theme: a key of THEMES.

        Where motion is off, a group's attribute `opacity` decides whether it is seen. Elsewhere an animation does.
        """
        animations = {}  # name of an animation -> its steps, see `keyframes`
        body = []
        groups = [*in_groups(self.shapes), *in_groups(self.texts)]  # texts last: they lie on top
        for number, (spans, shapes) in enumerate(groups):
            steps = {0: HIDDEN}
            for start, stop in spans:
                steps |= {start: SEEN, stop: HIDDEN}
            animations[f"s{number}"] = steps
            is_seen_in_still = any(start <= self.still < stop for start, stop in spans)
            # :d writes True as 1 and False as 0.
            body.append(f'<g class="s{number}" opacity="{is_seen_in_still:d}">{svg_of(shapes)}</g>')
        for (start, stop, until, dx, dy), tiles in self.flights.items():
            # Flights at the same seconds share an animation, in which --x and --y stand for dx and dy.
            name = f"f{1000 * start:.0f}-{1000 * stop:.0f}-{1000 * until:.0f}"
            # If `until` is `stop`, HIDDEN would replace LANDS in the dict without the 0.01.
            animations[name] = {0: HIDDEN, start: LEAVES, stop: LANDS, until + 0.01: HIDDEN}
            # Callers give a tile with a number a flight of its own. cells.css outlines it, so an eye can follow it.
            followed = " followed" if any(tile.words for tile in tiles) else ""
            body.append(f'<g class="{name}{followed}" opacity="0" style="--x:{dx}px;--y:{dy}px">{svg_of(tiles)}</g>')
        motion = "".join(self.keyframes(name, steps) for name, steps in animations.items())
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" ',
            f'width="{self.width * 1.4:g}" role="img"><title>{escape(self.title)}</title>',
            "<style>svg{", THEMES[theme], "}", page_file("cells.css"),
            "\n@media(prefers-reduced-motion:no-preference){", motion, "}</style>",
            patterns(), '<rect width="100%" height="100%" class="paper"/>\n']
        return "".join(head) + "\n".join(body) + "\n</svg>\n"


def in_groups(spans_of_shapes):
    """Return pairs of spans and all shapes that are visible in these spans. spans_of_shapes: {shape: its spans}."""
    groups = {}
    for shape, spans in spans_of_shapes.items():
        groups.setdefault(joined(spans), []).append(shape)
    return groups.items()


def joined(spans):
    """Return the spans as a tuple. A span that begins when the span before ends is joined to it."""
    result = []
    last_stop = None
    for start, stop in spans:
        if start == last_stop:
            start, _ = result.pop()
        result.append((start, stop))
        last_stop = stop
    return tuple(result)


def with_stops(history, end):
    """Return [(what, start, stop), …] of a history [(start, what), …].

    what: anything that is seen, such as a caption. It is seen from second `start` until the next begins, and the last
    until second `end`.
    """
    return [(what, start, stop) for (start, what), (stop, _) in pairwise([*history, (end, None)])]


def svg_of(shapes):
    """Return the SVG of shapes: first of the bars, then of the Tiles.

    All Tiles of the same kind and owner are drawn as one path, which keeps the file small.
    """
    svg = []
    tiles_by_look = {}  # (kind, owner) -> Tiles
    for shape in shapes:
        if isinstance(shape, Tile):
            tiles_by_look.setdefault((shape.kind, shape.owner), []).append(shape)
        else:
            svg.append(shape)
    for (kind, owner), tiles in tiles_by_look.items():
        # In a path M goes to a corner, h draws sideways, v draws down, and z closes the outline.
        outlines = "".join(f"M{tile.x} {tile.y}h{tile.width - 1}v{tile.height - 1}h{1 - tile.width}z" for tile in tiles)
        words = "".join(f'<text x="{tile.x + tile.width // 2}" y="{tile.y + tile.height - 5}">{tile.words}</text>'
                        for tile in tiles if tile.words)
        # `fill` names a pattern of `patterns`. Kinds without stripes have no pattern: cells.css fills their cells.
        svg.append(f'<g class="cell {kind} o{owner}" fill="url(#{kind}{owner})"><path d="{outlines}"/>{words}</g>')
    return "".join(svg)


def patterns(n_owners=4):
    """Return the SVG of the stripes of each kind in STRIPES, in the colour of each owner from -1 on."""
    stripes = []
    for owner in range(-1, n_owners):
        for kind, (size, degrees, width, opacity) in STRIPES.items():
            stripes.append(
                f'<pattern id="{kind}{owner}" class="o{owner}" width="{size}" height="{size}" '
                f'patternUnits="userSpaceOnUse" patternTransform="rotate({degrees})">'
                f'<path d="M0 0h9v9h-9z" class="paper"/><path d="M0 0h9v9h-9z" class="own" fill-opacity="{opacity}"/>'
                f'<path d="M0 0h{width}v9h-{width}z" class="own"/></pattern>')
    return f"<defs>{''.join(stripes)}</defs>"


def short_number(value):
    """Write a number in at most NUMBER_LENGTH characters. Eighths are written as a fraction."""
    if value is None:  # NaN, or infinite
        return "?"
    eighths = 8 * (abs(value) % 1)
    if eighths in range(1, 8) and abs(value) < 1000:  # a float is in a range only if it is a whole number
        sign = "-" if value < 0 else ""
        return f"{sign}{int(abs(value)) or ''}{EIGHTHS[int(eighths) - 1]}"
    for digits in range(NUMBER_LENGTH, 0, -1):
        text = f"{value:.{digits}g}"
        if len(text) <= NUMBER_LENGTH:
            return text
    return "…"
