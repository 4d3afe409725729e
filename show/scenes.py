"""Draws a scene for each stage: an animation of what each rank holds, and of what flies from rank to rank.

A stage is an optimizer of this project that shards (folders stage*/). Its scene shows the recording of a training step
with this optimizer. A recording (show/frames.py) has this vocabulary:

    frame       a moment: in each frame a rank executes one line of the optimizer's source, or waits
    cell        the memory of one number. Cells lie in storages, and each cell has a place: its column and line in a row
    row         the name of a kind of memory, such as "gradients", and the cells of each rank that have this name
    operation   a collective, from frame "start" to frame "end". An all-reduce is two: a reduce-scatter, an all-gather
    "kind"      of an operation: "reduce-scatter", "all-gather" or "broadcast"
    "whole"     "all-reduce" in both operations of an all-reduce, otherwise the kind
    "what"      what an operation sends: "gradients" or "parameters"
    beat        a sentence of show/beats.txt, which is about one frame. Only beats with a caption are in a scene

A scene takes one beat after the other. It shows the caption, then the messages that have arrived since the last beat,
as flying cells, and then the memory in the frame of the beat.

Texts such as "bar live" and "middle soft" are CSS classes of show/page/cells.css.
"""

import textwrap
from itertools import pairwise
from typing import NamedTuple

from . import hero
from .frames import memory_after
from .picture import Picture, Tile, short_number, with_stops

N_RANKS = 4
# Lengths are in pixels, also those without a name below.
LEFT = 8  # where the first rank begins
RANK = 110  # width of a rank
GAP = 12  # between two ranks
LINE = 16  # height of a line of cells
BAR = 13  # height of a line of bars
WIDTH = 2 * LEFT + N_RANKS * RANK + (N_RANKS - 1) * GAP
# Times are in seconds of the animation.
WORD_S = 0.14  # for each word of a caption: a caption is read before anything flies
FOLLOWED_S = 1.8  # for one message that flies alone, with its values
TOGETHER_S = 1.2  # for all messages of an operation
REST_S = 1.2  # after the messages of a beat


class Drawn(NamedTuple):
    """What a scene shows of a recording."""
    still: int  # which of the captions is seen if the reader has turned motion off: an index of the list of captions
    # A slot is a strip of the scene: words above it -> names of the rows that take turns there. "": no words.
    slots: dict


# A row is named after an attribute of the optimizer ("GradBuffer.flat": a class and its attribute), or after a local
# variable ("average: flat": a method and its variable). Here are the slots for the model's rows and for AdamW's.
MODEL = {"parameters": ("parameters",), "gradients": ("gradients",)}
MOMENTS = {"two moments of each element that the rank updates": ("exp_avg",), "": ("exp_avg_sq",)}

SCENES = {  # number of a stage -> what its scene shows
    "1": Drawn(-1, MODEL | {"a flat copy, to be sent": ("average: flat", "sync_params: flat")} | MOMENTS),
    "2": Drawn(-2, MODEL | {
        "a flat copy; later the shards of all ranks": ("average: flat", "sync_params: gathered"),
        "its own shard, padded": ("sync_params: padded",)} | MOMENTS),
    "3": Drawn(-2, {
        "each rank's flat buffer: line r belongs to rank r": ("GradBuffer.flat",),
        "parameters": ("parameters",)} | MOMENTS),
    "4": Drawn(4, {
        "parameters: a column is a bucket, line r belongs to rank r": ("ParameterBuffer.flat",),
        "gradients, until their bucket is sent": ("gradients",),
        "two bucket buffers, one below the other": ("BucketBuffer.sent",),
        "averages of the rank's own shards": ("PartitionedGradient.shard",)} | MOMENTS),
}


class Flight(NamedTuple):
    """Messages of an operation that fly at the same time. Times are seconds of the animation."""
    operation: dict  # an entry of recording["operations"]
    messages: range  # numbers of the messages: each has an entry in operation["arrows"], and in operation["moves"]
    start: float
    stop: float
    landing: float  # when all messages of the operation have arrived
    is_followed: bool = False  # whether one message flies alone, with its values, so that an eye can follow it


class Timetable(NamedTuple):
    """What is seen when. Times are seconds of the animation."""
    captions: list  # (second, the beat whose caption is seen from then on)
    changes: list  # (second, the frame whose memory is seen from then on)
    flights: list  # of Flights
    end: float


def timetable(recording):
    """Return the Timetable of a scene.

    Operations fly one after the other, even if they were in flight together. The first operation of each kind has a
    message that flies alone before the others.
    """
    captions = []
    changes = [(0.0, 0)]
    flights = []
    kinds_followed = set()  # kinds of operations that have had a message that flew alone
    second = 0.0
    last_frame = 0  # of the beat before
    operations = sorted(recording["operations"], key=lambda operation: operation["end"])
    for beat in recording["beats"]:
        if not beat["caption"]:
            continue
        captions.append((second, beat))
        second += WORD_S * len(beat["caption"].split())
        for operation in operations:
            has_ended_since = last_frame < operation["end"] <= beat["frame"]
            if not has_ended_since:
                continue
            changes.append((second, operation["end"] - 1))  # while messages fly, memory is as before they arrive
            messages = range(len(operation["arrows"]))
            kind = operation["kind"], operation["whole"]
            if kind not in kinds_followed:
                kinds_followed.add(kind)
                arrival = second + FOLLOWED_S
                landing = arrival + TOGETHER_S
                flights.append(Flight(operation, messages[:1], second, arrival, landing, is_followed=True))
                messages = messages[1:]
                second = arrival
            landing = second + TOGETHER_S
            flights.append(Flight(operation, messages, second, landing, landing))
            second = landing
        last_frame = beat["frame"]
        changes.append((second, last_frame))
        second += REST_S
    return Timetable(captions, changes, flights, second)


class Panel:
    """Draws the memory of all ranks into a picture: ranks beside each other, and slots below each other."""

    def __init__(self, picture, recording, slots, top):
        """Draw what doesn't change, from y `top` on: the names of ranks, and the words of slots. slots: see Drawn."""
        self.picture = picture
        self.recording = recording
        self.bottom = top + 20  # y below the last slot
        self.tops = {}  # name of a row -> y of its first line of cells
        for rank in range(N_RANKS):
            x = LEFT + rank * (RANK + GAP)
            picture.rect(x, top, RANK - 2, 3, f"own o{rank}")
            picture.text(x, top + 15, f"rank {rank}")
        n_columns = 0  # of cells, in the widest row
        for words, names in slots.items():
            if words:
                picture.text(LEFT, self.bottom + 11, words)
                self.bottom += 15
            self.tops |= dict.fromkeys(names, self.bottom)  # these rows take turns at the same y
            n_lines = 0
            for storage in recording["storages"]:
                if storage["row"] in names:
                    for column, line in storage["places"]:
                        n_columns = max(n_columns, column + 1)
                        n_lines = max(n_lines, line + 1)
            self.bottom += LINE * n_lines + 2
        self.cell_width = RANK // n_columns

    def tiles(self, number, cells, first=0):
        """Return the Tiles that draw `cells`, which lie in a storage from its cell `first` on.

        number: the index of the storage in recording["storages"].
        """
        storage = self.recording["storages"][number]
        tiles = []
        for cell, (column, line) in zip(cells, storage["places"][first:]):
            # `owner` gives a cell its colour: the rank that updates the cell's element, or else the rank that holds it.
            owner = storage["rank"]
            if cell.element is not None:
                owner = self.recording["owners"][cell.element]
            x = LEFT + storage["rank"] * (RANK + GAP) + column * self.cell_width
            y = self.tops[storage["row"]] + line * LINE
            words = ""
            if cell.kind not in ("padding", "garbage", "unset", "moment"):  # numbers that don't help a reader
                words = short_number(cell.value)
            tiles.append(Tile(cell.kind, owner, x, y, self.cell_width, LINE, words))
        return tiles

    def draw(self, frame, start, stop):
        """Add all cells as they are after a frame, visible from second `start` to `stop`.

        Several storages may have the same place. Then the newest is drawn: it has the highest number.
        """
        tile_at = {}  # (x, y) -> Tile
        for number, cells in sorted(memory_after(self.recording, frame).items()):
            if cells and self.recording["storages"][number]["row"] in self.tops:
                for tile in self.tiles(number, cells):
                    tile_at[tile.x, tile.y] = tile
        for tile in tile_at.values():
            self.picture.add(tile, start, stop)

    def fly(self, flight):
        """Add the cells of a Flight, which fly from where they were sent to where they arrive. Return how many fly.

        A cell that has arrived stays visible until all messages of the operation have arrived. In a reduce-scatter it
        vanishes at once, because only the sum of all cells that arrive is kept.
        """
        n_flying = 0  # cells
        for index in flight.messages:
            sender, receiver, n_bytes, frame, arrival = flight.operation["arrows"][index]  # it leaves in `frame`
            # From cell `first` of the storage `source` to cell `target_first` of the storage `target`.
            source, first, target, target_first, n_cells = flight.operation["moves"][index]
            leaves = flight.start
            arrives = flight.stop
            if not flight.is_followed:
                # Messages to rank r + 1 leave at the start, messages to rank r + 2 after a sixth of the flight, and
                # messages to rank r + 3 after two sixths. After the last rank comes rank 0. Each takes four sixths.
                sixth = (flight.stop - flight.start) / 6
                leaves += sixth * ((receiver - sender) % N_RANKS - 1)
                arrives = leaves + sixth * 4
            until = arrives if flight.operation["kind"] == "reduce-scatter" else flight.landing
            cells = memory_after(self.recording, frame)[source][first : first + n_cells]
            landed_tiles = self.tiles(target, cells, target_first)
            for tile, landed in zip(self.tiles(source, cells, first), landed_tiles):
                if not flight.is_followed:
                    tile = tile._replace(words="")
                self.picture.fly(tile, landed.x - tile.x, landed.y - tile.y, leaves, arrives, until)
                n_flying += 1
        return n_flying


def draw_timeline(picture, recording, frames_seen, top):
    """Draw lines of bars, with the frames from left to right. Return the y below them. top: the y where they begin.

    The first line has the phases of the training step. The lines below have the operations: a line for each bucket, or
    for each kind of operation if there is only one bucket. A bucket is a part of the gradients that is sent at once. An
    operation is highlighted while it is in flight. A vertical mark moves along to the frame that is seen.
    frames_seen: [(frame, start, stop), …]: the memory after `frame` is seen from second `start` to `stop`.
    """
    n_frames = len(recording["frames"])
    left = LEFT + 88
    frame_width = (WIDTH - LEFT - left) / n_frames

    phases = [(frame["step"], frame["phase"]) for frame in recording["frames"]]
    # The recording has step 0, and the forward pass of step 1.
    backward = phases.index((0, "backward"))
    after_backward = n_frames - phases[::-1].index((0, "backward"))  # the frame after the last of the backward pass
    forward = phases.index((1, "forward"))
    edges = [backward, after_backward, forward, n_frames]  # frames in which a phase begins, or the last one ends
    for phase, (start, end) in zip(("backward", "step", "forward"), pairwise(edges)):
        picture.rect(left + start * frame_width, top, (end - start) * frame_width - 1, BAR - 2, "line")
        middle = left + (start + end) / 2 * frame_width
        picture.text(min(middle, WIDTH - LEFT - 20), top + 9, phase, "middle soft")  # the word stays in the picture
    # For each bucket the numbers of its parameters. Buckets are in the order in which they are sent.
    buckets = [operation["params"] for operation in recording["operations"] if operation["kind"] == "reduce-scatter"]
    lines = {}  # name of a bucket or of an operation -> the number of its line: 1 is the line below the phases
    for operation in recording["operations"]:
        name = operation["whole"]
        if len(buckets) > 1:
            name = f"bucket {1 + buckets.index(operation['params'])}"
        number = lines.setdefault(name, 1 + len(lines))
        y = top + BAR * number
        picture.text(LEFT, y + 9, name)
        x = left + operation["start"] * frame_width
        width = (operation["end"] - operation["start"]) * frame_width
        picture.rect(x, y, width, BAR - 2, f"bar {operation['what']}")
        for frame, start, stop in frames_seen:
            if operation["start"] <= frame < operation["end"]:
                picture.rect(x, y, width, BAR - 2, f"bar {operation['what']} live", start, stop)
    for frame, start, stop in frames_seen:
        picture.rect(left + frame * frame_width, top + BAR, 1.5, BAR * len(lines), "ink", start, stop)
    return top + BAR * (1 + len(lines)) + 2


def scene(recording, ddp_bytes, drawn):
    """Return the Picture of a stage. drawn: an entry of SCENES. ddp_bytes: what a rank sends in a step with DDP."""
    times = timetable(recording)
    beats_seen = with_stops(times.captions, times.end)  # (beat, start, stop), …
    frames_seen = with_stops(times.changes, times.end)  # (frame, start, stop), …
    still_beat, still_start, still_stop = beats_seen[drawn.still]
    # Where motion is off, the picture shows the last moment of this beat's caption.
    picture = Picture(recording["title"], WIDTH, times.end, still_stop - 0.1)
    for number, (beat, start, stop) in enumerate(beats_seen, 1):
        for line, words in enumerate(textwrap.wrap(beat["caption"], 56)):
            picture.text(LEFT, 18 + 17 * line, words, "strong", start, stop)
        progress = f"{number} of {len(beats_seen)}" if number > 1 else "1: the loop starts here"
        picture.text(WIDTH - LEFT, 52, progress, "soft end", start, stop)
    panel_top = draw_timeline(picture, recording, frames_seen, 58)
    panel = Panel(picture, recording, drawn.slots, panel_top)
    for frame, start, stop in frames_seen:
        panel.draw(frame, start, stop)
    n_flown = 0  # cells that all ranks have sent
    sent = [(0.0, 0)]  # (second, bytes that a rank has sent, on average): a cell has 4 bytes
    for flight in times.flights:
        n_flown += panel.fly(flight)
        sent.append((flight.landing, 4 * n_flown // N_RANKS))
    for n_bytes, start, stop in with_stops(sent, times.end):
        words = f"each rank has sent {n_bytes} B (DDP: {ddp_bytes:g} B in all)"
        picture.text(LEFT, 52, words, "soft", start, stop)
    picture.legend(LEFT, panel.bottom + 8)
    return picture


def pictures(recordings):
    """Return {name of a file, without theme and ".svg": Picture}: the scenes, and README.md's picture (show/hero.py).

    recordings: {id: recording, see `recordings_of` in show/page.py}. The id of a stage is its number, and DDP has "0".
    """
    ddp_bytes = recordings["0"]["sent_bytes"]
    of_stages = {f"watch_{id}": scene(recordings[id], ddp_bytes, drawn) for id, drawn in SCENES.items()}
    return {"watch": hero.picture()} | of_stages
