"""One clock for all ranks, which isn't the wall's: ticks, of what ranks can know of each other.

A rank does one line a tick. A message arrives a tick after it has left, at the soonest, and a collective ends a tick
after the last rank has begun it; until then who waits stays at its line. Two recordings give the same ticks.
"""

from dataclasses import dataclass, field, replace

PHASES = (("model(", "forward"), (".backward(", "backward"), (".step(", "step"), (".zero_grad(", "zero_grad"))


@dataclass
class Moment:
    """What one rank does in one tick: an event of trace.py, or a loop's later rounds folded into one."""

    stack: tuple
    depth: int
    phase: str
    memory: dict
    labels: dict
    dead: dict
    is_line: bool
    starts: list = field(default_factory=list)
    ends: list = field(default_factory=list)
    tick: int = 0


def moments_of(record, source):
    """-> the moments of one rank, phases of the loop's lines included. `source`: lines of loop.py."""
    moments, phase = [], "shard"
    for event, labels, dead in zip(record["events"], record["labels"], record["dead"]):
        places = event.stack
        if places and places[0].file == "loop.py":
            text = source[places[0].line - 1]
            phase = next((name for code, name in PHASES if code in text), "" if phase == "shard" else phase)
        moments.append(
            Moment(
                places,
                len(places),
                event.phase or phase,
                event.memory,
                labels,
                dead,
                event.is_line,
                list(event.starts),
                list(event.ends),
            )
        )
    return moments


def folded(moments):
    """Rounds of a loop after its first are one with the last moment of that, unless they send something.

    Also not if a function that they call waits for a message: what arrives is worth a moment.
    """
    kept, seen, index = [], {}, 0  # seen: (call, line) -> number of sends when it was there last
    n_starts = 0
    while index < len(moments):
        moment = moments[index]
        last = moment.stack[-1] if moment.stack else None
        key = (last.call, last.line) if last else None
        if kept and moment.is_line and seen.get(key) == n_starts:
            end = index + 1
            while end < len(moments) and (
                moments[end].depth > moment.depth
                or not moments[end].is_line
                and moments[end].stack[-1:] == moment.stack[-1:]
            ):
                end += 1
            body = moments[index:end]
            if not any(one.starts or one.ends and one.depth > moment.depth for one in body):
                kept[-1] = replace(
                    kept[-1],
                    memory=body[-1].memory,
                    labels=body[-1].labels,
                    dead=body[-1].dead,
                    ends=kept[-1].ends + [key for one in body for key in one.ends],
                )
                index = end
                continue
        n_starts += len(moment.starts)
        if moment.is_line:
            seen[key] = n_starts
        kept.append(moment)
        index += 1
    return kept


def shown(moments, steps):
    """The moments of so many steps, and of the forward pass after them."""
    step = -1
    for index, moment in enumerate(moments):
        step += is_beginning(moment)
        if step == steps and moment.phase != "forward":
            return moments[:index]
    return moments


def is_beginning(moment):
    """Whether this is the line of the loop that a step begins with."""
    return moment.is_line and moment.depth == 1 and moment.phase == "forward"


def set_ticks(ranks, first):
    """Give each moment its tick; `ranks`: the moments of each. They may wait for each other: round and round.

    first: for each rank its first moment in the loop, which all ranks begin in the same tick.
    """
    started, at, ready = {}, [0] * len(ranks), [0] * len(ranks)  # started: key -> {rank: tick}
    expected, begin = {}, None
    for rank, moments in enumerate(ranks):
        for moment in moments:
            for operation in moment.starts:
                expected.setdefault(operation.key, set()).add(rank)
    while any(index < len(moments) for index, moments in zip(at, ranks)):
        before = list(at)
        for rank, moments in enumerate(ranks):
            while at[rank] < len(moments):
                moment, tick = moments[at[rank]], ready[rank]
                if at[rank] == first[rank]:
                    if any(index < start for index, start in zip(at, first)):
                        break
                    begin = max(ready) if begin is None else begin
                    tick = begin
                if not all(expected[key] <= started.get(key, {}).keys() for key in moment.ends):
                    break
                for key in moment.ends:
                    tick = max(tick, 1 + max(started[key].values()))
                moment.tick, ready[rank] = tick, tick + 1
                for operation in moment.starts:
                    started.setdefault(operation.key, {})[rank] = tick
                at[rank] += 1
        if at == before:
            raise RuntimeError("ranks wait for each other for ever")
