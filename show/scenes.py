"""The scenes of the chapters, one a stage: what each rank holds, and what flies between them, with its numbers.

They are drawn from the recordings and the beats of the page: from beats that have a caption.
"""

import textwrap
from itertools import pairwise
from typing import NamedTuple

from . import hero
from .frames import memory_after
from .picture import Picture, Tile, short_number, spans

N_RANKS = 4
LEFT = 8  # pixels
RANK = 110  # width of a rank
GAP = 12
LINE = 16  # height of a cell
BAR = 13
WIDTH = 2 * LEFT + N_RANKS * RANK + (N_RANKS - 1) * GAP
WORD_S = 0.14  # a caption is read first
FOLLOWED_S = 1.8  # one message alone, with its values
TOGETHER_S = 1.2  # all messages of an operation
REST_S = 1.2

MODEL = {"parameters": ("parameters",), "gradients": ("gradients",)}
MOMENTS = {"two moments of each element that the rank updates": ("exp_avg",), "": ("exp_avg_sq",)}
# The beat that is seen where motion is off; and what is written above -> rows that are never there at the same time.
SCENES = {
    "1": (-1, MODEL | {"a flat copy, to be sent": ("average: flat", "sync_params: flat")} | MOMENTS),
    "2": (-2, MODEL | {"a flat copy; later the shards of all ranks": ("average: flat", "sync_params: gathered"),
                       "its own shard, padded": ("sync_params: padded",)} | MOMENTS),
    "3": (-2, {"each rank's flat buffer: line r belongs to rank r": ("GradBuffer.flat",),
               "parameters": ("parameters",)} | MOMENTS),
    "4": (4, {"parameters: a column is a bucket, line r belongs to rank r": ("ParameterBuffer.flat",),
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
    is_followed: bool  # by the reader's eye: one message alone, with its values


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
    followed = set()  # kinds of operations whose first message has been followed
    second = 0.0
    before = 0
    operations = sorted(recording["operations"], key=lambda operation: operation["end"])
    for beat in recording["beats"]:
        if not beat["caption"]:
            continue
        captions.append((second, beat))
        second += WORD_S * len(beat["caption"].split())
        for operation in operations:
            if not before < operation["end"] <= beat["frame"]:
                continue
            changes.append((second, operation["end"] - 1))
            messages = range(len(operation["arrows"]))
            kind = operation["kind"], operation["whole"]
            if kind not in followed:
                followed.add(kind)
                start = second + FOLLOWED_S
                flights.append(Flight(operation, messages[:1], second, start, start + TOGETHER_S, True))
                messages = messages[1:]
                second = start
            landing = second + TOGETHER_S
            flights.append(Flight(operation, messages, second, landing, landing, False))
            second = landing
        changes.append((second, beat["frame"]))
        second += REST_S
        before = beat["frame"]
    return Timetable(captions, changes, flights, second)


class Panel:
    """The memory of all ranks: rows below each other from `top` on; `bottom` is below the last."""

    def __init__(self, picture, recording, rows, top):
        self.picture = picture
        self.recording = recording
        self.bottom = top + 20
        self.tops = {}  # name of a row -> y of its first line
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
                    n_columns = max(n_columns, *(column + 1 for column, _ in storage["places"]))
                    n_lines = max(n_lines, *(line + 1 for _, line in storage["places"]))
            self.bottom += LINE * n_lines + 2
        self.width = RANK // n_columns  # of a cell

    def tiles(self, number, cells, first=0):
        """Return the Tiles of some cells of a storage, from the cell `first` on."""
        storage = self.recording["storages"][number]
        tiles = []
        for cell, (column, line) in zip(cells, storage["places"][first:]):
            owner = storage["rank"]
            if cell.element is not None and cell.kind != "moment":
                owner = self.recording["owners"][cell.element]
            x = LEFT + storage["rank"] * (RANK + GAP) + column * self.width
            y = self.tops[storage["row"]] + line * LINE
            words = "" if cell.kind in ("padding", "garbage", "unset", "moment") else short_number(cell.value, 4)
            tiles.append(Tile(cell.kind, owner, x, y, self.width, LINE, words))
        return tiles

    def draw(self, frame, *span):
        """Add all cells as they are after a frame: where a new storage takes the place of another, the new."""
        seen = {}  # place -> Tile
        for number, cells in sorted(memory_after(self.recording, frame).items()):
            if cells and self.recording["storages"][number]["row"] in self.tops:
                seen |= {(tile.x, tile.y): tile for tile in self.tiles(number, cells)}
        for tile in seen.values():
            self.picture.add(tile, *span)

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
            targets = self.tiles(target, cells, target_first)
            for tile, landed in zip(self.tiles(source, cells, first), targets):
                if not flight.is_followed:
                    tile = tile._replace(words="")
                self.picture.fly(tile, landed.x - tile.x, landed.y - tile.y, leaves, arrives, until)
                n_flying += 1
        return n_flying


def draw_timeline(picture, recording, changes, top):
    """Draw what runs, from left to right, and below it what is in flight: each bucket, or else each kind of message."""
    frames = recording["frames"]
    left = LEFT + 88
    scale = (WIDTH - LEFT - left) / len(frames)

    def draw_bar(start, end, y, kind, *span):
        picture.rect(left + start * scale, y, (end - start) * scale, BAR - 2, kind, *span)

    backward = [number for number, frame in enumerate(frames) if (frame["step"], frame["phase"]) == (0, "backward")]
    forward = [number for number, frame in enumerate(frames) if frame["step"] == 1]
    edges = [backward[0], backward[-1] + 1, forward[0], len(frames)]
    for phase, (start, end) in zip(("backward", "step", "forward"), pairwise(edges)):
        picture.rect(left + start * scale, top, (end - start) * scale - 1, BAR - 2, "line")
        picture.text(min(left + (start + end) / 2 * scale, WIDTH - LEFT - 20), top + 9, phase, "middle soft")
    buckets = [operation["params"] for operation in recording["operations"] if operation["kind"] == "reduce-scatter"]
    lines = {}  # name of a bucket, or of a kind of message -> number of its line
    for operation in recording["operations"]:
        start, end = operation["start"], operation["end"]
        name = operation["whole"]
        if len(buckets) > 1:
            name = f"bucket {1 + buckets.index(operation['params'])}"
        y = top + BAR * lines.setdefault(name, 1 + len(lines))
        picture.text(LEFT, y + 9, name)
        draw_bar(start, end, y, f"bar {operation['what']}")
        for frame, *span in changes:
            if start <= frame < end:
                draw_bar(start, end, y, f"bar {operation['what']} live", *span)
    for frame, *span in changes:
        picture.rect(left + frame * scale, top + BAR, 1.5, BAR * len(lines), "ink", *span)
    return top + BAR * (1 + len(lines)) + 2


def scene(recording, ddp_bytes, still, rows):
    """Return the Picture of a stage. ddp_bytes: what DDP sends."""
    times = timetable(recording)
    captions = spans(times.captions, times.end)
    changes = spans(times.changes, times.end)
    _, _, still_end = captions[still]
    picture = Picture(recording["title"], WIDTH, times.end, still_end - 0.1)
    for number, (beat, *span) in enumerate(captions, 1):
        for line, words in enumerate(textwrap.wrap(beat["caption"], 56)):
            picture.text(LEFT, 18 + 17 * line, words, "strong", *span)
        progress = f"{number} of {len(captions)}" if number > 1 else "1: the loop starts here"
        picture.text(WIDTH - LEFT, 52, progress, "soft end", *span)
    panel_top = draw_timeline(picture, recording, changes, 58)
    panel = Panel(picture, recording, rows, panel_top)
    for frame, *span in changes:
        panel.draw(frame, *span)
    n_flown = 0
    sent = [(0.0, 0)]  # (second, bytes of fp32 that a rank has sent, on average)
    for flight in times.flights:
        n_flown += panel.fly(flight)
        sent.append((flight.landing, 4 * n_flown // N_RANKS))
    for n_bytes, *span in spans(sent, times.end):
        words = f"each rank has sent {n_bytes} B (DDP: {ddp_bytes:g} B in all)"
        picture.text(LEFT, 52, words, "soft", *span)
    picture.legend(LEFT, panel.bottom + 8)
    return picture


def pictures(recordings):
    """Return {file name: Picture} of all pictures. recordings: by their ids."""
    ddp_bytes = recordings["0"]["sent_bytes"]
    of_stages = {f"watch_{id}": scene(recordings[id], ddp_bytes, *SCENES[id]) for id in SCENES}
    return {"watch": hero.picture()} | of_stages
