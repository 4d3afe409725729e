"""Rows run dry, and replayed on stated hardware: what a rank would hold, how long a step would take."""

import functools
import importlib
import math
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import stage4_overlap
from harness import models
from harness import rows as catalogue
from harness.alone import rank_0_of
from harness.ledger import Ledger, wire_bytes
from harness.memory import StorageMemory, mark_grads, mark_state
from harness.models import build_model, forward_flops
from harness.results import (
    Message,
    PlanConditions,
    PlanResult,
    PlanRow,
    PlanSize,
    PublishedRun,
    RecordedStep,
    length,
    most_alive,
    union,
)
from harness.rows import Choice
from stage4_overlap.transport import GlooTransport

# -------------------------------------------------------------------------------------------------------------- dry_run
# A step of training that computes nothing: the code of a stage on tensors without memory, on rank 0 of d.


class Event(NamedTuple):
    """Something that happens in a step, on rank 0, in `phase`: forward, backward or step.

    `what`: "compute": operators ran, of so many FLOPs or bytes read and written. "launch": a collective left, `kind` as
    in the ledger, `n_bytes` of the full tensor. "wait": computing stops until launch `index` has arrived, of this step,
    or with `lag` 1 of the step before. `live`: bytes that are alive by then. `group_size`, `stride`: a message travels
    among so many ranks, one of every `stride`; 0: among all.
    """
    what: str
    phase: str
    flops: float = 0
    n_bytes: int = 0
    kind: str = ""
    index: int = 0
    lag: int = 0
    live: int = 0
    group_size: int = 0
    stride: int = 1


class Cost(NamedTuple):
    """Of a micro-batch: bytes of activations at their peak; FLOPs of the forward pass."""
    activations: float
    flops: float


class Recorded(NamedTuple):
    """`held`: bytes by kind after a step, `theory`: their sum by the formula. `peak`: the most at one moment of a step,
    activations included."""
    numel: int
    held: dict
    theory: float
    peak: float
    events: list


class Dry(StorageMemory):
    """Counts memory and writes events down; collectives go nowhere."""

    def __init__(self):
        super().__init__()
        self.works, self.ledger = [], Ledger()
        self.begin_step(0)

    # torch would guard every operator against being compiled, which takes longer than all else here.
    _should_skip_dynamo = classmethod(lambda cls: False)

    def begin_step(self, number):
        self.number, self.phase, self.events, self.n_launched, self.futures = number, "forward", [], 0, []
        self.reset_peak()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "prim":  # asks for a property
            return function(*args, **kwargs)
        arguments = {**dict(zip([argument.name for argument in function._schema.arguments], args)), **kwargs}
        if function.namespace == "c10d":
            return self.launch(function._schema, args, arguments)
        result = function(*args, **kwargs)
        for tensor in tensors_in(result):
            self._track_tensor(tensor)
        self.compute(0, bytes_touched(function, arguments, result))
        return result

    def compute(self, flops, n_bytes):
        """What has no FLOPs joins the event before, if that computes too."""
        last = self.events[-1] if self.events else None
        if not flops and last and last.what == "compute" and last.phase == self.phase:
            live = max(last.live, self.live)
            self.events[-1] = last._replace(n_bytes=last.n_bytes + n_bytes, live=live)
        elif flops or n_bytes:
            self.events.append(Event("compute", self.phase, flops, n_bytes, live=self.live))

    def launch(self, schema, args, arguments):
        entry = self.ledger.entry_of(schema.name, arguments)
        kind, work = entry.kind, FakeWork(self, self.number, self.n_launched, args[0])
        if kind in ("broadcast", "reduce") and entry.group_size == 2:  # goes from one to the other
            kind = "send" if (arguments["root_rank"] == 0) == (kind == "broadcast") else "recv"
        ranks = [*dist.get_process_group_ranks(dist.ProcessGroup.unbox(arguments["process_group"]))[:2], 1]
        self.events.append(Event("launch", self.phase, 0, entry.size, kind, self.n_launched, live=self.live,
                                 group_size=entry.group_size, stride=max(1, ranks[1] - ranks[0])))
        self.n_launched += 1
        self.works = [*self.works[-64:], work]  # alive until C++ has taken it
        return work.boxed() if len(schema.returns) == 1 else (args[0], work.boxed())

    def wait(self, number, index):
        self.events.append(Event("wait", self.phase, index=index, lag=self.number - number))


class FakeWork(dist.Work):
    """Arrives nowhere. Whoever waits for it is written down."""

    def __init__(self, dry, number, index, tensors):
        super().__init__()
        self.dry, self.number, self.index, self.tensors, self.is_known = dry, number, index, tensors, False

    def wait(self, timeout=None):
        if not self.is_known:
            self.dry.wait(self.number, self.index)
        self.tensors = None
        return True

    def is_completed(self):
        """Who asks is told so when two more have left, and waits no more."""
        self.is_known = self.index + 2 < self.dry.n_launched or self.number < self.dry.number
        return self.is_known

    def get_future(self):
        self.dry.futures.append(self.index)
        future = torch.futures.Future()
        future.set_result(self.tensors)
        self.tensors = None
        return future


def tensors_in(values):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def bytes_touched(function, arguments, result):
    """What an operator reads and writes in the device's memory. Views touch nothing, and neither do empty tensors."""
    schema = function._schema
    if function.is_view or "empty" in schema.name:
        return 0
    # A fused optimizer writes gradients only where it unscales them.
    written = {one.name for one in schema.arguments if one.alias_info and one.alias_info.is_write} - {"grads"}
    unread = written if schema.name.endswith(("copy_", "zero_", "fill_")) else ["out"]
    read = [value for name, value in arguments.items() if name not in unread]
    made = [] if any(one.alias_info for one in schema.returns) else result
    return sum(tensor.nbytes for tensor in tensors_in([read, [arguments.get(name) for name in written], made]))


@contextmanager
def fake(d, cap_mb=None, gloo=False):
    """This process is rank 0 of d, tensors have no memory, and stages are cores. `gloo`: stage 4 exchanges parts.

    DDP gets the buckets that it has from its second step on, and compares no values: fake tensors have none.
    """
    assign, optimizer_class = dist._compute_bucket_assignment_by_size, catalogue.optimizer_class
    stage_4 = stage4_overlap.optimizer.ShardedOptimizer
    limits = [int(cap_mb * 2**20)] if cap_mb else [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20]

    def in_order_of_gradients(tensors, _, sparse):
        buckets, sizes = assign(tensors[::-1], limits, sparse[::-1])
        return [[len(tensors) - 1 - i for i in bucket] for bucket in buckets][::-1], sizes[::-1]

    def core(package, _=None):
        module = {"stage": f"{package}.optimizer", "varia": package}.get(package[:5])
        return importlib.import_module(module).ShardedOptimizer if module else optimizer_class(package)
    with (rank_0_of(d), torch.device("meta"), mock.patch.object(catalogue, "optimizer_class", core),
          mock.patch("torch.optim.adam._device_dtype_check_for_fused", lambda *args: None),
          mock.patch.object(stage_4, "transport_for",
                            staticmethod((lambda group, *_: GlooTransport(group)) if gloo else stage_4.transport_for)),
          mock.patch.multiple(dist, _compute_bucket_assignment_by_size=in_order_of_gradients,
                              _verify_params_across_processes=lambda *args: None)):
        to_nowhere = dist.group.WORLD._get_backend(torch.device("cpu"))
        dist.group.WORLD._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.CUSTOM, to_nowhere)
        yield


def cost_of(spec, dtype, batch_size, sequence_length):
    """-> Cost: activations of a forward and backward pass of the model itself, as counted; FLOPs by formula."""
    with FakeTensorMode(), Dry() as dry:  # on the meta device attention would be another one
        model = build_model(spec, dtype)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
        tokens, targets = torch.zeros(2, batch_size, sequence_length, dtype=torch.int64)
        before = dry.live
        dry.reset_peak()
        model(tokens, targets).backward()
        numel = sum(param.numel() for param in model.parameters())
        return Cost(dry.peak - before, forward_flops(spec, numel, batch_size, sequence_length))


class Part(torch.autograd.Function):
    """One parameter, as if its part of the model ran: it holds as much, takes as many FLOPs, and has a gradient."""

    @staticmethod
    def forward(ctx, x, param, cost, dry):
        ctx.param, ctx.cost, ctx.dry = param, cost, dry
        dry.hold(cost.activations)
        dry.compute(cost.flops, 0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.dry.compute(2 * ctx.cost.flops, 0)
        ctx.dry.hold(-ctx.cost.activations)
        return grad, torch.empty_like(ctx.param), None, None


def stand_in(model, cost, dry):
    """Replace `model.forward`: modules in the order in which they are registered. Hooks run; stage 4 waits in them."""
    parts = [(module, list(module.parameters(recurse=False))) for module in model.modules()]
    total = sum(param.numel() for _, params in parts for param in params)  # a tied parameter counts twice

    def forward():
        x = torch.zeros((), requires_grad=True)
        for module, params in parts:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
            for param in params:
                x = Part.apply(x, param, Cost(*(value * param.numel() / total for value in cost)), dry)
        return x
    model.forward = forward


def record(choice, spec, d, cost, gloo=False):
    """Two steps of that row on rank 0 of d -> Recorded, of the second."""
    way = catalogue.find(*choice)
    with fake(d, choice.bucket_mb, gloo), Dry() as dry:
        model = build_model(spec, way.dtype)
        stand_in(model, cost, dry)
        training = way.build(model, dict(fused=True))
        for number in (0, 1):
            dry.begin_step(number)
            loss = (training.forward if number else model)()  # DDP would change its buckets after its first step
            dry.phase = "backward"
            loss.backward()
            del loss
            for index in dry.futures:  # DDP's C++ waits for them when the backward pass ends, and tells nobody
                dry.wait(number, index)
            dry.phase = "step"
            training.update()
            held = held_by(dry, training)
            training.zero_grad()
        numel = sum(param.numel() for param in model.parameters())
        theory = way.bytes_per_param(numel, d, SimpleNamespace(bucket_buffer_bytes=held["buffers"])) * numel
        return Recorded(numel, held, theory, dry.peak, dry.events)


def held_by(memory, training):
    """-> {kind: bytes}, after a step. What no kind knows are buffers: those that buckets travel in."""
    params, inner = list(training.model.parameters()), getattr(training.optimizer, "optimizer", training.optimizer)
    memory.mark("parameters", params)
    mark_grads(memory, params)
    mark_grads(memory, stepped := [param for group in inner.param_groups for param in group["params"]])
    memory.mark("main parameters", stepped)
    mark_state(memory, inner)
    found = memory.by_kind()
    return {kind: found.get(kind, 0) for kind in ("parameters", "gradients", "main parameters", "state", "buffers")}


# --------------------------------------------------------------------------------------------------------------- replay
# How long a recorded step takes on machines that aren't there: its events, one after the other, on stated hardware.


REPLAYED_STEPS = 3  # parameters of one step travel in the next: the last is like all that follow


class Hardware(NamedTuple):
    """What a step is replayed on. Rates in FLOPs and bytes a second, latencies in seconds a hop.

    `flops`: what a device reaches in matrix products, not what it is sold with. `in_node`: a rank's ring inside a node.
    `between`: all links of a node to others; `sharing` groups use them at once (tensor parallelism). `trees`: whether
    reduce-scatters and all-gathers go through trees over the nodes, or in rings.
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
    trees: bool = False


def message_seconds(kind, n_bytes, d, hardware, stride=1):
    """Of one collective of `n_bytes` (the full tensor) among one rank of every `stride`, d in all, while the others do
    the same. In a ring it passes each of them once, and every node once.

    NCCL's all-reduce goes through trees over the nodes: as many bytes, fewer hops. So do its reduce-scatter and
    all-gather where it takes PAT (arXiv:2506.20252): on its own with one GPU a node. `send`, `recv`: to a neighbour.
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
    tree = (in_group - 1) * hardware.latency_in_node + math.log2(between + 1) * hardware.latency_between
    if kind == "all_reduce":
        hops = 2 * (min(hops, tree) if hardware.backend == "nccl" else hops)
    elif hardware.trees and kind in ("reduce_scatter", "all_gather"):
        hops = min(hops, tree)
    # The ledger counts what d ranks send on average. Each of them passes a broadcast, or a reduce, on whole.
    travels = n_bytes if kind in ("broadcast", "reduce") else wire_bytes(kind, n_bytes, d, hardware.backend)
    return hops + travels / rate


def accumulated(events, micro_batches, exchange_each):
    """Events of a step of one micro-batch -> of several. `exchange_each`: every backward pass exchanges its gradients,
    or else the last one does."""
    # Who has waited for parameters once waits no more.
    passes = [event for event in events if event.phase != "step"
              and (exchange_each or event.what == "compute" or event.lag)]
    return passes * (micro_batches - 1) + events


def replay(events, hardware, d, micro_batches=1, exchange_each=False):
    """-> the last of a few steps, a RecordedStep. Exposed: the device waits for messages."""
    clock, arrived, messages = 0.0, {}, []
    free_at = {"out": 0.0, "in": 0.0}  # when the line has carried what is queued, in each direction
    for step in range(REPLAYED_STEPS):
        began, busy, phases, live = clock, [], {}, []
        for event in accumulated(events, micro_batches, exchange_each):
            start = clock
            live.append((start, event.live))
            if event.what == "compute":
                clock += event.flops / hardware.flops + event.n_bytes / hardware.memory_rate
                busy.append((start, clock))
            elif event.what == "wait":
                clock = max(clock, arrived[step - event.lag, event.index] if step >= event.lag else 0.0)
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
        communication=[Message(one.kind, one.bytes, max(one.start, began) - began, one.end - began)
                       for one in messages if one.end > began],
        memory=most_alive([one for one in live if one[1]], began, clock))


# ---------------------------------------------------------------------------------------------------------- calibration
# The rate at which the model takes as long as a run did.


def calibrated(rate, modelled, hardware, measured):
    """`hardware` with that `rate` ("flops", "between") at which modelled(hardware) takes `measured` seconds."""
    low, high = 1e6, 1e16
    for _ in range(50):
        middle = math.sqrt(low * high)
        found = hardware._replace(**{rate: middle})
        low, high = (middle, high) if modelled(found) > measured else (low, middle)
    if abs(modelled(found) / measured - 1) > 1e-3:
        raise ValueError(f"no {rate} gives {measured:.3g} s: the model takes {modelled(found):.3g} s")
    return found


# ------------------------------------------------------------------------------------------------------- published_runs
# Modelled beside published: Megatron-LLaMA's runs, and those of a user of it.


# LLaMA-13B, sequences of 2048 on 8 x A100-80GB a node, tokens/s a GPU: (optimizer, GPUs, sequences a step, sequences a
# micro-batch, tokens/s). Megatron-LLaMA's README; neither it nor the user's issue 22 there says how many GPUs share
# layers, and the README not how large a step is: both are assumed, as in LLaMA's paper and in issue 27 there.
PUBLISHED = [("overlapped", 256, 2048, 4, 1890), ("distributed", 256, 2048, 4, 1630),
             ("overlapped", 512, 2048, 4, 1845), ("distributed", 512, 2048, 4, 1430)]
A_USERS = [("distributed", 128, 1024, 2, 1885.8), ("distributed", 128, 2048, 2, 2045.4),
           ("overlapped", 128, 1024, 2, 1126.3), ("overlapped", 128, 2048, 2, 1142.1)]
SHARING, LENGTH = 2, 2048
A100 = Hardware(312e12, 2.0e12, 300e9, 100e9, sharing=SHARING)


def step_of(run, hardware, is_hidden=True):
    """-> modelled seconds. Our stage 4 stands for the overlapped optimizer, which sends fp32 gradients after each
    micro-batch; stage 3 for the distributed one. Not `is_hidden`: each message is waited for at once."""
    kind, gpus, sequences, batch, _ = run
    d, events = gpus // SHARING, []
    for event in recorded_13b(kind, d, batch):
        is_fp32 = kind == "overlapped" and event.kind == "reduce_scatter"
        events.append(event._replace(n_bytes=2 * event.n_bytes) if is_fp32 else event)
        events += [event._replace(what="wait")] if event.what == "launch" and not is_hidden else []
    return replay(events, hardware, d, sequences // d // batch, kind == "overlapped").seconds


@functools.lru_cache
def recorded_13b(kind, d, batch):
    spec = models.NAMED["13b"]._replace(tensor_parallel=SHARING)
    cost = cost_of(spec, "bfloat16", batch, LENGTH)
    choice = {"overlapped": Choice("stage 4 bf16", 400), "distributed": Choice("stage 3 bf16/fp32")}[kind]
    return record(choice, spec, d, cost).events


def tokens(run):
    """In a step, for each GPU."""
    return run[2] * LENGTH / run[1]


def published():
    """-> hardware and published runs of plan_results.Check."""
    def rows(what, runs, hardware, is_hidden=True):
        return [PublishedRun(what, *run, tokens(run) / step_of(run, hardware, is_hidden)) for run in runs]
    first, (less, more) = PUBLISHED[0], A_USERS[:2]
    theirs = calibrated("flops", lambda one: step_of(first, one), A100, tokens(first) / first[-1])
    # These two differ in micro-batches alone, which send nothing: they tell computing and the line apart.
    users = calibrated("flops", lambda one: step_of(more, one) - step_of(less, one), A100,
                       tokens(more) / more[-1] - tokens(less) / less[-1])
    users = calibrated("between", lambda one: step_of(less, one), users, tokens(less) / less[-1])
    return ([(one.flops / 1e12, one.between / 1e9) for one in (theirs, users)],
            [*rows("calibrated", PUBLISHED[:1], theirs), *rows("predicted", [*PUBLISHED[1:], *A_USERS], theirs),
             *rows("calibrated, user's", A_USERS[:2], users), *rows("predicted, user's", A_USERS[2:], users),
             *rows("none hidden", A_USERS[2:], users, False)])


# -------------------------------------------------------------------------------------------------------------- planner
# Rows run dry and replayed: what a rank would hold, how long a step would take.


DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ROWS = {"fp32": [*catalogue.LADDER, "owner reduce"], "bf16": [row.name for row in catalogue.PLANNED]}
# By dtype: the row that is ours, the one that sends to owners, and DDP.
COMPARED = {"fp32": ("stage 4 overlap", "owner reduce", "ddp"),
            "bf16": ("stage 4 bf16", "owner reduce bf16", "ddp bf16")}
HYBRID = catalogue.PLANNED[-1].name
STAGE_4, BUCKETED = ({COMPARED[dtype][i] for dtype in DTYPES for i in places} | {HYBRID} for places in ((0,), (0, 2)))
RANKS = (1, 8, 64, 1024)  # that all rows are counted at
CAPS_MB = (100, 400, 1600, 6400)  # buckets that are tried beside the default
AS_FAST = 1.02  # times that differ by less are equal: the model is no better than that
EFFICIENCY = 0.4  # what computing reaches of the device's FLOPs
# As makers state them: 16-bit FLOPs, bytes of memory, bytes to a neighbour in the node, bytes of a node to others.
DEVICES = {"h100": Hardware(989e12, 3.35e12, 450e9, 400e9), "a100": A100}


class Planner:
    """Runs rows dry, in processes of their own, and replays them: `workers` is a ProcessPoolExecutor.

    `recorded`: (Choice, d) -> dry_run.Recorded, of all that were run.
    """

    def __init__(self, args, workers):
        self.args, self.workers, self.recorded, device = args, workers, {}, DEVICES[args.device]
        self.spec, self.room = args.spec._replace(tensor_parallel=args.tensor_parallel), args.device_memory * 1e9
        flops = device.flops * EFFICIENCY / (2 if args.dtype == "fp32" else 1)  # TF32 is half as fast as 16 bits
        self.hardware = device._replace(flops=flops, sharing=args.tensor_parallel, trees=args.trees)
        self.cost = workers.submit(cost_of, self.spec, DTYPES[args.dtype], args.batch_size,
                                   args.sequence_length).result()

    def run(self, choices, ranks):
        """Each row on each number of ranks."""
        found = {(choice, d): self.workers.submit(record, choice, self.spec, d, self.cost)
                 for choice in choices for d in ranks if (choice, d) not in self.recorded}
        self.recorded.update((task, one.result()) for task, one in found.items())

    def fits(self, choice, d):
        return self.recorded[choice, d].peak <= self.room

    def is_bucket(self, choice):
        """Two buffers take at most half of what whole gradients would: stage 3 keeps those, and has no buckets."""
        held = self.recorded[choice, self.args.world].held
        return held["buffers"] <= held["parameters"] / 2

    def ms(self, choice, d, micro_batches=None, exchange_each=False, **hardware):
        """Of a micro-batch, of which a step has `micro_batches`, or else --accumulate. `hardware`: what is replaced."""
        k, hardware = micro_batches or self.args.accumulate, self.hardware._replace(**hardware)
        return 1e3 * replay(self.recorded[choice, d].events, hardware, d, k, exchange_each).seconds / k

    def sizes(self, base):
        """-> Choices of a size of bucket, the default first; few rows have buckets."""
        caps_mb = [self.args.bucket_cap_mb] if self.args.bucket_cap_mb else [None, *CAPS_MB]
        return [Choice(base, cap_mb) for cap_mb in (caps_mb if base in BUCKETED else [None])]

    def tuned(self, base, **hardware):
        """-> the smallest size with which it is as fast as with any, of those that are buckets and fit."""
        sizes = [choice for choice in self.sizes(base) if self.is_bucket(choice)] or self.sizes(base)
        fitting = [choice for choice in sizes if self.fits(choice, self.args.world)] or sizes
        ms = {choice: self.ms(choice, self.args.world, **hardware) for choice in fitting}
        return next(choice for choice in fitting if ms[choice] <= AS_FAST * min(ms.values()))


def plan(planner):
    """-> PlanResult: counts at several d, and the step at --world."""
    args = planner.args
    ranks = sorted({d for d in RANKS if d < args.world} | {args.world})
    planner.run([choice for base in ROWS[args.dtype] for choice in planner.sizes(base)], [args.world])  # all at once
    choices = [planner.tuned(base) for base in ROWS[args.dtype]]
    planner.run(choices, ranks)
    apart = ("json", "svg", "check", "advise", "spec", "trees")
    asked = {key: value for key, value in vars(args).items() if key not in apart}
    numel = planner.recorded[choices[-1], args.world].numel
    conditions = PlanConditions(**asked, parameters=numel, activations=planner.cost.activations,
                                efficiency=EFFICIENCY, **planner.hardware._asdict())
    tried = [choice for base in ROWS[args.dtype] if base in STAGE_4 for choice in planner.sizes(base)]
    sizes = [PlanSize(*choice, **both_ms(planner, choice), peak=planner.recorded[choice, args.world].peak,
                      is_bucket=planner.is_bucket(choice)) for choice in tried]
    return PlanResult(conditions, [plan_row(planner, choice, ranks) for choice in choices], sizes)


def both_ms(planner, choice):
    return {f"in_{name}_ms": planner.ms(choice, planner.args.world, trees=trees)
            for name, trees in (("rings", False), ("trees", True))}


def plan_row(planner, choice, ranks):
    counted = {d: planner.recorded[choice, d] for d in ranks}
    last, formula = counted[planner.args.world], functools.partial(catalogue.find(*choice).bytes_per_param, 1)
    all_of_it, of_two = (formula(d, SimpleNamespace(bucket_buffer_bytes=0)) for d in (1, 2))
    shared, whole = 2 * (all_of_it - of_two), 2 * of_two - all_of_it
    return PlanRow(
        *choice, formula=f"{whole:g}{f' + {shared:g}/d' * bool(shared)}{' + b' * (choice.base in STAGE_4)}",
        held=last.held, padding=sum(last.held.values()) - last.theory, peak=last.peak,
        fits_from=next((d for d in ranks if all(planner.fits(choice, more) for more in ranks if more >= d)), 0),
        bytes_per_param={d: sum(one.held.values()) / one.numel for d, one in counted.items()},
        bytes_per_param_theory={d: one.theory / one.numel for d, one in counted.items()},
        **both_ms(planner, choice),
        step=replay(last.events, planner.hardware, planner.args.world, planner.args.accumulate))
