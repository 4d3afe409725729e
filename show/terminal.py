"""A recording in a terminal: frame by frame, what has changed in the memory of each rank."""

import functools

import rich.console
import rich.markup
import rich.text

from .frames import Memory

COLOURS = ["#8ecae6", "#ffc857", "#8fd694", "#f4a3b5", "#c3aef2", "#d9c27e", "#f79d65", "#a9b8c6"]  # by owner
EIGHTHS = "⅛¼⅜½⅝¾⅞"  # an average over 2, 4 or 8 ranks has them
EXPLANATION = """\
Element e, from 1 on, has the gradient 100 r + e on rank r. Colour: the rank that updates it. Grey: nobody reads it \
again before it is written. │: another parameter, shard or piece begins."""


def short(value, room=5):
    """Write a number in at most `room` characters: eighths as such, of others as many digits as fit."""
    if value is None:
        return "?"
    eighths = 8 * (abs(value) % 1)
    if eighths in range(1, 8) and abs(value) < 1000:
        sign = "-" if value < 0 else ""
        return f"{sign}{int(abs(value)) or ''}{EIGHTHS[int(eighths) - 1]}"
    texts = [f"{value:.{digits}g}" for digits in range(room, 0, -1)]
    return next((text for text in texts if len(text) <= room), "…")


def draw_row(memory, rank, numbers):
    """-> the line of one rank."""
    line = rich.text.Text(f"  rank {rank} ")
    recording = memory.recording
    alive = [number for number in numbers if memory.cells.get(number)]
    for number in alive:
        starts, before = {0}, None
        for shard in recording["storages"][number]["shards"]:
            starts |= {max(starts) + shard * (1 + rank) for rank in range(recording["ranks"])}
        for cell, (value, kind, element, _) in enumerate(memory.cells[number]):
            owner, param = -1, None
            if element is not None:
                owner, param = recording["owners"][element], memory.params[element]
            style = f"black on {COLOURS[owner % 8]}" if owner >= 0 and kind != "padding" else ""
            style = "grey50" if kind in ("garbage", "mixture", "unset") else style
            line.append("│" if cell in starts or before is not None and param not in (None, before) else " ")
            line.append(f"{'·' if kind == 'padding' else short(value):>5}", style)
            before = before if param is None else param
    return line if alive else line.append("released" if memory.cells.keys() & numbers else "–")


def play(recording):
    """Prints the frames in which memory changes or a message leaves, and the last."""
    say = functools.partial(rich.console.Console(highlight=False).print, soft_wrap=True)
    escape = rich.markup.escape
    memory = Memory(recording)
    frames = recording["frames"]
    say(f"[bold]{escape(recording['title'])}[/]\n{EXPLANATION}\n")
    for index, frame in enumerate(frames):
        changed = memory.take(frame)
        leaving = [operation for operation in recording["operations"]
                   if min(arrow[3] for arrow in operation["arrows"]) == index]
        if not (changed or leaving or index == len(frames) - 1):
            continue
        name, file, line, text = memory.place(frame["at"][0][0] if frame["at"] else 0)
        say(f"[bold]{index + 1}/{len(frames)}[/] {frame['phase'] or 'start'} · {name}, {file}:{line}")
        say(f"    {escape(text)}")
        for operation in leaving:
            arrows = operation["arrows"]
            sizes = " to ".join(map(str, sorted({arrow[2] for arrow in arrows})))
            say(f"  ⇒ {operation['kind']} of {operation['what']}: {len(arrows)} messages of {sizes} B")
        for row, ranks in memory.rows().items():
            if any(number in changed for numbers in ranks.values() for number in numbers):
                say(f"  [bold]{escape(row)}[/]")
                for rank, numbers in sorted(ranks.items()):
                    say(draw_row(memory, rank, numbers))
        say()
