"""A recording in a terminal: frame by frame, what has changed in the memory of each rank."""

import rich.console
import rich.markup
import rich.text

COLOURS = ["#8ecae6", "#ffc857", "#8fd694", "#f4a3b5", "#c3aef2", "#d9c27e", "#f79d65", "#a9b8c6"]  # by owner
NOTHING = ("zero", "padding", "unset")
EXPLANATION = """\
Element e, from 1 on, has the gradient 100 r + e on rank r. Colour: the rank that steps it. Grey: nobody reads it again \
before it is written. │: another parameter, shard or piece begins."""


class Memory:
    """What all ranks hold, as frames go by."""

    def __init__(self, recording):
        self.recording, self.cells, self.dead, self.gone, self.at = recording, {}, {}, set(), {}

    def take(self, frame):
        """-> the storages in which something has changed."""
        changed = set()
        for storage, start, values, labels in frame["cells"]:
            if storage in self.gone or storage not in self.cells:
                self.cells[storage] = []
                self.gone.discard(storage)
            self.cells[storage][start : start + len(values)] = list(zip(values, labels))
            changed.add(storage)
        self.dead.update((storage, set(cells)) for storage, cells in frame["dead"])
        self.gone.update(frame["gone"])
        self.at.update(map(tuple, frame["at"]))
        return changed | set(frame["gone"])

    def rows(self):
        """-> {row: {rank: storages, by part}}, in the order in which they came."""
        rows = {}
        for number, storage in enumerate(self.recording["storages"]):
            rows.setdefault(storage["row"], {}).setdefault(storage["rank"], []).append(number)
        for ranks in rows.values():
            for numbers in ranks.values():
                numbers.sort(key=lambda number: part_key(self.recording["storages"][number]["part"]))
        return rows

    def place(self, rank):
        """-> (function, file, line, text) of the line at which a rank is."""
        function, line = self.recording["stacks"][self.at[rank]][-1]
        name, file, *_ = self.recording["functions"][function]
        title, source = self.recording["files"][file]
        return name, title, line, source.splitlines()[line - 1].strip()


def part_key(part):
    digits = "".join(sign for sign in part if sign.isdecimal())
    return int(digits or 0), part


def short(value):
    """At most five characters: three digits where they fit."""
    if value is None:
        return "?"
    texts = [f"{value:.{digits}g}" for digits in (5, 4, 3, 2, 1)]
    return next((text for text in texts if len(text) <= 5), "…")


def draw_row(memory, rank, numbers):
    """-> the line of one rank."""
    recording, line = memory.recording, rich.text.Text(f"  rank {rank} ")
    begins = {start for n in numbers for block in recording["storages"][n]["blocks"] for start, _ in block}
    for number in numbers:
        if number in memory.gone or number not in memory.cells:
            continue
        before = None
        for cell, (value, label) in enumerate(memory.cells[number]):
            kind, element, _ = recording["labels"][label]
            owner = -1 if element is None else recording["owners"][element]
            garbage = kind == "mixture" or kind == "unset" or cell in memory.dead.get(number, ()) and kind not in NOTHING
            style = "grey50" if garbage else f"black on {COLOURS[owner % 8]}" if owner >= 0 and kind != "padding" else ""
            line.append("│" if cell == 0 or cell in begins or before not in (None, param(recording, element)) else " ")
            line.append(f"{'·' if kind == 'padding' else short(value):>5}", style)
            before = param(recording, element) if element is not None else before
    return line if len(line.plain) > 9 else line.append("released" if any(n in memory.gone for n in numbers) else "–")


def param(recording, element):
    if element is None:
        return None
    for index, numel in enumerate(recording["params"]):
        if element < numel:
            return index
        element -= numel


def play(recording, console=None, every=False):
    """Prints the frames in which memory changes or a message leaves; with `every` also the others."""
    console = console or rich.console.Console(highlight=False)
    memory, frames = Memory(recording), recording["frames"]
    console.print(f"[bold]{rich.markup.escape(recording['title'])}[/]\n{EXPLANATION}\n", soft_wrap=True)
    for index, frame in enumerate(frames):
        changed = memory.take(frame)
        leaving = [one for one in recording["operations"] if min(arrow[3] for arrow in one["arrows"]) == index] if \
            recording["operations"] else []
        if not (changed or leaving or every or index == len(frames) - 1):
            continue
        moved = [rank for rank, _ in frame["at"]]
        name, file, line, text = memory.place(moved[0] if moved else 0)
        console.print(f"[bold]{index + 1}/{len(frames)}[/] {frame['phase'] or 'start'} · {name}, {file}:{line}", soft_wrap=True)
        console.print(f"    {rich.markup.escape(text)}", soft_wrap=True)
        for one in leaving:
            sizes = sorted({arrow[2] for arrow in one["arrows"]})
            console.print(f"  ⇒ {one['kind']} of {one['what']}: {len(one['arrows'])} messages of "
                          f"{' to '.join(map(str, sizes))} B", soft_wrap=True)
        for row, ranks in memory.rows().items():
            if any(number in changed for numbers in ranks.values() for number in numbers):
                console.print(f"  [bold]{rich.markup.escape(row)}[/]", soft_wrap=True)
                for rank, numbers in sorted(ranks.items()):
                    console.print(draw_row(memory, rank, numbers), soft_wrap=True)
        console.print()
