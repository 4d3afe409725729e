"""The scenes of the chapters, one a stage: what each rank holds, and what flies between them, with its numbers.

They are drawn from the recordings and the beats of the page: from beats that have a caption.
"""

import textwrap
from itertools import pairwise
from typing import NamedTuple

from . import hero
from .frames import Memory
from .picture import Cell, Picture, spans
from .terminal import short

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


class Panel:
    """The memory of all ranks: rows below each other from `top` on; `bottom` is below the last."""

    def __init__(self, picture, recording, rows, top):
        self.picture = picture
        self.recording = recording
        self.bottom = top + 20
        self.tops = {}
        for rank in range(N_RANKS):
            picture.rect(LEFT + rank * (RANK + GAP), top, RANK - 2, 3, f"own o{rank}")
            picture.text(LEFT + rank * (RANK + GAP), top + 15, f"rank {rank}")
        n_columns = 0
        for words, names in rows.items():
            if words:
                picture.text(LEFT, self.bottom + 11, words)
                self.bottom += 15
            self.tops |= dict.fromkeys(names, self.bottom)
            columns, lines = zip(*(place for storage in recording["storages"] if storage["row"] in names
                                   for place in storage["places"]))
            n_columns = max(n_columns, 1 + max(columns))
            self.bottom += LINE * (1 + max(lines)) + 2
        self.width = RANK // n_columns

    def cells(self, number, values, first=0):
        """Return the Cells of `values`, which are those of a storage from `first` on."""
        storage, cells = self.recording["storages"][number], []
        for (value, kind, element, _), (column, line) in zip(values, storage["places"][first:]):
            owner = storage["rank"] if element is None or kind == "moment" else self.recording["owners"][element]
            x = LEFT + storage["rank"] * (RANK + GAP) + column * self.width
            y = self.tops[storage["row"]] + line * LINE
            words = "" if kind in ("padding", "garbage", "unset", "moment") else short(value, 4)
            cells.append(Cell(kind, owner, x, y, self.width, LINE, words))
        return cells

    def draw(self, frame, *span):
        """Add all cells as they are after a frame: where a new storage takes the place of another, the new."""
        cells = {}
        for number, values in sorted(Memory(self.recording, frame).cells.items()):
            if values and self.recording["storages"][number]["row"] in self.tops:
                cells |= {(cell.x, cell.y): cell for cell in self.cells(number, values)}
        for cell in cells.values():
            self.picture.add(cell, *span)

    def fly(self, flight):
        """Add the messages of a flight, each from where it was sent to where it arrives. Return how many cells fly.

        What is gathered stays where it arrives until all of it is there. What is summed is drawn as a sum then.
        """
        operation = flight.operation
        n_flying = 0
        for index in flight.messages:
            sender, receiver, _, frame, _ = operation["arrows"][index]
            source, first, target, target_first, n_cells = operation["moves"][index]
            values = Memory(self.recording, frame).cells[source][first : first + n_cells]
            delay = flight.seconds / 6 * ((receiver - sender) % N_RANKS - 1)  # from further away it arrives later
            leaves = flight.start + (0 if flight.is_followed else delay)
            arrives = flight.stop if flight.is_followed else leaves + flight.seconds * 2 / 3
            until = arrives if "reduce" in operation["kind"] else flight.landing
            for cell, landed in zip(self.cells(source, values, first), self.cells(target, values, target_first)):
                words = cell.words if flight.is_followed else ""
                way = landed.x - cell.x, landed.y - cell.y
                self.picture.fly(cell._replace(words=words), *way, leaves, arrives, until)
                n_flying += 1
        return n_flying


class Flight(NamedTuple):
    operation: dict
    messages: range  # indices of the operation's arrows
    start: float  # this, `stop` and `landing` in seconds of the picture
    stop: float
    landing: float  # when all messages of the operation have arrived
    is_followed: bool  # by the reader's eye: one message alone, with its values

    @property
    def seconds(self):
        return self.stop - self.start


def span_of(operation):
    return min(arrow[3] for arrow in operation["arrows"]), max(arrow[4] for arrow in operation["arrows"])


def timetable(recording):
    """Return captions, (second, beat); changes of memory, (second, frame); Flights; and the second of the end.

    One thing moves at a time: operations follow each other, also where they were in flight together.
    """
    captions = []
    changes = [(0.0, 0)]
    flights = []
    followed = set()
    second = 0.0
    before = 0
    for beat in filter(lambda beat: beat["caption"], recording["beats"]):
        captions.append((second, beat))
        second += WORD_S * len(beat["caption"].split())
        for operation in sorted(recording["operations"], key=lambda operation: span_of(operation)[1]):
            if not before < span_of(operation)[1] <= beat["frame"]:
                continue
            changes.append((second, span_of(operation)[1] - 1))
            kind = operation["kind"], operation["whole"]
            n_followed = int(kind not in followed)
            followed.add(kind)
            start = second + FOLLOWED_S * n_followed
            landing = start + TOGETHER_S
            if n_followed:
                flights.append(Flight(operation, range(1), second, start, landing, True))
            others = range(n_followed, len(operation["arrows"]))
            flights.append(Flight(operation, others, start, landing, landing, False))
            second = landing
        changes.append((second, beat["frame"]))
        second += REST_S
        before = beat["frame"]
    return captions, changes, flights, second


def draw_timeline(picture, recording, changes, top):
    """Draw what runs, from left to right, and below it what is in flight: each bucket, or else each kind of message."""
    frames = recording["frames"]
    operations = recording["operations"]
    left = LEFT + 88
    lines = {}
    scale = (WIDTH - LEFT - left) / len(frames)
    backward = [index for index, frame in enumerate(frames) if (frame["step"], frame["phase"]) == (0, "backward")]
    forward = [index for index, frame in enumerate(frames) if frame["step"] == 1]
    edges = backward[0], backward[-1] + 1, forward[0], len(frames)
    for phase, (first, last) in zip(("backward", "step", "forward"), pairwise(edges)):
        picture.rect(left + first * scale, top, (last - first) * scale - 1, BAR - 2, "line")
        picture.text(min(left + (first + last) / 2 * scale, WIDTH - LEFT - 20), top + 9, phase, "middle soft")
    buckets = [operation["params"] for operation in operations if operation["kind"] == "reduce-scatter"]
    for operation in operations:
        first, last = span_of(operation)
        kind = f"bar {operation['what']}"
        name = f"bucket {1 + buckets.index(operation['params'])}" if len(buckets) > 1 else operation["whole"]
        y = top + BAR * lines.setdefault(name, 1 + len(lines))
        picture.text(LEFT, y + 9, name)
        picture.rect(left + first * scale, y, (last - first) * scale, BAR - 2, kind)
        for frame, *span in changes:
            if first <= frame < last:
                picture.rect(left + first * scale, y, (last - first) * scale, BAR - 2, f"{kind} live", *span)
    for frame, *span in changes:
        picture.rect(left + frame * scale, top + BAR, 1.5, BAR * len(lines), "ink", *span)
    return top + BAR * (1 + len(lines)) + 2


def scene(recording, still, rows):
    """Return the Picture of a stage."""
    captions, changes, flights, end = timetable(recording)
    captions, changes = spans(captions, end), spans(changes, end)
    picture = Picture(recording["title"], WIDTH, end, captions[still][-1] - 0.1)
    for number, (beat, *span) in enumerate(captions, 1):
        for line, words in enumerate(textwrap.wrap(beat["caption"], 56)):
            picture.text(LEFT, 18 + 17 * line, words, "strong", *span)
        progress = f"{number} of {len(captions)}" if number > 1 else "1: the loop starts here"
        picture.text(WIDTH - LEFT, 52, progress, "soft end", *span)
    panel = Panel(picture, recording, rows, draw_timeline(picture, recording, changes, 58))
    for frame, *span in changes:
        panel.draw(frame, *span)
    n_flown = 0
    sent = [(0.0, 0)]  # (second, bytes of fp32 that a rank has sent, on average)
    for flight in flights:
        n_flown += panel.fly(flight)
        sent.append((flight.landing, 4 * n_flown // N_RANKS))
    for n_bytes, *span in spans(sent, end):
        words = f"each rank has sent {n_bytes} B (DDP: {recording['formula']['ddp_sent']} B in all)"
        picture.text(LEFT, 52, words, "soft", *span)
    picture.legend(LEFT, panel.bottom + 8)
    return picture


def pictures(recordings):
    """Return {file name: Picture} of all pictures. recordings: by their ids."""
    return {"watch": hero.picture()} | {f"watch_{id}": scene(recordings[id], *SCENES[id]) for id in SCENES}
