"""Plays rank 0 of d ranks in one process, without memory or network, to count bytes and list events.

A dry run trains for two steps on tensors of torch's device "meta", which have sizes and no memory. Nothing is computed,
and nothing is sent. plan.py and bench.py make tables of what dry runs count. replay.py plays the events of a dry run
with the speed of real machines.

    row               a way to train; the catalogue, harness/training/rows.py, lists all rows
    RowId             the name of a row, and maybe the size of a bucket
    bucket            the unit in which DDP and stage 4 send gradients
    stage             an optimizer of this project, in a folder stage*/
    core              a stage's class ShardedOptimizer: its algorithm without the guard, the code that refuses wrong use
    main parameter    the fp32 copy of a 16-bit parameter; an optimizer updates it, and rounds it into the parameter
    work              what torch returns for a collective in flight: an object, on which a rank waits
    launch            the call of a collective
    micro-batch       what one forward and one backward pass train on; several may make up a step
    transport         the class by which stage 4 sends; Exchange is the transport for gloo
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
from harness.measuring.ledger import Ledger, named_arguments
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
    """What rank 0 does at one moment of a step."""
    what: str  # "compute"; "launch"; or "wait": computing stops until a message has arrived
    phase: str  # "forward", "backward" or "step"
    # A field below is set only for the values of `what` that its comment begins with.
    flops: float = 0  # compute: floating-point operations
    n_bytes: int = 0  # compute: bytes that are read and written in memory; launch: bytes of the full tensor
    kind: str = ""  # launch: kind of the collective, such as "all_gather"; between two ranks "send" or "recv"
    index: int = 0  # launch: its number among the launches of the step; wait: the number of the awaited launch
    lag: int = 0  # wait: how many steps ago the awaited launch was, 0 or 1
    group_size: int = 0  # launch: how many ranks take part
    stride: int = 1  # launch: the difference between the numbers of two neighbouring ranks in the group


class Cost(NamedTuple):
    """What a micro-batch costs in a model."""
    activations: float = 0  # bytes of activations, at their peak
    flops: float = 0  # floating-point operations of the forward pass; the backward pass takes twice as many


class Recorded(NamedTuple):
    """The second step of a dry run."""
    numel: int  # number of elements of the model's parameters
    held: dict  # {kind of memory: bytes after the step}: see `held_by`
    theory: float  # bytes after the step by the row's formula
    peak: float  # the most bytes at one moment of the step, activations included
    events: list  # of Events, in order

    @property
    def bytes_per_param(self):
        """Return the bytes after the step, for each element of the parameters."""
        return sum(self.held.values()) / self.numel


WORKS_KEPT = 64  # the last works, which a DryRun keeps: C++ loses a work whose Python object is gone
FP32_BYTES = 4  # of one value


class DryRun(Memory):
    """Counts memory, lists events, and sends nothing.

    A Memory, which counts bytes, is a TorchDispatchMode: torch calls `__torch_dispatch__` in place of every operator.
    """

    def __init__(self):
        super().__init__()
        self.last_works = deque(maxlen=WORKS_KEPT)  # FakeWorks; never read
        # Only its method `entry_of` is called: it finds out the kind and the bytes of a collective.
        self.ledger = Ledger()
        self.begin_step(0)

    # torch asks this private method. If it returned True, torch would keep the compiler away from every operator, which
    # takes most of the time of a dry run.
    _should_skip_dynamo = classmethod(lambda cls: False)

    def begin_step(self, step_number):
        """Begin a step, and forget the events of the step before."""
        self.step_number = step_number
        self.phase = "forward"  # the function `record` sets the next phases
        self.events = []  # of this step
        # (number of the step, index of the launch): DDP waits for these launches at the end of the backward pass.
        # FakeWork.get_future adds them, and the function `record` makes "wait" events of them.
        self.awaited_by_ddp = []
        self.n_launched = 0  # number of collectives launched in this step so far
        self.reset_peak()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Call the operator `function`, and add an event. Collectives, the operators of c10d, are not called."""
        kwargs = kwargs or {}
        if function.namespace == "prim":  # asks for a property of a tensor
            return function(*args, **kwargs)
        arguments = named_arguments(function._schema, args, kwargs)
        if function.namespace == "c10d":
            return self.launch(function._schema, args, arguments)
        result = function(*args, **kwargs)
        self.track(tensors_in(result))
        self.compute(0, bytes_touched(function, arguments, result))
        return result

    def compute(self, flops, n_bytes):
        """Add a "compute" event, except for an operator that computes nothing, such as a view."""
        if flops or n_bytes:
            self.events.append(Event("compute", self.phase, flops, n_bytes))

    def launch(self, schema, args, arguments):
        """Add a "launch" event. Returns what the collective would return: a work, or tensors and a work.

        C++ takes and returns a work in a box, a torch.ScriptObject.
        """
        entry = self.ledger.entry_of(schema.name, arguments)
        kind = entry.kind
        if kind in ("broadcast", "reduce") and entry.group_size == 2:  # is a message from one rank to the other
            rank_0_is_root = arguments["root_rank"] == 0
            root_sends = kind == "broadcast"  # in a reduce the root receives
            # Rank 0 sends as a root that sends, or as the other rank of a root that receives.
            kind = "send" if rank_0_is_root == root_sends else "recv"
        ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(arguments["process_group"]))
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1  # the ranks of a group have equal distances
        self.events.append(Event("launch", self.phase, n_bytes=entry.size, kind=kind, index=self.n_launched,
                                 group_size=entry.group_size, stride=stride))
        work = FakeWork(self, args[0])  # the first argument has the tensors that the operator writes
        self.n_launched += 1
        self.last_works.append(work)
        return work.boxed() if len(schema.returns) == 1 else (args[0], work.boxed())

    def wait(self, step_number, index):
        """Add a "wait" event, for launch `index` of step `step_number`."""
        self.events.append(Event("wait", self.phase, index=index, lag=self.step_number - step_number))


class FakeWork(dist.Work):
    """Is the work of a collective that a DryRun launches. A call of `wait` adds a "wait" event to the DryRun."""

    def __init__(self, dry_run, tensors):
        super().__init__()
        self.dry_run = dry_run
        self.step_and_index = (dry_run.step_number, dry_run.n_launched)  # number of the step, index of the launch in it
        self.tensors = tensors  # of the collective: they stay alive until the rank has waited, as in a real run
        self.has_arrived = False  # what `is_completed` has last returned; if True, `wait` adds no event

    def wait(self, timeout=None):
        if not self.has_arrived:
            self.dry_run.wait(*self.step_and_index)
        self.tensors = None
        return True

    def is_completed(self):
        """Return whether this collective has arrived. Only the row "owner reduce" calls this.

        In a dry run a collective counts as arrived when two more were launched after it, or the next step has begun.
        """
        # Pairs (step, index) are compared: an earlier step is less, and in the same step an earlier launch.
        second_last_launch = (self.dry_run.step_number, self.dry_run.n_launched - 2)
        self.has_arrived = self.step_and_index < second_last_launch
        return self.has_arrived

    def get_future(self):
        """Return a future that has the result at once. Only DDP calls this, and waits for the future in C++.

        There no DryRun sees the wait. So the launch is noted in `awaited_by_ddp`.
        """
        self.dry_run.awaited_by_ddp.append(self.step_and_index)
        future = torch.futures.Future()
        future.set_result(self.tensors)
        self.tensors = None
        return future


def tensors_in(values):
    """Return the list of all tensors in `values`, which may be nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def bytes_touched(function, arguments, result):
    """Count the bytes that an operator reads and writes in the device's memory.

    `arguments`: {name: value}.
    """
    # torch's description of arguments and results. An argument has an `alias_info` if a result shares its memory, and
    # `is_write` there says whether the operator writes the argument. A result has an `alias_info` if it is no new
    # tensor.
    schema = function._schema
    if function.is_view or "empty" in schema.name:  # a view, or a new tensor that nobody has written
        return 0
    written = {argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write}
    written.discard("grads")  # a fused optimizer writes gradients only where it unscales them
    # These operators don't read the argument that they write. Other operators do, unless its name is "out".
    only_writes = schema.name.endswith(("copy_", "zero_", "fill_"))
    unread = written if only_writes else {"out"}
    inputs = [value for name, value in arguments.items() if name not in unread]
    outputs = [arguments.get(name) for name in written]
    makes_new_tensors = not any(returned.alias_info for returned in schema.returns)
    if makes_new_tensors:
        outputs.append(result)
    return sum(tensor.nbytes for tensor in tensors_in([inputs, outputs]))


def core_class(package, name="DistributedOptimizer"):
    """Return the core of a package. This function stands in for rows.optimizer_class, which returns the class `name`.

    `package`: the dotted name of a stage's folder, or of a file of variants/.
    """
    module = f"{package}.optimizer" if package.startswith("stage") else package
    return importlib.import_module(module).ShardedOptimizer


def assign_to_buckets(cap_mb):
    """Return a function that assigns parameters to DDP's buckets as DDP itself does from its second step on.

    DDP would need a real first step for it, in which it learns the order of the gradients.

    `cap_mb`: size of a bucket in MiB; None: DDP's default, with a smaller first bucket.
    """
    torchs_assignment = dist._compute_bucket_assignment_by_size
    if cap_mb is None:
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, catalogue.DEFAULT_MB * 2**20]
    else:
        limits = [int(cap_mb * 2**20)]

    def assign(params, limits_of_step_1, are_sparse):
        """Fill buckets from the last parameter to the first, because the last one's gradient comes first.

        Stands in for torch's function, which takes the same arguments, and returns (for each bucket the list of indices
        in `params`, sizes of buckets). `limits_of_step_1` is unused. As DDP expects, the first bucket is returned last.
        """
        buckets, sizes = torchs_assignment(params[::-1], limits, are_sparse[::-1])
        last = len(params) - 1
        # So far the indices count from the last parameter. Make them count from the first.
        buckets = [[last - i for i in bucket] for bucket in buckets]
        return buckets[::-1], sizes[::-1]
    return assign


@contextmanager
def fake(d, cap_mb=None, transport=None):
    """Within this context this process plays rank 0 of d. Tensors have no memory, and stages have no guards.

    Args:
        cap_mb: size of DDP's buckets: see `assign_to_buckets`.
        transport: the class by which stage 4 is to send; None: stage 4 chooses.
    """
    stage_4 = stage4_overlap.optimizer.ShardedOptimizer
    # Stage 4 calls transport_for(group, …) to make the object by which it sends. Stand in for it if a class was given.
    transport_for = stage_4.transport_for if transport is None else lambda group, *_: transport(group)
    patches = [
        mock.patch.object(catalogue, "optimizer_class", core_class),
        mock.patch.object(stage_4, "transport_for", staticmethod(transport_for)),
        mock.patch.object(dist, "_compute_bucket_assignment_by_size", assign_to_buckets(cap_mb)),
        # DDP compares parameters across ranks, and these tensors have no values.
        mock.patch.object(dist, "_verify_params_across_processes", lambda *args: None),
        # torch refuses fused AdamW on the meta device, where it would work.
        mock.patch("torch.optim.adam._device_dtype_check_for_fused", lambda *args: None)]
    # rank_0_of: torch's fake backend, with which a rank is alone and nothing is sent.
    with rank_0_of(d), torch.device("meta"), ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        # The fake backend serves tensors on the CPU. Here it serves tensors on the meta device, too.
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        dist.group.WORLD._register_backend(torch.device("meta"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        yield


def cost_of(config, dtype, batch_size, sequence_length):
    """Count the activations of a micro-batch, and its FLOPs by formula. Returns Cost.

    `config`: sizes of the model, a GPT or LLaMA.
    """
    def drop_grad(param):
        """Drop a gradient as soon as it is there, so that it doesn't count as an activation."""
        param.grad = None

    # Tensors of FakeTensorMode have no memory, like those on the meta device, but say that they are on the CPU. On the
    # meta device attention would call another kernel, with other activations.
    with FakeTensorMode(), DryRun() as dry_run:
        model = models.model_of(config, dtype)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(drop_grad)
        tokens, targets = torch.zeros(2, batch_size, sequence_length, dtype=torch.int64)
        bytes_before = dry_run.live  # of the model
        dry_run.reset_peak()
        model(tokens, targets).backward()
        numel = sum(param.numel() for param in model.parameters())
    # A token takes 2 FLOPs per parameter. In each layer attention has two products, with 2 FLOPs for each token of the
    # sequence and each of `width` values. Causal attention counts like full attention, as in most published figures.
    attention_flops = 4 * config.n_layers * sequence_length * config.width / config.tensor_parallel
    return Cost(dry_run.peak - bytes_before, batch_size * sequence_length * (2 * numel + attention_flops))


class ParameterUse(torch.autograd.Function):
    """Stands for what a model does with one parameter: it takes FLOPs, holds activations, and makes a gradient."""

    @staticmethod
    def forward(ctx, x, param, cost, dry_run):
        """Return `x`, a scalar that links the uses of all parameters into one graph. `cost`: the Cost of this use."""
        ctx.param = param
        ctx.cost = cost
        ctx.dry_run = dry_run
        dry_run.hold(cost.activations)
        dry_run.compute(cost.flops, 0)
        return x.view_as(x)  # autograd needs another tensor than its input

    @staticmethod
    def backward(ctx, grad):
        ctx.dry_run.compute(2 * ctx.cost.flops, 0)
        ctx.dry_run.hold(-ctx.cost.activations)
        return grad, torch.empty_like(ctx.param), None, None  # a gradient for each argument of forward


def stand_in(model, cost, dry_run):
    """Return a function to call in place of `model.forward`. It uses every parameter of every module, in order.

    `cost`: the Cost of the whole model. Each parameter has a share of it in proportion to its size.
    """
    parts = [(module, list(module.parameters(recurse=False))) for module in model.modules()]
    # The sum counts a tied parameter, which belongs to two modules, twice.
    total = sum(param.numel() for _, params in parts for param in params)

    def forward():
        x = torch.zeros((), requires_grad=True)
        for module, params in parts:
            for hook in module._forward_pre_hooks.values():  # stage 4's hook waits for the module's parameters
                hook(module, ())
            for param in params:
                share = param.numel() / total
                x = ParameterUse.apply(x, param, Cost(cost.activations * share, cost.flops * share), dry_run)
        return x
    return forward


def record(row_id, config, d, cost=Cost(), transport=None):
    """Run two steps of a row dry on rank 0 of d. Returns the second step as a Recorded.

    Args:
        config: sizes of the model.
        cost: of the whole model; by default computing takes no FLOPs and no memory.
        transport: see `fake`.
    """
    configuration = catalogue.find(*row_id)
    with fake(d, row_id.bucket_mb, transport), DryRun() as dry_run:
        model = models.model_of(config, configuration.dtype)
        model.forward = stand_in(model, cost, dry_run)
        training = configuration.build(model, dict(fused=True))
        for number in (0, 1):
            dry_run.begin_step(number)
            # `training.forward` may be DDP, which would change its buckets after a first step. So step 0 is without it.
            forward = training.forward if number == 1 else model
            loss = forward()
            dry_run.phase = "backward"
            loss.backward()
            del loss
            for step_and_index in dry_run.awaited_by_ddp:  # DDP has waited for these launches, unseen
                dry_run.wait(*step_and_index)
            dry_run.phase = "step"
            training.update()
            held = held_by(dry_run, training)
            training.zero_grad()
        numel = sum(param.numel() for param in model.parameters())
        # The formula asks an optimizer only for the bytes of its bucket buffers. Give it an object with counted bytes.
        buffers = SimpleNamespace(bucket_buffer_bytes=held["buffers"])
        theory = configuration.bytes_per_param(numel, d, buffers) * numel
        return Recorded(numel, held, theory, dry_run.peak, dry_run.events)


def held_by(memory, training):
    """Return {kind of memory: bytes} after a step. What is of no other kind counts as "buffers" of buckets."""
    params = list(training.model.parameters())
    inner = getattr(training.optimizer, "optimizer", training.optimizer)  # the AdamW inside a stage, or AdamW itself
    # What AdamW updates: main parameters, or parameters.
    stepped = [param for group in inner.param_groups for param in group["params"]]
    memory.mark("parameters", params)
    mark_grads(memory, params + stepped)
    memory.mark("main parameters", stepped)  # a parameter keeps the kind "parameters"
    mark_state(memory, inner)
    by_kind = memory.by_kind()
    return {kind: by_kind.get(kind, 0) for kind in ("parameters", "gradients", "main parameters", "state", "buffers")}


# ----------------------------------------------------------------------------------- Tables of dry runs, for bench.py


STATE_RANKS = (1, 2, 4, 8, 64, 1024)  # numbers of ranks, each a column of the table of model state
LADDER_RANKS = (2, 8, 64)  # numbers of ranks in README's ladder, a table of DDP and the stages


class State(NamedTuple):
    """A line of the table of model state."""
    name: str  # the stage, and the dtypes of parameters and gradients
    row: str  # the row's name in the catalogue
    formula: str  # for bytes per parameter on d ranks; b: stage 4's two bucket buffers


STATES = [
    State("stage 3 bfloat16/bfloat16", "stage 3 bf16/bf16", "4 + 16/d"),
    State("stage 3 bfloat16/float32", "stage 3 bf16/fp32", "6 + 12/d"),
    State("stage 3 float32/float32", catalogue.GRAD_BUFFER, "8 + 8/d"),
    State("stage 4 bfloat16/float32", catalogue.OVERLAP_BF16, "2 + 16/d + b"),
    State("stage 4 float32/float32", catalogue.OVERLAP, "4 + 12/d + b"),
]


def model_state(model):
    """Make the table of bytes per parameter that stages 3 and 4 hold after a step. Stage 4 sends as it does on gloo."""
    def bytes_per_param(state, d):
        """Return what rank 0 of d holds. If padding adds more than 1 %, the formula's value is added below it."""
        step = record(RowId(state.row), MODELS[model], d, transport=Exchange)
        by_formula = step.theory / step.numel
        is_padded = abs(step.bytes_per_param - by_formula) > 0.01 * by_formula
        # A cell of two lines: what was counted, and below, in brackets, the formula.
        return Marked(step.bytes_per_param, f"\n({by_formula:.2f})") if is_padded else step.bytes_per_param
    columns = {"name": name_column("name", "parameters/gradients"), "formula": column("formula", "formula", form=TEXT)}
    for d in STATE_RANKS:
        columns[f"{d}"] = column(f"d = {d}", functools.partial(bytes_per_param, d=d), "counted", ".2f")
    return sheet_of(
        "Model state, bytes a parameter, by number of ranks", STATES, columns,
        ["b: the two bucket buffers of stage 4. In brackets: the formula, where padding adds more than 1 %."])


def ladder(model):
    """Make the columns of README's ladder that are counted. The other columns are measured on two hosts.

    A rung is a line of the ladder.
    """
    def bytes_per_param(rung):
        """Return a text: the bytes that a rank holds, counted for stages 3 and 4, by formula for other rungs."""
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
