"""Draws the scenes of the chapters, one a stage: what each rank holds, and what flies from rank to rank, with values.

A scene shows the recording of a stage (show/frames.py), as the page does: beat after beat (show/beats.txt), but only
beats that have a caption.
"""

import textwrap
from itertools import pairwise
from typing import NamedTuple

from . import hero
from .frames import memory_after
from .picture import Picture, Tile, short_number, with_stops

N_RANKS = 4
LEFT = 8  # pixels
RANK = 110  # width of a rank
GAP = 12
LINE = 16  # height of a cell
BAR = 13  # height of a line of the timeline
WIDTH = 2 * LEFT + N_RANKS * RANK + (N_RANKS - 1) * GAP
WORD_S = 0.14  # a caption is read before anything flies
FOLLOWED_S = 1.8  # one message alone, with its values
TOGETHER_S = 1.2  # all messages of an operation
REST_S = 1.2  # at the end of a beat

MODEL = {"parameters": ("parameters",), "gradients": ("gradients",)}
MOMENTS = {"two moments of each element that the rank updates": ("exp_avg",), "": ("exp_avg_sq",)}


class Drawn(NamedTuple):
    """What a scene shows of a recording. Rows of a recording are named in show/trace.py."""
    still: int  # index of the caption that is seen where motion is off
    rows: dict  # words above a row of the scene -> rows of the recording that are drawn there, one at a time


SCENES = {
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
    """Messages of an operation that fly at the same time. Times are seconds of the picture."""
    operation: dict
    messages: range  # indices of the operation's arrows
    start: float
    stop: float
    landing: float  # when all messages of the operation have arrived
    is_followed: bool = False  # by the reader's eye: one message alone, with its values


class Timetable(NamedTuple):
    """What is seen when. Times are seconds of the picture."""
    captions: list  # (second, beat)
    changes: list  # (second, frame whose memory is seen from then on)
    flights: list
    end: float


def timetable(recording):
    """Return the Timetable of a scene. One operation follows the other, also where they were in flight together."""
    captions = []
    changes = [(0.0, 0)]
    flights = []
    kinds_followed = set()  # of operations whose first message has flown alone
    second = 0.0
    last_frame = 0  # of the beat before
    operations = sorted(recording["operations"], key=lambda operation: operation["end"])
    for beat in recording["beats"]:
        if not beat["caption"]:
            continue
        captions.append((second, beat))
        second += WORD_S * len(beat["caption"].split())
        for operation in operations:
            if not last_frame < operation["end"] <= beat["frame"]:
                continue
            changes.append((second, operation["end"] - 1))
            messages = range(len(operation["arrows"]))
            kind = (operation["kind"], operation["whole"])
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
    """Draws the memory of all ranks into a picture: rows below each other, a column of the panel for each rank."""

    def __init__(self, picture, recording, rows, top):
        """rows: see Drawn."""
        self.picture = picture
        self.recording = recording
        self.bottom = top + 20  # below the last row
        self.tops = {}  # name of a row of the recording -> y of its first line
        for rank in range(N_RANKS):
            x = LEFT + rank * (RANK + GAP)
            picture.rect(x, top, RANK - 2, 3, f"own o{rank}")
            picture.text(x, top + 15, f"rank {rank}")
        n_columns = 0
        for words, names in rows.items():
            if words:
                picture.text(LEFT, self.bottom + 11, words)
                self.bottom += 15
            self.tops |= dict.fromkeys(names, self.bottom)
            n_lines = 0
            for storage in recording["storages"]:
                if storage["row"] in names:
                    for column, line in storage["places"]:
                        n_columns = max(n_columns, column + 1)
                        n_lines = max(n_lines, line + 1)
            self.bottom += LINE * n_lines + 2
        self.cell_width = RANK // n_columns

    def tiles(self, number, cells, first=0):
        """Return the Tiles of some cells of a storage, which begin with the cell `first`."""
        storage = self.recording["storages"][number]
        tiles = []
        for cell, (column, line) in zip(cells, storage["places"][first:]):
            owner = storage["rank"]
            if cell.element is not None:
                owner = self.recording["owners"][cell.element]
            x = LEFT + storage["rank"] * (RANK + GAP) + column * self.cell_width
            y = self.tops[storage["row"]] + line * LINE
            words = ""
            if cell.kind not in ("padding", "garbage", "unset", "moment"):
                words = short_number(cell.value)
            tiles.append(Tile(cell.kind, owner, x, y, self.cell_width, LINE, words))
        return tiles

    def draw(self, frame, start, stop):
        """Add all cells as they are after a frame. Where several storages have a place, the newest is drawn."""
        tile_at = {}  # place -> Tile
        for number, cells in sorted(memory_after(self.recording, frame).items()):
            if cells and self.recording["storages"][number]["row"] in self.tops:
                for tile in self.tiles(number, cells):
                    tile_at[tile.x, tile.y] = tile
        for tile in tile_at.values():
            self.picture.add(tile, start, stop)

    def fly(self, flight):
        """Add the messages of a flight, each from where it was sent to where it arrives. Return how many cells fly.

        What is gathered stays where it arrives until all of it is there. What is summed is drawn as a sum then.
        """
        n_flying = 0
        for index in flight.messages:
            sender, receiver, _, frame, _ = flight.operation["arrows"][index]
            source, first, target, target_first, n_cells = flight.operation["moves"][index]
            leaves = flight.start
            arrives = flight.stop
            if not flight.is_followed:
                seconds = flight.stop - flight.start
                leaves += seconds / 6 * ((receiver - sender) % N_RANKS - 1)  # from further away it arrives later
                arrives = leaves + seconds * 2 / 3
            until = arrives if flight.operation["kind"] == "reduce-scatter" else flight.landing
            cells = memory_after(self.recording, frame)[source][first : first + n_cells]
            landed_tiles = self.tiles(target, cells, target_first)
            for tile, landed in zip(self.tiles(source, cells, first), landed_tiles):
                if not flight.is_followed:
                    tile = tile._replace(words="")
                self.picture.fly(tile, landed.x - tile.x, landed.y - tile.y, leaves, arrives, until)
                n_flying += 1
        return n_flying


def draw_timeline(picture, recording, changes, top):
    """Draw what runs, from left to right, and below it what is in flight. Return the y below it.

    There is a line for each bucket, or where there are no buckets for each kind of message. changes: (frame, start,
    stop), where the frame is seen from second `start` to `stop`.
    """
    n_frames = len(recording["frames"])
    left = LEFT + 88
    frame_width = (WIDTH - LEFT - left) / n_frames

    phases = [(frame["step"], frame["phase"]) for frame in recording["frames"]]
    backward = phases.index((0, "backward"))
    after_backward = n_frames - phases[::-1].index((0, "backward"))
    forward = [step for step, _ in phases].index(1)
    edges = [backward, after_backward, forward, n_frames]
    for phase, (start, end) in zip(("backward", "step", "forward"), pairwise(edges)):
        picture.rect(left + start * frame_width, top, (end - start) * frame_width - 1, BAR - 2, "line")
        middle = left + (start + end) / 2 * frame_width
        picture.text(min(middle, WIDTH - LEFT - 20), top + 9, phase, "middle soft")
    buckets = [operation["params"] for operation in recording["operations"] if operation["kind"] == "reduce-scatter"]
    lines = {}  # name of a bucket, or of a kind of message -> number of its line
    for operation in recording["operations"]:
        name = operation["whole"]
        if len(buckets) > 1:
            name = f"bucket {1 + buckets.index(operation['params'])}"
        y = top + BAR * lines.setdefault(name, 1 + len(lines))
        picture.text(LEFT, y + 9, name)
        x = left + operation["start"] * frame_width
        width = (operation["end"] - operation["start"]) * frame_width
        picture.rect(x, y, width, BAR - 2, f"bar {operation['what']}")
        for frame, *span in changes:
            if operation["start"] <= frame < operation["end"]:
                picture.rect(x, y, width, BAR - 2, f"bar {operation['what']} live", *span)
    for frame, *span in changes:
        picture.rect(left + frame * frame_width, top + BAR, 1.5, BAR * len(lines), "ink", *span)
    return top + BAR * (1 + len(lines)) + 2


def scene(recording, ddp_bytes, drawn):
    """Return the Picture of a stage. ddp_bytes: what DDP sends. drawn: an entry of SCENES."""
    times = timetable(recording)
    captions = with_stops(times.captions, times.end)  # (beat, start, stop), …
    changes = with_stops(times.changes, times.end)  # (frame, start, stop), …
    _, _, still_end = captions[drawn.still]
    picture = Picture(recording["title"], WIDTH, times.end, still_end - 0.1)
    for number, (beat, *span) in enumerate(captions, 1):
        for line, words in enumerate(textwrap.wrap(beat["caption"], 56)):
            picture.text(LEFT, 18 + 17 * line, words, "strong", *span)
        progress = f"{number} of {len(captions)}" if number > 1 else "1: the loop starts here"
        picture.text(WIDTH - LEFT, 52, progress, "soft end", *span)
    panel_top = draw_timeline(picture, recording, changes, 58)
    panel = Panel(picture, recording, drawn.rows, panel_top)
    for frame, start, stop in changes:
        panel.draw(frame, start, stop)
    n_flown = 0
    sent = [(0.0, 0)]  # (second, bytes of fp32 that a rank has sent, on average)
    for flight in times.flights:
        n_flown += panel.fly(flight)
        sent.append((flight.landing, 4 * n_flown // N_RANKS))
    for n_bytes, *span in with_stops(sent, times.end):
        words = f"each rank has sent {n_bytes} B (DDP: {ddp_bytes:g} B in all)"
        picture.text(LEFT, 52, words, "soft", *span)
    picture.legend(LEFT, panel.bottom + 8)
    return picture


def pictures(recordings):
    """Return {file name: Picture} of all pictures. recordings: by their ids."""
    ddp_bytes = recordings["0"]["sent_bytes"]
    of_stages = {f"watch_{id}": scene(recordings[id], ddp_bytes, drawn) for id, drawn in SCENES.items()}
    return {"watch": hero.picture()} | of_stages
