"""Finds out what the value in each cell of a recorded rank is, such as a gradient, or garbage: the cell's label.

A program is run twice (show/record.py). The first run has values that a reader can check, and its values are shown. But
there some sums of gradients equal parameters. The second run has values that can't be confused, and does the same at
the same lines. A table holds all values that can appear in the second run, each with its label. Looking up a cell's
value of the second run in the table gives the label of this cell in both runs.

A label is (kind, element, origin). element counts the elements of all parameters from 0, and is None if the value
belongs to no element. The kinds, and what origin means of each (otherwise it is None):

    gradient    of one rank, from its own batch; origin: the rank
    share       this gradient divided by d, the number of ranks: what is sent; origin: the rank
    average     of the gradients of all ranks; origin: the step of training
    parameter   origin: how many steps have updated the value. Only the table has this kind. A recording has:
    old         a parameter before the step that an event belongs to
    new         a parameter after this step
    stale       a parameter that has not been updated by the step before, although the next step has begun
    moment      what AdamW, the inner optimizer, remembers
    zero        0 in a cell that has an element, or will have an element
    padding     0 in a cell that never has an element
    garbage     a value that nobody reads before it is overwritten or released
    unset       memory that nobody has written yet: it holds NaN, see show/record.py
    mixture     anything else

The record of a run is a Trace of show/trace.py. Its events are the lines that the rank has executed, in order.
"""

import math
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import torch

from .frames import Cell
from .trace import MOMENTS

TOLERANCE = 1e-5  # relative: the optimizer may add up gradients in another order than the table, and round differently
WITHOUT_VALUE = ("zero", "padding", "unset")  # these cells hold no value that could be garbage
# After the backward pass and sync_grads, which averages gradients, no rank's own gradients are used any more. In these
# phases such a gradient may still be sent, but only as padding.
AFTER_GRADS = ("step_own", "sync_params", "zero_grad", "forward")


class Label(NamedTuple):
    kind: str
    element: int | None = None
    origin: int | None = None


class Entry(NamedTuple):
    """A value that a cell may hold, and the label of a cell that holds the value."""
    value: float
    label: Label


class Table:
    """Finds the label of a value."""

    def __init__(self, weights, grads, later_weights):
        """Take the values that appear in the second run. n: how many elements all parameters have together.

        weights: (n,), before the first step. grads: (steps, ranks, n). later_weights: after each step (n,).
        """
        self.entries = []
        for n_updates, values in enumerate([weights, *later_weights]):
            self.add("parameter", n_updates, values)
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
        """Return the label of the nearest value. element: the element that lies in the cell, or None if unknown."""
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
    """Return {(number of a storage, its bytes at some event): labels of its cells} for all memory of a trace."""
    # (number of a storage, cell) -> the element of the model's parameters or gradients that lies in the cell.
    element_of_view = {(uid, cell): element for uid, storage in trace.storages.items()
                       for cell, element in storage.elements.items()}
    # The same for other cells too, whose labels tell the element: None if a cell holds several elements in turn.
    elements = dict(element_of_view)
    labels = {}
    for event in trace.events:
        for uid, memory in event.memory.items():
            if (uid, memory) in labels:
                continue
            labels_of_storage = []
            for cell, value in enumerate(values_of(memory)):
                label = table.label_of(value, elements.get((uid, cell)))
                if label.element is not None:
                    element_before = elements.setdefault((uid, cell), label.element)
                    if element_before != label.element:
                        elements[uid, cell] = None
                labels_of_storage.append(label)
            labels[uid, memory] = labels_of_storage
    # After all events it is known which cells never get an element: a zero in such a cell is padding.
    for (uid, _), labels_of_storage in labels.items():
        row = trace.storages[uid].row  # the name of the storage
        for cell, label in enumerate(labels_of_storage):
            if label.kind == "zero" and (uid, cell) not in elements:
                labels_of_storage[cell] = Label("padding")
            elif label.kind == "zero":
                labels_of_storage[cell] = Label("zero", element_of_view.get((uid, cell)))
            elif row in MOMENTS and label.kind != "unset":
                labels_of_storage[cell] = Label("moment")  # the table has no moments, so their element isn't known
    return labels


def labelled_events(trace, telling, table, n_steps):
    """Return the events of a trace, each with the Cells that its storages hold after the event.

    trace: of the run whose values are shown. telling: the Trace of the second run, whose values are in the table.
    A value is garbage if its cell is written, or is released, or the recording ends before anybody reads the cell. The
    model's own parameters are never garbage, because the user may read them at any time.
    """
    labels = labels_of(telling, table)
    labelled = []
    accesses = list(trace.log)
    next_access = defaultdict(dict)  # number of a storage -> {cell: "read" or "write"}
    # Backwards, so that at each event the next access of each cell is known. `twin`: the same event of the second run.
    for event, twin in zip(reversed(trace.events), reversed(telling.events), strict=True):
        while len(accesses) > event.n_accesses:  # these accesses happened after the event
            (uid, first, end), how = accesses.pop()
            next_access[uid] |= dict.fromkeys(range(first, end), how)
        cells_of = {}
        for uid, memory in event.memory.items():
            labels_of_storage = labels[uid, twin.memory[uid]]
            cells = []
            for cell, (value, label) in enumerate(zip(values_of(memory), labels_of_storage)):
                is_read = trace.storages[uid].is_model or next_access[uid].get(cell) == "read"
                cells.append(Cell(plain(value), *label_in_step(label, event, is_read, n_steps)))
            cells_of[uid] = tuple(cells)
        labelled.append(replace(event, cells=cells_of))
    return labelled[::-1]


def label_in_step(label, event, is_read, n_steps):
    """Return the label that a recording has after an event for a `label` of the table.

    is_read: whether the cell is read before it is written. n_steps: how many steps of training are shown.
    """
    if label.kind in WITHOUT_VALUE:
        return label
    is_left_over = label.kind in ("gradient", "share") and event.phase in AFTER_GRADS
    if is_left_over or not is_read:
        return Label("garbage", label.element)
    if label.kind != "parameter":
        return label
    if label.origin < event.step:
        return label._replace(kind="stale")
    # After the last step a forward pass is shown, of a step that is never finished. Parameters that the last step has
    # updated are still called new there.
    last_step = n_steps - 1
    if label.origin > min(event.step, last_step):
        return label._replace(kind="new")
    return label._replace(kind="old")


def values_of(memory):
    """Return the numbers that the bytes `memory` hold."""
    return torch.frombuffer(bytearray(memory), dtype=torch.float32).tolist()


def plain(value):
    """Return a number with the six digits that a reader needs, or None for NaN and infinity, which json can't hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
