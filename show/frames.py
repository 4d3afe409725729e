"""Makes one recording out of what all ranks have recorded, as plain data that json can hold: for page and scenes.

A recording is a list of frames, on one clock. The clock is logical: it orders only what messages order, so two
recordings of a program have the same frames. A rank executes one line per frame. A message arrives at the earliest one
frame after it has left, and a collective ends one frame after the last rank has begun it. A rank that waits stays at
its line until then. The entries of a recording:

ranks, params    of the program; params: number of elements of each parameter
files        [name, source] of each file of the core; the first is that of the loop
functions    [name, file, first line, last line, docstring]; file: an index in `files`
owners       for each element the rank that steps it, or -1 where every rank does
storages     {rank, row, part, numel, nbytes}: memory of a rank, and the row of cells in which it is drawn
sent_bytes   bytes that a rank sends in a step, on average
operations   {kind, whole, what, params, start, end, arrows, moves}: what the ranks send in one collective
    kind     "broadcast", "reduce-scatter" or "all-gather"
    whole    the kind again; "all-reduce" in each of the two operations of an all-reduce
    what     "gradients" or "parameters"
    params   numbers of the parameters of which all elements are sent
    start    the first frame in which a rank sends
    end      the frame in which all has arrived
    arrows   [from, to, bytes, first frame, frame of arrival] of each message
    moves    for each arrow the cells that fly: [storage, first cell, storage where they arrive, first cell, how many]
frames       {phase, step, at, memory}: differences to the frame before
    at       [rank, stack], of ranks that have moved; stack: [function, line], …, outermost first
    memory   [storage, its cells]; null for the cells of a storage that has been released
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
        sends = any(inner.starts for inner in body)
        # Whether a function that this line calls waits for a message.
        calls_what_waits = any(inner.ends and len(inner.stack) > len(event.stack) for inner in body)
        # The rank is back at a line, and has sent nothing since it was there.
        is_again = bool(result) and event.is_line and n_starts_at.get(place) == n_starts
        if is_again and not calls_what_waits and not sends:
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
    """Return the event with this index, and the events in the functions that its line calls."""
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
    events_to_come = [deque(events) for events in events_of_ranks]
    n_ranks = len(events_to_come)
    frames = []
    n_callers = Counter()  # key of an operation -> how many ranks have begun it
    while any(events_to_come):
        frame = {}
        for rank, events in enumerate(events_to_come):
            if events and all(n_callers[key] == n_ranks for key in events[0].ends):
                frame[rank] = events.popleft()
        if not frame:
            raise RuntimeError("ranks wait for each other for ever")
        # After all ranks have moved: what begins in this frame can't end before the next.
        for event in frame.values():
            n_callers.update(operation.key for operation in event.starts)
        frames.append(frame)
    return frames


def recording(records, program):
    """Return the recording of a program. records: what `record_rank` returns, of each rank."""
    sources = records[0].sources
    files = list(sources)
    functions = []
    for file, source in enumerate(sources.values()):
        functions += functions_in(file, ast.parse(source))
    function_numbers = {(files[file], first): number for number, (_, file, first, *_) in enumerate(functions)}
    storage_numbers = {}  # (rank, uid) -> index in recording["storages"]
    for rank, record in enumerate(records):
        for event in record.events:
            for uid in event.cells:
                storage_numbers.setdefault((rank, uid), len(storage_numbers))
    schedule = in_frames([record.events for record in records])
    frames = []
    cells_before = [{} for _ in records]  # of each rank: storage -> cells
    event_of_rank_0 = records[0].events[0]
    for events in schedule:
        event_of_rank_0 = events.get(0, event_of_rank_0)
        at = []
        memory = []
        for rank, event in events.items():
            at.append([rank, [[function_numbers[place.file, place.first_line], place.line] for place in event.stack]])
            for uid in cells_before[rank] | event.cells:
                cells = event.cells.get(uid)
                if cells != cells_before[rank].get(uid):
                    memory.append([storage_numbers[rank, uid], cells])
            cells_before[rank] = event.cells
        frames.append({"phase": event_of_rank_0.phase, "step": event_of_rank_0.step, "at": at, "memory": memory})
    sent = operations(schedule, program.params, storage_numbers)
    sent_bytes = sum(n_bytes for operation in sent for _, _, n_bytes, *_ in operation["arrows"])
    return {
        "ranks": program.ranks, "params": list(program.params),
        "files": list(sources.items()),
        "functions": functions,
        "owners": [owner_of(element, records) for element in range(sum(program.params))],
        "storages": [records[rank].storages[uid] for rank, uid in storage_numbers],
        "operations": sent,
        "sent_bytes": sent_bytes / program.ranks / program.steps,
        "frames": frames,
    }


def owner_of(element, records):
    """Return the rank that updates an element, or -1 if several ranks do."""
    ranks = [rank for rank, record in enumerate(records) if element in record.owned]
    return ranks[0] if len(ranks) == 1 else -1


def functions_in(file, parent, prefix=""):
    """Return the entry of recording["functions"] of each function in a syntax tree, outer functions first."""
    functions = []
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef):
            # As Python's tracing has it, a function begins with its first decorator.
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions.append([prefix + node.name, file, first, node.end_lineno, ast.get_docstring(node) or ""])
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            functions += functions_in(file, node, f"{prefix}{node.name}.")
    return functions


def operations(schedule, params, storage_numbers):
    """Return recording["operations"]. An operation consists of one call on each rank: an Operation of show/wires.py."""
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
                move = move_of(call_of_rank, sender, receiver, storage_numbers)
                n_bytes = CELL_BYTES * move[-1]
                arrival = ends.get((key, receiver), len(schedule))  # nobody may have waited for it
                arrows.append([sender, receiver, n_bytes, starts[key, sender], arrival])
                moves.append(move)
        what, params_sent = contents(sent[key], params)
        result.append({
            "kind": call_of_rank[0].kind, "whole": call_of_rank[0].whole, "what": what, "params": params_sent,
            "start": min(start for _, _, _, start, _ in arrows), "end": max(end for _, _, _, _, end in arrows),
            "arrows": arrows, "moves": moves})
    return result


def contents(cells, params):
    """Return what is sent, "gradients" or "parameters", and the numbers of the parameters that are sent whole.

    Padding may hold some elements of an earlier message, but never all elements of a parameter.
    """
    gradients = {cell.element for cell in cells if cell.kind in ("gradient", "share", "average")}
    parameters = {cell.element for cell in cells if cell.kind in ("old", "new", "stale")}
    what = "gradients" if gradients else ""
    if parameters:
        what = "parameters"
    params_sent = []
    first = 0
    for index, numel in enumerate(params):
        if (gradients | parameters).issuperset(range(first, first + numel)):
            params_sent.append(index)
        first += numel
    return what, params_sent


def move_of(call_of_rank, sender, receiver, storage_numbers):
    """Return the cells that fly from rank to rank, as an entry of `moves`. call_of_rank: {rank: its Operation}."""
    kind = call_of_rank[sender].kind
    # Each is a Span (show/trace.py): the number of a storage, and cells of the storage.
    uid, first, end = call_of_rank[sender].reads
    target_uid, target, target_end = call_of_rank[receiver].writes
    n_cells = min(end - first, target_end - target)
    if kind == "reduce-scatter":
        first += receiver * n_cells
    if kind == "all-gather":
        target += sender * n_cells
    # Memory that no name leads to isn't shown, and has no number.
    source_number = storage_numbers.get((sender, uid))
    target_number = storage_numbers.get((receiver, target_uid))
    return [source_number, first, target_number, target, n_cells]


def memory_after(recording, frame):
    """Return {storage: its Cells} as all ranks hold them after a frame; None for a storage that has been released."""
    memory = {}
    for changes in recording["frames"][: frame + 1]:
        for storage, cells in changes["memory"]:
            memory[storage] = None if cells is None else [Cell(*cell) for cell in cells]
    return memory
