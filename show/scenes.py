"""The scenes of the chapters, one a stage: what each rank holds, and what flies between them, with its numbers.

They are drawn from the recordings and the beats of the page: from beats that have a caption. Two chapters have stills.
"""

import re
import textwrap
from typing import NamedTuple

from . import hero
from .frames import Memory
from .picture import Cell, Picture
from .terminal import short

N_RANKS, LEFT, RANK, GAP, LINE, BAR = 4, 8, 110, 12, 16, 13  # pixels: RANK: the width of one; LINE: a cell's height
WIDTH = 2 * LEFT + N_RANKS * RANK + (N_RANKS - 1) * GAP
FLIGHT_S, NEXT_FLIGHT_S, READING_S = 1.3, 0.25, 1.9


class Scene(NamedTuple):
    title: str
    columns: int  # cells of a rank side by side
    still: int  # the beat that is seen where motion is off
    rows: dict  # what is written above -> rows of the recording that are never there at the same time


MODEL = {"parameters": ("parameters",), "gradients": ("gradients",)}
MOMENTS = {"first moments": ("exp_avg",), "second moments": ("exp_avg_sq",)}
SCENES = {
    "1": Scene("Stage 1: naive broadcast", 5, 5, MODEL | {
        "flat copy, to be sent": ("average: flat", "sync_params: flat")} | MOMENTS),
    "2": Scene("Stage 2: padded all-gather", 5, 5, MODEL | {
        "flat copy, later all shards": ("average: flat", "sync_params: gathered"),
        "its own shard, padded": ("sync_params: padded",)} | MOMENTS),
    "3": Scene("Stage 3: grad buffer", 4, 3, {
        "the buffer: line r belongs to rank r": ("GradBuffer.flat",), "parameters": ("parameters",)} | MOMENTS),
    "4": Scene("Stage 4: overlap", 5, 2, {
        "parameters: the columns are buckets 1 to 5, line r is rank r's": ("ParameterBuffer.flat",),
        "gradients, until their bucket leaves": ("gradients",), "two bucket buffers": ("BucketBuffer.sent",),
        "averages of its own shards": ("PartitionedGradient.shard",)}),
}
KINDS = {"gradient": "gradient", "average": "average", "old": "old", "stale": "old, awaited",
         "new": "new", "moment": "moment", "garbage": "garbage"}


class Panel:
    """The memory of all ranks: rows below each other from `top` on; `bottom` is below the last."""

    def __init__(self, picture, recording, columns, rows, top):
        self.picture, self.recording, self.width, self.tops = picture, recording, RANK // columns, {}
        lines = {}
        for storage in recording["storages"]:
            lines[storage["row"]] = max([lines.get(storage["row"], 0), *(1 + line for _, line in storage["places"])])
        for words, names in rows.items():
            picture.text(LEFT, top + 11, words)
            self.tops |= dict.fromkeys(names, top + 15)
            top += 17 + LINE * max(lines[name] for name in names)
        self.bottom = top

    def cell(self, number, index, values):
        value, kind, element, _ = values
        storage = self.recording["storages"][number]
        owner = storage["rank"] if element is None or kind == "moment" else self.recording["owners"][element]
        column, line = storage["places"][index]
        x = LEFT + storage["rank"] * (RANK + GAP) + column * self.width
        words = "" if kind in ("padding", "garbage", "unset") else short(value)
        return Cell(kind, owner, x, self.tops[storage["row"]] + line * LINE, self.width, LINE, words)

    def cells(self, frame):
        """Return all cells that are seen after a frame: where a new storage takes the place of another, the new."""
        memory, cells = Memory(self.recording, frame), {}
        for number in sorted(memory.cells):
            for index, values in enumerate(memory.cells[number] or ()):
                if self.recording["storages"][number]["row"] in self.tops:
                    cell = self.cell(number, index, values)
                    cells[cell.x, cell.y] = cell
        return cells.values()

    def draw(self, changes, end):
        """Add the cells with the seconds in which they are seen. changes: (second, frame), in order."""
        spans = {}
        for (start, frame), (stop, _) in zip(changes, [*changes[1:], (end, 0)]):
            for cell in self.cells(frame):
                of_cell = spans.setdefault(cell, [])
                first = of_cell.pop()[0] if of_cell and of_cell[-1][1] == start else start
                of_cell.append((first, stop))
        for cell, of_cell in spans.items():
            self.picture.add(cell, *([] if of_cell == [(0, end)] else of_cell))
        return {cell.kind for cell in spans}

    def fly(self, second, operation):
        """Add what an operation carries. What comes from further away arrives later."""
        for (sender, receiver, _, frame, _), move in zip(operation["arrows"], operation["moves"]):
            source, first, target, target_first, n_cells = move
            values = Memory(self.recording, frame).cells[source]
            start = second + FLIGHT_S / 6 * ((receiver - sender) % N_RANKS - 1)
            for index in range(n_cells):
                cell = self.cell(source, first + index, values[first + index])
                there = self.cell(target, target_first + index, values[first + index])
                if cell.kind != "padding":
                    self.picture.fly(cell, there.x - cell.x, there.y - cell.y, start, start + FLIGHT_S * 2 / 3)


def span_of(operation):
    return min(arrow[3] for arrow in operation["arrows"]), max(arrow[4] for arrow in operation["arrows"])


def timetable(recording):
    """Return captions, changes of memory and flights, (second, beat, frame or operation) each; and the loop's end."""
    captions, changes, flights, second, before = [], [], [], 0.0, 0
    for beat in filter(lambda beat: beat["caption"], recording["beats"]):
        captions.append((second, beat))
        arriving = [operation for operation in recording["operations"]
                    if before < span_of(operation)[1] <= beat["frame"]]
        landing = second
        for number, operation in enumerate(arriving):
            changes.append((landing, span_of(operation)[1] - 1))
            flights.append((second + number * NEXT_FLIGHT_S, operation))
            landing = flights[-1][0] + FLIGHT_S
        changes.append((landing, beat["frame"]))
        second, before = max(second + 1.2, landing) + READING_S, beat["frame"]
    return captions, changes, flights, second


def scene(id, recording):
    """Return the Picture of a stage."""
    spec, (captions, changes, flights, end) = SCENES[id], timetable(recording)
    picture = Picture(spec.title, WIDTH, 0, end, captions[spec.still][0] + FLIGHT_S + 1)
    piece = (WIDTH - 2 * LEFT) / len(captions)
    for number, ((start, beat), (stop, _)) in enumerate(zip(captions, [*captions[1:], (end, None)])):
        picture.rect(LEFT + number * piece, 6, piece - 3, 4, "line")
        picture.rect(LEFT + number * piece, 6, piece - 3, 4, "ink", (start, stop))
        for line, words in enumerate(textwrap.wrap(beat["caption"], 44)):
            picture.text(LEFT, 28 + 17 * line, words, "b", (start, stop))
        place = f"{number + 1} of {len(captions)}" if number else "1: the loop starts here"
        picture.text(WIDTH - LEFT, 62, place, "s e", (start, stop))
    top = 70
    if len({operation["kind"] for operation in recording["operations"]}) < len(recording["operations"]) - 4:
        top = draw_timeline(picture, recording, changes, end)
    else:
        for (start, operation), (next_start, _) in zip(flights, [*flights[1:], (end, None)]):
            n_bytes = sum(arrow[2] for arrow in operation["arrows"] if arrow[0] == operation["arrows"][0][0])
            words = f"in flight: {operation['kind']} of {operation['what']}, {n_bytes} B from each sender"
            picture.text(LEFT, 62, words, "s", (start, min(start + FLIGHT_S, next_start)))
    panel = Panel(picture, recording, spec.columns, spec.rows, draw_ranks(picture, top))
    kinds, x = panel.draw(changes, end), LEFT
    for second, operation in flights:
        panel.fly(second, operation)
    for kind in filter(kinds.__contains__, KINDS):
        picture.add(Cell(kind, 0, x, panel.bottom + 8, 18, 12))
        picture.text(x + 20, panel.bottom + 18, KINDS[kind], "s")
        x += 32 + 6.2 * len(KINDS[kind])
    picture.height = panel.bottom + 26
    return picture


def draw_ranks(picture, top):
    for rank in range(N_RANKS):
        picture.rect(LEFT + rank * (RANK + GAP), top, RANK - 2, 3, f"c{rank}")
        picture.text(LEFT + rank * (RANK + GAP), top + 15, f"rank {rank}")
    return top + 20


def draw_timeline(picture, recording, changes, end):
    """Draw what runs, from left to right, and below it a bar for each bucket, marked while it is in flight."""
    frames, top, n_buckets = recording["frames"], 72, len(recording["operations"]) // 2
    scale = (WIDTH - 2 * LEFT) / len(frames)
    for step, phase in ((0, "backward"), (1, "forward")):
        inside = [index for index, frame in enumerate(frames) if (frame["step"], frame["phase"]) == (step, phase)]
        picture.rect(LEFT + inside[0] * scale, top, len(inside) * scale, BAR - 2, "line")
        picture.text(LEFT + (inside[0] + len(inside) / 2) * scale, top + 9, phase, "m s")
    for number, operation in enumerate(recording["operations"]):
        (first, last), y = span_of(operation), top + BAR * (1 + number % n_buckets)
        box, kind = (LEFT + first * scale, y, (last - first) * scale, BAR - 2), operation["what"]
        picture.rect(*box, f"{kind} pale")
        seconds = [second for second, frame in changes if first <= frame < last]
        landed = min([second for second, frame in changes if frame >= last], default=end)
        if seconds:
            picture.rect(*box, f"{kind} live", (seconds[0], landed))
        bucket = number + 1 if number < n_buckets else 2 * n_buckets - number
        picture.text(LEFT + first * scale + 4, y + 9, f"bucket {bucket}")
    for (start, frame), (stop, _) in zip(changes, [*changes[1:], (end, 0)]):
        picture.rect(LEFT + frame * scale, top, 1.5, BAR * (n_buckets + 1), "ink", (start, stop))
    return top + BAR * (n_buckets + 1) + 2


def pictures(recordings):
    """Return {file name: Picture} of all pictures. recordings: by their ids."""
    made = {"watch": hero.picture()} | {f"watch_{id}": scene(id, recordings[id]) for id in SCENES}
    made["show_buffer"] = buffer = Picture("Stage 3: the buffer of four ranks in its five states", WIDTH, 0)
    made["show_buckets"] = buckets = Picture("Stage 4: buckets, each cut into a shard for each rank", WIDTH, 0)
    buffer.height = draw_ranks(buffer, 6)
    for beat in recordings["3"]["beats"]:
        state = re.match(r"State \d[^A-Z]*([A-Z_]+)", beat["says"])
        if state and beat["caption"]:
            rows = {f"{state[1]}: {beat['caption']}": ("GradBuffer.flat",)}
            panel = Panel(buffer, recordings["3"], 4, rows, buffer.height)
            panel.draw([(0, beat["frame"])], buffer.seconds)
            buffer.height = panel.bottom
    words, rows = next(iter(SCENES["4"].rows.items()))
    panel = Panel(buckets, recordings["4"], 5, {words: rows}, draw_ranks(buckets, 6))
    panel.draw([(0, 0)], buckets.seconds)
    buckets.height = panel.bottom
    return made
