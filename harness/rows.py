"""Lists the rows: each configuration to train by its name, with what it must agree with, send and hold."""

import collections
import contextlib
import functools
import importlib
import math
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import stage4_overlap
from harness import FOUR, ONE, THREE, TWO
from harness.exchange import in_place_of_gloos, start
from harness.reference import bf16_sum, ddp_16bit, in_16_bits, in_ddp, rounded
from harness.training import Training

# Names of rows that several files read. They are short, because the table has to fit a terminal.
COMPUTE_ONLY = "compute only"
REFERENCE = "ddp"
REPLICATED = "replicated"
NAIVE_BROADCAST = "stage 1 naive broadcast"
ALL_GATHER = "stage 2 all-gather"
GRAD_BUFFER = "stage 3 grad buffer"
OVERLAP = "stage 4 overlap"
OVERLAP_BF16 = "stage 4 overlap bf16"
FSDP2 = "fsdp2"
ZERO = "ddp + torch ZeRO"
# The reference and the stages: what one picture shows.
LADDER = [REFERENCE, NAIVE_BROADCAST, ALL_GATHER, GRAD_BUFFER, OVERLAP]
# What the variants are compared with: --rows variants measures these, too.
BASES_OF_VARIANTS = GRAD_BUFFER, OVERLAP, OVERLAP_BF16, "ddp summed in bf16"
ONE_PARAMETER = 1e-6  # MiB: a bucket is closed by the first parameter in it


def is_asked(text, name):
    """Return whether --rows `text`, parts of names with commas between them, asks for the row of that name."""
    return any(part in name for part in text.split(",")) or (text == "variants" and name in BASES_OF_VARIANTS)


class HasRowId:
    """Gives a class with the fields `base` and `bucket_mb` a name to show, such as "ddp, 2 MiB buckets"."""

    row_id = property(lambda self: RowId(self.base, self.bucket_mb))

    @property
    def name(self):
        return self.base if self.bucket_mb is None else f"{self.base}, {self.size} buckets"

    @property
    def size(self):
        if self.bucket_mb is None:
            return "default"
        return "one-parameter" if self.bucket_mb == ONE_PARAMETER else f"{self.bucket_mb:g} MiB"


class RowId(HasRowId, collections.namedtuple("RowId", "base bucket_mb", defaults=[None])):
    """Names a row of the catalogue, with buckets of `bucket_mb` MiB; None: of its default size."""


# ------------------------ Ways to train the same model on the same data: each a small function that sets one of them up


def compute_only(model, adamw):
    return Training(model, model, torch.optim.AdamW(model.parameters(), **adamw))


class ComputeAndBytes(Training):
    """Sends as many bytes as stage 4 to the next rank while it computes, and waits for them when the step ends. All are
    read from one MiB of memory and written to another one, so sending takes what the machine needs for bytes alone."""

    def __init__(self, model, adamw):
        super().__init__(model, self._send_and_compute, torch.optim.AdamW(model.parameters(), **adamw))
        numel = sum(param.numel() for param in model.parameters())
        rank = dist.get_rank()
        d = dist.get_world_size()
        n = round(2 * numel * (d - 1) / d)  # elements that stage 4 sends: gradients and parameters
        sent, received = torch.zeros(2, 2**18, device=next(model.parameters()).device)  # 1 MiB, a message of stage 4
        self.messages = [(sent[:n - start], (rank + 1) % d, received[:n - start], (rank - 1) % d)
                         for start in range(0, n, len(sent))]
        self.optimizer.bucket_buffer_bytes = sent.nbytes + received.nbytes

    def _send_and_compute(self, tokens, targets):
        self.works = start(self.messages, None)
        return self.model(tokens, targets)

    def update(self):
        super().update()
        for work in self.works:
            work.wait()


def with_ddp(make, bucket_cap_mb=None, hook=None, is_alone=False):
    """Let DDP average the gradients while backward runs, in buckets; `make(params, **adamw)` makes the optimizer.

    `is_alone`: DDP has a gloo group of this rank alone, because it can't work with ranks whose messages go nowhere.
    """
    def build(model, adamw):
        group = {"process_group": dist.new_group([0], backend="gloo")} if is_alone else {}
        return Training(model, in_ddp(model, bucket_cap_mb, hook, **group), make(model.parameters(), **adamw))
    return build


ddp_of_one = functools.partial(with_ddp, is_alone=True)


def beneath_ddp(package, bucket_cap_mb=None):
    """Let DDP average the gradients, and stage 1 or 2 update the parameters."""
    return with_ddp(lambda params, **adamw: optimizer_class(package)(params, average_gradients=False, **adamw),
                    bucket_cap_mb)


ddp = with_ddp(torch.optim.AdamW)
ddp_summed_in_bf16 = with_ddp(torch.optim.AdamW, hook=bf16_sum)
zero = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)


def ddp_and_zero(bucket_cap_mb=None):
    """Set up ZeroRedundancyOptimizer as its documentation says: each rank broadcasts the parameters that it updates.

    With a bucket size ZeRO is tuned, too: the parameters of a rank are views of one tensor, which is sent as a whole.
    """
    return with_ddp(functools.partial(zero, parameters_as_bucket_view=bucket_cap_mb is not None), bucket_cap_mb)


def fsdp2(reshard_after_forward):
    """Set up FSDP2 as its documentation says: each block is a unit, and the rest of the model is the last one."""
    def build(model, adamw):
        mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return Training(model, model, torch.optim.AdamW(model.parameters(), **adamw))
    return build


def stage(package, name="DistributedOptimizer", prefetch=False, **settings):
    """Set up a stage by its class's `name`; "ShardedOptimizer" is a stage without its guard."""
    def build(model, adamw):
        optimizer = optimizer_class(package, name)(model.parameters(), torch.optim.AdamW, **settings, **adamw)
        if prefetch:
            optimizer.prefetch_params(model)
        return Training(model, model, optimizer)
    return build


stage_with_prefetch = functools.partial(stage, prefetch=True)
owner_reduce = functools.partial(stage, "harness.owner_reduce", "OwnerReduce")


HYBRID_RANKS = 64  # that share the state in make plan: on eight nodes of eight, 1/64 is nearly all that sharding saves


def size_of_pairs(d):
    """Return how many ranks share the state in the row `variants hybrid`: 2 where that leaves several groups, or 1."""
    return 2 if d > 2 and d % 2 == 0 else 1


size_of_hybrid_groups = functools.partial(math.gcd, HYBRID_RANKS)  # fewer ranks where d is no multiple


def hybrid(group_size, bucket_cap_mb=None):
    """Set up stage 4 in groups of neighbours, replicated across them. `group_size(d)`: ranks that share a state."""
    def build(model, adamw):
        d = dist.get_world_size()
        shape = d // group_size(d), group_size(d)
        mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, shape)
        return stage_with_prefetch("variants.hybrid", mesh=mesh, bucket_cap_mb=bucket_cap_mb)(model, adamw)
    return build


def same_bits(model, adamw):
    """Set up variants/same_bits.py with one leaf on each rank, which is as much work as in the other rows."""
    return stage_with_prefetch("variants.same_bits", leaves=dist.get_world_size())(model, adamw)


def optimizer_class(package, name="DistributedOptimizer"):
    return getattr(importlib.import_module(package), name)


def by_muon_rows(name):
    """Return a `build` that calls `name` of variants/muon_rows.py, imported only then: variants/ imports harness/."""
    return lambda model, adamw: getattr(importlib.import_module("variants.muon_rows"), name)(model, adamw)


ddp_and_muon = by_muon_rows("ddp_and_muon")


class Configuration(NamedTuple):
    """A row. `sends` and the four costs below it are bytes per parameter, with AdamW.

    A rank should send `sends` times (d-1)/d in a step. After a step it should hold `whole` + `shared` / d, gradients
    included, besides the buffers of buckets. Where there are two optimizers, the parameters of the first one cost
    `rest_whole` + `rest_shared` / d instead.
    """
    name: str
    kind: str  # floor (learns nothing of other ranks), reference, stage, peer, or noise (the reference once more)
    build: Callable  # (model, AdamW's settings) -> Training
    sends: float
    whole: float
    shared: float = 0
    rest_whole: float | None = None
    rest_shared: float = 0
    sharing: Callable = lambda d: d  # how many of d ranks share the state
    starts_apart: bool = True  # other ranks start with other weights: the constructor broadcasts those of rank 0
    dtype: str = "float32"  # of the parameters
    reference: Callable = ddp  # builds the training that this one must agree with
    with_buckets: Callable | None = None  # with_buckets(bucket_cap_mb) -> build, where the row has buckets
    context: Callable = in_place_of_gloos  # the context in which the row is measured: see exchange.py

    def wire_bytes(self, numel, d):
        return self.sends * numel * (d - 1) / d

    def bytes_per_param(self, numel, d, optimizer):
        optimizers = getattr(optimizer, "optimizers", [optimizer])
        held = self.whole + self.shared / self.sharing(d)
        if self.rest_whole is not None:
            rest = self.rest_whole + self.rest_shared / d
            n_rest = sum(param.numel() for group in optimizers[0].param_groups for param in group["params"])
            held += (rest - held) * n_rest / numel  # the average over all elements
        return held + sum(getattr(part, "bucket_buffer_bytes", 0) for part in optimizers) / numel


# --------------------------------------- Stage 4 without a part of it: one half of its overlap, or what of it is tuning


class LateSender(stage4_overlap.DistributedOptimizer):
    """Is stage 4, except that no bucket is sent before the backward pass has ended."""

    pass_has_ended = False

    def send_full_buckets(self):
        if self.pass_has_ended:
            super().send_full_buckets()

    def _finish_round(self):
        self.pass_has_ended = True
        super()._finish_round()
        self.pass_has_ended = False


# A context in which stage 4's transport cuts nothing into pieces: no message has 2**40 bytes.
whole_messages = functools.partial(mock.patch.object, stage4_overlap.transport, "PIECE_BYTES", 1 << 40)


# ------------------------------ Rows that are asked for: 16 bits by --dtype, variants by --rows, and those of make plan


def rows_of_16_bits(dtype, short):
    """List rows with parameters in 16 bits, and AdamW on fp32 copies. Each divides and sums as its reference does."""
    in_dtype = functools.partial(Configuration, dtype=dtype)
    stage_4 = stage_with_prefetch(FOUR, reduce_dtype=torch.float32)  # NCCL alone would sum in 16 bits
    return [
        in_dtype(f"{COMPUTE_ONLY} {short}", kind="floor", build=in_16_bits(alone=True), sends=0, whole=20,
                 starts_apart=False, reference=in_16_bits()),
        in_dtype(f"stage 3 {short}/fp32", kind="stage", build=stage(THREE, grad_dtype=torch.float32), sends=6, whole=6,
                 shared=12, reference=in_16_bits(divided_in=torch.float32)),
        in_dtype(f"stage 3 {short}/{short}", kind="stage", build=stage(THREE), sends=4, whole=4, shared=16,
                 reference=in_16_bits(summed_in=None)),
        in_dtype(f"{OVERLAP} {short}", kind="stage", build=stage_4, sends=4, whole=2, shared=16,
                 reference=in_16_bits(divided_in=torch.float32)),
    ]


def variant(name, build=None, sends=8, whole=4, shared=12, **fields):
    """Make the row of a file of variants/; by default it sends and holds what stage 4 does."""
    return Configuration(f"variants {name}", kind="stage", build=build or stage_with_prefetch(f"variants.{name}"),
                         sends=sends, whole=whole, shared=shared, **fields)


with_muon = functools.partial(Configuration, sends=8, reference=ddp_and_muon)

# Shown where --rows asks for them.
VARIANTS = [
    variant("per_parameter", stage("variants.per_parameter"), whole=8, shared=8),
    with_muon("ddp + muon", kind="peer", build=ddp_and_muon, whole=12, rest_whole=16, starts_apart=False),
    with_muon("stage 2 muon", kind="peer", build=by_muon_rows("in_stage_2"), whole=8, shared=4, rest_whole=8,
              rest_shared=8),
    with_muon("muon stacked by shape", kind="peer", build=by_muon_rows("stacked"), whole=8, shared=12, rest_whole=8,
              rest_shared=8),
    with_muon("variants muon", kind="stage", build=by_muon_rows("whole_matrices"), whole=4, shared=8, rest_whole=4,
              rest_shared=12),
    variant("hybrid", hybrid(size_of_pairs), sharing=size_of_pairs),
    variant("wire16", sends=6, reference=rounded(divided_in=torch.bfloat16)),
    variant("moments16", shared=8, reference=rounded(moments_in=torch.bfloat16)),
    variant("same_bits", build=same_bits),
    variant("finite"),
    variant("blocks"),
    variant("offload", shared=16),
    variant("remainder16", sends=4, whole=2, shared=14, reference=in_16_bits(divided_in=torch.float32, ties_away=True),
            dtype="bfloat16"),
    Configuration("ddp summed in bf16", kind="peer", build=ddp_summed_in_bf16, sends=4, whole=16,
                  reference=rounded(divided_in=torch.bfloat16, summed_in=torch.bfloat16)),
]


def in_buckets(name, make, **fields):
    """Make a row of which --sweep and make plan try several bucket sizes. `make(bucket_cap_mb=…)` returns a `build`."""
    return Configuration(name, build=make(), with_buckets=lambda mb: make(bucket_cap_mb=mb), **fields)


planned = functools.partial(in_buckets, kind="stage", dtype="bfloat16")
STAGE_4_BF16 = "stage 4 bf16"
HYBRID_BF16 = f"hybrid of {HYBRID_RANKS} bf16"
# Rows of make plan: with 16-bit parameters, for GPUs.
PLANNED = [
    planned("ddp bf16", ddp_16bit, sends=4, whole=20),
    planned("owner reduce bf16", owner_reduce, sends=4, whole=2, shared=6),
    planned("stage 1 bf16", functools.partial(stage, ONE), sends=4, whole=4, shared=4),
    planned("stage 2 bf16", functools.partial(stage, TWO), sends=4, whole=4, shared=4),
    *rows_of_16_bits("bfloat16", "bf16")[1:3],
    planned(STAGE_4_BF16, functools.partial(stage_with_prefetch, FOUR), sends=4, whole=2, shared=16),
    planned(HYBRID_BF16, functools.partial(hybrid, size_of_hybrid_groups), sends=4, whole=2, shared=16,
            sharing=size_of_hybrid_groups),
]


ROWS = [
    Configuration(COMPUTE_ONLY, kind="floor", build=compute_only, sends=0, whole=16, starts_apart=False),
    Configuration("compute + bytes", kind="floor", build=ComputeAndBytes, sends=8, whole=16, starts_apart=False),
    in_buckets(REFERENCE, functools.partial(with_ddp, torch.optim.AdamW), kind="reference", sends=8, whole=16),
    in_buckets("ddp + stage 1", functools.partial(beneath_ddp, ONE), kind="stage", sends=12, whole=8, shared=8),
    in_buckets("ddp + stage 2", functools.partial(beneath_ddp, TWO), kind="stage", sends=12, whole=8, shared=8),
    Configuration(REPLICATED, kind="stage", build=stage("harness.reference"), sends=8, whole=16),
    Configuration(NAIVE_BROADCAST, kind="stage", build=stage(ONE), sends=12, whole=8, shared=8),
    Configuration(ALL_GATHER, kind="stage", build=stage(TWO), sends=12, whole=8, shared=8),
    Configuration(GRAD_BUFFER, kind="stage", build=stage(THREE), sends=8, whole=8, shared=8),
    in_buckets(OVERLAP, functools.partial(stage_with_prefetch, FOUR), kind="stage", sends=8, whole=4, shared=12),
    in_buckets(ZERO, ddp_and_zero, kind="peer", sends=12, whole=8, shared=8),
    in_buckets("owner reduce", owner_reduce, kind="peer", sends=8, whole=4, shared=12),
    Configuration(FSDP2, kind="peer", build=fsdp2(reshard_after_forward=False), sends=8, whole=0, shared=16,
                  starts_apart=False),
    Configuration("fsdp2 reshard", kind="peer", build=fsdp2(reshard_after_forward=True), sends=12, whole=0, shared=16,
                  starts_apart=False),
    Configuration("stage 2, gloo's own", kind="stage", build=stage(TWO), sends=12, whole=8, shared=8,
                  context=contextlib.nullcontext),
    Configuration("stage 3, gloo's own", kind="stage", build=stage(THREE), sends=8, whole=8, shared=8,
                  context=contextlib.nullcontext),
    Configuration("fsdp2, gloo's own", kind="peer", build=fsdp2(reshard_after_forward=False), sends=8, whole=0,
                  shared=16, starts_apart=False, context=contextlib.nullcontext),
    Configuration("ddp again", kind="noise", build=ddp, sends=8, whole=16),
    *rows_of_16_bits("bfloat16", "bf16"),
    *rows_of_16_bits("float16", "fp16"),
]
# Stage 4 with a half of its overlap, or without any: on two hosts they show how much time each half saves.
HALVES = {"neither": functools.partial(stage, __name__, "LateSender"), "only gradients": functools.partial(stage, FOUR),
          "only parameters": functools.partial(stage_with_prefetch, __name__, "LateSender")}
HALF_OVERLAPS = [in_buckets(f"stage 4 {half}", make, kind="stage", sends=8, whole=4, shared=12)
                 for half, make in HALVES.items()]
# Stage 4 without a part that tunes it and that its idea doesn't need: measured on two hosts, too.
UNTUNED = [
    Configuration("stage 4, whole messages", kind="stage", build=stage_with_prefetch(FOUR), sends=8, whole=4, shared=12,
                  context=whole_messages),
]


def find(base, bucket_mb=None):
    """Return the Configuration of that name, with buckets of `bucket_mb` MiB; None: of its default size."""
    row = next((row for row in [*ROWS, *HALF_OVERLAPS, *UNTUNED, *PLANNED, *VARIANTS] if row.name == base), None)
    if row is None or (bucket_mb is not None and row.with_buckets is None):
        raise LookupError(f"there is no row {RowId(base, bucket_mb).name!r}")
    if bucket_mb is None:
        return row
    kind = "peer" if row.kind == "reference" else row.kind  # the reference is the row with the default size
    return row._replace(kind=kind, build=row.with_buckets(bucket_mb))


def in_context_of_row(measure):
    """Decorate a function (rank, settings, base, bucket_mb) that measures a row, to run inside of the row's context."""
    @functools.wraps(measure)
    def measure_in_context(rank, settings, *row_id):
        with find(*row_id).context():
            return measure(rank, settings, *row_id)
    return measure_in_context


# -------------------------------------------------- Bucket sizes: which are tried of which rows, and which was the best


TUNED = [REFERENCE, ZERO]  # these rows are also measured with the bucket size that is DDP's best
DEFAULT_MB = 25  # of DDP
SIZES = [ONE_PARAMETER, 0.25, 1, 2, 4, 8, 25, 100]  # MiB
# The rows of a sweep; of the curve's sweep at each rate DDP alone, with fewer sizes.
SWEPT = [*(RowId(REFERENCE, size) for size in (None, 0.25, 1, 2, 4, 8)), *(RowId(OVERLAP, size) for size in SIZES)]
SWEPT_FOR_CURVE = [RowId(REFERENCE, size) for size in (None, 0.25, 1, 4)]


def is_whole(sweep):
    """Return whether `sweep` isn't None and has more than DDP, which is all that the curve's sweeps have."""
    return sweep is not None and any(row.base == OVERLAP for row in sweep.rows)


def tuned_row_ids(rows):
    """Return RowIds of TUNED with the bucket size that was DDP's fastest in a sweep; [] where that is its default."""
    fastest = min((row for row in rows if row.base == REFERENCE), key=lambda row: row.median_ms, default=None)
    if fastest is None or fastest.bucket_mb is None or not fastest.rounds_ms:
        return []
    return [RowId(base, fastest.bucket_mb) for base in TUNED]


def with_tuned(row_ids, tuned_ids):
    """List `row_ids`, with each of `tuned_ids` behind the row of the same base with default buckets, or at the end."""
    listed = []
    for row_id in row_ids:
        listed.append(row_id)
        if row_id.bucket_mb is None:
            listed += [tuned_id for tuned_id in tuned_ids if tuned_id.base == row_id.base]
    return listed + [tuned_id for tuned_id in tuned_ids if tuned_id not in listed]


def tuned_row(result, base):
    """Return the row `base` of two hosts with the sweep's best bucket size, maybe the default; None: not measured."""
    with_size = [row for row in result.rows if row.base == base and row.bucket_mb is not None and row.rounds_ms]
    if with_size:
        return min(with_size, key=lambda row: row.median_ms)
    has_sweep = result.sweep is not None
    is_default_best = has_sweep and all(row_id.base != base for row_id in tuned_row_ids(result.sweep.rows))
    return result.timed(base) if is_default_best else None
