"""A recording: frames of all ranks on one clock, as plain data that json can hold: for page, terminal and figures.

title, ranks, dtype, params      of the program; params: elements of each parameter
files        [name, source], those of the core; the loop's first
functions    [name, file, first line, last line, docstring]
owners       for each element the rank that steps it, or -1 where every rank does
storages     {rank, row, part, numel, itemsize, counted, blocks}; a block is a list of lines, [start, numel] each
labels       [kind, element, origin], which cells refer to: see show/labels.py
stacks       [[function, line], …], outermost first
operations   {kind, what, row, params, calls, arrows}; an arrow is [from, to, bytes, first frame, that of arrival]
frames       {phase, step, at, cells, dead, gone, ended}: differences to the frame before
    at       [rank, stack], of ranks that have moved
    cells    [storage, first cell, values, labels], also of memory that is new; null is NaN
    dead     [storage, cells that nobody reads again before they are written or released]
    gone     storages that have been released
    ended    [rank, operation] which have brought what this frame wrote
"""

import ast
import itertools
from pathlib import Path

from . import clock
from .memory import NOTHING

FORMAT = 1
LINE_CELLS = 9  # the longest line of cells that is drawn
FIRST_ROWS = ("parameters", "ParameterBuffer.flat", "gradients")
GRADIENTS = ("gradient", "share", "sum", "average")


def recording(records, program, sources, title=""):
    """What `record` returns -> a recording. `sources`: name -> text of the watched files."""
    loop_lines = sources["loop.py"].splitlines()
    ranks = [clock.shown(clock.folded(clock.moments_of(record, loop_lines)), program.steps) for record in records]
    first = [next(i for i, m in enumerate(ms) if m.stack and m.stack[0].file == "loop.py") for ms in ranks]
    clock.set_ticks(ranks, first)
    start = min(ms[i].tick for ms, i in zip(ranks, first))
    builder = Builder(records, program, sources, first, start)
    for rank, moments in enumerate(ranks):
        builder.add_rank(rank, moments)
    for before, frame in itertools.pairwise(builder.frames):
        if not any(rank == 0 for rank, _ in frame["at"]):
            frame["phase"], frame["step"] = before["phase"], before["step"]
    return {
        "format": FORMAT,
        "title": title,
        "ranks": program.ranks,
        "dtype": program.dtype,
        "params": list(program.params),
        "files": [list(item) for item in sources.items()],
        "functions": builder.functions,
        "owners": builder.owners(),
        "storages": builder.storages,
        "labels": [list(label) for label in builder.label_numbers],
        "stacks": list(builder.stack_numbers.values()),
        "operations": builder.operations(ranks),
        "frames": builder.frames,
    }


class Builder:
    def __init__(self, records, program, sources, first, start):
        self.records, self.program, self.first, self.start = records, program, first, start
        self.functions = [
            function for file, source in enumerate(sources.values()) for function in functions_in(file, source)
        ]
        self.files = list(sources)
        self.label_numbers, self.stack_numbers, self.storage_numbers = {}, {}, {}
        self.storages, self.frames, self.sent = [], [], {}

    def frame(self, tick):
        while len(self.frames) <= tick - self.start:
            self.frames.append({"phase": "", "step": 0, "at": [], "cells": [], "dead": [], "gone": [], "ended": []})
        return self.frames[tick - self.start]

    def add_rank(self, rank, moments):
        memory, dead, step = {}, {}, -1
        for moment in moments[self.first[rank] :]:
            frame = self.frame(moment.tick)
            frame["at"].append([rank, self.stack(moment.stack)])
            step += clock.is_beginning(moment)
            if rank == 0:
                frame["phase"], frame["step"] = moment.phase, max(0, step)
            for uid, values in moment.memory.items():
                self.write(frame, rank, uid, memory.get(uid), (values, moment.labels[uid]))
                labels = moment.labels[uid]
                cells = [cell for cell in sorted(moment.dead[uid]) if labels[cell].kind not in NOTHING]
                if cells != dead.get(uid, []):
                    frame["dead"].append([self.storage(rank, uid), cells])
                    dead[uid] = cells
            for uid in memory.keys() - moment.memory.keys():
                frame["gone"].append(self.storage(rank, uid))
                dead.pop(uid, None)
            frame["gone"].sort()
            memory = {uid: (values, moment.labels[uid]) for uid, values in moment.memory.items()}

    def write(self, frame, rank, uid, before, now):
        """The cells that have another value or another label than before, in runs."""
        if before is not None and before[0] is now[0] and before[1] == now[1]:
            return
        number, (values, labels) = self.storage(rank, uid), now
        numbers = [self.label_numbers.setdefault(label, len(self.label_numbers)) for label in labels]
        texts = [plain(value) for value in values]
        run = None
        for cell, (text, label) in enumerate(zip(texts, numbers)):
            if before is not None and plain(before[0][cell]) == text and before[1][cell] == labels[cell]:
                run = None
                continue
            if run is None:
                run = [number, cell, [], []]
                frame["cells"].append(run)
            run[2].append(text)
            run[3].append(label)

    def stack(self, places):
        line = tuple((self.function(place), place.line) for place in places)
        if line not in self.stack_numbers:
            self.stack_numbers[line] = [list(one) for one in line]
        return list(self.stack_numbers).index(line)

    def function(self, place):
        file = self.files.index(place.file)
        around = [
            i
            for i, (_, in_file, start, end, _) in enumerate(self.functions)
            if in_file == file and start <= place.line <= end
        ]
        return around[-1]

    def storage(self, rank, uid):
        if (rank, uid) not in self.storage_numbers:
            storage = next(one for one in self.records[rank]["storages"] if one.uid == uid)
            self.storage_numbers[rank, uid] = len(self.storages)
            elements = self.elements_of(rank, uid, storage)
            self.storages.append(
                {
                    "rank": rank,
                    "row": storage.row,
                    "part": storage.part,
                    "numel": storage.numel,
                    "itemsize": storage.itemsize,
                    "counted": storage.counted,
                    "blocks": blocks_of(storage, elements, self.program),
                }
            )
        return self.storage_numbers[rank, uid]

    def elements_of(self, rank, uid, storage):
        """-> for each cell the first element that is ever in it, or None."""
        elements = [storage.elements.get(cell) for cell in range(storage.numel)]
        for labels in self.records[rank]["labels"]:
            for cell, label in enumerate(labels.get(uid, ())):
                if elements[cell] is None:
                    elements[cell] = label.element
        return elements

    def owners(self):
        owners = [[] for _ in range(sum(self.program.params))]
        for rank, record in enumerate(self.records):
            begun = next(
                labels
                for event, labels in zip(record["events"], record["labels"])
                if event.stack and event.stack[0].file == "loop.py"
            )
            for uid, start, end in record["owned"]:
                for label in begun.get(uid, ())[start:end]:
                    if label.element is not None and rank not in owners[label.element]:
                        owners[label.element].append(rank)
        return [ranks[0] if len(ranks) == 1 else -1 for ranks in owners]

    def operations(self, ranks):
        """Messages that one line sends are one operation; calls of other ranks belong to it by their keys."""
        groups, ends = {}, {}
        self.end = self.start + len(self.frames)  # what nobody has waited for is under way until then
        for rank, moments in enumerate(ranks):
            for moment in moments:
                for key in moment.ends:
                    ends[key, rank] = moment.tick
        for rank, moments in enumerate(ranks):
            number = 0
            for moment in moments[self.first[rank] :]:
                number += bool(moment.starts)
                for operation in moment.starts:
                    if operation.kind != "receive":
                        self.add_operation(groups.setdefault(number, {}), rank, moment, operation, ends)
        result = [groups[number] for number in sorted(groups)]
        for index, operation in enumerate(result):
            for rank, tick in sorted(operation.pop("ended").items()):
                if tick < self.end:
                    self.frame(tick)["ended"].append([rank, index])
            operation["arrows"].sort()
        return result

    def add_operation(self, group, rank, moment, operation, ends):
        if not group:
            group.update(
                {"kind": operation.kind, "what": "", "row": "", "params": [], "calls": 0, "arrows": [], "ended": {}}
            )
        group["calls"] += rank == 0
        for source, target, nbytes in operation.arrows:
            arrived = ends.get((operation.key, target), self.end)
            group["arrows"].append([source, target, nbytes, moment.tick - self.start, arrived - self.start])
            group["ended"][target] = max(arrived, group["ended"].get(target, 0))
        for span in operation.spans:
            self.describe(group, rank, moment, span)

    def describe(self, group, rank, moment, span):
        """Which storage is sent, and what is in it."""
        (number, start, end), params = span, params_of(self.program)
        for storage in self.records[rank]["storages"]:
            if storage.torch_uid == number and storage.uid in moment.labels:
                labels = moment.labels[storage.uid][start // storage.itemsize : end // storage.itemsize]
                kinds = {label.kind for label in labels}
                history = self.sent.setdefault((rank, storage.uid), [])  # [moment, first byte, end], of all messages
                if not history or history[-1][0] is not moment:
                    history.append([moment, start, end])
                history[-1][1:] = min(history[-1][1], start), max(history[-1][2], end)
                group["row"] = group["row"] or storage.row
                # Where shares travel, an average is what the last reduce-scatter has left in the same memory.
                wanted = ("share",) if "share" in kinds else ("parameter", *GRADIENTS)
                sent = {
                    params[label.element]
                    for cell, label in enumerate(labels, start // storage.itemsize)
                    if label.kind in wanted
                    and not is_left_over(history, cell, storage)
                }
                group["params"] = sorted(sent.union(group["params"]))
                if kinds & {"parameter"}:
                    group["what"] = "parameters"
                elif kinds & set(GRADIENTS):
                    group["what"] = "gradients"


def is_left_over(history, cell, storage):
    """Whether a cell holds what the message before this one has left there: in padding, that is nobody's."""
    if len(history) == 1:
        return False
    (before, start, end), (now, _, _) = history[-2:]
    return start <= cell * storage.itemsize < end and before.labels[storage.uid][cell] == now.labels[storage.uid][cell]


def plain(value):
    """A number as json and a reader take it: six digits are enough for what 32 bits hold here. NaN is None."""
    if value != value:
        return None
    short = float(f"{value:.6g}")
    return int(short) if short == int(short) else short


def functions_in(file, source):
    """-> [name, file, first line, last line, docstring] of each function, outer ones before inner ones."""
    found = []

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef):
                start = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                found.append([prefix + child.name, file, start, child.end_lineno, ast.get_docstring(child) or ""])
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(source), "")
    return found


def blocks_of(storage, elements, program):
    """How the cells of a storage are laid out: d lines for what is cut into d shards, else a line a parameter.

    -> blocks, which stand side by side; each is a list of lines, [first cell, numel].
    """
    d, numel, blocks, done = program.ranks, storage.numel, [], 0
    if d > 1:
        sharded = sorted(
            {(offset, shape[1]) for offset, shape in storage.views if len(shape) == 2 and shape[0] == d and shape[1]},
            key=lambda one: (one[0], -one[1]),
        )
        sharded = (
            sharded or [(0, numel // d) for _, shape in storage.views if len(shape) == 1 and shape[0] * d == numel][:1]
        )
        for offset, shard in sharded:
            if offset == done:
                blocks.append([[offset + rank * shard, shard] for rank in range(d)])
                done = offset + d * shard
    rest, params = list(range(done, numel)), params_of(program)
    lines = []
    for cell in rest:
        element = elements[cell]
        new = not lines or lines[-1][1] == LINE_CELLS
        if not new and element is not None and elements[cell - 1] is not None:
            new = params[element] != params[elements[cell - 1]]
        if new:
            lines.append([cell, 0])
        lines[-1][1] += 1
    return blocks + [[line] for line in lines]


def params_of(program):
    return [index for index, numel in enumerate(program.params) for _ in range(numel)]


def sources_of(paths):
    return {name: Path(path).read_text(encoding="utf-8") for path, name in paths.items()}
