"""Spans of time, (start, end) each, and what was alive in parts of one."""


MEMORY_PARTS = 200  # of a step; of each the most that is alive: a picture has no more room, and a peak is never lost


def most_alive(live, start, end):
    """`live`: [(time, bytes), …] -> the most bytes that were alive in each of MEMORY_PARTS equal parts of a step."""
    parts = [0] * MEMORY_PARTS
    for (since, n_bytes), (until, _) in zip(live, [*live[1:], (end, 0)]):
        if since < end and until > start:
            first, last = (int((moment - start) / (end - start) * MEMORY_PARTS) for moment in (since, until))
            for i in range(max(first, 0), min(last + 1, MEMORY_PARTS)):
                parts[i] = max(parts[i], n_bytes)
    return parts


def union(spans):
    """Spans that may overlap -> the same time, in spans that don't, in order."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def overlap(ones, others):
    """The time that lies in both; each a list of disjoint spans."""
    return [(max(a, c), min(b, d)) for a, b in ones for c, d in others if max(a, c) < min(b, d)]


def length(spans):
    return sum(end - start for start, end in spans)
