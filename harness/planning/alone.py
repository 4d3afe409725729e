"""Plays rank 0 of d ranks in one process, without memory or network, to count bytes and list events.

A dry run is a step of training that computes nothing: the core of a row's stage, on tensors without memory.
"""

import importlib
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

import stage4_overlap
from harness.measuring.ledger import Ledger
from harness.measuring.memory import Memory, mark_grads, mark_state
from harness.publishing.tables import TEXT, Marked, column, name_column, sheet_of
from harness.ranks.meeting import rank_0_of
from harness.training import models
from harness.training import rows as catalogue
from harness.training.options import MODELS
from harness.training.rows import RowId
from stage4_overlap.transport import Exchange

# --------------------------------------------------------------------------------------------------------- A dry run


class Event(NamedTuple):
    """An event of a step, on rank 0. `what` and `phase` are of all events, the other fields of some."""
    what: str  # "compute"; "launch": a collective leaves; or "wait": computing stops until a message has arrived
    phase: str  # "forward", "backward" or "step"
    flops: float = 0  # compute
    n_bytes: int = 0  # compute: bytes that are read and written; launch: bytes of the full tensor
    live: int = 0  # compute, launch: bytes that are alive then
    kind: str = ""  # launch: that of the collective, as in the ledger
    index: int = 0  # launch: its number in the step; wait: the number of the launch that is waited for
    lag: int = 0  # wait: 1 if that launch was in the step before
    group_size: int = 0  # launch: how many ranks take part; 0: all
    stride: int = 1  # launch: one of every `stride` ranks takes part


class Cost(NamedTuple):
    """What a micro-batch costs."""
    activations: float = 0  # bytes, at their peak
    flops: float = 0  # of the forward pass


class Recorded(NamedTuple):
    """A step that was run dry."""
    numel: int  # of the model
    held: dict  # bytes after the step, by kind
    theory: float  # the sum of `held` by the formula
    peak: float  # the most bytes at one moment, activations included
    events: list

    @property
    def bytes_per_param(self):
        return sum(self.held.values()) / self.numel


WORKS_ALIVE = 64  # so many works stay referenced here: C++ loses a work that Python drops too early
FP32_BYTES = 4


class Dry(Memory):
    """Counts memory and lists events, as a TorchDispatchMode that sees every operator. Collectives go nowhere."""

    def __init__(self):
        super().__init__()
        self.works = []  # the last WORKS_ALIVE
        self.ledger = Ledger()
        self.begin_step(0)

    # Without this torch guards every operator against being compiled, which takes most of the time.
    _should_skip_dynamo = classmethod(lambda cls: False)

    def begin_step(self, number):
        self.number = number
        self.phase = "forward"
        self.events = []
        self.futures = []  # numbers of launches that DDP waits for when the backward pass ends
        self.n_launched = 0
        self.reset_peak()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "prim":  # asks for a property
            return function(*args, **kwargs)
        names = [argument.name for argument in function._schema.arguments]
        arguments = {**dict(zip(names, args)), **kwargs}
        if function.namespace == "c10d":
            return self.launch(function._schema, args, arguments)
        result = function(*args, **kwargs)
        self.track(tensors_in(result))
        self.compute(0, bytes_touched(function, arguments, result))
        return result

    def compute(self, flops, n_bytes):
        """Add an event. Without FLOPs the bytes join the last event, if that computes in the same phase."""
        last = self.events[-1] if self.events else None
        joins = last and flops == 0 and last.what == "compute" and last.phase == self.phase
        if joins:
            self.events[-1] = last._replace(n_bytes=last.n_bytes + n_bytes, live=max(last.live, self.live))
        elif flops or n_bytes:
            self.events.append(Event("compute", self.phase, flops, n_bytes, live=self.live))

    def launch(self, schema, args, arguments):
        """Add an event for a collective. Returns what the collective returns: a work, maybe beside tensors."""
        entry = self.ledger.entry_of(schema.name, arguments)
        work = FakeWork(self, args[0])
        kind = entry.kind
        if kind in ("broadcast", "reduce") and entry.group_size == 2:  # goes from one rank to the other
            is_root = arguments["root_rank"] == 0
            sends = is_root if kind == "broadcast" else not is_root
            kind = "send" if sends else "recv"
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(arguments["process_group"]))
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        self.events.append(Event("launch", self.phase, n_bytes=entry.size, kind=kind, index=self.n_launched,
                                 live=self.live, group_size=entry.group_size, stride=stride))
        self.n_launched += 1
        self.works = [*self.works[-WORKS_ALIVE:], work]
        return work.boxed() if len(schema.returns) == 1 else (args[0], work.boxed())

    def wait(self, number, index):
        """Add an event: the rank waits for launch `index` of step `number`."""
        self.events.append(Event("wait", self.phase, index=index, lag=self.number - number))


class FakeWork(dist.Work):
    """Stands for the next collective that `dry` launches. Nothing is sent; a call of `wait` becomes an event."""

    def __init__(self, dry, tensors):
        super().__init__()
        self.dry = dry
        self.step = dry.number
        self.index = dry.n_launched
        self.tensors = tensors
        self.has_arrived = False

    def wait(self, timeout=None):
        if not self.has_arrived:
            self.dry.wait(self.step, self.index)
        self.tensors = None
        return True

    def is_completed(self):
        """Return whether two later collectives were launched: then this one counts as arrived, and no wait is noted."""
        launched_before = (self.dry.number, self.dry.n_launched - 2)
        self.has_arrived = (self.step, self.index) < launched_before
        return self.has_arrived

    def get_future(self):
        """Return a future for DDP, which has the result at once. Its wait is noted when the backward pass ends."""
        self.dry.futures.append(self.index)
        future = torch.futures.Future()
        future.set_result(self.tensors)
        self.tensors = None
        return future


def tensors_in(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def bytes_touched(function, arguments, result):
    """Count the bytes that an operator reads and writes in the device's memory. Views and empty tensors have none."""
    schema = function._schema
    if function.is_view or "empty" in schema.name:
        return 0
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    written.discard("grads")  # a fused optimizer writes gradients only where it unscales them
    overwrites = schema.name.endswith(("copy_", "zero_", "fill_"))  # and doesn't read what it writes
    unread = written if overwrites else {"out"}
    inputs = [value for name, value in arguments.items() if name not in unread]
    outputs = [arguments.get(name) for name in written]
    makes_new_tensors = not any(returned.alias_info for returned in schema.returns)
    if makes_new_tensors:
        outputs.append(result)
    return sum(tensor.nbytes for tensor in tensors_in([inputs, outputs]))


def core_class(package, name="DistributedOptimizer"):
    """Stand in for rows.optimizer_class: return the core of a stage or a variant, which has no guard."""
    module = f"{package}.optimizer" if package.startswith("stage") else package
    return importlib.import_module(module).ShardedOptimizer


def assign_to_buckets(cap_mb):
    """Return a function that assigns parameters to DDP's buckets as DDP itself does from its second step on."""
    torchs_assignment = dist._compute_bucket_assignment_by_size
    default_limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, catalogue.DEFAULT_MB * 2**20]
    limits = [int(cap_mb * 2**20)] if cap_mb else default_limits

    def assign(tensors, _, sparse):
        """Fill buckets from the last parameter on, whose gradient comes first, and return the first bucket last."""
        buckets, sizes = torchs_assignment(tensors[::-1], limits, sparse[::-1])
        last = len(tensors) - 1
        buckets = [[last - i for i in bucket] for bucket in buckets]  # indices in the order of `tensors`
        return buckets[::-1], sizes[::-1]
    return assign


@contextmanager
def fake(d, cap_mb=None, transport=None):
    """Let this process play rank 0 of d, with tensors that have no memory, and stages' cores without their guards.

    cap_mb: size of DDP's buckets; None: DDP's default. transport: a class in place of stage 4's transport; None: stage
    4's own.
    """
    stage_4 = stage4_overlap.optimizer.ShardedOptimizer
    transport_for = stage_4.transport_for if transport is None else lambda group, *_: transport(group)
    patches = [
        mock.patch.object(catalogue, "optimizer_class", core_class),
        mock.patch.object(stage_4, "transport_for", staticmethod(transport_for)),
        mock.patch.object(dist, "_compute_bucket_assignment_by_size", assign_to_buckets(cap_mb)),
        # DDP compares parameters across ranks, and these tensors have no values.
        mock.patch.object(dist, "_verify_params_across_processes", lambda *args: None),
        # torch refuses fused AdamW on the meta device, where it would work.
        mock.patch("torch.optim.adam._device_dtype_check_for_fused", lambda *args: None)]
    with rank_0_of(d), torch.device("meta"), ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        # The fake backend serves tensors of the CPU; here it serves those of the meta device, too.
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        dist.group.WORLD._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        yield


def cost_of(config, dtype, batch_size, sequence_length):
    """Count activations of a forward and backward pass of the model itself, and FLOPs by formula. Returns Cost."""
    def drop_grad(param):
        param.grad = None

    with FakeTensorMode(), Dry() as dry:  # on the meta device attention would use another kernel
        model = models.model_of(config, dtype)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(drop_grad)
        tokens, targets = torch.zeros(2, batch_size, sequence_length, dtype=torch.int64)
        before = dry.live
        dry.reset_peak()
        model(tokens, targets).backward()
        numel = sum(param.numel() for param in model.parameters())
    # Causal attention counts like full attention, as in most published figures.
    attention = 4 * config.n_layers * sequence_length * config.width / config.tensor_parallel
    return Cost(dry.peak - before, batch_size * sequence_length * (2 * numel + attention))


class ParameterUse(torch.autograd.Function):
    """Stands in for one parameter's part of the model: it holds as much, takes as many FLOPs, and has a gradient."""

    @staticmethod
    def forward(ctx, x, param, cost, dry):
        ctx.param = param
        ctx.cost = cost
        ctx.dry = dry
        dry.hold(cost.activations)
        dry.compute(cost.flops, 0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.dry.compute(2 * ctx.cost.flops, 0)
        ctx.dry.hold(-ctx.cost.activations)
        return grad, torch.empty_like(ctx.param), None, None


def stand_in(model, cost, dry):
    """Replace `model.forward` by a walk over the modules that runs their hooks, in which stage 4 waits.

    `cost`: of the model. Each parameter has a share in proportion to its size.
    """
    parts = [(module, list(module.parameters(recurse=False))) for module in model.modules()]
    total = sum(param.numel() for _, params in parts for param in params)  # a tied parameter counts twice

    def share_of(param):
        share = param.numel() / total
        return Cost(cost.activations * share, cost.flops * share)

    def forward():
        x = torch.zeros((), requires_grad=True)
        for module, params in parts:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
            for param in params:
                x = ParameterUse.apply(x, param, share_of(param), dry)
        return x
    model.forward = forward


def record(row_id, config, d, cost=Cost(), transport=None):
    """Run two steps of a row dry on rank 0 of d. Returns the second step, Recorded. `transport`: see `fake`."""
    configuration = catalogue.find(*row_id)
    with fake(d, row_id.bucket_mb, transport), Dry() as dry:
        model = models.model_of(config, configuration.dtype)
        stand_in(model, cost, dry)
        training = configuration.build(model, dict(fused=True))
        for number in (0, 1):
            dry.begin_step(number)
            forward = training.forward if number == 1 else model  # DDP would change its buckets after its first step
            loss = forward()
            dry.phase = "backward"
            loss.backward()
            del loss
            for index in dry.futures:  # DDP's C++ waits for these launches when the backward pass ends, unseen
                dry.wait(number, index)
            dry.phase = "step"
            training.update()
            held = held_by(dry, training)
            training.zero_grad()
        numel = sum(param.numel() for param in model.parameters())
        buffers = SimpleNamespace(bucket_buffer_bytes=held["buffers"])
        theory = configuration.bytes_per_param(numel, d, buffers) * numel
        return Recorded(numel, held, theory, dry.peak, dry.events)


def held_by(memory, training):
    """Return {kind: bytes} after a step. What is no other kind are buffers, of buckets in flight."""
    params = list(training.model.parameters())
    inner = getattr(training.optimizer, "optimizer", training.optimizer)
    stepped = [param for group in inner.param_groups for param in group["params"]]
    memory.mark("parameters", params)
    mark_grads(memory, params + stepped)
    memory.mark("main parameters", stepped)
    mark_state(memory, inner)
    by_kind = memory.by_kind()
    return {kind: by_kind.get(kind, 0) for kind in ("parameters", "gradients", "main parameters", "state", "buffers")}


# ----------------------------------------------------------------------------------- Tables of dry runs, for bench.py


STATE_RANKS = (1, 2, 4, 8, 64, 1024)
LADDER_RANKS = (2, 8, 64)


class State(NamedTuple):
    """A row of the table of model state. Its name has the dtypes of parameters and gradients."""
    name: str
    row_id: RowId
    formula: str  # of bytes per parameter; b: stage 4's two bucket buffers


STATES = [
    State("stage 3 bfloat16/bfloat16", RowId("stage 3 bf16/bf16"), "4 + 16/d"),
    State("stage 3 bfloat16/float32", RowId("stage 3 bf16/fp32"), "6 + 12/d"),
    State("stage 3 float32/float32", RowId(catalogue.GRAD_BUFFER), "8 + 8/d"),
    State("stage 4 bfloat16/float32", RowId(catalogue.OVERLAP_BF16), "2 + 16/d + b"),
    State("stage 4 float32/float32", RowId(catalogue.OVERLAP), "4 + 12/d + b"),
]


def model_state(model):
    """Make the table of bytes per parameter that stages 3 and 4 hold after a step; stage 4 as on gloo, by exchange."""
    def of_ranks(d):
        def held(state):
            step = record(state.row_id, MODELS[model], d, transport=Exchange)
            by_formula = step.theory / step.numel
            is_padded = abs(step.bytes_per_param - by_formula) > 0.01 * by_formula
            return Marked(step.bytes_per_param, f"\n({by_formula:.2f})") if is_padded else step.bytes_per_param
        return column(f"d = {d}", held, "counted", ".2f")
    return sheet_of(
        "Model state, bytes a parameter, by number of ranks", STATES, {
            "name": name_column("name", "parameters/gradients"),
            "formula": column("formula", "formula", form=TEXT),
            **{f"{d}": of_ranks(d) for d in STATE_RANKS}},
        ["b: the two bucket buffers of stage 4. In brackets: the formula, where padding adds more than 1 %."])


def ladder(model):
    """Make the columns of README's table that are counted: those of time are measured on two hosts."""
    def held(rung):
        """Write bytes per parameter after a step: of stages 3 and 4 as counted, padding and buffers included."""
        if rung.row in (catalogue.GRAD_BUFFER, catalogue.OVERLAP):
            steps = [record(RowId(rung.row), MODELS[model], d, transport=Exchange) for d in LADDER_RANKS]
            by_ranks = [step.bytes_per_param for step in steps]
        else:
            configuration = catalogue.find(rung.row)
            by_ranks = [configuration.whole + configuration.shared / d for d in LADDER_RANKS]
        return " · ".join(f"{n_bytes:.1f}" for n_bytes in by_ranks)
    return sheet_of("", catalogue.RUNGS, {
        "stage": name_column("title", "stage"), "collectives": column("collectives", "collectives", form=TEXT),
        "held": column(f"bytes per parameter on {' · '.join(map(str, LADDER_RANKS))} ranks", held),
        "sends": column("values sent per parameter", lambda rung: catalogue.find(rung.row).sends, form="g",
                        unit=FP32_BYTES)})
