"""One clock for all ranks, which isn't the wall's: ticks, of what ranks can know of each other.

A rank does one line a tick. A message arrives a tick after it has left, at the soonest, and a collective ends a tick
after the last rank has begun it; until then who waits stays at its line. Two recordings give the same ticks.
"""

PHASES = (("model(", "forward"), (".backward(", "backward"), (".step(", "step"), (".zero_grad(", "zero_grad"))


def with_phases(events, source):
    """Give each event of a rank that is in no method of the core its phase. `source`: lines of loop.py."""
    phase = "shard"
    for event in events:
        if event.stack and event.stack[0].file == "loop.py":
            text = source[event.stack[0].line - 1]
            phase = next((name for code, name in PHASES if code in text), "" if phase == "shard" else phase)
        event.phase = event.phase or phase
    return events


def folded(events):
    """Rounds of a loop after its first are one with the last event of that, unless they send something.

    Also not if a function that they call waits for a message: what arrives is worth an event.
    """
    kept, seen, index = [], {}, 0  # seen: (call, line) -> number of sends when it was there last
    n_starts = 0
    while index < len(events):
        event = events[index]
        last = event.stack[-1] if event.stack else None
        key = (last.call, last.line) if last else None
        if kept and event.is_line and seen.get(key) == n_starts:
            end, depth = index + 1, len(event.stack)
            while end < len(events) and (
                len(events[end].stack) > depth
                or not events[end].is_line and events[end].stack[-1:] == event.stack[-1:]
            ):
                end += 1
            body = events[index:end]
            if not any(one.starts or one.ends and len(one.stack) > depth for one in body):
                kept[-1].memory, kept[-1].labels = body[-1].memory, body[-1].labels
                kept[-1].ends += [key for one in body for key in one.ends]
                index = end
                continue
        n_starts += len(event.starts)
        if event.is_line:
            seen[key] = n_starts
        kept.append(event)
        index += 1
    return kept


def shown(events, steps):
    """The events of so many steps, and of the forward pass after them."""
    step = -1
    for index, event in enumerate(events):
        step += is_beginning(event)
        if step == steps and event.phase != "forward":
            return events[:index]
    return events


def is_beginning(event):
    """Whether this is the line of the loop that a step begins with."""
    return event.is_line and len(event.stack) == 1 and event.phase == "forward"


def set_ticks(ranks, first):
    """Give each event its tick; `ranks`: the events of each. They may wait for each other: round and round.

    first: for each rank its first event in the loop, which all ranks begin in the same tick.
    """
    started, at, ready = {}, [0] * len(ranks), [0] * len(ranks)  # started: key -> {rank: tick}
    expected, begin = {}, None
    for rank, events in enumerate(ranks):
        for operation in (one for event in events for one in event.starts):
            expected.setdefault(operation.key, set()).add(rank)
    while any(index < len(events) for index, events in zip(at, ranks)):
        before = list(at)
        for rank, events in enumerate(ranks):
            while at[rank] < len(events):
                event, tick = events[at[rank]], ready[rank]
                if at[rank] == first[rank]:
                    if any(index < start for index, start in zip(at, first)):
                        break
                    begin = max(ready) if begin is None else begin
                    tick = begin
                if not all(expected[key] <= started.get(key, {}).keys() for key in event.ends):
                    break
                event.tick = max([tick, *(1 + max(started[key].values()) for key in event.ends)])
                ready[rank] = event.tick + 1
                for operation in event.starts:
                    started.setdefault(operation.key, {})[rank] = event.tick
                at[rank] += 1
        if at == before:
            raise RuntimeError("ranks wait for each other for ever")
