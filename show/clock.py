"""One clock for all ranks, which isn't the wall's: frames, of what ranks can know of each other.

A rank does one line a frame. A message arrives a frame after it has left, at the soonest, and a collective ends a frame
after the last rank has begun it; until then who waits stays at its line. Two recordings give the same frames.
"""

import itertools
from collections import Counter, deque


def folded(events):
    """Rounds of a loop after its first are one with the last event of that, unless they send something.

    Also not if a function that they call waits for a message: what arrives is worth an event.
    """
    kept, index, n_starts = [], 0, 0
    seen = {}  # (place,) -> number of sends when the rank was there last
    while index < len(events):
        event = events[index]
        depth, place = len(event.stack), event.stack[-1:]
        body = [event, *itertools.takewhile(
            lambda one: len(one.stack) > depth or not one.is_line and one.stack[-1:] == place,
            itertools.islice(events, index + 1, None),
        )]
        is_again = kept and event.is_line and seen.get(place) == n_starts
        if is_again and not any(one.starts or one.ends and len(one.stack) > depth for one in body):
            kept[-1].memory = body[-1].memory
            kept[-1].ends += [key for one in body for key in one.ends]
            index += len(body)
            continue
        n_starts += len(event.starts)
        if event.is_line:
            seen[place] = n_starts
        kept.append(event)
        index += 1
    return kept


def in_frames(ranks):
    """-> of each frame {rank: its event}, of ranks that move in it; their events get its number. `ranks`: their events.
    """
    waiting, frames, begun = [deque(events) for events in ranks], [], Counter()
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
