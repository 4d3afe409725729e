"""The picture of README.md's first screen: a step of DDP, of stage 3 and of stage 4, one after the other on one clock.

The picture is a diagram and no recording: a row is a kind of memory, cut into the quarters of four ranks. Bytes and
values are those of AdamW in fp32, d = 4. The clock starts with the backward pass and stops after the next forward pass.
The same work takes the same time in each system. How long a forward pass, a backward pass and half of an all-reduce
take beside each other was measured at 300 Mbit/s, as were the times in README.md's table.
"""

from itertools import permutations, product
from typing import NamedTuple

from .picture import Picture, Tile, with_stops

RANKS = range(4)
LEFT = 78  # pixels
RANK = 92  # width of a rank
GAP = 12
CELL = 23  # width of a quarter
LINE = 11
WIDTH = 500
UNIT = 28  # pixels of a unit of the clock
HEIGHT = 118  # of a system
SECONDS_A_UNIT = 0.56
PAUSE_S = 2.2
# In units of the clock.
BACKWARD = 4
FORWARD = 2
HALF_ALL_REDUCE = 4.105
UPDATE = 0.2  # of all parameters
FIRST_BUCKET = 0.25  # until the first bucket is full
JUST_AFTER_0 = 0.01  # what a history has at 0 is seen before the clock starts, too
ROWS = ("parameters", "gradients", "moments", "")  # the last: the other moments


class System(NamedTuple):
    """DDP, stage 3 or stage 4: what happens when. Times are units of the clock; a pair of times is (start, end)."""
    title: str
    reduce_scatter: tuple
    update: tuple
    all_gather: tuple
    forward: list  # a pair of times for each part of the forward pass
    is_sharded: bool
    held_bytes: int  # by a rank, for each parameter
    words: dict  # time -> the caption from then on

    @property
    def end(self):
        _, end = self.forward[-1]
        return end

    def histories(self):
        """Return for each of ROWS the history of the quarter that a rank averages, and of the other quarters.

        A history is {time: kind of cell from then on}; the kind "" is no cell.
        """
        _, averaged = self.reduce_scatter
        _, updated = self.update
        _, gathered = self.all_gather
        after_use = "" if self.title == "Stage 4" else "garbage"  # stage 4 releases gradients
        gradients = {0: "", FIRST_BUCKET: "gradient"}
        own_gradients = gradients | {averaged: "average", updated: after_use}
        if self.is_sharded:
            other_gradients = gradients | {averaged: after_use}
            other_parameters = {0: "old", gathered: "new"}
            other_moments = {0: ""}
        else:
            other_gradients = gradients | {averaged: "garbage", gathered: "average", updated: after_use}
            other_parameters = {0: "old", updated: "new"}
            other_moments = {0: "moment"}
        own_parameters = {0: "old", updated: "new"}
        moments = ({0: "moment"}, other_moments)
        return [(own_parameters, other_parameters), (own_gradients, other_gradients), moments, moments]


def system_of(title, sends_at, held_bytes, is_sharded=True):
    """Return a System. sends_at: when a rank begins to send. Stage 4 receives during the next forward pass."""
    averaged = sends_at + HALF_ALL_REDUCE
    if is_sharded:
        updated = averaged + UPDATE / 4
        end = updated + HALF_ALL_REDUCE
        update = (averaged, updated)
        all_gather = (updated, end)
    else:
        gathered = averaged + HALF_ALL_REDUCE
        end = gathered + UPDATE
        all_gather = (averaged, gathered)
        update = (gathered, end)
    forward = [(end, end + FORWARD)]
    words = {JUST_AFTER_0: "Backward pass: each rank has its own gradients."}
    if not is_sharded:
        words |= {sends_at: "All-reduce, first half: each rank averages a quarter.",
                  averaged: "Second half: it sends its averages to all others.",
                  gathered: "Each rank updates everything, with all moments."}
    elif sends_at == BACKWARD:
        words |= {sends_at: "Reduce-scatter: each rank averages a quarter.",
                  averaged: "It updates this quarter, and sends it to all others."}
    else:
        words |= {sends_at: "Reduce-scatter, while the pass goes on: each rank averages a quarter.",
                  averaged: "It updates this quarter, and sends it during the next forward pass."}
        # A quarter of the layers may run when a quarter of the parameters has arrived.
        arrivals = [updated + HALF_ALL_REDUCE * quarter / 4 for quarter in (1, 2, 3, 4)]
        forward = [(arrival, arrival + FORWARD / 4) for arrival in arrivals]
    return System(title, (sends_at, averaged), update, all_gather, forward, is_sharded, held_bytes, words)


SYSTEMS = [system_of("DDP", FIRST_BUCKET, 16, is_sharded=False), system_of("Stage 3", BACKWARD, 10),
           system_of("Stage 4", FIRST_BUCKET, 7)]


def draw(picture, top, system, start_s):
    """Draw a system below `top`. Its clock starts at the second `start_s` of the picture."""
    def second_of(time):
        return start_s + time * SECONDS_A_UNIT

    def spans_of(history):
        seconds = [(second_of(time) if time else 0, part) for time, part in history.items()]
        return with_stops(seconds, picture.seconds)

    def tile(rank, quarter, line, kind):
        return Tile(kind, quarter, LEFT + rank * (RANK + GAP) + quarter * CELL, top + 16 + line * LINE, CELL, LINE)

    picture.text(8, top + 11, system.title, "strong")
    done = f"Done in {system.end / SYSTEMS[0].end:.2f} of DDP's time."
    if system is SYSTEMS[0]:
        done = "Done: every rank holds all moments."
    for words, *span in spans_of({0: "", **system.words, system.end: done}):
        picture.text(LEFT, top + 11, words, "", *span)
    for line, (row, (own, others)) in enumerate(zip(ROWS, system.histories())):
        picture.text(LEFT - 8, top + 25 + line * LINE, row, "end")
        for rank, quarter in product(RANKS, RANKS):
            for kind, *span in spans_of(own if rank == quarter else others):
                if kind:
                    picture.add(tile(rank, quarter, line, kind), *span)
    n_flown = draw_flights(picture, system, second_of, tile)
    draw_bars(picture, top, system, second_of)
    values = n_flown / len(RANKS) ** 2  # a cell is a quarter of the parameters, and four ranks send
    picture.text(LEFT - 8, top + 101, "holds", "end")
    picture.rect(LEFT, top + 92, 5 * system.held_bytes, 10, "bar")
    words = f"{system.held_bytes} bytes, and sends {values:g} values, for each parameter"
    picture.text(LEFT + 5 * system.held_bytes + 5, top + 101, words)


def draw_flights(picture, system, second_of, tile):
    """Draw what flies: first one message alone, then the others. Return how many cells fly.

    second_of, tile: the functions in `draw`.
    """
    n_flown = 0
    for half in (system.reduce_scatter, system.all_gather):
        start, stop = map(second_of, half)
        alone_until = start + (stop - start) * 0.4
        for sender, receiver in permutations(RANKS, 2):
            if half == system.reduce_scatter:
                flying = tile(sender, receiver, 1, "gradient")
            elif system.is_sharded:
                flying = tile(sender, sender, 0, "new")
            else:
                flying = tile(sender, sender, 1, "average")
            leaves = alone_until
            arrives = stop
            if (sender, receiver) == (0, 1):
                leaves = start
                arrives = alone_until
            picture.fly(flying, (receiver - sender) * (RANK + GAP), 0, leaves, arrives, arrives)
            n_flown += 1
    return n_flown


def draw_bars(picture, top, system, second_of):
    """Draw what a rank computes, from left to right, and below it what the rank sends."""
    gathered = "parameters" if system.is_sharded else "gradients"

    def draw_bar(words, y, name, what, times):
        start, stop = times
        x = LEFT + UNIT * start
        width = max(2, UNIT * (stop - start) - 1)
        picture.text(LEFT - 8, y + 9, words, "end")
        picture.rect(x, y, width, 12, f"bar {what}" if what else "line")
        picture.rect(x, y, width, 12, f"bar {what} live", second_of(start), second_of(stop))
        if width > 5 * len(name):
            picture.text(x + width / 2, y + 10, name, "middle")

    computed = [("backward", (0, BACKWARD)), ("update", system.update)]
    computed += [("forward", times) for times in system.forward]
    for name, times in computed:
        draw_bar("computes", top + 62, name, "", times)
    draw_bar("sends", top + 76, "reduce-scatter", "gradients", system.reduce_scatter)
    draw_bar("sends", top + 76, "all-gather", gathered, system.all_gather)
    if len(system.forward) > 1:
        picture.text(LEFT + UNIT * system.end + 4, top + 72, "forward")


def picture():
    """Return the Picture: system below system, each of which starts when the system before is done."""
    starts = [PAUSE_S]
    for system in SYSTEMS:
        starts.append(starts[-1] + system.end * SECONDS_A_UNIT + PAUSE_S)
    end = starts[-1] + 2 * PAUSE_S
    drawn = Picture("A step of DDP, of stage 3 and of stage 4: the same traffic, 1/d of the state", WIDTH, end, end - 1)
    drawn.text(8, 20, "The same traffic, and 1/d of the optimizer's state", "strong")
    for rank in RANKS:
        drawn.text(LEFT + rank * (RANK + GAP) + RANK / 2, 40, f"rank {rank}", "middle")
    for number, system in enumerate(SYSTEMS):
        draw(drawn, 48 + number * HEIGHT, system, starts[number])
    bottom = 48 + len(SYSTEMS) * HEIGHT
    drawn.text(8, bottom + 42, "Widths are times at 300 Mbit/s, until the end of the next forward pass.", "soft")
    drawn.legend(8, bottom)
    drawn.height += 14
    return drawn
