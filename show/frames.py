"""A recording: frames of all ranks on one clock, as plain data that json can hold: for page, terminal and figures.

The clock isn't the wall's, but of what ranks can know of each other. A rank does one line a frame. A message arrives a
frame after it has left, at the soonest, and a collective ends a frame after the last rank has begun it; until then who
waits stays at its line. Two recordings give the same frames.

title, ranks, params      of the program; params: elements of each parameter
files        [name, source], those of the core; the loop's first
functions    [name, file, first line, last line, docstring]
owners       for each element the rank that steps it, or -1 where every rank does
storages     {rank, row, part, numel, nbytes, shards}; of what is cut into d shards, bucket after bucket, `shards` are
             the lengths of one in each bucket
sent_bytes   by each rank in a step, on average, as harness/ledger.py counts it
cells        [value, kind, element, origin], which frames refer to: see show/labels.py; the value of NaN is null
stacks       [[function, line], …], outermost first
operations   {kind, whole, what, params, arrows, moves}; an arrow is [from, to, bytes, first frame, that of arrival].
             An all-reduce is two operations, its halves, whose `whole` is "all-reduce"
    moves    for each arrow the cells that fly: [storage, first cell, storage where they arrive, first cell, how many]
frames       {phase, step, at, memory}: differences to the frame before
    at       [rank, stack], of ranks that have moved
    memory   [storage, its cells]; null for the cells of one that has been released
"""

import ast
import itertools
from collections import Counter, deque


def folded(events):
    """Rounds of a loop after its first are one with the last event of that, unless they send, or call what waits."""
    result, index, n_starts = [], 0, 0
    seen = {}  # (place,) -> number of sends when the rank was there last
    while index < len(events):
        event = events[index]
        depth, place = len(event.stack), event.stack[-1:]
        body = [event, *itertools.takewhile(lambda inner: len(inner.stack) > depth
                                            or not inner.is_line and inner.stack[-1:] == place, events[index + 1 :])]
        is_again = result and event.is_line and seen.get(place) == n_starts
        if is_again and not any(inner.starts or inner.ends and len(inner.stack) > depth for inner in body):
            result[-1].cells = body[-1].cells
            result[-1].ends += [key for inner in body for key in inner.ends]
            index += len(body)
            continue
        n_starts += len(event.starts)
        if event.is_line:
            seen[place] = n_starts
        result.append(event)
        index += 1
    return result


def in_frames(ranks):
    """`ranks`: events of each. -> of each frame {rank: its event}, of ranks that move in it; events get its number."""
    waiting = [deque(events) for events in ranks]
    frames = []
    begun = Counter()
    callers = Counter(operation.key for events in ranks for event in events for operation in event.starts)
    while any(waiting):
        frame = {rank: events[0] for rank, events in enumerate(waiting)
                 if events and all(begun[key] == callers[key] for key in events[0].ends)}
        if not frame:
            raise RuntimeError("ranks wait for each other for ever")
        for rank, event in frame.items():
            waiting[rank].popleft()
            event.frame = len(frames)
            begun.update(operation.key for operation in event.starts)
        frames.append(frame)
    return frames


def recording(records, program, title=""):
    """`records`: what `record_rank` returns, of each rank -> a recording."""
    ranks = [record["events"] for record in records]
    sources = records[0]["sources"]
    functions = [function for file, source in enumerate(sources.values())
                 for function in functions_in(file, ast.parse(source))]
    used = ((rank, uid) for rank, events in enumerate(ranks) for event in events for uid in event.cells)
    storages = {key: number for number, key in enumerate(dict.fromkeys(used))}
    stacks, cells, frames = {}, {}, []  # stacks, cells: each -> its number
    before = [{} for _ in ranks]
    for events in in_frames(ranks):
        phase, step = (events[0].phase, events[0].step) if 0 in events else (frames[-1]["phase"], frames[-1]["step"])
        frames.append({"phase": phase, "step": step, "at": [], "memory": []})
        for rank, event in events.items():
            stack = tuple((function_at(place, functions, list(sources)), place.line) for place in event.stack)
            frames[-1]["at"].append([rank, stacks.setdefault(stack, len(stacks))])
            for uid in {**before[rank], **event.cells}:
                values = event.cells.get(uid)
                if values != before[rank].get(uid):
                    numbers = values and [cells.setdefault(cell, len(cells)) for cell in values]
                    frames[-1]["memory"].append([storages[rank, uid], numbers])
            before[rank] = event.cells
    steppers = [[rank for rank, record in enumerate(records) if element in record["owned"]]
                for element in range(sum(program.params))]
    return {
        "format": 4, "title": title, "ranks": program.ranks, "params": list(program.params),
        "files": [list(item) for item in sources.items()],
        "functions": functions,
        "owners": [ranks[0] if len(ranks) == 1 else -1 for ranks in steppers],
        "storages": [records[rank]["storages"][uid] for rank, uid in storages],
        "operations": operations(ranks, program.params, len(frames), storages),
        "sent_bytes": sum(record["sent_bytes"] for record in records) / len(records),
        "cells": list(map(list, cells)),
        "stacks": [[list(place) for place in stack] for stack in stacks],
        "frames": frames,
    }


def operations(ranks, params, n_frames, storages):
    """Messages that one line sends are one operation; calls of other ranks belong to it by their order."""
    ends = {(key, rank): event.frame for rank, events in enumerate(ranks) for event in events for key in event.ends}
    receivers = {(operation.key, rank): operation for rank, events in enumerate(ranks) for event in events
                 for operation in event.starts}
    senders = [[event for event in events if event.starts] for events in ranks]
    rows, stops = [], list(itertools.accumulate(params))
    for events in itertools.zip_longest(*senders):
        calls = [(event.frame, operation) for event in events if event for operation in event.starts
                 if operation.kind != "recv"]
        elements = frozenset().union(*(operation.elements for _, operation in calls))
        # In padding there may be some elements of what was sent before, but never all of a parameter.
        sent = [i for i, stop in enumerate(stops) if elements.issuperset(range(stop - params[i], stop))]
        arrows = []
        for frame, operation in calls:
            for arrow in operation.arrows:
                end = ends.get((operation.key, arrow[1]), n_frames)  # nobody may have waited for it
                move = move_of(operation, receivers.get((operation.key, arrow[1])), arrow, len(ranks), storages)
                arrows.append(([*arrow, frame, end], move))
        what = next((operation.what for _, operation in reversed(calls) if operation.what), "")
        if arrows:
            arrows, moves = zip(*sorted(arrows))
            kind, whole = calls[0][1].kind, calls[0][1].whole
            rows.append({"kind": kind, "whole": whole, "what": what, "params": sent, "arrows": arrows, "moves": moves})
    return rows


def move_of(sent, received, arrow, d, storages):
    """Return which cells an arrow carries: [storage, first cell, storage where they arrive, first cell, how many]."""
    sender, receiver, _ = arrow
    if not (sent.reads and received and received.writes):
        return []
    (uid, first, end), (target_uid, target, target_end) = sent.reads[0], received.writes[0]
    n_cells = min(end - first, target_end - target)
    if sent.kind in ("reduce-scatter", "all-to-all"):
        first += receiver * (end - first) // d
    if sent.kind in ("all-gather", "all-to-all"):
        target += sender * (target_end - target) // d
    return [storages[sender, uid], first, storages[receiver, target_uid], target, n_cells]


def function_at(place, functions, files):
    """-> the number of the innermost function that a place lies in."""
    return max(number for number, (_, file, first, last, _) in enumerate(functions)
               if files[file] == place.file and first <= place.line <= last)


def functions_in(file, parent, prefix=""):
    """Each function in a tree, outer ones before inner ones."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield [prefix + node.name, file, first, node.end_lineno, ast.get_docstring(node) or ""]
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield from functions_in(file, node, f"{prefix}{node.name}.")


class Memory:
    """What all ranks hold, as the frames of a recording go by: after frame `last` at first."""

    def __init__(self, recording, last=-1):
        self.recording, self.stacks = recording, {}  # stacks: of ranks
        self.cells = {}  # storage -> (value, kind, element, origin) of each of its cells; None when it is released
        self.params = [index for index, numel in enumerate(recording["params"]) for _ in range(numel)]
        for frame in recording["frames"][: last + 1]:
            self.take(frame)

    def take(self, frame):
        """-> the storages in which something has changed."""
        for storage, cells in frame["memory"]:
            self.cells[storage] = cells and [tuple(self.recording["cells"][number]) for number in cells]
        self.stacks.update(map(tuple, frame["at"]))
        return {storage for storage, _ in frame["memory"]}

    def rows(self):
        """-> {row: {rank: storages, by part}}, in the order in which they came."""
        rows, storages = {}, self.recording["storages"]
        for number, storage in enumerate(storages):
            rows.setdefault(storage["row"], {}).setdefault(storage["rank"], []).append(number)
        for numbers in (numbers for ranks in rows.values() for numbers in ranks.values()):
            numbers.sort(key=lambda number: int("0" + "".join(filter(str.isdecimal, storages[number]["part"]))))
        return rows

    def place(self, rank):
        """-> (function, file, line, text) of the line at which a rank is."""
        function, line = self.recording["stacks"][self.stacks[rank]][-1]
        name, file, *_ = self.recording["functions"][function]
        title, source = self.recording["files"][file]
        return name, title, line, source.splitlines()[line - 1].strip()
