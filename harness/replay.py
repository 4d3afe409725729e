"""Models time: how long a recorded step takes on machines that aren't there, one event after the other."""

import math
from typing import NamedTuple

from harness.ledger import wire_bytes
from harness.results import Message, RecordedStep, length, most_alive, union

REPLAYED_STEPS = 3  # parameters of one step travel in the next: the last is like all that follow


class Hardware(NamedTuple):
    """A machine that a step is replayed on. Rates in FLOPs and bytes per second, latencies in seconds per hop.

    `flops`: what a device reaches in matrix products, not what it is sold with. `in_node`: a rank's ring inside a node.
    `between`: all links of a node to others; `sharing` groups use them at once (tensor parallelism).
    """
    flops: float
    memory_rate: float
    in_node: float
    between: float
    per_node: int = 8
    sharing: int = 1
    latency_in_node: float = 3e-6
    latency_between: float = 14e-6
    backend: str = "nccl"


# As makers state them: 16-bit FLOPs, bytes of memory, bytes to a neighbour in the node, bytes of a node to others.
DEVICES = {"h100": Hardware(989e12, 3.35e12, 450e9, 400e9), "a100": Hardware(312e12, 2.0e12, 300e9, 100e9)}


def message_seconds(kind, n_bytes, d, hardware, stride=1):
    """Model the seconds of a collective of `n_bytes` (the full tensor) among d ranks, one of every `stride`, while the
    other ranks do the same.

    In a ring it passes each of them once, and every node once. NCCL's all-reduce goes through trees over the nodes: as
    many bytes, fewer hops. `send` and `recv` go to a neighbour.
    """
    if d == 1:
        return 0.0
    sharing = hardware.sharing * stride
    in_group = max(1, hardware.per_node // sharing)  # ranks of this group on a node
    between = math.ceil(d / in_group) - 1
    # As many groups as a node has ranks, at most, use its links to others at once.
    rate = min(hardware.in_node, hardware.between / min(sharing, hardware.per_node) if between else math.inf)
    if kind in ("send", "recv"):
        return (hardware.latency_between if between else hardware.latency_in_node) + n_bytes / rate
    hops = (d - 1 - between) * hardware.latency_in_node + between * hardware.latency_between
    if kind == "all_reduce":
        tree = (in_group - 1) * hardware.latency_in_node + math.log2(between + 1) * hardware.latency_between
        hops = 2 * (min(hops, tree) if hardware.backend == "nccl" else hops)
    # The ledger counts what d ranks send on average. Each of them passes a broadcast, or a reduce, on whole.
    travels = n_bytes if kind in ("broadcast", "reduce") else wire_bytes(kind, n_bytes, d, hardware.backend)
    return hops + travels / rate


def replay(events, hardware, d, micro_batches=1, exchange_each=False):
    """Replay events of a step of one micro-batch. Returns the last of a few steps of several, a RecordedStep.

    `exchange_each`: every backward pass exchanges its gradients, or else the last one does. Exposed: the device waits
    for messages.
    """
    passes = [event for event in events if event.phase != "step"  # who has waited for parameters once waits no more
              and (exchange_each or event.what == "compute" or event.lag)]
    clock = 0.0
    arrived = {}  # (step, index of the launch) -> when the message has arrived
    messages = []
    free_at = {"out": 0.0, "in": 0.0}  # when the line has carried what is queued, in each direction
    for step in range(REPLAYED_STEPS):
        began = clock
        busy, live = [], []
        phases = {}
        for event in passes * (micro_batches - 1) + events:
            start = clock
            live.append((start, event.live))
            if event.what == "compute":
                clock += event.flops / hardware.flops + event.n_bytes / hardware.memory_rate
                busy.append((start, clock))
            elif event.what == "wait":
                clock = max(clock, arrived.get((step - event.lag, event.index), 0.0))
            else:
                used = {"send": ["out"], "recv": ["in"]}.get(event.kind, ["out", "in"])
                leaves = max(clock, *(free_at[direction] for direction in used))
                ranks = event.group_size or d
                arrives = leaves + message_seconds(event.kind, event.n_bytes, ranks, hardware, event.stride)
                free_at.update(dict.fromkeys(used, arrives))
                arrived[step, event.index] = arrives
                last = messages[-1] if messages else None
                if last and (last.kind, last.end) == (event.kind, leaves):  # close behind
                    last.bytes, last.end = last.bytes + event.n_bytes, arrives
                else:
                    messages.append(Message(event.kind, event.n_bytes, leaves, arrives))
            phases.setdefault(event.phase, []).append((start, clock))
    busy = union(busy)
    return RecordedStep(
        seconds=clock - began, exposed_seconds=clock - began - length(busy),
        phases=[(name, a - began, b - began) for name, spans in phases.items() for a, b in union(spans)],
        busy=[(a - began, b - began) for a, b in busy],
        communication=[Message(message.kind, message.bytes, max(message.start, began) - began, message.end - began)
                       for message in messages if message.end > began],
        memory=most_alive([(time, n_bytes) for time, n_bytes in live if n_bytes], began, clock))


def calibrated(rate, modelled, hardware, measured):
    """Return `hardware` with that `rate` ("flops", "between") at which modelled(hardware) takes `measured` seconds."""
    low, high = 1e6, 1e16
    for _ in range(50):
        middle = math.sqrt(low * high)
        tried = hardware._replace(**{rate: middle})
        if modelled(tried) > measured:
            low = middle
        else:
            high = middle
    if abs(modelled(tried) / measured - 1) > 1e-3:
        raise ValueError(f"no {rate} gives {measured:.3g} s: the model takes {modelled(tried):.3g} s")
    return tried
