"""A recording in a terminal: frame by frame, what has changed in the memory of each rank."""

import rich.console
import rich.markup
import rich.text

from .memory import Memory

COLOURS = ["#8ecae6", "#ffc857", "#8fd694", "#f4a3b5", "#c3aef2", "#d9c27e", "#f79d65", "#a9b8c6"]  # by owner
EXPLANATION = """\
Element e, from 1 on, has the gradient 100 r + e on rank r. Colour: the rank that steps it. Grey: nobody reads it \
again before it is written. │: another parameter, shard or piece begins."""


def short(value):
    """At most five characters: three digits where they fit."""
    if value is None:
        return "?"
    texts = [f"{value:.{digits}g}" for digits in (5, 4, 3, 2, 1)]
    return next((text for text in texts if len(text) <= 5), "…")


def draw_row(memory, rank, numbers):
    """-> the line of one rank."""
    storages, line = memory.recording["storages"], rich.text.Text(f"  rank {rank} ")
    alive = [number for number in numbers if number in memory.cells and number not in memory.gone]
    for number in alive:
        begins = {start for block in storages[number]["blocks"] for start, _ in block}
        before = None
        for cell, (value, _) in enumerate(memory.cells[number]):
            kind, owner, param = memory.kind(number, cell), memory.owner(number, cell), memory.param(number, cell)
            is_garbage = kind in ("garbage", "mixture", "unset")
            style = (
                "grey50" if is_garbage else f"black on {COLOURS[owner % 8]}" if owner >= 0 and kind != "padding" else ""
            )
            line.append("│" if cell in begins or before is not None and param not in (None, before) else " ")
            line.append(f"{'·' if kind == 'padding' else short(value):>5}", style)
            before = before if param is None else param
    return line if alive else line.append("released" if set(numbers) & memory.gone else "–")


def play(recording, console=None, every=False):
    """Prints the frames in which memory changes or a message leaves; with `every` also the others."""
    console = console or rich.console.Console(highlight=False)
    memory, frames = Memory(recording), recording["frames"]
    console.print(f"[bold]{rich.markup.escape(recording['title'])}[/]\n{EXPLANATION}\n", soft_wrap=True)
    for index, frame in enumerate(frames):
        changed = memory.take(frame)
        leaving = (
            [one for one in recording["operations"] if min(arrow[3] for arrow in one["arrows"]) == index]
            if recording["operations"]
            else []
        )
        if not (changed or leaving or every or index == len(frames) - 1):
            continue
        moved = [rank for rank, _ in frame["at"]]
        name, file, line, text = memory.place(moved[0] if moved else 0)
        console.print(
            f"[bold]{index + 1}/{len(frames)}[/] {frame['phase'] or 'start'} · {name}, {file}:{line}", soft_wrap=True
        )
        console.print(f"    {rich.markup.escape(text)}", soft_wrap=True)
        for one in leaving:
            sizes = sorted({arrow[2] for arrow in one["arrows"]})
            console.print(
                f"  ⇒ {one['kind']} of {one['what']}: {len(one['arrows'])} messages of "
                f"{' to '.join(map(str, sizes))} B",
                soft_wrap=True,
            )
        for row, ranks in memory.rows().items():
            if any(number in changed for numbers in ranks.values() for number in numbers):
                console.print(f"  [bold]{rich.markup.escape(row)}[/]", soft_wrap=True)
                for rank, numbers in sorted(ranks.items()):
                    console.print(draw_row(memory, rank, numbers), soft_wrap=True)
        console.print()
