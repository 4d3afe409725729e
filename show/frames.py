"""A recording: frames of all ranks on one clock, as plain data that json can hold: for page, terminal and figures.

title, ranks, dtype, params      of the program; params: elements of each parameter
files        [name, source], those of the core; the loop's first
functions    [name, file, first line, last line, docstring]
owners       for each element the rank that steps it, or -1 where every rank does
storages     {rank, row, part, numel, itemsize, counted, shards}; of what is cut into d shards, bucket after bucket,
             `shards` are the lengths of one in each bucket
labels       [kind, element, origin], which cells refer to: see show/labels.py
stacks       [[function, line], …], outermost first
operations   {kind, what, params, arrows}; an arrow is [from, to, bytes, first frame, that of arrival]
frames       {phase, step, at, cells, gone, ended}: differences to the frame before
    at       [rank, stack], of ranks that have moved
    cells    [storage, first cell, values, labels], also of memory that is new; null is NaN
    gone     storages that have been released
    ended    [rank, operation] which have brought what this frame wrote
"""

import ast
import itertools
from pathlib import Path

from . import clock

FORMAT = 2
GRADIENTS = {"gradient", "share", "sum", "average"}


def recording(records, program, sources, title=""):
    """What `record` returns -> a recording. `sources`: name -> text of the watched files."""
    loop_lines = sources["loop.py"].splitlines()
    ranks = [clock.shown(clock.folded(clock.with_phases(one["events"], loop_lines)), program.steps) for one in records]
    first = [next(i for i, one in enumerate(events) if is_in_loop(one)) for events in ranks]
    clock.set_ticks(ranks, first)
    ranks = [events[begin:] for events, begin in zip(ranks, first)]
    builder = Builder(records, program, sources, min(events[0].tick for events in ranks))
    for rank, events in enumerate(ranks):
        builder.add_rank(rank, events)
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
        "owners": builder.owners(ranks),
        "storages": builder.storages,
        "operations": builder.operations(ranks),
        "labels": [list(label) for label in builder.label_numbers],
        "stacks": [[list(place) for place in stack] for stack in builder.stack_numbers],
        "frames": builder.frames,
    }


def is_in_loop(event):
    return bool(event.stack) and event.stack[0].file == "loop.py"


class Builder:
    def __init__(self, records, program, sources, start):
        self.records, self.program, self.start = records, program, start
        self.functions = [one for file, source in enumerate(sources.values()) for one in functions_in(file, source)]
        self.files = list(sources)
        self.label_numbers, self.stack_numbers, self.storage_numbers = {}, {}, {}
        self.storages, self.frames = [], []

    def frame(self, tick):
        while len(self.frames) <= tick - self.start:
            self.frames.append({"phase": "", "step": 0, "at": [], "cells": [], "gone": [], "ended": []})
        return self.frames[tick - self.start]

    def add_rank(self, rank, events):
        memory, step = {}, -1
        for event in events:
            frame = self.frame(event.tick)
            frame["at"].append([rank, self.stack(event.stack)])
            step += clock.is_beginning(event)
            if rank == 0:
                frame["phase"], frame["step"] = event.phase, max(0, step)
            now = {uid: self.cells_of(event, uid, max(0, step)) for uid in event.memory}
            for uid, cells in now.items():
                self.write(frame, self.storage(rank, uid), memory.get(uid, []), cells)
            frame["gone"] += [self.storage(rank, uid) for uid in memory.keys() - now.keys()]
            frame["gone"].sort()
            memory = now

    def cells_of(self, event, uid, step):
        """-> (value, number of its label) of each cell. Parameters are told by the step that the rank is in."""
        cells = []
        for value, label in zip(event.memory[uid], event.labels[uid]):
            if label.kind == "parameter":
                is_new = label.origin > min(step, self.program.steps - 1)
                label = label._replace(kind="stale" if label.origin < step else "new" if is_new else "old")
            cells.append((plain(value), self.label_numbers.setdefault(label, len(self.label_numbers))))
        return cells

    def write(self, frame, number, before, now):
        """The cells that have another value or another label than before, in runs."""
        run = None
        for cell, (value, label) in enumerate(now):
            if before and before[cell] == (value, label):
                run = None
                continue
            if run is None:
                run = [number, cell, [], []]
                frame["cells"].append(run)
            run[2].append(value)
            run[3].append(label)

    def stack(self, places):
        line = tuple((self.function(place), place.line) for place in places)
        return self.stack_numbers.setdefault(line, len(self.stack_numbers))

    def function(self, place):
        file = self.files.index(place.file)
        lines = [(of, range(start, end + 1)) for _, of, start, end, _ in self.functions]
        return max(i for i, (of, within) in enumerate(lines) if of == file and place.line in within)

    def storage(self, rank, uid):
        if (rank, uid) not in self.storage_numbers:
            storage = next(one for one in self.records[rank]["storages"] if one.uid == uid)
            self.storage_numbers[rank, uid] = len(self.storages)
            said = {name: getattr(storage, name) for name in ("row", "part", "numel", "itemsize", "counted")}
            self.storages.append({"rank": rank, **said, "shards": shards_of(storage, self.program.ranks)})
        return self.storage_numbers[rank, uid]

    def owners(self, ranks):
        owners = [[] for _ in range(sum(self.program.params))]
        for rank, record in enumerate(self.records):
            for uid, start, end in record["owned"]:
                for label in ranks[rank][0].labels.get(uid, ())[start:end]:
                    if label.element is not None and rank not in owners[label.element]:
                        owners[label.element].append(rank)
        return [ranks[0] if len(ranks) == 1 else -1 for ranks in owners]

    def operations(self, ranks):
        """Messages that one line sends are one operation; calls of other ranks belong to it by their keys."""
        groups, ends = {}, {}
        self.end = self.start + len(self.frames)  # what nobody has waited for is under way until then
        for rank, events in enumerate(ranks):
            ends.update(((key, rank), event.tick) for event in events for key in event.ends)
        for rank, events in enumerate(ranks):
            number = 0
            for event in events:
                number += bool(event.starts)
                for operation in event.starts:
                    if operation.kind != "receive":
                        self.add_operation(groups.setdefault(number, {}), rank, event, operation, ends)
        result = [groups[number] for number in sorted(groups)]
        params = params_of(self.program)
        for index, operation in enumerate(result):
            for rank, tick in sorted(operation.pop("ended").items()):
                if tick < self.end:
                    self.frame(tick)["ended"].append([rank, index])
            operation["arrows"].sort()
            # In padding there may be some elements of what was sent before, but never all of a parameter.
            sent = [params[element] for element in operation.pop("elements")]
            operation["params"] = [i for i, numel in enumerate(self.program.params) if sent.count(i) == numel]
        return result

    def add_operation(self, group, rank, event, operation, ends):
        if not group:
            group.update({"kind": operation.kind, "what": "", "arrows": [], "ended": {}, "elements": set()})
        for source, target, nbytes in operation.arrows:
            arrived = ends.get((operation.key, target), self.end)
            group["arrows"].append([source, target, nbytes, event.tick - self.start, arrived - self.start])
            group["ended"][target] = max(arrived, group["ended"].get(target, 0))
        for number, start, end in operation.spans:
            for storage in self.records[rank]["storages"]:
                if storage.torch_uid == number and storage.uid in event.labels:
                    labels = event.labels[storage.uid][start // storage.itemsize : end // storage.itemsize]
                    kinds = {label.kind for label in labels}
                    what = "parameters" if "parameter" in kinds else "gradients" if kinds & GRADIENTS else ""
                    group["what"] = what or group["what"]
                    group["elements"].update(one.element for one in labels if one.kind in (*GRADIENTS, "parameter"))


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


def shards_of(storage, d):
    """-> of memory that is cut into d shards, bucket after bucket, how many cells a shard has in each; else []."""
    cuts = {(offset, shape[1]) for offset, shape in storage.views if len(shape) == 2 and shape[0] == d and shape[1]}
    if not cuts and any(shape == (storage.numel // d,) for _, shape in storage.views):
        cuts = {(0, storage.numel // d)}
    shards, done = [], 0
    for offset, shard in sorted(cuts, key=lambda one: (one[0], -one[1])):
        if offset == done:
            shards.append(shard)
            done += d * shard
    return shards if d > 1 and done == storage.numel else []


def params_of(program):
    return [index for index, numel in enumerate(program.params) for _ in range(numel)]


def sources_of(paths):
    return {name: Path(path).read_text(encoding="utf-8") for path, name in paths.items()}
