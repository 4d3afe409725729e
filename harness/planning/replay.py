"""Models time: how long a recorded step takes on machines that aren't there, one event after the other.

alone.py trains as rank 0 of d ranks, and lists what the rank does as Events. Here a Player plays the events with the
speed of given Hardware. The lower half of the file compares the model with runs that others have published.

    Event                its field `what` is "compute", "launch" (of a collective) or "wait" (for a message); `phase` is
                         "forward", "backward" or "step". Of a launch: `index`, its number in the step; `group_size`,
                         how many ranks take part; `stride`, the distance between their numbers. Of a wait: `index` of
                         the awaited launch, and `lag`, how many steps ago that was, 0 or 1
    RowId                a way to train, listed in harness/training/rows.py: its name, and MiB of a bucket if it has any
    device               a GPU, with a rank
    node                 a machine with several devices
    hop                  the way of a message from one device to the next
    message              what a collective sends
    data-parallel group  ranks that have the same part of a model and train on different data
    tensor parallelism   several devices share each layer of the model; each has a part of it
    micro-batch          what one forward and one backward pass train on; several may make up a step
    stages 3 and 4       optimizers of this project, in the folders stage3_gradbuffer/ and stage4_overlap/
"""

import bisect
import functools
import math
from typing import NamedTuple

from harness.measuring.ledger import wire_bytes
from harness.planning import alone
from harness.publishing.tables import column, name_column, sheet_of
from harness.training.options import LLAMAS
from harness.training.rows import STAGE_4_BF16, RowId

# Parameters of one step may still travel in the next step. So the first two steps differ from all later steps.
REPLAYED_STEPS = 3


class Hardware(NamedTuple):
    """A cluster with NCCL, on which steps are replayed. Rates are per second, latencies in seconds."""
    flops: float  # floating-point operations that a device does in matrix products
    memory_rate: float  # bytes that a device reads or writes in its own memory
    in_node: float  # bytes from one device to the next device of the same node
    between: float  # bytes over all links from a node to other nodes together
    per_node: int = 8  # number of devices in a node
    sharing: int = 1  # number of devices that share a layer by tensor parallelism, each in another data-parallel group
    latency_in_node: float = 3e-6  # until a message reaches the next device of the node
    latency_between: float = 14e-6  # until a message reaches the next node


# As makers state them. FLOPs are of 16-bit numbers.
DEVICES = {
    "h100": Hardware(flops=989e12, memory_rate=3.35e12, in_node=450e9, between=400e9),
    "a100": Hardware(flops=312e12, memory_rate=2.0e12, in_node=300e9, between=100e9),
}


def message_seconds(kind, n_bytes, d, hardware, stride=1):
    """Model the seconds of a collective of `n_bytes` (the full tensor) in a group of d ranks.

    One of every `stride` neighbouring ranks is in the group. Other groups, of the other ranks, do the same at the same
    time. A message goes from rank to rank in a ring, through each node once. NCCL's all-reduce may instead go through
    trees over the nodes, with as many bytes and fewer hops. A "send" or "recv" goes to a neighbour.
    """
    if d == 1:
        return 0.0
    n_groups = hardware.sharing * stride  # a node has ranks of so many groups, which share its links
    ranks_in_node = max(1, hardware.per_node // n_groups)  # number of this group's ranks in a node
    hops_between = math.ceil(d / ranks_in_node) - 1  # from node to node
    rate = hardware.in_node
    if hops_between:
        groups_on_link = min(n_groups, hardware.per_node)  # at most one for each device of the node
        rate = min(rate, hardware.between / groups_on_link)
    if kind in ("send", "recv"):
        latency = hardware.latency_between if hops_between else hardware.latency_in_node
        return latency + n_bytes / rate
    hops_in_node = d - 1 - hops_between
    latency = hops_in_node * hardware.latency_in_node + hops_between * hardware.latency_between
    if kind == "all_reduce":
        tree_depth = math.log2(hops_between + 1)
        tree_latency = (ranks_in_node - 1) * hardware.latency_in_node + tree_depth * hardware.latency_between
        latency = 2 * min(latency, tree_latency)  # twice: a reduce-scatter and an all-gather, or up and down the tree
    # `wire_bytes` is an average over the ranks. In a broadcast or reduce the last rank of the ring sends nothing, and
    # each of the other ranks sends all bytes.
    passing_bytes = n_bytes if kind in ("broadcast", "reduce") else wire_bytes(kind, n_bytes, d, "nccl")
    return latency + passing_bytes / rate


# Kind of message -> directions of the link that it takes; all other kinds take both.
DIRECTIONS = {"send": ["out"], "recv": ["in"]}


class Player:
    """Plays events of rank 0 on two clocks: the device's and the link's. Messages queue on the link. Times in seconds.
    """

    def __init__(self, hardware):
        self.hardware = hardware
        self.clock = 0.0  # the device's: when the events so far are done
        self.waited = 0.0  # the part of `clock` in which the device waited for messages
        # Direction -> the link's clock: when it has carried all messages that are queued so far.
        self.link_free_at = {"out": 0.0, "in": 0.0}
        # (number of the step, index of the launch) -> when the message has arrived. `launch` fills it.
        self.arrives_at = {}

    def play(self, event, step):
        """Play an event of step number `step`."""
        if event.what == "compute":
            self.clock += event.flops / self.hardware.flops + event.n_bytes / self.hardware.memory_rate
        elif event.what == "launch":
            self.launch(event, step)
        else:
            # `lag` is 1 if the message was launched in the step before. Step 0 doesn't wait for such a message.
            arrives_at = self.arrives_at.get((step - event.lag, event.index), 0.0)
            wait_seconds = max(0.0, arrives_at - self.clock)
            self.waited += wait_seconds
            self.clock += wait_seconds

    def launch(self, event, step):
        """Queue the message of a "launch" event on the link: it leaves when all its directions are free."""
        directions = DIRECTIONS.get(event.kind, ["out", "in"])
        leaves_at = max(self.clock, *(self.link_free_at[direction] for direction in directions))
        seconds = message_seconds(event.kind, event.n_bytes, event.group_size, self.hardware, event.stride)
        self.link_free_at.update(dict.fromkeys(directions, leaves_at + seconds))
        self.arrives_at[step, event.index] = leaves_at + seconds


class ModelledStep(NamedTuple):
    """How long a step takes by the model."""
    seconds: float
    exposed_seconds: float  # the part of `seconds` in which the device waits for messages


def replay(events, hardware, micro_batches=1, exchange_each=False):
    """Replay REPLAYED_STEPS steps of `micro_batches` each, and return the last step, a ModelledStep.

    Args:
        events: the events of a step of one micro-batch.
        exchange_each: whether every backward pass exchanges its gradients, and not only the last pass of a step.
    """
    def is_in_first_passes(event):
        """Return whether the event happens in each micro-batch of a step, not only in the last one."""
        waits_for_parameters = event.lag > 0  # which the step before has sent
        is_repeated = exchange_each or event.what == "compute" or waits_for_parameters
        return is_repeated and event.phase != "step"

    events_of_first_passes = [event for event in events if is_in_first_passes(event)]
    player = Player(hardware)
    for step in range(REPLAYED_STEPS):
        clock_before = player.clock
        waited_before = player.waited
        for event in events_of_first_passes * (micro_batches - 1) + events:
            player.play(event, step)
    return ModelledStep(player.clock - clock_before, player.waited - waited_before)


# -------------------------------------------------------------------------------------------------- Published runs


SHARING = 2  # number of GPUs that share a layer by tensor parallelism
LENGTH = 2048  # tokens of a sequence


class PublishedRun(NamedTuple):
    """A run of LLaMA-13B that others have published, on nodes of 8 x A100-80GB."""
    optimizer: str  # "overlapped" or "distributed", as Megatron-LLaMA calls its two optimizers
    gpus: int  # number of all GPUs
    sequences: int  # number of sequences in a step, on all GPUs
    batch: int  # number of sequences in a micro-batch
    tokens_per_s: float  # tokens per second and GPU, as published


# MAKERS is from the README of Megatron-LLaMA, USERS is what a user reports in that repository's issue 22. How many GPUs
# share a layer, and how many sequences a step of MAKERS has, is assumed, as in LLaMA's paper and in issue 27.
MAKERS = [PublishedRun("overlapped", 256, 2048, 4, 1890), PublishedRun("distributed", 256, 2048, 4, 1630),
          PublishedRun("overlapped", 512, 2048, 4, 1845), PublishedRun("distributed", 512, 2048, 4, 1430)]
USERS = [PublishedRun("distributed", 128, 1024, 2, 1885.8), PublishedRun("distributed", 128, 2048, 2, 2045.4),
         PublishedRun("overlapped", 128, 1024, 2, 1126.3), PublishedRun("overlapped", 128, 2048, 2, 1142.1)]


class ModelledRun(NamedTuple):
    """A published run, and what the model gives for it."""
    calibration: str  # "calibrated": the hardware's FLOPs were chosen to agree with this run; else "predicted"
    run: PublishedRun
    tokens_per_s: float  # tokens per second and GPU, modelled

    @property
    def error(self):
        """Return how much larger the modelled number is, as a part of the published number."""
        return self.tokens_per_s / self.run.tokens_per_s - 1


@functools.cache
def events_of(optimizer, d, batch):
    """Record a step of a published run on d data-parallel ranks. Returns its Events.

    Stage 4 stands for the overlapped optimizer, and stage 3 for the distributed optimizer. The overlapped optimizer
    sends gradients in fp32, and stage 4 in 16 bits, so the bytes of reduce-scatters are doubled.
    """
    config = LLAMAS["13b"]._replace(tensor_parallel=SHARING)
    cost = alone.cost_of(config, "bfloat16", batch, LENGTH)
    if optimizer == "distributed":
        return alone.record(RowId("stage 3 bf16/fp32"), config, d, cost).events
    # Stage 4 has buckets of 400 MiB here. Only reduce-scatters send gradients.
    events = alone.record(RowId(STAGE_4_BF16, 400), config, d, cost).events
    return [event._replace(n_bytes=2 * event.n_bytes) if event.kind == "reduce_scatter" else event for event in events]


def modelled_tokens_per_s(run, hardware):
    """Model the tokens per second and GPU of a published run on `hardware`.

    The overlapped optimizer exchanges gradients after each micro-batch, the distributed optimizer once per step.
    """
    d = run.gpus // SHARING
    micro_batches = run.sequences // d // run.batch
    events = events_of(run.optimizer, d, run.batch)
    step = replay(events, hardware, micro_batches, exchange_each=run.optimizer == "overlapped")
    return run.sequences * LENGTH / run.gpus / step.seconds


def calibrated(run, hardware):
    """Return `hardware` with the FLOPs per second at which the model of `run` agrees with what was published."""
    def of_flops(flops):
        """Return the modelled tokens per second of a device with this many FLOPs per second."""
        return modelled_tokens_per_s(run, hardware._replace(flops=flops))

    # A search by halves among whole numbers of FLOPs, which works because more FLOPs give more tokens.
    flops = bisect.bisect(range(10**16), run.tokens_per_s, key=of_flops)
    return hardware._replace(flops=flops)


def check():
    """Compare the model with all published runs.

    The hardware's FLOPs are calibrated on the first run of MAKERS; all other runs are predicted. Returns a table, and
    {name: text} of numbers for the sentences of a page.
    """
    first, *others = MAKERS
    hardware = calibrated(first, DEVICES["a100"]._replace(sharing=SHARING))

    def model_all(calibration, runs):
        return [ModelledRun(calibration, run, modelled_tokens_per_s(run, hardware)) for run in runs]

    of_makers = model_all("predicted", others)
    of_users = model_all("predicted", USERS)
    errors_of_makers = [abs(modelled.error) for modelled in of_makers]
    errors_of_overlapped = [modelled.error for modelled in of_users if modelled.run.optimizer == "overlapped"]
    figures = {  # "theirs" in a name: of MAKERS
        "off_theirs": f"{math.ceil(100 * max(errors_of_makers))}",  # error of the worst prediction for MAKERS, in %
        "off_users": f"{math.floor(100 * min(errors_of_overlapped))}",  # smallest error for USERS, overlapped, in %
        "flops_theirs": f"{hardware.flops / 1e12:.0f}"}  # TFLOP/s, calibrated
    sheet = sheet_of(
        "LLaMA-13B on 8 x A100 a node: tokens/s a GPU", [*model_all("calibrated", [first]), *of_makers, *of_users], {
            "calibration": name_column("calibration"),
            "optimizer": name_column(lambda modelled: modelled.run.optimizer),
            "gpus": column("GPUs", lambda modelled: modelled.run.gpus),
            "sequences": column("sequences\na step", lambda modelled: modelled.run.sequences),
            "published": column("", lambda modelled: modelled.run.tokens_per_s, "published", ",.0f"),
            "modelled": column("", "tokens_per_s", "modelled", ",.0f"),
            "error": column("error", "error", "modelled", "+.1%")},
        ["What is assumed, and calibrated on which row: results/methods.md."])
    return sheet, figures
