"""Draws the picture at the top of README.md: how four ranks train a step with DDP, with stage 3 and with stage 4.

Stages 3 and 4 of this project (folders stage*/) are optimizers that shard: each of the four ranks averages and updates
a quarter of the parameters. With DDP every rank updates all of them. Each of the three is called a system.

The picture is an animation. It is drawn from the constants below, and not from a recording of a program. A system has
four columns, one for each rank. A column has a row of four cells for each kind of memory, such as gradients. A cell is
a quarter: cell r belongs to rank r. Below the cells are two lines with bars: what a rank computes, and what it sends.

Each system has a clock. It starts with the backward pass and stops after the next forward pass. The same work takes the
same time in each system. The ratio of a forward pass, a backward pass and half of an all-reduce was measured on a
network of 300 Mbit/s, as were the times in README.md's table. Bytes are counted for AdamW with 32-bit values.
"""

from itertools import permutations, product
from typing import NamedTuple

from .picture import Picture, Tile, with_stops

RANKS = range(4)
# Lengths are in pixels, also those without a name below.
LEFT = 78  # where the first rank's column begins
RANK = 92  # width of a rank's column
GAP = 12  # between two columns
CELL = 23  # width of a cell
LINE = 11  # height of a cell
WIDTH = 500  # of the picture
UNIT = 28  # width of a unit of the clock, in bars
HEIGHT = 118  # of a system
SECONDS_A_UNIT = 0.56  # seconds of the animation in a unit of the clock
PAUSE_S = 2.2  # seconds of the animation before each system
# Times are in units of a system's clock.
BACKWARD = 4  # length of the backward pass
FORWARD = 2  # length of the forward pass
HALF_ALL_REDUCE = 4.105  # length of a reduce-scatter or an all-gather of everything
UPDATE = 0.2  # length of an update of all parameters
FIRST_BUCKET = 0.25  # when the first bucket is sent: a part of the gradients
JUST_AFTER_0 = 0.01  # when the first caption appears: a caption at 0 would be seen before the clock starts, too
ROWS = ("parameters", "gradients", "moments", "")  # AdamW has two moments of each parameter: the last row is the second


class System(NamedTuple):
    """DDP, stage 3 or stage 4: what happens when. Times are in units of the clock. A pair of times is (start, end)."""
    title: str
    reduce_scatter: tuple  # a pair of times; of DDP: the first half of its all-reduce
    update: tuple  # a pair of times
    all_gather: tuple  # a pair of times; of DDP: the second half of its all-reduce
    forward: list  # a pair of times for each part of the forward pass: stage 4 may wait between the parts
    is_sharded: bool
    held_bytes: int  # bytes that a rank holds for each parameter of the model
    words: dict  # time -> the caption from then on

    @property
    def end(self):
        """The time at which the next forward pass ends."""
        _, end = self.forward[-1]
        return end

    def histories(self):
        """Return for each of ROWS two histories: of the quarter that a rank averages, and of the other quarters.

        A history is {time: kind of the cell from then on}. Kinds are keys of KINDS in show/picture.py; "": no cell.
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
    """Return a System. sends_at: when a rank begins to send gradients.

    A sharded system that sends before the backward pass ends is stage 4: its all-gather overlaps the next forward pass.
    """
    averaged = sends_at + HALF_ALL_REDUCE
    if is_sharded:
        updated = averaged + UPDATE / 4  # a rank updates a quarter
        done = updated + HALF_ALL_REDUCE  # every rank has all new parameters
        update = (averaged, updated)
        all_gather = (updated, done)
    else:
        gathered = averaged + HALF_ALL_REDUCE
        done = gathered + UPDATE
        all_gather = (averaged, gathered)
        update = (gathered, done)
    forward = [(done, done + FORWARD)]
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


# Bytes that a rank holds for each parameter; a value has 4. DDP: the parameter, the gradient and two moments, 16 bytes.
# Stage 3 keeps a quarter of the moments: 8 + 8/4. Stage 4 keeps a quarter of the gradients, too: 4 + 12/4.
SYSTEMS = [system_of("DDP", FIRST_BUCKET, 16, is_sharded=False), system_of("Stage 3", BACKWARD, 10),
           system_of("Stage 4", FIRST_BUCKET, 7)]


def draw(picture, top, system, start_s):
    """Draw a system into a Picture, below the y `top`. The clock starts at the second `start_s` of the animation."""
    def second_of(time):
        return start_s + time * SECONDS_A_UNIT

    def spans_of(history):
        """Return [(kind or words, start, stop), …] in seconds of the animation. history: {time: kind or words}."""
        seconds = [(second_of(time) if time else 0, shown) for time, shown in history.items()]
        return with_stops(seconds, picture.seconds)

    def tile(rank, quarter, line, kind):
        """Return the cell of a quarter, which has the colour of its owner, in the column of a rank. line: of ROWS."""
        return Tile(kind, quarter, LEFT + rank * (RANK + GAP) + quarter * CELL, top + 16 + line * LINE, CELL, LINE)

    picture.text(8, top + 11, system.title, "strong")
    done = f"Done in {system.end / SYSTEMS[0].end:.2f} of DDP's time."
    if system is SYSTEMS[0]:
        done = "Done: every rank holds all moments."
    # Without the empty caption at 0 the first caption would be seen from the start of the animation on.
    for words, start, stop in spans_of({0: "", **system.words, system.end: done}):
        picture.text(LEFT, top + 11, words, "", start, stop)
    for line, (own, others) in enumerate(system.histories()):
        picture.text(LEFT - 8, top + 25 + line * LINE, ROWS[line], "end")
        for rank, quarter in product(RANKS, RANKS):
            for kind, start, stop in spans_of(own if rank == quarter else others):
                if kind:
                    picture.add(tile(rank, quarter, line, kind), start, stop)
    n_flown = draw_flights(picture, system, second_of, tile)
    draw_bars(picture, top, system, second_of)
    # A cell is a quarter of the parameters, and four ranks send: so many values a rank sends for each parameter.
    values = n_flown / len(RANKS) ** 2
    picture.text(LEFT - 8, top + 101, "holds", "end")
    picture.rect(LEFT, top + 92, 5 * system.held_bytes, 10, "bar")
    words = f"{system.held_bytes} bytes, and sends {values:g} values, for each parameter"
    picture.text(LEFT + 5 * system.held_bytes + 5, top + 101, words)


def draw_flights(picture, system, second_of, tile):
    """Draw the cells that fly from rank to rank. Return how many cells fly.

    First the message from rank 0 to rank 1 flies alone, so that an eye can follow it. Then all others fly together.
    second_of, tile: the functions in `draw`.
    """
    n_flown = 0
    for half in (system.reduce_scatter, system.all_gather):
        start, stop = map(second_of, half)
        alone_until = start + (stop - start) * 0.4
        for sender, receiver in permutations(RANKS, 2):
            if half == system.reduce_scatter:
                flying = tile(sender, receiver, 1, "gradient")  # the receiver averages this quarter
            elif system.is_sharded:
                flying = tile(sender, sender, 0, "new")  # the sender has updated this quarter
            else:
                flying = tile(sender, sender, 1, "average")  # the sender has averaged this quarter
            leaves = alone_until
            arrives = stop
            if (sender, receiver) == (0, 1):
                leaves = start
                arrives = alone_until
            picture.fly(flying, (receiver - sender) * (RANK + GAP), 0, leaves, arrives, arrives)
            n_flown += 1
    return n_flown


def draw_bars(picture, top, system, second_of):
    """Draw two lines of bars, with times from left to right: what a rank computes, and what it sends.

    second_of: the function in `draw`.
    """
    what_is_gathered = "parameters" if system.is_sharded else "gradients"

    def draw_bar(words, y, name, what, times):
        """Draw a bar, which is highlighted while the clock is in it, and the words left of its line.

        name: written in the bar if there is room. what: "gradients" or "parameters", which decides the colour, or "".
        """
        start, stop = times
        x = LEFT + UNIT * start
        width = max(2, UNIT * (stop - start) - 1)
        picture.text(LEFT - 8, y + 9, words, "end")
        picture.rect(x, y, width, 12, f"bar {what}" if what else "line")  # classes of show/page/cells.css
        picture.rect(x, y, width, 12, f"bar {what} live", second_of(start), second_of(stop))
        if width > 5 * len(name):
            picture.text(x + width / 2, y + 10, name, "middle")

    computed = [("backward", (0, BACKWARD)), ("update", system.update)]
    computed += [("forward", times) for times in system.forward]
    for name, times in computed:
        draw_bar("computes", top + 62, name, "", times)
    draw_bar("sends", top + 76, "reduce-scatter", "gradients", system.reduce_scatter)
    draw_bar("sends", top + 76, "all-gather", what_is_gathered, system.all_gather)
    if len(system.forward) > 1:  # then each part is too short for the name
        picture.text(LEFT + UNIT * system.end + 4, top + 72, "forward")


def picture():
    """Return the Picture of all systems, one below the other. Each starts when the system above is done."""
    starts = [PAUSE_S]  # seconds of the animation
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
    drawn.height += 14  # for the words about widths, below the legend
    return drawn
