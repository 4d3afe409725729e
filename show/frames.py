"""A recording: frames of all ranks on one clock, as plain data that json can hold: for page, terminal and figures.

The clock is logical: it orders only what messages order, so two recordings give the same frames. A rank executes one
line per frame. A message arrives at the earliest one frame after it has left, and a collective ends one frame after the
last rank has begun it. A rank that waits stays at its line until then.

ranks, params    of the program; params: elements of each parameter
files        [name, source], those of the core; the loop's first
functions    [name, file, first line, last line, docstring]
owners       for each element the rank that steps it, or -1 where every rank does
storages     {rank, row, part, numel, nbytes}
sent_bytes   by each rank in a step, on average
operations   {kind, whole, what, params, start, end, arrows, moves}; kind: of collective; what: "gradients" or
             "parameters"; start: the first frame in which a rank sends, end: the frame in which all has arrived. An
             all-reduce is two operations, whose `whole` is "all-reduce"
    arrows   [from, to, bytes, first frame, that of arrival]
    moves    for each arrow the cells that fly: [storage, first cell, storage where they arrive, first cell, how many]
frames       {phase, step, at, memory}: differences to the frame before
    at       [rank, stack], of ranks that have moved; stack: [function, line], …, outermost first
    memory   [storage, its cells]; null for the cells of one that has been released
             a cell is [value, kind, element, origin]: see show/labels.py; the value of NaN is null
"""

import ast
import itertools
from collections import Counter, deque
from dataclasses import replace
from typing import NamedTuple

CELL_BYTES = 4  # all values that are shown have 32 bits


class Cell(NamedTuple):
    """What an element of a storage holds: see show/labels.py."""
    value: float | None
    kind: str
    element: int | None
    origin: int | None


def folded(events):
    """Merge each later iteration of a loop into the event before, if the iteration neither sends nor waits."""
    result = []
    n_starts = 0
    n_starts_at = {}  # place -> how many messages had left when the rank was there last
    index = 0
    while index < len(events):
        event = events[index]
        place = event.stack[-1:]
        body = body_of(events, index)
        # The rank is back at a line, and has sent nothing since it was there.
        is_again = bool(result) and event.is_line and n_starts_at.get(place) == n_starts
        calls_what_waits = any(inner.ends and len(inner.stack) > len(event.stack) for inner in body)
        if is_again and not calls_what_waits and not any(inner.starts for inner in body):
            ends = [key for inner in body for key in inner.ends]
            result[-1] = replace(result[-1], cells=body[-1].cells, ends=result[-1].ends + ends)
            index += len(body)
            continue
        n_starts += len(event.starts)
        if event.is_line:
            n_starts_at[place] = n_starts
        result.append(event)
        index += 1
    return result


def body_of(events, index):
    """Return the event with this index, and those in the functions that its line calls."""
    first = events[index]
    body = [first]
    for event in events[index + 1 :]:
        is_inside = len(event.stack) > len(first.stack)
        is_same_line = not event.is_line and event.stack[-1:] == first.stack[-1:]
        if not (is_inside or is_same_line):
            break
        body.append(event)
    return body


def in_frames(events_of_ranks):
    """Return for each frame {rank: its event}, of the ranks that move in the frame."""
    waiting = [deque(events) for events in events_of_ranks]
    frames = []
    n_callers = Counter()  # key of an operation -> how many ranks have begun it
    while any(waiting):
        frame = {rank: events[0] for rank, events in enumerate(waiting)
                 if events and all(n_callers[key] == len(waiting) for key in events[0].ends)}
        if not frame:
            raise RuntimeError("ranks wait for each other for ever")
        for rank, event in frame.items():
            waiting[rank].popleft()
            n_callers.update(operation.key for operation in event.starts)
        frames.append(frame)
    return frames


def recording(records, program):
    """Return the recording of a program. records: what `record_rank` returns, of each rank."""
    files = list(records[0].sources)
    functions = []
    for file, source in enumerate(records[0].sources.values()):
        functions += functions_in(file, ast.parse(source))
    function_places = [(files[file], first) for _, file, first, *_ in functions]
    storages = {}  # (rank, uid) -> number
    for rank, record in enumerate(records):
        for event in record.events:
            for uid in event.cells:
                storages.setdefault((rank, uid), len(storages))
    schedule = in_frames([record.events for record in records])
    frames = []
    before = [{} for _ in records]
    event_of_rank_0 = records[0].events[0]
    for events in schedule:
        event_of_rank_0 = events.get(0, event_of_rank_0)
        frame = {"phase": event_of_rank_0.phase, "step": event_of_rank_0.step, "at": [], "memory": []}
        for rank, event in events.items():
            stack = [[function_places.index((place.file, place.first_line)), place.line] for place in event.stack]
            frame["at"].append([rank, stack])
            for uid in before[rank] | event.cells:
                cells = event.cells.get(uid)
                if cells != before[rank].get(uid):
                    frame["memory"].append([storages[rank, uid], cells])
            before[rank] = event.cells
        frames.append(frame)
    owners = []
    for element in range(sum(program.params)):
        ranks = [rank for rank, record in enumerate(records) if element in record.owned]
        owners.append(ranks[0] if len(ranks) == 1 else -1)
    sent = operations(schedule, program.params, storages)
    sent_bytes = sum(n_bytes for operation in sent for _, _, n_bytes, *_ in operation["arrows"])
    return {
        "ranks": program.ranks, "params": list(program.params),
        "files": list(records[0].sources.items()),
        "functions": functions,
        "owners": owners,
        "storages": [records[rank].storages[uid] for rank, uid in storages],
        "operations": sent,
        "sent_bytes": sent_bytes / program.ranks / program.steps,
        "frames": frames,
    }


def functions_in(file, parent, prefix=""):
    """Return each function in a tree as an entry of recording["functions"], outer functions before inner ones."""
    functions = []
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions.append([prefix + node.name, file, first, node.end_lineno, ast.get_docstring(node) or ""])
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            functions += functions_in(file, node, f"{prefix}{node.name}.")
    return functions


def operations(schedule, params, storages):
    """Return what the ranks send, as recording["operations"]. An operation consists of one call per rank."""
    calls = {}  # key -> {rank: Operation}
    sent = {}  # key -> Cells that are sent, of all ranks
    starts = {}  # (key, rank) -> number of a frame
    ends = {}  # (key, rank) -> number of a frame
    for number, events in enumerate(schedule):
        for rank, event in events.items():
            for operation in event.starts:
                uid, first, end = operation.reads
                calls.setdefault(operation.key, {})[rank] = operation
                sent.setdefault(operation.key, []).extend(event.cells.get(uid, ())[first:end])
                starts[operation.key, rank] = number
            for key in event.ends:
                ends[key, rank] = number
    result = []
    for key, call_of_rank in calls.items():
        arrows = []
        moves = []
        for sender, receiver in itertools.permutations(sorted(call_of_rank), 2):
            if call_of_rank[sender].root in (None, sender):
                *endpoints, n_cells = move_of(call_of_rank, sender, receiver, storages)
                end = ends.get((key, receiver), len(schedule))  # nobody may have waited for it
                arrows.append([sender, receiver, CELL_BYTES * n_cells, starts[key, sender], end])
                moves.append([*endpoints, n_cells])
        result.append({
            "kind": call_of_rank[0].kind, "whole": call_of_rank[0].whole, **contents(sent[key], params),
            "start": min(start for _, _, _, start, _ in arrows), "end": max(end for _, _, _, _, end in arrows),
            "arrows": arrows, "moves": moves})
    return result


def contents(cells, params):
    """Return what is sent, gradients or parameters, and of which parameters all elements are sent.

    In padding there may be some elements of what was sent before, but never all of a parameter.
    """
    gradients = {cell.element for cell in cells if cell.kind in ("gradient", "share", "average")}
    parameters = {cell.element for cell in cells if cell.kind in ("old", "new", "stale")}
    what = "gradients" if gradients else ""
    if parameters:
        what = "parameters"
    sent = []
    first = 0
    for index, numel in enumerate(params):
        if (gradients | parameters).issuperset(range(first, first + numel)):
            sent.append(index)
        first += numel
    return {"what": what, "params": sent}


def move_of(call_of_rank, sender, receiver, storages):
    """Return the cells that fly from rank to rank, as an entry of `moves`. call_of_rank: {rank: its Operation}."""
    kind = call_of_rank[sender].kind
    uid, first, end = call_of_rank[sender].reads
    target_uid, target, target_end = call_of_rank[receiver].writes
    n_cells = min(end - first, target_end - target)
    if kind == "reduce-scatter":
        first += receiver * n_cells
    if kind == "all-gather":
        target += sender * n_cells
    # Memory that no name leads to isn't shown, and has no number.
    return [storages.get((sender, uid)), first, storages.get((receiver, target_uid)), target, n_cells]


def memory_after(recording, frame):
    """Return {storage: its Cells} as all ranks hold them after a frame; None for a storage that has been released."""
    memory = {}
    for changes in recording["frames"][: frame + 1]:
        for storage, cells in changes["memory"]:
            memory[storage] = None if cells is None else [Cell(*cell) for cell in cells]
    return memory
