"""Tells by its value what each cell is: a second run, whose values can't be confused, is labelled by a table of values.

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

import math
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import torch

from .frames import Cell
from .trace import MOMENTS

TOLERANCE = 1e-5  # of sums, which the core and the table may round in other orders
WITHOUT_VALUE = ("zero", "padding", "unset")  # these cells hold no value that could be garbage
# Phases in which no gradient is used any more: one that is left in a bucket buffer may only be sent as padding.
AFTER_GRADS = ("step_own", "sync_params", "zero_grad", "forward")


class Label(NamedTuple):
    kind: str
    element: int | None = None
    origin: int | None = None


class Entry(NamedTuple):
    """A value that a cell may hold, and the label of the cell then."""
    value: float
    label: Label


class Table:
    """Finds the label of a value."""

    def __init__(self, weights, grads, later_weights):
        """weights: (n,), at first; grads: (steps, d, n); later_weights: (n,) after each replicated step."""
        self.entries = []
        for version, values in enumerate([weights, *later_weights]):
            self.add("parameter", version, values)
        for step, grads_of_ranks in enumerate(grads):
            shares = grads_of_ranks / len(grads_of_ranks)
            for rank, (gradients, shares_of_rank) in enumerate(zip(grads_of_ranks, shares)):
                self.add("gradient", rank, gradients)
                self.add("share", rank, shares_of_rank)
            self.add("average", step, shares.sum(0))

    def add(self, kind, origin, values):
        """Add an entry for each element. values: (n,)."""
        self.entries += [Entry(value, Label(kind, element, origin)) for element, value in enumerate(values.tolist())]

    def label_of(self, value, element):
        """Return the label of the nearest value. element: the one that the cell shows, if that is known."""
        if math.isnan(value):
            return Label("unset")
        if value == 0:
            return Label("zero")
        near = [entry for entry in self.entries if abs(entry.value - value) <= abs(entry.value) * TOLERANCE]
        near_of_element = [entry for entry in near if entry.label.element == element]
        if not near:
            return Label("mixture", element)
        return min(near_of_element or near, key=lambda entry: abs(entry.value - value)).label


def labels_of(trace, table):
    """Return {(storage, its bytes): labels of its cells} for all memory of a trace."""
    # (storage, cell) -> the element of the model's parameters or gradients that lies there
    element_of_view = {(uid, cell): element for uid, storage in trace.storages.items()
                       for cell, element in storage.elements.items()}
    elements = dict(element_of_view)  # the same of all cells, by the label; None where a cell shows several in turn
    labels = {}
    for event in trace.events:
        for uid, memory in event.memory.items():
            if (uid, memory) in labels:
                continue
            labels_of_storage = []
            for cell, value in enumerate(values_of(memory)):
                label = table.label_of(value, elements.get((uid, cell)))
                if label.element is not None and elements.setdefault((uid, cell), label.element) != label.element:
                    elements[uid, cell] = None
                labels_of_storage.append(label)
            labels[uid, memory] = labels_of_storage
    # Only now it is known which cells never get an element: a zero there is padding.
    for (uid, _), labels_of_storage in labels.items():
        row = trace.storages[uid].row
        for cell, label in enumerate(labels_of_storage):
            if label.kind == "zero" and (uid, cell) not in elements:
                labels_of_storage[cell] = Label("padding")
            elif label.kind == "zero":
                labels_of_storage[cell] = Label("zero", element_of_view.get((uid, cell)))
            elif row in MOMENTS and label.kind != "unset":
                # A first moment shows the element of its gradient. A second moment is like no value of the table.
                labels_of_storage[cell] = Label("moment", label.element if row == MOMENTS[0] else None)
    return labels


def labelled_events(trace, telling, table, n_steps):
    """Return the events of a trace with their cells. telling: the trace of the run whose values are in the table.

    Garbage is what nobody reads before it is written or released, or the recording ends. But the model's own parameters
    anybody may read.
    """
    labels = labels_of(telling, table)
    labelled = []
    accesses = list(trace.log)
    next_access = defaultdict(dict)  # storage -> {cell: "read" or "write"}
    # Backwards, so that at each event the next access of each cell is known.
    for event, twin in zip(reversed(trace.events), reversed(telling.events), strict=True):
        while len(accesses) > event.n_accesses:
            (uid, first, end), how = accesses.pop()
            next_access[uid] |= dict.fromkeys(range(first, end), how)
        cells_of = {}
        for uid, memory in event.memory.items():
            cells = []
            for cell, (value, label) in enumerate(zip(values_of(memory), labels[uid, twin.memory[uid]])):
                is_read = trace.storages[uid].is_model or next_access[uid].get(cell) == "read"
                cells.append(Cell(plain(value), *label_in_step(label, event, is_read, n_steps)))
            cells_of[uid] = tuple(cells)
        labelled.append(replace(event, cells=cells_of))
    return labelled[::-1]


def label_in_step(label, event, is_read, n_steps):
    """Return a label as it is after an event. is_read: whether the cell is read before it is written."""
    if label.kind in WITHOUT_VALUE:
        return label
    is_left_over = label.kind in ("gradient", "share") and event.phase in AFTER_GRADS
    if is_left_over or not is_read:
        return Label("garbage", label.element)
    if label.kind != "parameter":
        return label
    if label.origin < event.step:
        return label._replace(kind="stale")
    last_step = n_steps - 1  # what follows is a forward pass alone: new parameters aren't old there
    if label.origin > min(event.step, last_step):
        return label._replace(kind="new")
    return label._replace(kind="old")


def values_of(memory):
    return torch.frombuffer(bytearray(memory), dtype=torch.float32).tolist()


def plain(value):
    """Return a number as a reader takes it: six digits are enough for what 32 bits hold here. NaN and inf are None."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
