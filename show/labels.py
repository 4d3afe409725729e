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

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import torch

from .frames import Cell
from .trace import MOMENTS

TOLERANCE = 1e-5  # of sums, which the core and the table may round in other orders
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
        known = [("parameter", version, values) for version, values in enumerate([weights, *later])]
        for step, of_ranks in enumerate(grads):
            shares = of_ranks / len(of_ranks)
            known += [("gradient", rank, values) for rank, values in enumerate(of_ranks)]
            known += [("share", rank, values) for rank, values in enumerate(shares)]
            known.append(("average", step, shares.sum(0)))
        self.entries = [(value, Label(kind, element, origin)) for kind, origin, values in known
                        for element, value in enumerate(values.tolist())]

    def label_of(self, value, element):
        """Return the label of the nearest value. element: the one that the cell shows, if that is known."""
        if value != value:  # NaN
            return Label("unset")
        if value == 0:
            return Label("zero")
        near = [(abs(known - value), label) for known, label in self.entries
                if abs(known - value) <= abs(value) * TOLERANCE]
        of_element = [(distance, label) for distance, label in near if label.element == element]
        if not near:
            return Label("mixture", element)
        _, label = min(of_element or near)
        return label


def labels_of(trace, table):
    """Return {(storage, its bytes): labels of its cells} for all memory of a trace."""
    views = {(uid, cell): element for uid, storage in trace.storages.items()
             for cell, element in storage.elements.items()}
    elements = dict(views)  # cell -> the element that the cell shows; None where the cell shows several in turn
    labels = {}
    for event in trace.events:
        for uid, memory in event.memory.items():
            if (uid, memory) in labels:
                continue
            labels[uid, memory] = []
            for cell, value in enumerate(values_of(memory)):
                label = table.label_of(value, elements.get((uid, cell)))
                if label.element is not None and elements.setdefault((uid, cell), label.element) != label.element:
                    elements[uid, cell] = None
                labels[uid, memory].append(label)
    for (uid, _), of_storage in labels.items():  # now that all is seen: a zero where never an element comes is padding
        row = trace.storages[uid].row
        for cell, label in enumerate(of_storage):
            if label.kind == "zero" and (uid, cell) not in elements:
                of_storage[cell] = Label("padding")
            elif label.kind == "zero":
                of_storage[cell] = Label("zero", views.get((uid, cell)))
            elif row in MOMENTS and label.kind != "unset":
                of_storage[cell] = Label("moment", label.element if row == MOMENTS[0] else None)
    return labels


def labelled_events(trace, telling, table, n_steps):
    """Return the events of a trace with their cells. telling: the trace of the run whose values are in the table.

    Garbage is what nobody reads before it is written or released, or the recording ends. But the model's own parameters
    anybody may read.
    """
    labels = labels_of(telling, table)
    events = []
    accesses = list(trace.log)
    next_access = defaultdict(dict)  # storage -> {cell: "read" or "write"}
    for event, twin in zip(reversed(trace.events), reversed(telling.events), strict=True):
        while len(accesses) > event.n_accesses:
            (uid, first, end), how = accesses.pop()
            next_access[uid] |= dict.fromkeys(range(first, end), how)
        cells = {}
        for uid, memory in event.memory.items():
            of_storage = []
            for cell, (value, label) in enumerate(zip(values_of(memory), labels[uid, twin.memory[uid]])):
                is_read = trace.storages[uid].is_model or next_access[uid].get(cell) == "read"
                of_storage.append(Cell(plain(value), *label_in_step(label, event, is_read, n_steps)))
            cells[uid] = tuple(of_storage)
        events.append(replace(event, cells=cells))
    return events[::-1]


def label_in_step(label, event, is_read, n_steps):
    """Return a label as it is after an event. is_read: whether the cell is read before it is written."""
    if label.kind in NOTHING:
        return label
    is_left_over = label.kind in ("gradient", "share") and event.phase in AFTER_GRADS
    if is_left_over or not is_read:
        return Label("garbage", label.element)
    if label.kind != "parameter":
        return label
    if label.origin < event.step:
        return label._replace(kind="stale")
    return label._replace(kind="new" if label.origin > min(event.step, n_steps - 1) else "old")


def values_of(memory):
    return torch.frombuffer(bytearray(memory), dtype=torch.float32).tolist()


def plain(value):
    """Return a number as a reader takes it: six digits are enough for what 32 bits hold here. NaN is None."""
    return None if value != value else float(f"{value:.6g}")
