"""What each cell is, told by its value: a second run has values that can't be confused, and is labelled by a table.

Kinds of a label (kind, element, origin): element counts from 0 over all parameters, None where there is none.

    gradient    of rank `origin`, from its own batch
    share       the same, divided by d: what is sent
    average     of all ranks; `origin`: in which step
    parameter   as it is before step `origin`, from 0 on; a recording has these in its place:
    old, new, stale    before this step, after it, and before it where the next one has begun
    moment      what the inner optimizer remembers
    zero        0, where an element has a place, or will have
    padding     a cell that no element ever gets
    garbage     what nobody reads before it is written or released
    unset       memory that nobody has written yet
    mixture     anything else
"""

import bisect
from collections import defaultdict
from typing import NamedTuple

import torch

STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")  # rows of moments; the first is the average itself after a step
NOTHING = ("zero", "padding", "unset")  # what these hold isn't garbage
# Phases in which no gradient is used any more: one that is left in a bucket buffer may only be sent as padding.
AFTER_GRADS = ("step_own", "sync_params", "zero_grad", "forward")


class Label(NamedTuple):
    kind: str
    element: int | None = None
    origin: int | None = None


class Table:
    """Finds labels by value. weights: (n,), at first; grads: (steps, d, n); later: (n,) after each replicated step."""

    def __init__(self, weights, grads, later):
        self.tolerance = 1e-5 if weights.dtype == torch.float32 else 4 * torch.finfo(weights.dtype).eps  # of sums
        known = [("parameter", version, values) for version, values in enumerate([weights, *later])]
        for step, of_ranks in enumerate(grads):
            shares = of_ranks.float() / len(of_ranks)
            known += [("gradient", rank, values) for rank, values in enumerate(of_ranks)]
            known += [("share", rank, values) for rank, values in enumerate(shares) if len(shares) > 1]
            known += [("average", step, shares.sum(0))]
        self.entries = sorted((value, Label(kind, element, origin)) for kind, origin, values in known
                              for element, value in enumerate(values.tolist()))
        self.values = [value for value, _ in self.entries]

    def find(self, value, element):
        """-> the label of the nearest value, of `element` if that is known; or None."""
        margin = abs(value) * self.tolerance
        first = bisect.bisect_left(self.values, value - margin)
        last = bisect.bisect_right(self.values, value + margin)
        near = [(abs(known - value), label) for known, label in self.entries[first:last]]
        at_home = [(distance, label) for distance, label in near if label.element == element]
        return min(at_home or near)[1] if near else None


def labels_of(trace, table):
    """-> {(storage, what it holds): labels of its cells}."""
    views = {(uid, cell): element for uid, storage in trace.storages.items()
             for cell, element in storage.elements.items()}
    homes, known = dict(views), {}  # homes: cell -> the element that is seen there; None where several are, in turn
    for uid, memory in (item for event in trace.events for item in event.memory.items()):
        if (uid, memory) not in known:
            values = trace.storages[uid].values(memory)
            known[uid, memory] = [label_of(table, value, (uid, cell), homes) for cell, value in enumerate(values)]
    for (uid, _), labels in known.items():  # now that all is seen: a zero where never an element comes is padding
        for cell, label in enumerate(labels):
            if label.kind == "zero":
                labels[cell] = Label("zero", views.get((uid, cell))) if (uid, cell) in homes else Label("padding")
            elif trace.storages[uid].row in STATES and label.kind != "unset":
                labels[cell] = Label("moment", label.element if trace.storages[uid].row == STATES[0] else None)
    return known


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


def put_cells(trace, labels, telling, steps):
    """Fill `cells` of each event of `trace`: (value, kind, element, origin) each. telling: events
    of the labelled run. Garbage is what nobody reads before it is written or released, or the recording ends; but the
    model's own parameters anybody may read."""
    nexts, log = defaultdict(dict), list(trace.log)  # nexts: storage -> {byte: how it is accessed next}
    for event, twin in zip(reversed(trace.events), reversed(telling)):
        while len(log) > event.n_accesses:
            uid, start, end, how = log.pop()
            nexts[uid].update(dict.fromkeys(range(start, end, 2), how))
        for uid, memory in event.memory.items():
            storage, seen = trace.storages[uid], []
            for cell, (value, label) in enumerate(zip(storage.values(memory), labels[uid, twin.memory[uid]])):
                is_read = storage.is_model or nexts[uid].get(cell * storage.dtype.itemsize) == "read"
                is_left_over = label.kind in ("gradient", "share") and event.phase in AFTER_GRADS
                if (is_left_over or not is_read) and label.kind not in NOTHING:
                    label = Label("garbage", label.element)
                elif label.kind == "parameter":
                    is_new = label.origin > min(event.step, steps - 1)
                    label = label._replace(kind="stale" if label.origin < event.step else "new" if is_new else "old")
                seen.append((plain(value), *label))
            event.cells[uid] = tuple(seen)


def plain(value):
    """A number as json and a reader take it: six digits are enough for what 32 bits hold here. NaN is None."""
    if value != value:
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) else short
