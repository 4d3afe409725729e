"""Figures of README.md and the chapters, drawn from the frames that the page plays: SVG that suits light and dark."""

from xml.sax.saxutils import escape

from .memory import Memory
from .terminal import short

COLOURS = ("#5db5ea", "#f0a93a", "#44bf94", "#e58fc0", "#b9a6f2", "#d8cf4a", "#e88a6a", "#9fb0c2")
STYLE = """
svg{--ink:#1c1e21;--soft:#5b616b;--line:#d5d9df;--paper:#fff;--grey:#dfe2e6;--grads:#0a7d4f;--params:#7b3fb5}
@media(prefers-color-scheme:dark){svg{--ink:#e8eaed;--soft:#a3a9b3;--line:#3a3f47;--paper:#15171a;--grey:#2b2f35;
--grads:#4fd39a;--params:#c59af2}}
.paper{fill:var(--paper)}text{font:11px ui-monospace,Menlo,Consolas,monospace;fill:var(--ink)}
.v{text-anchor:middle}.d{fill:#111}.g{fill:var(--soft)}.t{font:bold 13px system-ui,sans-serif}
.w{font:12px system-ui,sans-serif;fill:var(--soft)}.m{text-anchor:middle}.e{text-anchor:end}
.old{fill-opacity:.2;stroke-opacity:.8}.gradient{fill-opacity:.4}.share,.sum{fill-opacity:.22}.moment{fill-opacity:.5}
.zero{fill-opacity:.1}.new{stroke:#0008;stroke-width:2}.none{fill:none;stroke:var(--line)}
.freed{fill:none;stroke:var(--line);stroke-dasharray:2 2}.grey{fill:var(--grey)}.line{stroke:var(--line);fill:none}
.gradients{stroke:var(--grads);fill:var(--grads)}.parameters{stroke:var(--params);fill:var(--params)}
.arrow{fill:none;stroke-width:1.6;stroke-dasharray:5 4}.bar{stroke:none;fill-opacity:.35}
"""
CELL, ROW = 32, 18  # pixels


class Picture:
    """A list of SVG elements, and how large they are together."""

    def __init__(self, title, style=""):
        self.title, self.style, self.out, self.width, self.height = title, style, [], 0, 0

    def add(self, text, right=0, bottom=0):
        self.out.append(text)
        self.width, self.height = max(self.width, right), max(self.height, bottom)

    def text(self, x, y, text, kind="w"):
        width = len(text) * (7.6 if kind == "t" else 6.7) if kind[0] != "m" else 0
        self.add(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>', x + width, y + 6)

    def cell(self, x, y, kind, owner, text, width=CELL, extra=""):
        self.add(cell(x, y, kind, owner, text, width, extra), x + width, y + ROW)

    def svg(self):
        size = f'width="{self.width + 12:.0f}" height="{self.height + 10:.0f}"'
        box = f'viewBox="0 0 {self.width + 12:.0f} {self.height + 10:.0f}"'
        hatches = "".join(
            f'<pattern id="{name}" width="{step}" height="{step}" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate({angle})"><path d="M0 0V{step}" stroke="{colour}" '
            f'stroke-width="{width}"/></pattern>'
            for name, step, angle, width, colour in (
                ("h", 6, 45, 2, "#8888"),
                ("s", 4, 45, 1, "#8888"),
                ("x", 4, -45, 1.2, "#8886"),
                ("l", 4, 90, 1.5, "#8888"),
            )
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} role="img"><title>{escape(self.title)}</title>'
            f"<style>{STYLE.strip()}{self.style}</style><defs>{hatches}"
            '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
            '<path d="M0 0 8 4 0 8z" fill="context-stroke"/></marker></defs><rect width="100%" height="100%" '
            'class="paper"/>'
        )
        return "\n".join([head, *self.out, "</svg>\n"])


def cell(x, y, kind, owner, text, width=CELL, extra=""):
    """-> a cell as SVG. `extra`: attributes of the group."""
    colour = COLOURS[owner % 8] if owner >= 0 else "#9aa6b5"
    box = f'x="{x:g}" y="{y:g}" width="{width - 1:g}" height="{ROW - 1}"'
    rounded = ' rx="7"' if kind == "new" else ' rx="2"'
    shape = {"padding": f'<rect {box} class="none"/>', "freed": f'<rect {box} class="freed"/>'}.get(kind)
    if kind in ("garbage", "mixture", "unset"):
        shape = f'<rect {box} class="grey"/><rect {box} fill="url(#x)"/>'
    if shape is None:
        stroke = f' stroke="{colour}"' if kind == "old" else ""
        shape = f'<rect {box}{rounded} class="{kind}" fill="{colour}"{stroke}/>'
        hatch = {"gradient": "h", "share": "s", "sum": "s", "moment": "l"}.get(kind)
        shape += f'<rect {box} fill="url(#{hatch})"/>' if hatch else ""
    words = "" if kind == "freed" else "·" if kind == "padding" else text
    style = "v d" if kind in ("average", "new") else "v g" if kind in ("garbage", "padding", "zero") else "v"
    size = (
        f' style="font-size:{min(11, 1.55 * (width - 3) / len(words)):.3g}px"' if len(words) * 6.7 > width - 3 else ""
    )
    label = f'<text x="{x + (width - 1) / 2:g}" y="{y + 12.5:g}" class="{style}"{size}>{words}</text>' if words else ""
    return f"<g{extra}>{shape}{label}</g>"


def place_cells(memory, numbers, width=CELL, limit=10**9):
    """-> (storage, cell, x, y) of the cells of storages, blocks side by side; and the size of it all.

    A block that would be beyond `limit` begins a new line.
    """
    placed, x, y, height, most = [], 0, 0, 0, 0
    for number in numbers:
        for block in memory.recording["storages"][number]["blocks"]:
            wide = max(n for _, n in block) * width
            if x and x + wide > limit:
                x, y, height = 0, y + height + 3, 0
            for line, (start, n) in enumerate(block):
                placed += [(number, start + i, x + i * width, y + line * ROW) for i in range(n)]
            x += wide + 7
            most, height = max(most, x - 7), max(height, ROW * len(block))
    return placed, most, y + height


def state(memory, number, index):
    """-> kind, owner, text of a cell."""
    value, _ = memory.cells[number][index]
    return memory.kind(number, index), memory.owner(number, index), short(value)


def memories(recording):
    """-> (frame's number, frame, memory as it is then, storages that changed), one after the other."""
    memory = Memory(recording)
    for index, frame in enumerate(recording["frames"]):
        yield index, frame, memory, memory.take(frame)


# ------------------------------------------------------------------------------------------------------- stage 3


def buffer_states(recording, row="GradBuffer.flat"):
    """The five states of stage 3's buffer on each rank, and the line that leads from one to the next."""
    picture, y = Picture("The buffer of stage 3 on four ranks, through one step"), 22
    picture.text(10, y, "The buffer of stage 3 through one step", "t")
    for index, frame, memory, changed in memories(recording):
        ranks = memory.rows().get(row, {})
        function, file, line, text = memory.place(frame["at"][0][0]) if frame["at"] else ("", "", 0, "")
        if not any(number in changed for numbers in ranks.values() for number in numbers):
            continue
        if frame["phase"] == "backward" and not is_last_of_phase(recording, index, row):
            continue
        y += 24
        words = "before the step" if index == 0 else f"{function} ({file}:{line})"
        picture.text(10, y, words, "t" if index == 0 else "w")
        if index:
            picture.text(20 + 6.7 * len(words), y, text, "c")
        for rank, numbers in sorted(ranks.items()):
            placed, wide, high = place_cells(memory, numbers)
            for number, one, x, dy in placed:
                picture.cell(10 + rank * (wide + 26) + x, y + 7 + dy, *state(memory, number, one))
        y += 7 + high
    picture.text(
        10,
        y + 24,
        "Columns: ranks 0 to 3. Colour: the rank that owns a line. Hatched: own gradients; filled: "
        "averages; round: new parameters; grey: garbage.",
    )
    return picture.svg()


def is_last_of_phase(recording, index, row):
    """Whether no later frame of the same phase writes into `row`."""
    storages, phase = recording["storages"], recording["frames"][index]["phase"]
    for frame in recording["frames"][index + 1 :]:
        if frame["phase"] != phase:
            return True
        if any(storages[run[0]]["row"] == row for run in frame["cells"]):
            return False
    return True


# ------------------------------------------------------------------------------------------------------- stage 4


def bucket_partition(recording, row="ParameterBuffer.flat"):
    """Which bucket holds which parameters, and which line of it belongs to which rank."""
    memory = Memory(recording)
    memory.take(recording["frames"][0])
    (number,) = memory.rows()[row][0]
    picture = Picture("Stage 4: the parameters of one rank in buckets, each cut into four shards")
    picture.text(10, 20, "ParameterBuffer: buckets beside each other, a line a shard", "t")
    left = 100
    blocks, x = recording["storages"][number]["blocks"], left
    for index, block in enumerate(blocks):
        params = sorted({memory.param(number, start + i) for start, n in block for i in range(n)} - {None})
        wide = max(n for _, n in block) * 46
        picture.text(x, 44, f"bucket {index}: {', '.join(f'p{param}' for param in params)}")
        for line, (start, n) in enumerate(block):
            for i in range(n):
                element = recording["labels"][memory.cells[number][start + i][1]][1]
                words = "" if element is None else f"p{memory.param(number, start + i)}[{within(recording, element)}]"
                kind, owner = ("padding", -1) if element is None else ("average", recording["owners"][element])
                picture.cell(x + i * 46, 52 + line * ROW, kind, owner, words, 46)
        x += max(wide, 100) + 16
    for rank in range(recording["ranks"]):
        picture.text(10, 65 + rank * ROW, f"rank {rank} steps")
    y = 52 + recording["ranks"] * ROW + 22
    picture.text(
        10, y, "Gradients leave in the order of buckets, parameters come back in the reverse order. ·: padding."
    )
    return picture.svg()


def within(recording, element):
    for numel in recording["params"]:
        if element < numel:
            return element
        element -= numel


def overlap(recording):
    """Time from left to right: what rank 0 runs, and below it what is under way meanwhile."""
    frames, step = recording["frames"], 4.2
    picture, left = Picture("Stage 4: what rank 0 runs, and what is under way meanwhile"), 190
    picture.text(10, 20, "Stage 4: what rank 0 runs, and what is under way meanwhile", "t")
    start, phase = 0, None
    for index, frame in enumerate([*frames, {"phase": None}]):
        name = frame["phase"] if frame["phase"] not in ("", "step") else phase
        if name != phase or index == len(frames):
            if phase is not None and index > start:
                wide = (index - start) * step
                picture.add(
                    f'<rect x="{left + start * step:g}" y="34" width="{wide - 1:g}" height="20" class="grey"/>',
                    left + index * step,
                    56,
                )
                if wide > 5.8 * len(phase):
                    picture.text(left + (start + index) / 2 * step, 48, phase, "m w")
            start, phase = index, name
    picture.text(10, 48, "rank 0 runs")
    picture.text(10, 72, "a line of it a step to the right: no seconds")
    y = 84
    for operation in recording["operations"]:
        arrows = [arrow for arrow in operation["arrows"] if arrow[1] == 0]
        begin, end = min(arrow[3] for arrow in arrows), max(arrow[4] for arrow in arrows)
        params = ", ".join(f"p{param}" for param in operation["params"])
        picture.text(10, y + 13, f"{operation['what']} of {params}")
        picture.add(
            f'<rect x="{left + begin * step:g}" y="{y}" width="{(end - begin) * step:g}" height="17" '
            f'class="bar {operation["what"]}"/>',
            left + end * step,
            y + 17,
        )
        picture.text(left + (begin + end) / 2 * step, y + 13, f"{len(arrows)} × {arrows[0][2]} B to rank 0", "m w")
        y += 22
    picture.text(
        10,
        y + 16,
        "A bucket's gradients arrive when the third bucket needs their buffer, or in sync_grads; "
        "a layer waits for its own parameters only.",
    )
    return picture.svg()


# ----------------------------------------------------------------------------------------------- the first screen


def animation(recording, seconds=0.55):
    """One step, played: the line that rank 0 is at, messages under way, and the memory of all ranks.

    Only frames in which memory changes or a message leaves or arrives; each cell is there once for each of its states.
    """
    picture, width = Picture(recording["title"]), 24
    chosen = [
        index
        for index, frame in enumerate(recording["frames"])
        if index == 0 or frame["cells"] or frame["gone"] or frame["ended"] or starts_or_ends(recording, index)
    ]
    spans, lines = {}, []  # (place, drawing) -> [[first, end], …] in numbers of chosen frames
    top = 118
    for index, frame, memory, _ in memories(recording):
        if index not in chosen:
            continue
        slot = chosen.index(index)
        lines.append((slot, frame, memory.place(0)))
        y = top
        for _row, ranks in rows_of_picture(memory):
            high = 0
            for rank, numbers in sorted(ranks.items()):
                placed, _, tall = place_cells(memory, numbers, width, 9 * width)
                high = max(high, tall)
                for number, one, x, dy in placed:
                    if number in memory.cells:
                        kind, owner, text = state(memory, number, one)
                        key = (10 + rank * 236 + x, y + 16 + dy, kind, owner, text)
                        extend(spans.setdefault(key, []), slot)
            y += high + 24
    n, y = len(chosen), top
    for row, ranks in rows_of_picture(memory):
        picture.text(10, y + 11, row, "t")
        y += max(place_cells(memory, numbers, width, 9 * width)[2] for numbers in ranks.values()) + 24
    picture.text(
        10,
        y + 8,
        "Colour: the rank that steps an element. Hatched: gradients; filled: averages; outlined: old "
        "parameters; round: new ones; grey: garbage.",
    )
    for rank in range(recording["ranks"]):
        picture.add(
            f'<rect x="{10 + rank * 236}" y="64" width="216" height="4" fill="{COLOURS[rank % 8]}"/>',
            10 + rank * 236 + 216,
            70,
        )
        picture.text(10 + rank * 236, 60, f"rank {rank}", "t")
    animations = Animations(
        n, seconds, next(slot for slot, index in enumerate(chosen) if n_under_way(recording, index) > 1)
    )
    for (x, cell_y, kind, owner, text), parts in spans.items():
        for first, end in parts:
            picture.add(cell(x, cell_y, kind, owner, text, width, animations.attribute(first, end)))
    for slot, frame, (function, file, line, text) in lines:
        picture.add(
            f'<g{animations.attribute(slot, slot + 1)}><text x="10" y="18" class="t">{frame["phase"] or "start"}'
            f'</text><text x="110" y="18" class="w">{escape(function)}, {file}:{line}</text>'
            f'<text x="10" y="38">{escape(text[:110])}</text></g>'
        )
    for operation in recording["operations"]:
        draw_lane(picture, recording, operation, chosen, animations)
    picture.style = animations.style()
    return picture.svg()


def rows_of_picture(memory):
    wanted = (
        "ParameterBuffer.flat",
        "gradients",
        "BucketBuffer.sent",
        "BucketBuffer.received",
        "PartitionedGradient.shard",
        "momentum_buffer",
    )
    rows = memory.rows()
    return [(row, rows[row]) for row in wanted if row in rows]


def n_under_way(recording, index):
    return sum(any(start <= index < end for *_, start, end in one["arrows"]) for one in recording["operations"])


def starts_or_ends(recording, index):
    return any(index in arrow[3:] for operation in recording["operations"] for arrow in operation["arrows"])


def extend(parts, slot):
    if parts and parts[-1][1] == slot:
        parts[-1][1] = slot + 1
    else:
        parts.append([slot, slot + 1])


def draw_lane(picture, recording, operation, chosen, animations):
    """Arrows between the ranks' columns while an operation is under way: gradients above, parameters below."""
    begin = min(arrow[3] for arrow in operation["arrows"])
    end = max(arrow[4] for arrow in operation["arrows"])
    first = next(slot for slot, index in enumerate(chosen) if index >= begin)
    last = next((slot for slot, index in enumerate(chosen) if index >= end), len(chosen))
    alike = [one for one in recording["operations"] if one["what"] == operation["what"]]
    y, params = 82 + 13 * (alike.index(operation) % 3), ", ".join(f"p{param}" for param in operation["params"])
    paths = [
        f'<path d="M{118 + a * 236 + 24 * (1 if a < b else -1)} {y}Q{118 + (a + b) * 118} '
        f'{y - 9 if a < b else y + 9} {118 + b * 236 - 24 * (1 if a < b else -1)} {y}" class="arrow '
        f'{operation["what"]}" style="fill:none" marker-end="url(#tip)"/>'
        for a, b, *_ in operation["arrows"]
        if abs(a - b) == 1
    ]
    words = f'<text x="10" y="{y + 4}" class="w">{operation["what"]} {params}</text>'
    picture.add(f"<g{animations.attribute(first, max(last, first + 1))}>{''.join(paths)}{words}</g>")


class Animations:
    """CSS that shows an element from one slot to another, round and round; where motion isn't wanted, `still` alone."""

    def __init__(self, n, seconds, still):
        self.n, self.seconds, self.still, self.names = n, seconds, still, {}

    def attribute(self, first, end):
        if (first, end) == (0, self.n):
            return ""
        name = self.names.setdefault((first, end), f"a{len(self.names)}")
        return f' class="{name}"'

    def style(self):
        rules = []
        for (first, end), name in self.names.items():
            a, b = 100 * first / self.n, 100 * end / self.n
            keys = [f"0%{{visibility:hidden}}{a:.3f}%{{visibility:visible}}"] if first else ["0%{visibility:visible}"]
            keys += [f"{b:.3f}%{{visibility:hidden}}"] if end < self.n else ["100%{visibility:visible}"]
            rules.append(
                f"@keyframes {name}{{{''.join(keys)}}}.{name}{{visibility:hidden;animation:{name} "
                f"{self.n * self.seconds:g}s step-end infinite}}"
            )
        shown = ",".join(f".{name}" for (first, end), name in self.names.items() if first <= self.still < end)
        hidden = ",".join(f".{name}" for name in self.names.values())
        rules.append(
            f"@media(prefers-reduced-motion:reduce){{{hidden}{{animation:none}}{shown}{{visibility:visible}}}}"
        )
        return "".join(rules)


def all_figures(recordings):
    """-> {file name: text}. `recordings`: by the id of their program."""
    return {
        "show_buffer.svg": buffer_states(recordings["3"]),
        "show_buckets.svg": bucket_partition(recordings["4"]),
        "show_overlap.svg": overlap(recordings["4"]),
        "watch.svg": animation(recordings["4"]),
    }
