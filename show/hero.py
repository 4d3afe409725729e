"""The picture of README.md's first screen: a step of DDP, of stage 3 and of stage 4, one after the other on one clock.

It is a diagram and no recording: a row is a kind of memory, cut into the quarters of four ranks. Its bytes and values
are those of AdamW in fp32, d = 4. The clock starts with the backward pass and stops after the next forward pass. The
same work takes the same time in each system: what a forward pass, a backward pass and half of an all-reduce take beside
each other was measured at 300 Mbit/s, where README.md's table has its times.
"""

from dataclasses import dataclass
from itertools import permutations, product

from .picture import Cell, Picture, spans

RANKS = range(4)
LEFT = 78  # pixels
RANK = 92  # width of a rank
GAP = 12
CELL = 23
LINE = 11
WIDTH = 500
UNIT = 22.5  # pixels of a unit of the clock
HEIGHT = 118  # of a system
SECONDS_A_UNIT = 0.45
PAUSE_S = 2.2
# In units of the clock.
BACKWARD = 4
FORWARD = 2
HALF = 6  # of an all-reduce
UPDATE = 0.4  # of all parameters
BUCKET = 0.5  # until the first bucket is full


@dataclass
class System:
    """What happens when, in units of the clock. A message or a phase is (start, end)."""
    title: str
    reduce_scatter: tuple
    update: tuple
    all_gather: tuple
    forward: tuple  # (start, end) of its parts
    words: tuple  # (time, caption from then on), …
    gathers: str  # "average" or "new": what the all-gather carries
    held_bytes: int  # by a rank, for each parameter
    used: str = "garbage"  # what gradients are that nobody reads again; "": they are released

    @property
    def end(self):
        return self.forward[-1][1]

    def histories(self):
        """Return {row: (of the quarter that a rank averages, of the others)}: (time, kind of cell from then on), …"""
        averaged, updated, gathered = self.reduce_scatter[1], self.update[1], self.all_gather[1]
        is_ddp = self.gathers == "average"
        own = ((0, ""), (BUCKET, "gradient"), (averaged, "average"), (updated, self.used))
        others = ((0, ""), (BUCKET, "gradient"), (averaged, self.used))
        if is_ddp:
            others += ((gathered, "average"), (updated, "garbage"))
        new_to_others = updated if is_ddp else gathered
        return {
            "parameters": (((0, "old"), (updated, "new")), ((0, "old"), (new_to_others, "new"))),
            "gradients": (own, others),
            "moments": (((0, "moment"),), ((0, "moment" if is_ddp else ""),)),
        }


def after(start, duration):
    return start, start + duration


def ddp():
    reduce_scatter = after(BUCKET, HALF)
    all_gather = after(reduce_scatter[1], HALF)
    update = after(all_gather[1], UPDATE)
    words = ((0, "Backward pass: each rank has its own gradients."),
             (BUCKET, "All-reduce, first half: each rank averages a quarter."),
             (all_gather[0], "Second half: it sends its averages to all others."),
             (update[0], "Each rank updates everything, with all moments."))
    return System("DDP", reduce_scatter, update, all_gather, (after(update[1], FORWARD),), words, "average", 16)


def stage3():
    reduce_scatter = after(BACKWARD, HALF)
    update = after(reduce_scatter[1], UPDATE / 4)
    all_gather = after(update[1], HALF)
    words = ((0, "Backward pass: each rank has its own gradients."),
             (BACKWARD, "Reduce-scatter: each rank averages a quarter."),
             (update[0], "It updates this quarter, and sends it to all others."),
             (all_gather[1], "The same bytes, and 1/4 of the moments."))
    return System("Stage 3", reduce_scatter, update, all_gather, (after(all_gather[1], FORWARD),), words, "new", 10)


def stage4():
    reduce_scatter = after(BUCKET, HALF)
    update = after(reduce_scatter[1], UPDATE / 4)
    all_gather = after(update[1], HALF)
    arrivals = [all_gather[0] + HALF * part / 4 for part in (1, 2, 3, 4)]
    words = ((0, "Backward pass: each rank has its own gradients."),
             (BUCKET, "Reduce-scatter, meanwhile, in buckets."),
             (update[0], "All-gather, while the next forward pass runs."))
    forward = tuple(after(arrival, FORWARD / 4) for arrival in arrivals)
    return System("Stage 4", reduce_scatter, update, all_gather, forward, words, "new", 7, used="")


def draw(picture, top, system, start_s, ends, ddp_end):
    """Draw a system that begins at a second of the picture. `ends`: the second from which on its result is seen."""
    def second(time):
        return start_s + time * SECONDS_A_UNIT

    def seconds(history):
        return [(0 if time == 0 else second(time), kind) for time, kind in history]

    def cell(rank, quarter, line, kind):
        return Cell(kind, quarter, LEFT + rank * (RANK + GAP) + quarter * CELL, top + 16 + line * LINE, CELL, LINE)

    picture.text(8, top + 11, system.title, "strong")
    done = f"Done in {system.end / ddp_end:.2f} of DDP's time."
    captions = [(0, ""), *((second(time), words) for time, words in system.words), (ends, done)]
    for words, *span in spans(captions, picture.seconds):
        picture.text(LEFT, top + 11, words, "", *span)
    for line, row in enumerate(("parameters", "gradients", "moments", "moments")):
        if line < 3:
            picture.text(LEFT - 8, top + 25 + line * LINE, row, "end")
        for rank, quarter in product(RANKS, RANKS):
            history = system.histories()[row][rank != quarter]
            for kind, *span in spans(seconds(history), picture.seconds):
                if kind:
                    picture.add(cell(rank, quarter, line, kind), *span)
    n_flown = fly_half(picture, cell, 1, "gradient", True, *map(second, system.reduce_scatter))
    line = 1 if system.gathers == "average" else 0
    n_flown += fly_half(picture, cell, line, system.gathers, False, *map(second, system.all_gather))
    computes = [("backward", (0, BACKWARD)), ("update", system.update), *(("forward", part) for part in system.forward)]
    sends = [("reduce-scatter", system.reduce_scatter), ("all-gather", system.all_gather)]
    for y, kinds in ((62, computes), (76, sends)):
        picture.text(LEFT - 8, top + y + 9, "computes" if y == 62 else "sends", "end")
        for name, (start, stop) in kinds:
            colour = {"reduce-scatter": "gradients", "all-gather": "parameters"}.get(name, "")
            colour = "gradients" if system.gathers == "average" and colour else colour
            box = LEFT + UNIT * start, top + y, max(2, UNIT * (stop - start) - 1), 12
            picture.rect(*box, f"bar {colour}" if colour else "line")
            picture.rect(*box, f"bar {colour} live", second(start), second(stop))
            if box[2] > 5 * len(name):
                picture.text(box[0] + box[2] / 2, top + y + 10, name, "middle")
    if len(system.forward) > 1:
        picture.text(LEFT + UNIT * system.end + 4, top + 72, "forward")
    values = n_flown / len(RANKS) ** 2  # a cell is a quarter of the parameters, and four ranks send
    picture.text(LEFT - 8, top + 101, "holds", "end")
    picture.rect(LEFT, top + 92, 5 * system.held_bytes, 10, "bar")
    words = f"{system.held_bytes} bytes, and sends {values:g} values, for each parameter"
    picture.text(LEFT + 5 * system.held_bytes + 5, top + 101, words)


def fly_half(picture, cell, line, kind, is_reduced, start, stop):
    """Fly a half of an all-reduce: first one message alone, then all others. Return how many cells fly."""
    ways = list(permutations(RANKS, 2))
    alone = start + (stop - start) * 0.4
    for rank, receiver in ways:
        quarter = receiver if is_reduced else rank
        span = (start, alone) if (rank, receiver) == ways[0] else (alone, stop)
        picture.fly(cell(rank, quarter, line, kind), (receiver - rank) * (RANK + GAP), 0, *span)
    return len(ways)


def picture():
    systems = ddp(), stage3(), stage4()
    starts = [PAUSE_S]
    for system in systems:
        starts.append(starts[-1] + system.end * SECONDS_A_UNIT + PAUSE_S)
    end = starts[-1] + 2 * PAUSE_S
    whole = Picture("A step of DDP, of stage 3 and of stage 4: the same traffic, 1/d of the state", WIDTH, end, end - 1)
    whole.text(8, 20, "The same traffic, and 1/d of the optimizer's state", "strong")
    for rank in RANKS:
        whole.text(LEFT + rank * (RANK + GAP) + RANK / 2, 40, f"rank {rank}", "middle")
    for number, system in enumerate(systems):
        done = starts[number] + system.end * SECONDS_A_UNIT
        draw(whole, 48 + number * HEIGHT, system, starts[number], done, systems[0].end)
    bottom = 48 + len(systems) * HEIGHT
    whole.text(8, bottom + 42, "Widths are times at 300 Mbit/s, until the end of the next forward pass.", "soft")
    whole.legend(8, bottom)
    whole.height += 14
    return whole
