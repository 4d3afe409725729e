"""A recording in a terminal: frame by frame, what has changed in the memory of each rank."""

import rich.console
import rich.text

from . import page
from .frames import memory_after
from .picture import short_number
from .record import Program

COLOURS = ["#8ecae6", "#ffc857", "#8fd694", "#f4a3b5"]  # by owner
EXPLANATION = """\
Element e, from 1 on, has the gradient 100 r + e on rank r. Colour: the rank that updates it. Grey: nobody reads it \
again before it is written.
"""


def record_and_play(stage):
    """Record a stage, by its number, or a package, and print the frames in which memory changes or a message leaves."""
    program = Program(stage.strip("/").replace("/", "."))
    title = f"{stage}."
    for shown in page.SHOWN:
        if shown.id == stage:
            program = Program(shown.program.package)
            title = shown.title
    play(title, page.recorded(program))


def play(title, recording):
    console = rich.console.Console(highlight=False, markup=False)
    console.print(title, style="bold")
    console.print(EXPLANATION)
    n_frames = len(recording["frames"])
    storages = recording["storages"]
    for number, frame in enumerate(recording["frames"]):
        changed = {storage for storage, _ in frame["memory"]}
        leaving = [operation for operation in recording["operations"] if operation["start"] == number]
        if not changed and not leaving and number < n_frames - 1:
            continue
        _, stack = frame["at"][0]
        function, line = stack[-1]
        name, file, *_ = recording["functions"][function]
        file_name, source = recording["files"][file]
        console.print(f"{number + 1}/{n_frames} {frame['phase']} · {name}, {file_name}:{line}", style="bold")
        console.print(f"    {source.splitlines()[line - 1].strip()}")
        for operation in leaving:
            sizes = sorted({n_bytes for _, _, n_bytes, _, _ in operation["arrows"]})
            messages = f"{len(operation['arrows'])} messages of {' to '.join(map(str, sizes))} B"
            console.print(f"  ⇒ {operation['kind']} of {operation['what']}: {messages}")
        memory = memory_after(recording, number)
        for row in dict.fromkeys(storages[storage]["row"] for storage in sorted(changed)):
            console.print(f"  {row}", style="bold")
            for rank in range(recording["ranks"]):
                of_rank = [storage for storage in memory
                           if (storages[storage]["row"], storages[storage]["rank"]) == (row, rank)]
                of_rank.sort(key=lambda storage: storages[storage]["part"])
                cells = [cell for storage in of_rank for cell in memory[storage] or []]
                console.print(line_of(rank, cells, recording["owners"]))
        console.print()


def line_of(rank, cells, owners):
    """Return the line of what one rank holds in a row."""
    line = rich.text.Text(f"  rank {rank}")
    for cell in cells:
        value = "·" if cell.kind == "padding" else short_number(cell.value, 5)
        style = ""
        if cell.kind in ("garbage", "mixture", "unset"):
            style = "grey50"
        elif cell.element is not None and owners[cell.element] >= 0:
            style = f"black on {COLOURS[owners[cell.element]]}"
        line.append(" ")
        line.append(f"{value:>5}", style)
    return line if cells else line.append(" –")
