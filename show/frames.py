"""Joins what each rank has recorded into one recording: plain data that json can hold.

The web page docs/watch.html plays a recording, and show/scenes.py draws pictures of it. A recording shows a program: a
short training on several ranks with one optimizer class, which is called the core. The core is of a stage of this
project (folders stage*/), or of replicated training (show/replicated.py).

A recording is a list of frames, as a film is. In a frame each rank executes one line, or waits for a message. A message
arrives one frame after it has left, or later. A collective ends one frame after the last rank has begun it. Frames
don't depend on time: two recordings of a program have the same frames.

The entries of a recording are below. Elements are those of all parameters of the model, counted from 0.

ranks        the number of ranks
params       the number of elements of each parameter
files        [name, source] of each file that is shown: first show/loop.py, the training loop, then the core's files
functions    [name, file, first line, last line, docstring] of each function in the files; file: an index in `files`
owners       for each element the rank that updates the element, or -1 if several ranks do
storages     {rank, row, part, numel, nbytes}: a piece of memory of a rank, which consists of cells of 4 bytes
    row      the name that is written at the cells, such as "gradients"
    part     tells storages of the same row apart: "p0" of parameter 0, or the number of an object, such as a buffer
sent_bytes   the bytes that a rank sends in a step of training, on average
operations   {kind, whole, what, params, start, end, arrows, moves} of each collective. An all-reduce is two operations:
             a reduce-scatter and an all-gather
    kind     "broadcast", "reduce-scatter" or "all-gather"
    whole    "all-reduce" in both operations of an all-reduce, otherwise the same as `kind`
    what     what the ranks send: "gradients" or "parameters"
    params   the indices of the parameters that are sent whole. In the recording itself `params` has numbers of elements
    start    the first frame in which a rank sends
    end      the frame in which the last message arrives
    arrows   [from, to, bytes, frame in which it leaves, frame of arrival] of each message; from, to: ranks
    moves    [source, first cell, target, first cell, number of cells] of each message, in the order of `arrows`: the
             cells that fly from the storage `source` of the sender to the storage `target` of the receiver
frames       {phase, step, at, memory} of each frame. The last two hold only what differs from the frame before
    phase    what rank 0 is in, such as "backward" or "sync_grads"
    step     which step of training rank 0 is in, from 0 on
    at       [rank, stack] of each rank that has moved. stack: [function, line] of each running function, outermost
             first; function: an index in `functions`
    memory   [storage, cells] of each storage with changed cells; storage: an index in `storages`. cells is null after
             the storage has been released. A cell is [value, kind, element, origin], see Cell; a value of NaN is null

Each rank's own record is a list of events, see Event in show/trace.py. An event is a line that the rank has executed,
or a part of a line. A new part begins when a message leaves or arrives, for example. Attributes that are used here:

stack        the Places (file, line, function and call) at which the rank is, outermost first
is_line      False if the rank is still in the line of the event before
phase, step  as in a frame
starts       calls that send a message: Calls of show/wires.py. A Call is what one rank does of an operation
ends         keys of the operations whose messages arrive. Calls of one operation have the same key on all ranks
cells        {uid: Cells of the storage after the event}. The uid is a storage's number among the storages of its rank
"""

import ast
import itertools
from collections import Counter, deque
from dataclasses import replace
from typing import NamedTuple

CELL_BYTES = 4  # all values that are shown have 32 bits


class Cell(NamedTuple):
    """What 4 bytes of a storage hold. show/labels.py finds out what that is, and lists all kinds."""
    value: float | None  # None: NaN, or infinite
    # The kinds that are used here:
    #     "gradient"    of one rank; origin: the rank
    #     "share"       a gradient divided by the number of ranks; origin: the rank
    #     "average"     of the gradients of all ranks; origin: the step of training
    #     "old"         a parameter before it is updated; origin: how many steps have updated it
    #     "new"         a parameter after it was updated; origin: the same
    #     "stale"       a parameter that is still old in the next step; origin: the same
    kind: str
    element: int | None  # the element that the value belongs to, if any
    origin: int | None  # its meaning depends on the kind


def folded(events):
    """Return the events of a rank without repetitions: a loop that only computes is shown once.

    A repetition is a line at which the rank has been before, with no message sent in between. It is merged into the
    event before it, with all that the line calls. A repetition stays if it sends, or if it calls a function that waits.
    """
    result = []
    n_starts = 0  # how many messages have left
    n_starts_at = {}  # place -> how many messages had left when the rank was there last
    index = 0
    while index < len(events):
        event = events[index]
        place = event.stack[-1:]  # (the innermost Place,), or () outside all functions
        body = body_of(events, index)
        sends = any(inner.starts for inner in body)
        # Whether a function that this line calls waits for a message.
        calls_what_waits = any(inner.ends and len(inner.stack) > len(event.stack) for inner in body)
        is_again = event.is_line and n_starts_at.get(place) == n_starts
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
    """Return the event with this index, and the events after it in the same line and in functions that it calls."""
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
    """Return a dict for each frame: {rank: the rank's event in the frame}, without ranks that wait.

    events_of_ranks: for each rank the list of its events.
    """
    events_to_come = [deque(events) for events in events_of_ranks]
    n_ranks = len(events_to_come)
    frames = []
    n_callers = Counter()  # key of an operation -> how many ranks have begun it
    while any(events_to_come):
        frame = {}
        for rank, events in enumerate(events_to_come):
            # The next event happens only when all ranks have begun the operations that end in it.
            if events and all(n_callers[key] == n_ranks for key in events[0].ends):
                frame[rank] = events.popleft()
        if not frame:
            raise RuntimeError("ranks wait for each other for ever")
        # Counted after all ranks have moved: an operation that begins in this frame can't end before the next.
        for event in frame.values():
            n_callers.update(call.key for call in event.starts)
        frames.append(frame)
    return frames


def recording(records, program):
    """Return the recording of a program. records: for each rank its Record, see show/record.py."""
    sources = records[0].sources  # name of a file -> its source
    functions = []
    function_numbers = {}  # (name of a file, first line of a function) -> index in `functions`
    for file_number, (name, source) in enumerate(sources.items()):
        for function in functions_in(file_number, ast.parse(source)):
            _, _, first_line, *_ = function  # [name, file, first line, last line, docstring]
            function_numbers[name, first_line] = len(functions)
            functions.append(function)
    storage_numbers = {}  # (rank, uid) -> index in recording["storages"]
    for rank, record in enumerate(records):
        for event in record.events:
            for uid in event.cells:
                storage_numbers.setdefault((rank, uid), len(storage_numbers))
    schedule = in_frames([record.events for record in records])
    frames = []
    cells_before = [{} for _ in records]  # for each rank {uid: cells} after its last event
    event_of_rank_0 = records[0].events[0]
    for events in schedule:
        event_of_rank_0 = events.get(0, event_of_rank_0)
        at = []
        memory = []
        for rank, event in events.items():
            stack = [[function_numbers[place.file, place.first_line], place.line] for place in event.stack]
            at.append([rank, stack])
            for uid in cells_before[rank] | event.cells:  # each uid that one of the two dicts has
                cells = event.cells.get(uid)  # None: the storage has been released
                if cells != cells_before[rank].get(uid):
                    memory.append([storage_numbers[rank, uid], cells])
            cells_before[rank] = event.cells
        frames.append({"phase": event_of_rank_0.phase, "step": event_of_rank_0.step, "at": at, "memory": memory})
    all_operations = operations(schedule, program.params, storage_numbers)
    sent_bytes = 0  # by all ranks in all steps
    for operation in all_operations:
        for _, _, n_bytes, *_ in operation["arrows"]:  # [from, to, bytes, frame, frame of arrival]
            sent_bytes += n_bytes
    return {
        "ranks": program.ranks, "params": list(program.params),
        "files": list(sources.items()),
        "functions": functions,
        "owners": [owner_of(element, records) for element in range(sum(program.params))],
        "storages": [records[rank].storages[uid] for rank, uid in storage_numbers],
        "operations": all_operations,
        "sent_bytes": sent_bytes / program.ranks / program.steps,
        "frames": frames,
    }


def owner_of(element, records):
    """Return the rank that updates an element, or -1 if several ranks do."""
    ranks = [rank for rank, record in enumerate(records) if element in record.owned]
    return ranks[0] if len(ranks) == 1 else -1


def functions_in(file_number, parent, prefix=""):
    """Return the entry of recording["functions"] of each function in a syntax tree, outer functions first.

    file_number: of the file that contains them. parent: the node of the tree whose functions are listed. prefix: what
    is put before their names, such as "Class.".
    """
    functions = []
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef):
            # For Python's tracing, which show/trace.py uses, a function begins with its first decorator.
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            functions.append([prefix + node.name, file_number, first, node.end_lineno,
                              ast.get_docstring(node) or ""])
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            functions += functions_in(file_number, node, f"{prefix}{node.name}.")
    return functions


def operations(schedule, params, storage_numbers):
    """Return recording["operations"]. schedule: what `in_frames` returns. params: see recording["params"]."""
    calls = {}  # key of an operation -> {rank: its Call}
    sent_cells = {}  # key of an operation -> the Cells that all ranks send
    starts = {}  # (key, rank) -> number of the frame in which the rank calls
    ends = {}  # (key, rank) -> number of the frame in which the messages to this rank arrive
    for number, events in enumerate(schedule):
        for rank, event in events.items():
            for call in event.starts:
                # What the rank sends: cells of the storage `uid`, from the cell `first` to before the cell `end`.
                uid, first, end = call.reads
                calls.setdefault(call.key, {})[rank] = call
                sent_cells.setdefault(call.key, []).extend(event.cells.get(uid, ())[first:end])
                starts[call.key, rank] = number
            for key in event.ends:
                ends[key, rank] = number
    result = []
    for key, call_of_rank in calls.items():
        arrows = []
        moves = []
        for sender, receiver in itertools.permutations(sorted(call_of_rank), 2):
            if call_of_rank[sender].root in (None, sender):  # in a broadcast only the root sends
                move = move_of(call_of_rank, sender, receiver, storage_numbers)
                *_, n_cells = move  # the last of its five entries
                arrival = ends.get((key, receiver), len(schedule))  # after the end if the receiver never waits for it
                arrows.append([sender, receiver, CELL_BYTES * n_cells, starts[key, sender], arrival])
                moves.append(move)
        what, params_sent = contents(sent_cells[key], params)
        senders, receivers, sizes, departures, arrivals = zip(*arrows)
        result.append({
            "kind": call_of_rank[0].kind, "whole": call_of_rank[0].whole, "what": what, "params": params_sent,
            "start": min(departures), "end": max(arrivals), "arrows": arrows, "moves": moves})
    return result


def contents(cells, params):
    """Return what is sent, "gradients" or "parameters", and the indices of the parameters that are sent whole.

    cells: what all ranks send in one operation. Some may be padding, which makes a message longer: it still holds what
    an earlier message left there.
    """
    gradients = {cell.element for cell in cells if cell.kind in ("gradient", "share", "average")}
    parameters = {cell.element for cell in cells if cell.kind in ("old", "new", "stale")}
    what = "gradients" if gradients else ""
    if parameters:  # then gradients among the cells can only be padding
        what = "parameters"
    params_sent = []
    first = 0
    for index, numel in enumerate(params):
        # Padding may hold some elements of a parameter, but never all.
        if (gradients | parameters).issuperset(range(first, first + numel)):
            params_sent.append(index)
        first += numel
    return what, params_sent


def move_of(call_of_rank, sender, receiver, storage_numbers):
    """Return the entry of `moves` for a message from `sender` to `receiver`. call_of_rank: {rank: its Call}.

    In a reduce-scatter, part r of what is sent goes to rank r. In an all-gather, rank r's message becomes part r.
    """
    kind = call_of_rank[sender].kind
    uid, first, end = call_of_rank[sender].reads
    target_uid, target_first, target_end = call_of_rank[receiver].writes
    n_cells = min(end - first, target_end - target_first)
    if kind == "reduce-scatter":
        first += receiver * n_cells
    if kind == "all-gather":
        target_first += sender * n_cells
    # None for a storage that isn't shown, because no variable or attribute leads to it.
    source_number = storage_numbers.get((sender, uid))
    target_number = storage_numbers.get((receiver, target_uid))
    return [source_number, first, target_number, target_first, n_cells]


def memory_after(recording, frame):
    """Return {storage: its Cells} as all ranks hold them after a frame; None for a storage that has been released.

    storage: an index in recording["storages"]. frame: the number of the frame.
    """
    memory = {}
    for changes in recording["frames"][: frame + 1]:
        for storage, cells in changes["memory"]:
            memory[storage] = None if cells is None else [Cell(*cell) for cell in cells]
    return memory
