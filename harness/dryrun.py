"""A step of training that computes nothing: the code of a stage on tensors without memory, on rank 0 of d.

    spec = llama.NAMED["7b"]
    cost = cost_of(spec, torch.bfloat16, batch_size=1, sequence_length=2048)
    recorded = record(find("stage 4 bf16"), spec, 1024, cost)
    recorded.held      # {"parameters": bytes, "gradients": bytes, …}: a rank's, after a step
    recorded.events    # what happened, in order: see Event

torch's fake tensors have shapes and no memory; its fake process group sends nothing. The optimizer is a stage's core:
a guard asks tensors for their values, and fake ones have none. Its hooks, buckets and collectives run as in training.
The model runs once, for its cost. In a recorded step that cost is spread over the parameters by their size.
"""

from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

import stage4_overlap
from harness import peers
from harness.ledger import Ledger
from harness.llama import build_model, forward_flops
from harness.measure import rank_0_of
from harness.memory import StorageMemory
from harness.owner_reduce import OwnerReduce
from stage1_naive_broadcast.optimizer import ShardedOptimizer as Stage1
from stage2_allgather.optimizer import ShardedOptimizer as Stage2
from stage3_gradbuffer.optimizer import ShardedOptimizer as Stage3
from stage4_overlap.optimizer import ShardedOptimizer as Stage4
from stage4_overlap.transport import GlooTransport

FP32, BF16 = torch.float32, torch.bfloat16


class Row(NamedTuple):
    """`core`: of a stage, or None: AdamW on every rank. After a step a parameter takes `whole` + `shared` / d bytes,
    and in stage 4 its share of two bucket buffers."""
    name: str
    dtype: torch.dtype
    core: type | None
    whole: int
    shared: int
    settings: dict = {}

    @property
    def formula(self):
        return f"{self.whole} + {self.shared}/d{' + b' if self.core is Stage4 else ''}" if self.shared else "20"


ROWS = [  # those in fp32 are called as in the bench
    Row("ddp", FP32, None, 16, 0),
    Row("owner reduce", FP32, OwnerReduce, 4, 12),
    Row("stage 1 naive broadcast", FP32, Stage1, 8, 8),
    Row("stage 2 all-gather", FP32, Stage2, 8, 8),
    Row("stage 3 grad buffer", FP32, Stage3, 8, 8),
    Row("stage 4 overlap", FP32, Stage4, 4, 12),
    Row("ddp bf16", BF16, None, 20, 0),
    Row("owner reduce all bf16", BF16, OwnerReduce, 2, 6),
    Row("stage 1 all bf16", BF16, Stage1, 4, 4),
    Row("stage 2 all bf16", BF16, Stage2, 4, 4),
    Row("stage 3 bf16/fp32", BF16, Stage3, 6, 12, {"grad_dtype": FP32}),
    Row("stage 3 bf16/bf16", BF16, Stage3, 4, 16),
    Row("stage 4 bf16", BF16, Stage4, 2, 16),
]


def find(name):
    return next(row for row in ROWS if row.name == name)


def build(row, model, bucket_cap_mb):
    """-> peers.Training. 16-bit parameters without a stage have fp32 copies on every rank, which AdamW steps."""
    if row.core is None:
        return (peers.compute_only if row.dtype == FP32 else peers.compute_only_16bit)(model, dict(fused=True))
    sized = {"bucket_cap_mb": bucket_cap_mb} if row.core in (OwnerReduce, Stage4) else {}
    training = peers.Training(model, model, row.core(model.parameters(), fused=True, **row.settings, **sized))
    if row.core is Stage4:
        training.optimizer.prefetch_params(model)
    return training


# ---------------------------------------------------------------------------------------------------------------------
# What is counted


class Event(NamedTuple):
    """Something that happens in a step, on rank 0, in `phase`: forward, backward or step.

    `what`: "compute": operators ran, of so many FLOPs or bytes read and written. "launch": a collective left, `kind` as
    in the ledger, `n_bytes` of the full tensor. "wait": computing stops until launch `index` has arrived, of this step,
    or with `lag` 1 of the step before. `live`: bytes that are alive by then.
    """
    what: str
    phase: str
    flops: float = 0
    n_bytes: int = 0
    kind: str = ""
    index: int = 0
    lag: int = 0
    live: int = 0


class Cost(NamedTuple):
    """Of a micro-batch: bytes of activations at their peak; FLOPs of the forward pass."""
    activations: float
    flops: float


class Recorded(NamedTuple):
    """`held`: bytes by kind after a step. `peak`: the most at one moment of a step, activations included."""
    numel: int
    held: dict
    peak: float
    events: list


class Dry(StorageMemory):
    """Counts memory and writes events down; collectives go nowhere."""

    def __init__(self):
        super().__init__()
        self.works, self.ledger = [], Ledger()
        self.begin_step(0)

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # torch would guard every operator against being compiled, which takes longer than all else here

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

    def hold(self, n_bytes):
        """What the stood-in model keeps, or, less than 0, lets go."""
        self.live += n_bytes
        self.peak = max(self.peak, self.live)

    def launch(self, schema, args, arguments):
        entry = self.ledger.entry_of(schema.name, arguments)
        kind, work = entry.kind, FakeWork(self, self.number, self.n_launched, args[0])
        if kind in ("broadcast", "reduce") and entry.group_size == 2:  # goes from one to the other
            kind = "send" if (arguments["root_rank"] == 0) == (kind == "broadcast") else "recv"
        self.events.append(Event("launch", self.phase, 0, entry.size, kind, self.n_launched, live=self.live))
        self.n_launched += 1
        self.works = [*self.works[-64:], work]  # alive until C++ has taken it
        return work.boxed() if len(schema.returns) == 1 else (args[0], work.boxed())

    def wait(self, number, index):
        self.events.append(Event("wait", self.phase, index=index, lag=self.number - number))

    def wait_for_futures(self):
        """DDP's C++ waits for its futures when the backward pass ends, and tells nobody."""
        for number, index in self.futures:
            self.wait(number, index)
        self.futures = []


class FakeWork(dist.Work):
    def __init__(self, dry, number, index, tensors):
        super().__init__()
        self.dry, self.number, self.index, self.tensors = dry, number, index, tensors

    def wait(self, timeout=None):
        self.dry.wait(self.number, self.index)
        self.tensors = None
        return True

    def is_completed(self):
        """Who asks is told so when two more have left."""
        return self.index + 2 < self.dry.n_launched or self.number < self.dry.number

    def get_future(self):
        self.dry.futures.append((self.number, self.index))
        future = torch.futures.Future()
        future.set_result(self.tensors)
        self.tensors = None
        return future


def tensors_in(values):
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def bytes_touched(function, arguments, result):
    """What an operator reads and writes in the device's memory. Views touch nothing, and neither do empty tensors."""
    schema = function._schema
    if function.is_view or "empty" in schema.name:
        return 0
    written = [arguments.get(one.name) for one in schema.arguments if one.alias_info and one.alias_info.is_write]
    made = [] if any(one.alias_info for one in schema.returns) else result
    return sum(tensor.nbytes for tensor in tensors_in([list(arguments.values()), written, made]))


# ---------------------------------------------------------------------------------------------------------------------
# A run


@contextmanager
def fake(d, ddp_cap_mb=None, gloo=False):
    """This process is rank 0 of d, and tensors have no memory. `gloo`: stage 4 exchanges parts, as there.

    DDP gets the buckets that it has from its second step on, and compares no values: fake tensors have none.
    """
    assign, transport = dist._compute_bucket_assignment_by_size, stage4_overlap.optimizer.transport_for
    limits = [int(ddp_cap_mb * 2**20)] if ddp_cap_mb else [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20]

    def in_order_of_gradients(tensors, _, sparse):
        buckets, sizes = assign(tensors[::-1], limits, sparse[::-1])
        return [[len(tensors) - 1 - i for i in bucket] for bucket in buckets][::-1], sizes[::-1]
    with rank_0_of(d), FakeTensorMode(), mock.patch.multiple(
            dist, _compute_bucket_assignment_by_size=in_order_of_gradients,
            _verify_params_across_processes=lambda *args: None), mock.patch.object(
            stage4_overlap.optimizer, "transport_for", (lambda group, *_: GlooTransport(group)) if gloo else transport):
        yield


def cost_of(spec, dtype, batch_size, sequence_length):
    """Of a forward and backward pass of the model itself, operator by operator -> Cost."""
    def drop_grad(param):
        param.grad = None
    with fake(1), Dry() as dry:
        model = build_model(spec, dtype)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(drop_grad)
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


def record(row, spec, d, cost, bucket_cap_mb=None, gloo=False):
    """Two steps of `row` on rank 0 of d -> Recorded, of the second. `bucket_cap_mb`: in MiB; None: the row's default."""
    with fake(d, bucket_cap_mb, gloo), Dry() as dry:
        model = build_model(spec, row.dtype)
        stand_in(model, cost, dry)
        training = build(row, model, bucket_cap_mb)
        for number in (0, 1):
            if number and row.core is None:  # now: it would change its buckets after its first step
                training.forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
            dry.begin_step(number)
            loss = training.forward()
            dry.phase = "backward"
            loss.backward()
            del loss
            dry.wait_for_futures()
            dry.phase = "step"
            training.update()
            held = held_by(training, dry.live)
            training.zero_grad()
        return Recorded(sum(param.numel() for param in model.parameters()), held, dry.peak, dry.events)


def held_by(training, live):
    """`live`: bytes after a step -> {kind: bytes}. A storage is of the first kind that has a tensor in it; what its
    tensors leave free is padding. What no kind knows are buffers: those that buckets travel in."""
    inner = getattr(training.optimizer, "optimizer", training.optimizer)
    params = list(training.model.parameters())
    stepped = [param for group in inner.param_groups for param in group["params"]]
    grads = [grad for one in [*params, *stepped] for grad in (one.grad, getattr(one, "main_grad", None))]
    kinds = {"parameters": params, "gradients": tensors_in(grads), "main parameters": stepped,
             "moments": tensors_in(list(inner.state.values()))}
    held, seen, padding = {}, {}, 0
    for kind, tensors in kinds.items():
        mine = {}  # storage -> the tensors in it
        for tensor in tensors:
            if seen.setdefault(tensor.untyped_storage()._cdata, kind) == kind:
                mine.setdefault(tensor.untyped_storage()._cdata, {})[id(tensor)] = tensor
        held[kind] = sum(tensor.nbytes for group in mine.values() for tensor in group.values())
        padding += sum(next(iter(group.values())).untyped_storage().nbytes() for group in mine.values()) - held[kind]
    return {**held, "padding": padding, "buffers": round(live - sum(held.values()) - padding)}
