"""The picture of README.md's first screen: DDP's all-reduce, and below it the two halves with the update between them.

It is a diagram and no recording: a row is a kind of memory, cut into the quarters of four ranks. Its bytes and values
are those of AdamW in fp32, d = 4. To update everything takes four times as long as to update a quarter.
"""

from itertools import permutations, product

from .picture import Cell, Picture, spans

RANKS = range(4)
LEFT = 78  # pixels
RANK = 92  # width of a rank
GAP = 12
CELL = 23
LINE = 15
WIDTH = 492
END_S = 15
SENDS = {"all-reduce": "gradients", "reduce-scatter": "gradients", "all-gather": "parameters"}
# Histories are (second, what there is from then on), …: of a row for the quarter that a rank averages, and for others.
DDP = {
    "words": ((0, "Each rank has its own gradients."), (2, "All-reduce, first half: each rank averages a quarter."),
              (4, "Second half: it sends its averages to all others."), (6, "Each rank updates everything."),
              (10.8, "Done: each rank holds all moments.")),
    "runs": ((2, "all-reduce"), (6, "update of everything")), "done": 10.8,
    "parameters": (((0, "old"), (10.8, "new")), ((0, "old"), (10.8, "new"))),
    "gradients": (((0, "gradient"), (4, "average"), (10.8, "garbage")),
                  ((0, "gradient"), (4, "garbage"), (6, "average"), (10.8, "garbage"))),
    "moments": (((0, "old"), (10.8, "moment")), ((0, "old"), (10.8, "moment"))),
    "flight": (1, "average", 4, 6),  # of the second half: line, kind, from, to
    "memory": ((0, 16),), "sent": ((0, 0), (4, 0.75), (6, 1.5)),
}
SHARDED = {
    "words": ((0, "Each rank has its own gradients."), (2, "Reduce-scatter: each rank averages a quarter."),
              (4, "It updates this quarter, with its moments alone."),
              (5.2, "All-gather: it sends new parameters to all others."),
              (7.2, "Done: each rank holds 1/4 of the moments.")),
    "runs": ((2, "reduce-scatter"), (4, "update"), (5.2, "all-gather")), "done": 7.2,
    "parameters": (((0, "old"), (5.2, "new")), ((0, "old"), (7.2, "new"))),
    "gradients": (((0, "gradient"), (4, "average"), (5.2, "garbage")), ((0, "gradient"), (4, "garbage"))),
    "moments": (((0, "old"), (5.2, "moment")), ()),
    "flight": (0, "new", 5.2, 7.2),
    "memory": ((0, 10),), "sent": ((0, 0), (4, 0.75), (7.2, 1.5)),
}


def draw(picture, top, title, system):
    def cell(rank, quarter, line, kind):
        return Cell(kind, quarter, LEFT + rank * (RANK + GAP) + quarter * CELL, top + 18 + line * LINE, CELL, LINE)

    picture.text(8, top + 12, title, "strong")
    for words, *span in spans(system["words"], END_S):
        picture.text(190, top + 12, words, "", *span)
    for line, row in enumerate(("parameters", "gradients", "moments", "moments")):
        picture.text(LEFT - 8, top + 29 + line * LINE, row, "end")
        for rank, quarter in product(RANKS, RANKS):
            for kind, *span in spans(system[row][rank != quarter], END_S):
                picture.add(cell(rank, quarter, line, kind), *span)
    line, kind, *second_half = system["flight"]
    for rank, receiver in permutations(RANKS, 2):
        away = (receiver - rank) * (RANK + GAP)
        picture.fly(cell(rank, receiver, 1, "gradient"), away, 0, 2, 4)
        picture.fly(cell(rank, rank, line, kind), away, 0, *second_half)
    for words, start, stop in spans(system["runs"], system["done"]):
        box = LEFT + 46 * (start - 2), top + 82, 46 * (stop - start) - 2, 15
        picture.rect(*box, "line")
        picture.rect(*box, f"bar {SENDS.get(words, '')} live", start, stop)
        picture.text(box[0] + box[2] / 2, top + 93, words, "middle")
    for y, row, scale, unit in ((101, "memory", 8, "bytes"), (118, "sent", 256 / 3, "values")):
        picture.text(LEFT - 8, top + y + 10, row, "end")
        for size, *span in spans(system[row], END_S):
            picture.rect(LEFT, top + y, size * scale, 12, "bar", *span)
            picture.text(LEFT + 136, top + y + 10, f"{size} {unit} per parameter", "", *span)


def picture():
    whole = Picture("DDP, and the distributed optimizer: the same traffic, 1/d of the state", WIDTH, END_S, END_S - 1)
    whole.text(8, 20, "The same traffic, and 1/d of the optimizer's state", "strong")
    for rank in RANKS:
        whole.text(LEFT + rank * (RANK + GAP) + RANK / 2, 42, f"rank {rank}", "middle")
    draw(whole, 48, "DDP", DDP)
    draw(whole, 196, "Distributed optimizer", SHARDED)
    whole.legend(8, 340)
    return whole
