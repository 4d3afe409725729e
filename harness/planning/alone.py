"""Plays rank 0 of d ranks in one process, without memory or network, to count bytes and list events.

A row is a way to train, by its name in harness/training/rows.py. A dry run trains a row for two steps, on tensors that
have sizes and no memory, so nothing is computed and nothing is sent. Stages run as their cores, without the guards that
refuse wrong use.
"""

import functools
import importlib
from collections import deque
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
    """What rank 0 does at one moment of a step. Each field says which events have it."""
    what: str  # "compute"; "launch": a collective leaves; or "wait": computing stops until a message has arrived
    phase: str  # of all events: "forward", "backward" or "step"
    flops: float = 0  # compute
    n_bytes: int = 0  # compute: bytes that are read and written; launch: bytes of the full tensor
    kind: str = ""  # launch: of the collective, such as "all_gather"; between two ranks "send" or "recv"
    index: int = 0  # launch: its number in the step; wait: the number of the launch that is waited for
    lag: int = 0  # wait: 1 if that launch was in the step before
    group_size: int = 0  # launch: how many ranks take part
    stride: int = 1  # launch: one of every `stride` ranks takes part


class Cost(NamedTuple):
    """What a micro-batch costs."""
    activations: float = 0  # bytes, at their peak
    flops: float = 0  # of the forward pass


class Recorded(NamedTuple):
    """The second step of a dry run."""
    numel: int  # elements of the model's parameters
    held: dict  # {kind of memory: bytes after the step}
    theory: float  # bytes after the step by the row's formula
    peak: float  # the most bytes at one moment, activations included
    events: list

    @property
    def bytes_per_param(self):
        return sum(self.held.values()) / self.numel


# A work is what torch returns for a collective in flight: a rank waits on it. DryRun keeps so many of the last works,
# because torch's C++ loses a work whose Python object is gone.
WORKS_KEPT = 64
FP32_BYTES = 4


class DryRun(Memory):
    """Is a TorchDispatchMode, which sees every operator: it counts memory, lists events, and sends nothing."""

    def __init__(self):
        super().__init__()
        self.last_works = deque(maxlen=WORKS_KEPT)  # FakeWorks
        self.ledger = Ledger()  # knows the kind and the bytes of a collective from its arguments
        self.begin_step(0)

    # Without this torch guards every operator against being compiled, which takes most of the time.
    _should_skip_dynamo = classmethod(lambda cls: False)

    def begin_step(self, number):
        self.number = number  # of the step
        self.phase = "forward"  # `record` sets the next phases
        self.events = []  # of this step
        self.awaited_by_ddp = []  # (step, index) of launches for which DDP waits at the end of the backward pass
        self.n_launched = 0  # collectives of this step
        self.reset_peak()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function.namespace == "prim":  # asks for a property of a tensor
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
        """Add an event, except for an operator that computes nothing, such as a view."""
        if flops or n_bytes:
            self.events.append(Event("compute", self.phase, flops, n_bytes))

    def launch(self, schema, args, arguments):
        """Add an event for a collective. Returns what the collective returns: a work, or tensors and a work."""
        entry = self.ledger.entry_of(schema.name, arguments)
        kind = entry.kind
        if kind in ("broadcast", "reduce") and entry.group_size == 2:  # goes from one rank to the other
            rank_0_is_root = arguments["root_rank"] == 0
            root_sends = kind == "broadcast"
            kind = "send" if rank_0_is_root == root_sends else "recv"
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(arguments["process_group"]))
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        self.events.append(Event("launch", self.phase, n_bytes=entry.size, kind=kind, index=self.n_launched,
                                 group_size=entry.group_size, stride=stride))
        work = FakeWork(self, args[0])
        self.n_launched += 1
        self.last_works.append(work)
        return work.boxed() if len(schema.returns) == 1 else (args[0], work.boxed())

    def wait(self, number, index):
        """Add an event: the rank waits for launch `index` of step `number`."""
        self.events.append(Event("wait", self.phase, index=index, lag=self.number - number))


class FakeWork(dist.Work):
    """Is the work of a collective that a DryRun launches. A call of `wait` becomes an event."""

    def __init__(self, dry_run, tensors):
        super().__init__()
        self.dry_run = dry_run
        self.step_and_index = (dry_run.number, dry_run.n_launched)  # numbers of the step, and of the launch in it
        self.tensors = tensors  # stay alive until the rank has waited
        self.has_arrived = False

    def wait(self, timeout=None):
        if not self.has_arrived:
            self.dry_run.wait(*self.step_and_index)
        self.tensors = None
        return True

    def is_completed(self):
        """Return whether two more collectives were launched since, or a step began: then this one counts as arrived."""
        second_last_launch = (self.dry_run.number, self.dry_run.n_launched - 2)
        self.has_arrived = self.step_and_index < second_last_launch
        return self.has_arrived

    def get_future(self):
        """Return a future that has the result at once, for DDP's C++, which waits for it unseen: see `record`."""
        self.dry_run.awaited_by_ddp.append(self.step_and_index)
        future = torch.futures.Future()
        future.set_result(self.tensors)
        self.tensors = None
        return future


def tensors_in(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def bytes_touched(function, arguments, result):
    """Count the bytes that an operator reads and writes in the device's memory.

    `arguments`: {name: value}. The operator's schema says which of them are written, by its `alias_info`.
    """
    schema = function._schema
    if function.is_view or "empty" in schema.name:
        return 0
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    written.discard("grads")  # a fused optimizer writes gradients only where it unscales them
    only_writes = schema.name.endswith(("copy_", "zero_", "fill_"))  # others read what they write, except "out"
    unread = written if only_writes else {"out"}
    inputs = [value for name, value in arguments.items() if name not in unread]
    outputs = [arguments.get(name) for name in written]
    makes_new_tensors = not any(returned.alias_info for returned in schema.returns)
    if makes_new_tensors:
        outputs.append(result)
    return sum(tensor.nbytes for tensor in tensors_in([inputs, outputs]))


def core_class(package, name="DistributedOptimizer"):
    """Stand in for rows.optimizer_class, which returns the class with that name: return the core of the package."""
    module = f"{package}.optimizer" if package.startswith("stage") else package
    return importlib.import_module(module).ShardedOptimizer


def assign_to_buckets(cap_mb):
    """Return a function that assigns parameters to DDP's buckets as DDP itself does from its second step on.

    cap_mb: size of a bucket in MiB; None: DDP's default, with a smaller first bucket.
    """
    torchs_assignment = dist._compute_bucket_assignment_by_size
    if cap_mb is None:
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, catalogue.DEFAULT_MB * 2**20]
    else:
        limits = [int(cap_mb * 2**20)]

    def assign(params, limits_of_step_1, are_sparse):
        """Fill buckets from the last parameter on, whose gradient comes first, and return the first bucket last."""
        buckets, sizes = torchs_assignment(params[::-1], limits, are_sparse[::-1])
        last = len(params) - 1
        buckets = [[last - i for i in bucket] for bucket in buckets]  # indices in the order of `params`
        return buckets[::-1], sizes[::-1]
    return assign


@contextmanager
def fake(d, cap_mb=None, transport=None):
    """Let this process play rank 0 of d, with tensors that have no memory, and stages' cores without their guards.

    cap_mb: size of DDP's buckets: see `assign_to_buckets`. transport: a class in place of the one by which stage 4
    sends; None: stage 4's own choice.
    """
    stage_4 = stage4_overlap.optimizer.ShardedOptimizer
    transport_for = stage_4.transport_for if transport is None else lambda group, *_: transport(group)
    patches = [
        mock.patch.object(catalogue, "optimizer_class", core_class),
        mock.patch.object(stage_4, "transport_for", staticmethod(transport_for)),
        mock.patch.object(dist, "_compute_bucket_assignment_by_size", assign_to_buckets(cap_mb)),
        # DDP compares parameters across ranks, and these tensors have no values.
        mock.patch.object(dist, "_verify_params_across_processes", lambda *args: None),
        # torch refuses fused AdamW on the meta device, that of tensors without memory, where it would work.
        mock.patch("torch.optim.adam._device_dtype_check_for_fused", lambda *args: None)]
    with rank_0_of(d), torch.device("meta"), ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        # The fake backend serves tensors of the CPU; here it serves those of the meta device, too.
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        dist.group.WORLD._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        yield


def cost_of(config, dtype, batch_size, sequence_length):
    """Count the activations of a model's forward and backward pass, and its FLOPs by formula. Returns Cost."""
    def drop_grad(param):
        param.grad = None

    with FakeTensorMode(), DryRun() as dry_run:  # on the meta device attention would use another kernel
        model = models.model_of(config, dtype)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(drop_grad)
        tokens, targets = torch.zeros(2, batch_size, sequence_length, dtype=torch.int64)
        bytes_before = dry_run.live  # of the model
        dry_run.reset_peak()
        model(tokens, targets).backward()
        numel = sum(param.numel() for param in model.parameters())
    # A token takes 2 FLOPs per parameter, and those of attention. Causal attention counts like full attention, as in
    # most published figures.
    attention_flops = 4 * config.n_layers * sequence_length * config.width / config.tensor_parallel
    return Cost(dry_run.peak - bytes_before, batch_size * sequence_length * (2 * numel + attention_flops))


class ParameterUse(torch.autograd.Function):
    """Stands for what a model does with one parameter: it takes FLOPs, holds activations, and makes a gradient."""

    @staticmethod
    def forward(ctx, x, param, cost, dry_run):
        ctx.param = param
        ctx.cost = cost
        ctx.dry_run = dry_run
        dry_run.hold(cost.activations)
        dry_run.compute(cost.flops, 0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.dry_run.compute(2 * ctx.cost.flops, 0)
        ctx.dry_run.hold(-ctx.cost.activations)
        return grad, torch.empty_like(ctx.param), None, None


def stand_in(model, cost, dry_run):
    """Return a function in place of `model.forward`, which walks over the modules and runs their hooks.

    In these hooks stage 4 waits. `cost`: of the model. Each parameter has a share in proportion to its size.
    """
    parts = [(module, list(module.parameters(recurse=False))) for module in model.modules()]
    total = sum(param.numel() for _, params in parts for param in params)  # a tied parameter counts twice

    def forward():
        x = torch.zeros((), requires_grad=True)
        for module, params in parts:
            for hook in module._forward_pre_hooks.values():
                hook(module, ())
            for param in params:
                share = param.numel() / total
                x = ParameterUse.apply(x, param, Cost(cost.activations * share, cost.flops * share), dry_run)
        return x
    return forward


def record(row_id, config, d, cost=Cost(), transport=None):
    """Run two steps of a row dry on rank 0 of d. Returns the second step, Recorded. `transport`: see `fake`."""
    configuration = catalogue.find(*row_id)
    with fake(d, row_id.bucket_mb, transport), DryRun() as dry_run:
        model = models.model_of(config, configuration.dtype)
        model.forward = stand_in(model, cost, dry_run)
        training = configuration.build(model, dict(fused=True))
        for number in (0, 1):
            dry_run.begin_step(number)
            forward = training.forward if number == 1 else model  # DDP would change its buckets after its first step
            loss = forward()
            dry_run.phase = "backward"
            loss.backward()
            del loss
            for step_and_index in dry_run.awaited_by_ddp:
                dry_run.wait(*step_and_index)
            dry_run.phase = "step"
            training.update()
            held = held_by(dry_run, training)
            training.zero_grad()
        numel = sum(param.numel() for param in model.parameters())
        buffers = SimpleNamespace(bucket_buffer_bytes=held["buffers"])  # all that the formula asks of an optimizer
        theory = configuration.bytes_per_param(numel, d, buffers) * numel
        return Recorded(numel, held, theory, dry_run.peak, dry_run.events)


def held_by(memory, training):
    """Return {kind: bytes} after a step. Buffers, of buckets in flight, are what is of no other kind."""
    params = list(training.model.parameters())
    inner = getattr(training.optimizer, "optimizer", training.optimizer)  # the AdamW inside a stage, or AdamW itself
    stepped = [param for group in inner.param_groups for param in group["params"]]  # where there are, main parameters
    memory.mark("parameters", params)
    mark_grads(memory, params + stepped)
    memory.mark("main parameters", stepped)  # what has a kind already keeps it
    mark_state(memory, inner)
    by_kind = memory.by_kind()
    return {kind: by_kind.get(kind, 0) for kind in ("parameters", "gradients", "main parameters", "state", "buffers")}


# ----------------------------------------------------------------------------------- Tables of dry runs, for bench.py


STATE_RANKS = (1, 2, 4, 8, 64, 1024)
LADDER_RANKS = (2, 8, 64)


class State(NamedTuple):
    """A line of the table of model state."""
    name: str  # dtypes of parameters and gradients
    row: str
    formula: str  # of bytes per parameter; b: stage 4's two bucket buffers


STATES = [
    State("stage 3 bfloat16/bfloat16", "stage 3 bf16/bf16", "4 + 16/d"),
    State("stage 3 bfloat16/float32", "stage 3 bf16/fp32", "6 + 12/d"),
    State("stage 3 float32/float32", catalogue.GRAD_BUFFER, "8 + 8/d"),
    State("stage 4 bfloat16/float32", catalogue.OVERLAP_BF16, "2 + 16/d + b"),
    State("stage 4 float32/float32", catalogue.OVERLAP, "4 + 12/d + b"),
]


def model_state(model):
    """Make the table of bytes per parameter that stages 3 and 4 hold after a step; stage 4 as on gloo, by exchange."""
    def bytes_per_param(state, d):
        step = record(RowId(state.row), MODELS[model], d, transport=Exchange)
        by_formula = step.theory / step.numel
        is_padded = abs(step.bytes_per_param - by_formula) > 0.01 * by_formula
        return Marked(step.bytes_per_param, f"\n({by_formula:.2f})") if is_padded else step.bytes_per_param
    return sheet_of(
        "Model state, bytes a parameter, by number of ranks", STATES, {
            "name": name_column("name", "parameters/gradients"),
            "formula": column("formula", "formula", form=TEXT),
            **{f"{d}": column(f"d = {d}", functools.partial(bytes_per_param, d=d), "counted", ".2f")
               for d in STATE_RANKS}},
        ["b: the two bucket buffers of stage 4. In brackets: the formula, where padding adds more than 1 %."])


def ladder(model):
    """Make the columns of README's table that are counted: those of time are measured on two hosts."""
    def bytes_per_param(rung):
        """Write the bytes that a rank holds: of stages 3 and 4 as counted, padding and buffers included."""
        if rung.row in (catalogue.GRAD_BUFFER, catalogue.OVERLAP):
            steps = [record(RowId(rung.row), MODELS[model], d, transport=Exchange) for d in LADDER_RANKS]
            by_ranks = [step.bytes_per_param for step in steps]
        else:
            configuration = catalogue.find(rung.row)
            by_ranks = [configuration.whole + configuration.shared / d for d in LADDER_RANKS]
        return " · ".join(f"{n_bytes:.1f}" for n_bytes in by_ranks)
    return sheet_of("", catalogue.RUNGS, {
        "stage": name_column("title", "stage"), "collectives": column("collectives", "collectives", form=TEXT),
        "held": column(f"bytes per parameter on {' · '.join(map(str, LADDER_RANKS))} ranks", bytes_per_param),
        "sends": column("values sent per parameter", lambda rung: catalogue.find(rung.row).sends, form="g",
                        unit=FP32_BYTES)})
