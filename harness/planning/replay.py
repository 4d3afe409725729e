"""Models time: how long a recorded step takes on machines that aren't there, one event after the other."""

import dataclasses
import functools
import math
from typing import NamedTuple

from harness.measuring.ledger import wire_bytes
from harness.planning import alone
from harness.publishing.pictures import Message, RecordedStep, length, most_alive, union
from harness.publishing.tables import column, name_column, sheet_of
from harness.training.options import LLAMAS
from harness.training.rows import STAGE_4_BF16, RowId

REPLAYED_STEPS = 3  # parameters of one step travel in the next: the last is like all that follow


class Hardware(NamedTuple):
    """A machine that a step is replayed on, with NCCL. Rates in FLOPs and bytes per second, latencies in seconds a hop.

    `flops`: what a device reaches in matrix products, not what the maker states. `in_node`: a rank's ring inside a
    node. `between`: all links of a node to others; `sharing` groups use them at once (tensor parallelism).
    """
    flops: float
    memory_rate: float
    in_node: float
    between: float
    per_node: int = 8  # devices in a node
    sharing: int = 1
    latency_in_node: float = 3e-6
    latency_between: float = 14e-6


# As makers state them: 16-bit FLOPs, bytes of memory, bytes to a neighbour in the node, bytes of a node to others.
DEVICES = {"h100": Hardware(989e12, 3.35e12, 450e9, 400e9), "a100": Hardware(312e12, 2.0e12, 300e9, 100e9)}


def message_seconds(kind, n_bytes, d, hardware, stride=1):
    """Model the seconds of a collective of `n_bytes` (the full tensor) among d ranks, one of every `stride`.

    The other ranks do the same meanwhile. In a ring the message passes each rank once, and every node once. NCCL's
    all-reduce goes through trees over the nodes: as many bytes, fewer hops. `send` and `recv` go to a neighbour.
    """
    if d == 1:
        return 0.0
    sharing = hardware.sharing * stride
    ranks_in_node = max(1, hardware.per_node // sharing)  # of this group
    hops_between = math.ceil(d / ranks_in_node) - 1
    rate = hardware.in_node
    if hops_between:
        groups_on_link = min(sharing, hardware.per_node)  # a node has no more ranks than that to use its links at once
        rate = min(rate, hardware.between / groups_on_link)
    if kind in ("send", "recv"):
        latency = hardware.latency_between if hops_between else hardware.latency_in_node
        return latency + n_bytes / rate
    hops_in_node = d - 1 - hops_between
    latency = hops_in_node * hardware.latency_in_node + hops_between * hardware.latency_between
    if kind == "all_reduce":
        tree_depth = math.log2(hops_between + 1)
        tree = (ranks_in_node - 1) * hardware.latency_in_node + tree_depth * hardware.latency_between
        latency = 2 * min(latency, tree)
    # The ledger counts what d ranks send on average. Each of them passes a broadcast, or a reduce, on whole.
    travels = n_bytes if kind in ("broadcast", "reduce") else wire_bytes(kind, n_bytes, d, "nccl")
    return latency + travels / rate


class Player:
    """Plays events of rank 0 on two clocks: the device's, and the line's, on which messages queue. Times in seconds."""

    def __init__(self, hardware, d):
        self.hardware = hardware
        self.d = d
        self.clock = 0.0  # the device's
        self.free_at = {"out": 0.0, "in": 0.0}  # when the line has carried what is queued, in each direction
        self.arrived = {}  # (step, index of the launch) -> when the message has arrived
        self.messages = []

    def play(self, event, step):
        if event.what == "compute":
            self.clock += event.flops / self.hardware.flops + event.n_bytes / self.hardware.memory_rate
        elif event.what == "wait":
            arrival = self.arrived.get((step - event.lag, event.index), 0.0)
            self.clock = max(self.clock, arrival)
        else:
            self.launch(event, step)

    def launch(self, event, step):
        directions = {"send": ["out"], "recv": ["in"]}.get(event.kind, ["out", "in"])
        leaves = max(self.clock, *(self.free_at[direction] for direction in directions))
        n_ranks = event.group_size or self.d
        arrives = leaves + message_seconds(event.kind, event.n_bytes, n_ranks, self.hardware, event.stride)
        self.free_at.update(dict.fromkeys(directions, arrives))
        self.arrived[step, event.index] = arrives
        last = self.messages[-1] if self.messages else None
        if last and last.kind == event.kind and last.end == leaves:  # close behind: one message in a picture
            self.messages[-1] = last._replace(bytes=last.bytes + event.n_bytes, end=arrives)
        else:
            self.messages.append(Message(event.kind, event.n_bytes, leaves, arrives))


def replay(events, hardware, d, micro_batches=1, exchange_each=False):
    """Replay a few steps of `micro_batches`. Returns the last step, a RecordedStep.

    events: of a step of one micro-batch. exchange_each: every backward pass exchanges its gradients; or else only the
    last backward pass does. Exposed is the time in which the device waits for messages.
    """
    def is_in_first_passes(event):
        """Return whether the event happens in each micro-batch, not only in the last."""
        waits_for_parameters = event.lag > 0
        return event.phase != "step" and (exchange_each or event.what == "compute" or waits_for_parameters)

    events_of_first_passes = [event for event in events if is_in_first_passes(event)]
    player = Player(hardware, d)
    for step in range(REPLAYED_STEPS):
        began = player.clock
        busy = []
        live = []  # (time, bytes alive)
        phases = {}  # name -> spans
        for event in events_of_first_passes * (micro_batches - 1) + events:
            start = player.clock
            player.play(event, step)
            span = (start, player.clock)
            phases.setdefault(event.phase, []).append(span)
            if event.what == "compute":
                busy.append(span)
            if event.live:
                live.append((start, event.live))
    busy = union(busy)
    seconds = player.clock - began
    return RecordedStep(
        seconds=seconds, exposed_seconds=seconds - length(busy),
        phases=[(name, start - began, end - began) for name, spans in phases.items() for start, end in union(spans)],
        busy=[(start - began, end - began) for start, end in busy],
        communication=[message._replace(start=max(message.start, began) - began, end=message.end - began)
                       for message in player.messages if message.end > began],
        memory=most_alive(live, began, player.clock))


# -------------------------------------------------------------------------------------------------- Published runs


SHARING = 2  # GPUs that share a layer
LENGTH = 2048  # tokens of a sequence


class PublishedRun(NamedTuple):
    """A run of LLaMA-13B that others have published, on nodes of 8 x A100-80GB."""
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


# Megatron-LLaMA's README; neither the README nor the user's issue 22 there says how many GPUs share layers, and the
# README doesn't say how large a step is: both are assumed, as in LLaMA's paper and in issue 27 there.
MAKERS = [PublishedRun("overlapped", 256, 2048, 4, 1890), PublishedRun("distributed", 256, 2048, 4, 1630),
          PublishedRun("overlapped", 512, 2048, 4, 1845), PublishedRun("distributed", 512, 2048, 4, 1430)]
USERS_DISTRIBUTED = [PublishedRun("distributed", 128, 1024, 2, 1885.8),
                     PublishedRun("distributed", 128, 2048, 2, 2045.4)]
USERS_OVERLAPPED = [PublishedRun("overlapped", 128, 1024, 2, 1126.3), PublishedRun("overlapped", 128, 2048, 2, 1142.1)]


class ModelledRun(NamedTuple):
    """A published run beside the model. `calibration`: how the hardware was calibrated."""
    calibration: str
    run: PublishedRun
    tokens_per_s: float  # and GPU, modelled

    @property
    def error(self):
        return self.tokens_per_s / self.run.tokens_per_s - 1


class Check(NamedTuple):
    """Hardware as calibrated by the makers' runs and by the user's, and all ModelledRuns."""
    makers: Hardware
    users: Hardware
    runs: list


cost_of = functools.lru_cache(alone.cost_of)
record = functools.lru_cache(alone.record)


def seconds_of(run, hardware, is_hidden=True):
    """Model the seconds of a step. Not `is_hidden`: each message is waited for at once.

    Our stage 4 stands for the overlapped optimizer, which sends fp32 gradients after each micro-batch; stage 3 stands
    for the distributed optimizer.
    """
    is_overlapped = run.optimizer == "overlapped"
    row_id = RowId(STAGE_4_BF16, 400) if is_overlapped else RowId("stage 3 bf16/fp32")
    d = run.gpus // SHARING
    config = LLAMAS["13b"]._replace(tensor_parallel=SHARING)
    events = []
    for event in record(row_id, config, d, cost_of(config, "bfloat16", run.batch, LENGTH)).events:
        if is_overlapped and event.kind == "reduce_scatter":
            events.append(event._replace(n_bytes=2 * event.n_bytes))
        else:
            events.append(event)
        if event.what == "launch" and not is_hidden:
            events.append(event._replace(what="wait"))
    micro_batches = run.sequences // d // run.batch
    return replay(events, hardware, d, micro_batches, exchange_each=is_overlapped).seconds


def calibrated(rate, seconds, hardware, measured):
    """Return `hardware` with that `rate` ("flops", "between") at which seconds(hardware) is what was `measured`."""
    low = 1e6
    high = 1e16
    for _ in range(50):
        middle = math.sqrt(low * high)
        tried = hardware._replace(**{rate: middle})
        if seconds(tried) > measured:
            low = middle
        else:
            high = middle
    return tried


def published():
    """Calibrate two clusters, and model all published runs. Returns a Check."""
    def modelled(calibration, runs, hardware, is_hidden=True):
        return [ModelledRun(calibration, run, run.tokens / seconds_of(run, hardware, is_hidden)) for run in runs]

    def seconds_more(hardware):
        return seconds_of(more_sequences, hardware) - seconds_of(fewer_sequences, hardware)

    a100 = DEVICES["a100"]._replace(sharing=SHARING)
    calibrating, *others = MAKERS
    makers = calibrated("flops", functools.partial(seconds_of, calibrating), a100, calibrating.seconds)
    # These two runs differ in the number of micro-batches alone, which send nothing.
    fewer_sequences, more_sequences = USERS_DISTRIBUTED
    users = calibrated("flops", seconds_more, a100, more_sequences.seconds - fewer_sequences.seconds)
    users = calibrated("between", functools.partial(seconds_of, fewer_sequences), users, fewer_sequences.seconds)
    return Check(makers, users, [
        *modelled("calibrated", [calibrating], makers),
        *modelled("predicted", [*others, *USERS_DISTRIBUTED, *USERS_OVERLAPPED], makers),
        *modelled("calibrated, user's", USERS_DISTRIBUTED, users),
        *modelled("predicted, user's", USERS_OVERLAPPED, users),
        *modelled("none hidden", USERS_OVERLAPPED, users, is_hidden=False)])


def add_published(report, check):
    """Return the Report of make plan with the check: its table, and figures for sentences of a page."""
    def percents(calibration, runs):
        """Return the errors of these published runs."""
        return [100 * abs(modelled.error) for modelled in check.runs
                if modelled.calibration == calibration and modelled.run in runs]
    numbers = {
        "off_theirs": math.ceil(max(percents("predicted", MAKERS))),
        "off_users": math.floor(min(percents("predicted", USERS_OVERLAPPED))),
        "off_users_own": math.floor(min(percents("predicted, user's", USERS_OVERLAPPED))),
        "off_none_hidden": math.ceil(max(percents("none hidden", USERS_OVERLAPPED))),
        "flops_theirs": check.makers.flops / 1e12, "flops_users": check.users.flops / 1e12,
        "between_users": check.users.between / 1e9}
    figures = {name: f"{number:,.0f}" for name, number in numbers.items()}
    return dataclasses.replace(report, sheets={**report.sheets, "published": published_sheet(check.runs)},
                               figures={**report.figures, **figures})


def published_sheet(runs):
    """Make the table of ModelledRuns."""
    return sheet_of(
        "LLaMA-13B on 8 x A100 a node: tokens/s a GPU", runs, {
            "calibration": name_column("calibration"),
            "optimizer": name_column(lambda modelled: modelled.run.optimizer),
            "gpus": column("GPUs", lambda modelled: modelled.run.gpus),
            "sequences": column("sequences\na step", lambda modelled: modelled.run.sequences),
            "published": column("", lambda modelled: modelled.run.tokens_per_s, "published", ",.0f"),
            "modelled": column("", "tokens_per_s", "modelled", ",.0f"),
            "error": column("error", "error", "modelled", "+.1%")},
        ["What is assumed, and calibrated on which rows: results/methods.md."])
