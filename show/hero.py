"""The picture of README.md's first screen: DDP's all-reduce, and below it the two halves with the update between them.

It is a diagram and no recording: a row is a kind of memory, cut into the quarters of four ranks. Its bytes are those
of AdamW in fp32, d = 4.
"""

from .picture import Cell, Picture

RANKS = range(4)
LEFT, RANK, GAP, CELL, LINE, WIDTH = 120, 120, 12, 30, 20, 652
START, HALF, UPDATED, DDP_UPDATES, DDP_DONE, END = 2.2, 4.4, 5.6, 6.6, 11.4, 15.0  # seconds
DONE = 7.8  # 4.8 s are four times the update of a quarter: DDP_DONE - DDP_UPDATES
CAPTIONS = (
    (0, START, "Four ranks, each with gradients of its own."),
    (START, HALF, "Reduce-scatter: each rank averages one quarter."),
    (HALF, 6.4, "Below: update it now, with 1/4 of the moments."),
    (6.4, 9, "All-gather: averages above, new parameters below."),
    (9, DDP_DONE, "Above, every rank still updates everything."),
    (DDP_DONE, END, "The same traffic, 1/d of the optimizer's state."),
)
ROWS = ("parameters", "gradients", "moment 1", "moment 2")


def system(picture, top, name, kind, leaves, lands, updated, is_sharded):
    """Draw four ranks. In the second half `kind` leaves the owner of a quarter at `leaves`, and lands at `lands`."""
    picture.text(LEFT, top, name, "h")
    for line, words in enumerate(ROWS):
        picture.text(LEFT - 8, top + 24 + line * LINE, words, "r e")
    for rank in RANKS:
        for quarter in RANKS:
            is_own = rank == quarter
            new = updated if is_own or not is_sharded else lands
            average = (HALF, updated) if is_own else (END, END) if is_sharded else (lands, updated)
            parts = [(0, "old", 0, new), (0, "new", new, END), (1, "gradient", 0, HALF), (1, "average", *average),
                     (1, "garbage", HALF, average[0]), (1, "garbage", average[1], END)]
            if is_own or not is_sharded:
                parts += [(2, "moment", 0, END), (3, "moment", 0, END)]
            for line, of_kind, start, stop in parts:
                if start < stop:
                    picture.add(quarter_of(rank, quarter, top, line, of_kind), (start, stop))
        for quarter in set(RANKS) - {rank}:
            away = (quarter - rank) * (RANK + GAP)
            picture.fly(quarter_of(rank, quarter, top, 1, "gradient"), away, 0, START, HALF)
            line = 0 if kind == "new" else 1
            picture.fly(quarter_of(rank, rank, top, line, kind), away, 0, leaves, lands)


def quarter_of(rank, quarter, top, line, kind):
    return Cell(kind, quarter, LEFT + rank * (RANK + GAP) + quarter * CELL, top + 8 + line * LINE, CELL, LINE)


def bars(picture, top, parts):
    """Draw what runs: (words, from, to), as wide as it is long, and marked while it runs."""
    scale = (WIDTH - LEFT - 12) / (DDP_DONE - START)
    for words, start, stop in parts:
        box = LEFT + (start - START) * scale, top, (stop - start) * scale - 3, 22
        picture.rect(*box, "line")
        picture.rect(*box, "parameters live", (start, stop))
        picture.text(box[0] + box[2] / 2, top + 16, words, "q m")


def meters(picture, top, n_bytes, words, sent):
    """Draw bytes per parameter, and how much has been sent: (from, part of the whole) each."""
    picture.text(LEFT - 8, top + 13, "memory", "r e")
    picture.rect(LEFT, top, 8 * n_bytes, 16, "gradients pale")
    picture.text(LEFT + 8 * n_bytes + 8, top + 13, words, "r")
    picture.text(LEFT + 340, top + 13, "sent", "r e")
    picture.rect(LEFT + 348, top, 164, 16, "line")
    for (start, part), (stop, _) in zip(sent, [*sent[1:], (END, 0)]):
        picture.rect(LEFT + 348, top, 164 * part, 16, "gradients", (start, stop))


def picture():
    made = Picture("DDP, and the distributed optimizer: the same traffic, a quarter of the state", WIDTH, 424, END, 13)
    for start, stop, words in CAPTIONS:
        made.text(12, 26, words, "c", (start, stop))
    system(made, 62, "DDP", "average", HALF, DDP_UPDATES, DDP_DONE, False)
    bars(made, 154, [("all-reduce", START, DDP_UPDATES), ("update all", DDP_UPDATES, DDP_DONE)])
    meters(made, 184, 16, "16 bytes / parameter", [(START, 0.25), (HALF, 0.5), (5.5, 0.75), (DDP_UPDATES, 1)])
    system(made, 250, "the distributed optimizer", "new", UPDATED, DONE, UPDATED, True)
    bars(made, 342, [("reduce-scatter", START, HALF), ("update ¼", HALF, UPDATED), ("all-gather", UPDATED, DONE)])
    meters(made, 372, 10, "8 + 8/d = 10 bytes", [(START, 0.25), (HALF, 0.5), (6.7, 0.75), (DONE, 1)])
    for rank in RANKS:
        made.text(LEFT + rank * (RANK + GAP) + RANK / 2, 414, f"rank {rank}", "r m")
    return made
