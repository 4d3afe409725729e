"""An SVG that plays as an image, without a script: shapes, and the seconds in which each is seen.

Where motion is off, the picture stands still at the second `still`. An image can't know which theme GitHub shows, so
there are two files of each: light and dark.
"""

from html import escape
from typing import NamedTuple

OWNERS = ("#5db5ea", "#f0a93a", "#44bf94", "#e58fc0", "#9aa7b8")  # of ranks 0 to 3; the last: every rank
THEMES = {
    "": {"ink": "#1c1e21", "soft": "#565c66", "paper": "#fff", "line": "#d5d9df", "grey": "#d3d7dd", "bad": "#c4001a",
         "grads": "#0a7d4f", "params": "#7b3fb5"},
    "_dark": {"ink": "#e8eaed", "soft": "#a9afb9", "paper": "#0d1117", "line": "#3a3f47", "grey": "#3d434c",
              "bad": "#ff7b86", "grads": "#4fd39a", "params": "#c59af2"},
}
STRIPES = {  # of a kind of cell: size, turn, width and opacity of what is below
    "gradient": (5, 45, 5, 0.3), "share": (3, 45, 1.4, 0.12), "moment": (4, 90, 3, 0.25)}
SOLID = ("average", "new", "old", "stale")  # kinds that have their owner's colour
STYLE = """text{{font:11px system-ui,sans-serif;fill:{ink}}}.b{{font-weight:700;font-size:14px}}.s{{fill:{soft}}}
.v text{{font:9px ui-monospace,Menlo,Consolas,monospace;text-anchor:middle}}.w text{{font-size:7px}}.k text{{fill:#111}}
.m{{text-anchor:middle}}.e{{text-anchor:end}}.c{{font-weight:700;font-size:19px}}.h{{font-weight:700;font-size:16px}}.r{{font-size:15px}}.q{{font-size:14px}}
.paper{{fill:{paper}}}.line{{fill:{line}}}.ink{{fill:{ink}}}.tick{{stroke:{ink};stroke-width:1.4}}
.zero,.padding{{fill:none;stroke:{line}}}.garbage,.mixture,.unset{{fill:{grey}}}
.old{{fill-opacity:.15}}.stale{{fill-opacity:.12;stroke:{bad};stroke-dasharray:2 1.5}}
.new{{stroke:{ink};stroke-width:1.3}}.gradients{{fill:{grads}}}.parameters{{fill:{params}}}.pale{{fill-opacity:.22}}
.live{{fill-opacity:.3;stroke:{ink};stroke-dasharray:4 3}}.f{{opacity:0}}"""


class Cell(NamedTuple):
    """Drawn as on the page: gradients and moments striped, averages solid, new parameters round."""

    kind: str
    owner: int  # -1: every rank
    x: float
    y: float
    width: float
    height: float
    words: str = ""


class Picture:
    def __init__(self, title, width, height, seconds=1, still=0):
        self.title, self.width, self.height, self.seconds, self.still = title, width, height, seconds, still
        self.seen = {(): []}  # spans in which they are seen, ((from, to), …) in seconds -> shapes and Cells; (): always
        self.flights = {}  # (from, to) in seconds, x and y of the way -> Cells

    def add(self, shape, *spans):
        self.seen.setdefault(spans, []).append(shape)

    def text(self, x, y, words, kind="", *spans):
        self.add(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>', *spans)

    def rect(self, x, y, width, height, kind, *spans):
        self.add(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>', *spans)

    def fly(self, cell, dx, dy, start, end):
        """Add a cell that moves by (dx, dy) from where it is drawn, and is seen on its way alone."""
        self.flights.setdefault((start, end, dx, dy), []).append(cell)

    def percent(self, second):
        return f"{100 * second / self.seconds:.4g}%"

    def animations(self):
        seconds = f"{self.seconds:g}s"
        for number, spans in enumerate(filter(None, self.seen)):
            steps = {0: 0}
            for start, end in spans:
                steps |= {start: 1, end: 0}
            frames = "".join(f"{self.percent(second)}{{opacity:{opacity}}}" for second, opacity in steps.items())
            yield f".v{number}{{animation:v{number} {seconds} step-end infinite}}@keyframes v{number}{{{frames}}}"
        for number, (start, end) in enumerate(self.times_of_flights()):
            first, soon, late, last = map(self.percent, (start, start + 0.01, end - 0.01, end))
            yield (f".f{number}{{animation:f{number} {seconds} ease-in-out infinite}}@keyframes f{number}"
                   f"{{0%,{first}{{opacity:0;transform:none}}{soon}{{opacity:1;transform:none}}"
                   f"{late}{{opacity:1;transform:translate(var(--x),var(--y))}}"
                   f"{last},100%{{opacity:0;transform:translate(var(--x),var(--y))}}}}")

    def times_of_flights(self):
        return list(dict.fromkeys((start, end) for start, end, *_ in self.flights))

    def body(self):
        yield drawn(self.seen[()])
        for number, spans in enumerate(filter(None, self.seen)):
            hidden = "" if any(start <= self.still < end for start, end in spans) else ' opacity="0"'
            yield f'<g class="v{number}"{hidden}>{drawn(self.seen[spans])}</g>'
        numbers = {times: number for number, times in enumerate(self.times_of_flights())}
        for (start, end, dx, dy), cells in self.flights.items():
            style = f'style="--x:{dx:.4g}px;--y:{dy:.4g}px"'
            yield f'<g class="f f{numbers[start, end]}" {style}>{paths(cells, "paper")}{drawn(cells)}</g>'

    def svg(self, theme):
        body = "\n".join(self.body())
        stripes = "".join(
            f'<pattern id="{kind}{owner}" width="{size}" height="{size}" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate({turn})"><rect width="{size}" height="{size}" fill="{colour}" '
            f'fill-opacity="{opacity}"/><path d="M0 0V{size}" stroke="{colour}" stroke-width="{wide}"/></pattern>'
            for owner, colour in enumerate(OWNERS) for kind, (size, turn, wide, opacity) in STRIPES.items()
            if f"url(#{kind}{owner})" in body)
        colours = "".join(f".c{owner}{{fill:{colour};stroke:{colour}}}" for owner, colour in enumerate(OWNERS))
        moving = f"@media(prefers-reduced-motion:no-preference){{{''.join(self.animations())}}}"
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
                f'width="{self.width * 1.4:g}" role="img"><title>{escape(self.title)}</title><style>'
                f'{colours}{STYLE.format(**THEMES[theme])}{moving}</style><defs>{stripes}</defs>'
                f'<rect width="100%" height="100%" class="paper"/>\n{body}\n</svg>\n')


def drawn(shapes):
    """Return shapes as text, and of Cells that look alike one path, then their words."""
    cells, groups = [shape for shape in shapes if isinstance(shape, Cell)], {}
    for cell in cells:
        groups.setdefault((cell.kind, cell.owner % len(OWNERS)), []).append(cell)
    out = [shape for shape in shapes if not isinstance(shape, Cell)]
    for (kind, owner), group in groups.items():
        if kind in STRIPES:
            out.append(paths(group, kind, f' fill="url(#{kind}{owner})"'))
        else:
            out.append(paths(group, f"{kind} c{owner}" if kind in SOLID else kind))
    for style in ("v", "v w", "v k", "v w k"):
        words = [f'<text x="{cell.x + cell.width / 2 - 0.5:.4g}" y="{cell.y + cell.height - 5:.4g}">{cell.words}</text>'
                 for cell in cells if cell.words and style_of(cell) == style]
        out.append(f'<g class="{style}">{"".join(words)}</g>' if words else "")
    return "".join(out)


def style_of(cell):
    size = "v w" if len(cell.words) > 3 else "v"
    return f"{size} k" if cell.kind in ("average", "new") else size


def paths(cells, kind, more=""):
    steps = []
    for cell in cells:
        width, height = cell.width - 1, cell.height - 1
        if cell.kind == "new":
            r = height / 3
            arc, wide, high = f"a{r:.3g} {r:.3g} 0 0 1", f"{width - 2 * r:.4g}", f"{height - 2 * r:.3g}"
            steps.append(f"M{cell.x + r:.4g} {cell.y:.4g}h{wide}{arc} {r:.3g} {r:.3g}v{high}{arc}-{r:.3g} {r:.3g}"
                         f"h-{wide}{arc}-{r:.3g}-{r:.3g}v-{high}{arc} {r:.3g}-{r:.3g}")
        else:
            steps.append(f"M{cell.x:.4g} {cell.y:.4g}h{width:.4g}v{height:.4g}h-{width:.4g}z")
    return f'<path class="{kind}"{more} d="{"".join(steps)}"/>'
