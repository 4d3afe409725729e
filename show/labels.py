"""Labels the cells of a recorded rank's memory: says which value is a gradient, which is a parameter, which is garbage.

A cell is the memory of one number. Cells lie in storages, and each storage has a number, its uid. A Trace
(show/trace.py) is the record of a run on one rank. Its events are the lines that the rank has executed, in order.

A program runs twice. The values of the first run are shown, because a reader can check them. But some sums of gradients
equal parameters there. In the second run all values differ. A Table holds these values, each with its label. Both runs
do the same at the same lines. Therefore a cell's value in the second run gives the cell's label in both.

A label is (kind, element, origin). element counts the elements of all parameters from 0. It is None if the value
belongs to no element. The meaning of origin depends on the kind; it is None where the list names none:

    gradient    of one rank, from its own batch; origin: the rank
    share       this gradient divided by the number of ranks; origin: the rank
    average     of the gradients of all ranks; origin: the step of training
    parameter   origin: how many steps have updated it. Only the Table has this kind. A recording has in its place
    old         a parameter before the step that an event belongs to
    new         a parameter after this step
    stale       a parameter that lacks the update of the step before, although the next step has begun
    moment      what AdamW, the inner optimizer, remembers of earlier gradients
    zero        0 in a cell that has an element at some time
    padding     0 in a cell that never has an element
    garbage     a value that nobody reads before it is overwritten or released
    unset       memory that nobody has written yet: it holds NaN, see show/record.py
    mixture     anything else
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
# In these phases of a step all gradients have been averaged. A single rank's gradient is garbage then, even if its cell
# is read: a message may carry the gradient along, as filler at the end.
AFTER_GRADS = ("step_own", "sync_params", "zero_grad", "forward")


class Label(NamedTuple):
    kind: str
    element: int | None = None
    origin: int | None = None


class Entry(NamedTuple):
    """A value of the second run, and the label of a cell that holds this value."""
    value: float
    label: Label


class Table:
    """Finds the label of a value of the second run."""

    def __init__(self, weights, grads, later_weights):
        """Add an Entry for each value. n: how many elements all parameters have together.

        weights (n,): all parameters before the first step. later_weights: a list of all parameters (n,) after each
        step. grads (steps, ranks, n): each rank's own gradients.
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
        """Add an Entry for the value of each element. values: (n,)."""
        self.entries += [Entry(value, Label(kind, element, origin)) for element, value in enumerate(values.tolist())]

    def label_of(self, value, element):
        """Return the label of the nearest value, if possible of a value of `element`: the cell's element, or None."""
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
    """Return {(uid, bytes of the storage after some event): labels of its cells}. trace: of the second run.

    A storage is labelled once for each content that it has, so its bytes are a part of the key.
    """
    # (uid, cell) -> the element in the cell, for cells in which a parameter or gradient of the model lies.
    element_of_view = {(uid, cell): element for uid, storage in trace.storages.items()
                       for cell, element in storage.elements.items()}
    # The same for other cells, too, if their labels have an element. None: the cell holds several elements in turn.
    elements = dict(element_of_view)
    labels = {}
    for event in trace.events:
        for uid, memory in event.memory.items():  # memory: the bytes of the storage
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
        row = trace.storages[uid].row  # the name of what lies in the storage, such as "gradients" or "exp_avg"
        for cell, label in enumerate(labels_of_storage):
            if label.kind == "zero" and (uid, cell) not in elements:
                labels_of_storage[cell] = Label("padding")
            elif label.kind == "zero":
                labels_of_storage[cell] = Label("zero", element_of_view.get((uid, cell)))
            elif row in MOMENTS and label.kind != "unset":
                labels_of_storage[cell] = Label("moment")  # the Table has no moments, so their element isn't known
    return labels


def labelled_events(trace, second_trace, table, n_steps):
    """Return the events of a trace, each with the Cells that its storages hold after the event.

    trace: of the first run, whose values are shown. second_trace: of the second run. n_steps: see `label_in_step`.
    A value is garbage if nobody reads its cell before the cell is written or released, or the recording ends. The
    model's own parameters are never garbage, because the user may read them at any time.
    """
    labels = labels_of(second_trace, table)
    labelled = []
    accesses = list(trace.log)  # ((uid, first cell, cell after the last), "read" or "write") of each access, in order
    next_access = defaultdict(dict)  # uid -> {cell: "read" or "write", whichever comes next}
    # Backwards, so that the next access of each cell is known. `second`: the same event of the second run.
    for event, second in zip(reversed(trace.events), reversed(second_trace.events), strict=True):
        while len(accesses) > event.n_accesses:  # the event ended when trace.log had n_accesses entries
            (uid, first, end), how = accesses.pop()
            next_access[uid] |= dict.fromkeys(range(first, end), how)
        cells_of = {}
        for uid, memory in event.memory.items():
            labels_of_storage = labels[uid, second.memory[uid]]
            cells = []
            for cell, (value, label) in enumerate(zip(values_of(memory), labels_of_storage)):
                is_read = trace.storages[uid].is_model or next_access[uid].get(cell) == "read"
                cells.append(Cell(plain(value), *label_in_step(label, event, is_read, n_steps)))
            cells_of[uid] = tuple(cells)
        labelled.append(replace(event, cells=cells_of))
    return labelled[::-1]


def label_in_step(label, event, is_read, n_steps):
    """Return the label that a recording shows after an event. label: what `labels_of` has for the cell.

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
    # After the last step the next forward pass is shown, too. What the last step has updated is still called new there.
    last_step = n_steps - 1
    if label.origin > min(event.step, last_step):
        return label._replace(kind="new")
    return label._replace(kind="old")


def values_of(memory):
    """Return the numbers that the bytes `memory` hold."""
    return torch.frombuffer(bytearray(memory), dtype=torch.float32).tolist()


def plain(value):
    """Return a number rounded to six digits, or None for NaN and infinity, which json can't hold."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
