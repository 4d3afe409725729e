"""What each cell is, told by its value: a second run has values that can't be confused, and is labelled by a table.

Kinds of a label (kind, element, origin): element counts from 0 over all parameters, None where there is none.

    gradient    of rank `origin`, from its own batch
    share       the same, divided by d: what travels
    sum         of the shares of ranks 0 to `origin`
    average     of all ranks; `origin`: in which step
    parameter   as it is before step `origin`, from 0 on
    moment      what the inner optimizer remembers
    zero        0, where an element has a place, or will have
    padding     a cell that no element ever gets
    garbage     what nobody reads before it is written or released; a cell of a recording only, as are
    old, new, stale    parameters before this step, after it, and before it where the next one has begun
    unset       memory that nobody has written yet
    mixture     anything else
"""

import bisect
import itertools
from typing import NamedTuple

import torch

STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")  # rows of moments; the first is the average itself after a step


class Label(NamedTuple):
    kind: str
    element: int | None = None
    origin: int | None = None


class Table:
    """Finds labels by value. Built from what goes in: weights, and the gradients of each step on each rank.

    Args:
        weights: (n,) all elements before the first step.
        grads: (steps, d, n).
        later: for each step the elements after it, (n,) each: of a replicated step.
    """

    def __init__(self, weights, grads, later, dtype):
        self.tolerance = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        entries = []
        for version, values in enumerate([weights, *later]):
            entries += [(v, Label("parameter", e, version)) for e, v in enumerate(values.tolist())]
        for step, of_ranks in enumerate(grads):
            shares = of_ranks.float() / len(of_ranks)
            for rank, (own, share) in enumerate(zip(of_ranks, shares)):
                entries += [(v, Label("gradient", e, rank)) for e, v in enumerate(own.tolist())]
                if len(of_ranks) > 1:
                    entries += [(v, Label("share", e, rank)) for e, v in enumerate(share.tolist())]
            sums = list(itertools.accumulate(shares))
            for rank, values in enumerate(sums[1:-1], 1):
                entries += [(v, Label("sum", e, rank)) for e, v in enumerate(values.tolist())]
            entries += [(v, Label("average", e, step)) for e, v in enumerate(sums[-1].tolist())]
        self.entries = sorted(entries)
        self.values = [value for value, _ in self.entries]

    def find(self, value, element):
        """-> the label of the nearest value, of `element` if that is known; or None."""
        margin = abs(value) * self.tolerance
        first, last = bisect.bisect_left(self.values, value - margin), bisect.bisect_right(self.values, value + margin)
        near = [(abs(known - value), label) for known, label in self.entries[first:last]]
        at_home = [(distance, label) for distance, label in near if label.element == element]
        return min(at_home or near)[1] if near else None


def label_all(trace, table):
    """-> for each event {storage: labels of its cells}."""
    known, views = {}, {}
    for storage in trace.storages.values():
        views.update(((storage.uid, cell), element) for cell, element in storage.elements.items())
    homes = dict(views)  # (storage, cell) -> the element that is seen there; None where several are, in turn
    rows = {storage.uid: storage.row for storage in trace.storages.values()}
    for event in trace.events:
        for uid, values in event.memory.items():
            if (uid, id(values)) not in known:
                places = [(uid, cell) for cell in range(len(values))]
                known[uid, id(values)] = [label_of(table, *one, homes) for one in zip(values, places)]
    final = {  # now that all is seen: a zero where never an element comes is padding
        (uid, number): tuple(final_label(one, (uid, cell), homes, views, rows[uid]) for cell, one in enumerate(labels))
        for (uid, number), labels in known.items()
    }
    return [{uid: final[uid, id(values)] for uid, values in event.memory.items()} for event in trace.events]


def label_of(table, value, place, homes):
    if value != value:
        return Label("unset")
    if value == 0:
        return Label("zero")
    label = table.find(value, homes.get(place))
    if label is None:
        return Label("mixture", homes.get(place))
    if homes.setdefault(place, label.element) != label.element:
        homes[place] = None
    return label


def final_label(label, place, homes, views, row):
    if label.kind == "zero":
        return Label("zero", views.get(place)) if place in homes else Label("padding")
    if row not in STATES or label.kind == "unset":
        return label
    return Label("moment", label.element if row == STATES[0] else None)
