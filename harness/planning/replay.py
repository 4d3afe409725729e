"""Models time: how long a recorded step takes on machines that aren't there, one event after the other."""

import functools
import math
from typing import NamedTuple

from harness.measuring.ledger import wire_bytes
from harness.planning import alone
from harness.publishing.pictures import Message, RecordedStep, length, most_alive, union
from harness.publishing.tables import column, name_column, sheet_of
from harness.training import options
from harness.training.rows import STAGE_4_BF16, RowId

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
                    messages[-1] = last._replace(bytes=last.bytes + event.n_bytes, end=arrives)
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


# ------------------------------------------------- How far the model is from published runs, which make plan prints


cost_of = functools.lru_cache(alone.cost_of)
record = functools.lru_cache(alone.record)


# -------------------------------------------------------------------------------------------------- Published runs


class Run(NamedTuple):
    """A published run of LLaMA-13B, sequences of 2048 tokens on nodes of 8 x A100-80GB."""
    optimizer: str  # overlapped, or distributed
    gpus: int
    sequences: int  # per step
    batch: int  # sequences of a micro-batch
    tokens_per_s: float  # and GPU

    @property
    def tokens(self):
        """Return tokens per step and GPU."""
        return self.sequences * LENGTH / self.gpus

    @property
    def seconds(self):
        return self.tokens / self.tokens_per_s


# Megatron-LLaMA's README; neither it nor the user's issue 22 there says how many GPUs share layers, and the README not
# how large a step is: both are assumed, as in LLaMA's paper and in issue 27 there.
PUBLISHED = [Run("overlapped", 256, 2048, 4, 1890), Run("distributed", 256, 2048, 4, 1630),
             Run("overlapped", 512, 2048, 4, 1845), Run("distributed", 512, 2048, 4, 1430)]
OF_USER = [Run("distributed", 128, 1024, 2, 1885.8), Run("distributed", 128, 2048, 2, 2045.4),
           Run("overlapped", 128, 1024, 2, 1126.3), Run("overlapped", 128, 2048, 2, 1142.1)]
SHARING, LENGTH = 2, 2048  # GPUs that share a layer; tokens of a sequence


class PublishedRun(NamedTuple):
    """A Run, and what was modelled for it. `calibration`: how the hardware was calibrated."""
    calibration: str
    run: Run
    modelled: float  # tokens per second and GPU

    @property
    def error(self):
        return self.modelled / self.run.tokens_per_s - 1


def step_of(run, hardware, is_hidden=True):
    """Model the seconds of a step. Not `is_hidden`: each message is waited for at once.

    Our stage 4 stands for the overlapped optimizer, which sends fp32 gradients after each micro-batch; stage 3 stands
    for the distributed one.
    """
    is_overlapped = run.optimizer == "overlapped"
    row_id = RowId(STAGE_4_BF16, 400) if is_overlapped else RowId("stage 3 bf16/fp32")
    d = run.gpus // SHARING
    spec = options.SPECS["13b"]._replace(tensor_parallel=SHARING)
    events = []
    for event in record(row_id, spec, d, cost_of(spec, "bfloat16", run.batch, LENGTH)).events:
        is_fp32 = is_overlapped and event.kind == "reduce_scatter"
        events.append(event._replace(n_bytes=2 * event.n_bytes) if is_fp32 else event)
        if event.what == "launch" and not is_hidden:
            events.append(event._replace(what="wait"))
    return replay(events, hardware, d, run.sequences // d // run.batch, is_overlapped).seconds


class Calibration(NamedTuple):
    """Hardware as calibrated by the publisher's runs and by the user's, and all PublishedRuns."""
    publishers: Hardware
    users: Hardware
    runs: list


def published():
    """Calibrate two clusters, and model all published runs. Returns a Calibration."""
    def modelled(calibration, runs, hardware, is_hidden=True):
        return [PublishedRun(calibration, run, run.tokens / step_of(run, hardware, is_hidden)) for run in runs]
    small, large, *overlapped = OF_USER  # the first two differ in micro-batches alone, which send nothing
    a100 = DEVICES["a100"]._replace(sharing=SHARING)
    publishers = calibrated("flops", lambda hardware: step_of(PUBLISHED[0], hardware), a100, PUBLISHED[0].seconds)
    users = calibrated("flops", lambda hardware: step_of(large, hardware) - step_of(small, hardware), a100,
                       large.seconds - small.seconds)
    users = calibrated("between", lambda hardware: step_of(small, hardware), users, small.seconds)
    return Calibration(publishers, users, [
        *modelled("calibrated", PUBLISHED[:1], publishers), *modelled("predicted", PUBLISHED[1:] + OF_USER, publishers),
        *modelled("calibrated, user's", [small, large], users), *modelled("predicted, user's", overlapped, users),
        *modelled("none hidden", overlapped, users, is_hidden=False)])


# ---------------------------------------------------------------------------------------------------------- Its table


def add_published(report, calibration):
    """Add the check to a Report of make plan: its table, and figures for sentences of a page."""
    report.sheets["published"] = published_sheet(calibration.runs)

    def percents(name, is_users, *optimizers):
        """Return the errors of these published runs; the user's were on 128 GPUs."""
        return [100 * abs(run.error) for run in calibration.runs if run.calibration == name
                and run.run.optimizer in optimizers and (run.run.gpus == 128) == is_users]
    numbers = {
        "off_theirs": math.ceil(max(percents("predicted", False, "overlapped", "distributed"))),
        "off_users": math.floor(min(percents("predicted", True, "overlapped"))),
        "off_users_own": math.floor(min(percents("predicted, user's", True, "overlapped"))),
        "off_none_hidden": math.ceil(max(percents("none hidden", True, "overlapped"))),
        "flops_theirs": calibration.publishers.flops / 1e12, "flops_users": calibration.users.flops / 1e12,
        "between_users": calibration.users.between / 1e9}
    report.figures |= {name: f"{number:,.0f}" for name, number in numbers.items()}


def published_sheet(runs):
    """Make the table of PublishedRuns."""
    return sheet_of(
        "LLaMA-13B on 8 x A100 a node: tokens/s a GPU", runs, {
            "calibration": name_column("calibration"), "optimizer": name_column(lambda run: run.run.optimizer),
            "gpus": column("GPUs", lambda run: run.run.gpus),
            "sequences": column("sequences\na step", lambda run: run.run.sequences),
            "published": column("", lambda run: run.run.tokens_per_s, "published", ",.0f"),
            "modelled": column("", "modelled", "modelled", ",.0f"),
            "error": column("error", "error", "modelled", "+.1%")},
        ["What is assumed, and calibrated on which rows: results/methods.md."])
