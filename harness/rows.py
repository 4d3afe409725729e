"""The rows: each configuration to train by its name, with what it must agree with, send and hold."""

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
from harness import FOUR, ONE, THREE, TWO, muon
from harness.exchange import in_place_of_gloos, start
from harness.reference import bf16_sum, ddp_16bit, in_16_bits, in_ddp, rounded
from harness.training import Training

# What the variants are compared with: --rows variants measures these, too.
BESIDE_VARIANTS = "stage 3 grad buffer", "stage 4 overlap", "stage 4 overlap bf16", "ddp summed in bf16"
ONE_PARAMETER = 1e-6  # MiB: a bucket is closed by the first parameter in it


def is_asked(text, name):
    """Whether --rows `text`, one or several parts of names with commas between them, means the row of that name."""
    return any(one in name for one in text.split(",")) or text == "variants" and name in BESIDE_VARIANTS


class HasRowId:
    """For what has the two fields of a RowId: its names, to be shown, and never read, such as "ddp, 2 MB buckets"."""

    row_id = property(lambda self: RowId(self.base, self.bucket_mb))

    @property
    def name(self):
        return self.base if self.bucket_mb is None else f"{self.base}, {self.size} buckets"

    @property
    def size(self):
        if self.bucket_mb is None:
            return "default"
        return "one-parameter" if self.bucket_mb == ONE_PARAMETER else f"{self.bucket_mb:g} MB"


class RowId(HasRowId, collections.namedtuple("RowId", "base bucket_mb", defaults=[None])):
    """A row of the catalogue, with buckets of `bucket_mb` MiB; None: of its default size."""


# ------------------------ Ways to train the same model on the same data: each a small function that sets one of them up


def compute_only(model, adamw):
    return Training(model, model, torch.optim.AdamW(model.parameters(), **adamw))


class ComputeAndBytes(Training):
    """Sends as many bytes as stage 4 while it computes, to the next rank; nothing waits for them before the step ends.
    They come out of one piece of memory and go into another: what a machine takes for moving bytes, and no more."""

    def __init__(self, model, adamw):
        super().__init__(model, self._send_and_compute, torch.optim.AdamW(model.parameters(), **adamw))
        numel, rank, d = sum(param.numel() for param in model.parameters()), dist.get_rank(), dist.get_world_size()
        n = round(2 * numel * (d - 1) / d)  # elements, as stage 4 sends them
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
    """DDP averages the gradients while backward runs, in buckets; `make(params, **adamw)` makes what steps.

    `is_alone`: in a group of one on gloo, beside ranks whose messages go nowhere, which it can't work with.
    """
    def build(model, adamw):
        group = {"process_group": dist.new_group([0], backend="gloo")} if is_alone else {}
        return Training(model, in_ddp(model, bucket_cap_mb, hook, **group), make(model.parameters(), **adamw))
    return build


ddp_of_one = functools.partial(with_ddp, is_alone=True)


def beneath_ddp(package, bucket_cap_mb=None):
    """Stage 1 or 2 steps what it steps."""
    return with_ddp(lambda params, **adamw: optimizer_class(package)(params, average_gradients=False, **adamw),
                    bucket_cap_mb)


ddp = with_ddp(torch.optim.AdamW)
ddp_summed_in_bf16 = with_ddp(torch.optim.AdamW, hook=bf16_sum)
zero = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)


def ddp_and_zero(bucket_cap_mb=None):
    """As in its documentation: DDP averages the gradients, then each rank broadcasts the parameters that it stepped.

    With a bucket size it is tuned: parameters are views of one tensor for each rank, too, and travel together.
    """
    return with_ddp(functools.partial(zero, parameters_as_bucket_view=bucket_cap_mb is not None), bucket_cap_mb)


def fsdp2(reshard_after_forward):
    """As in its documentation: each block is a unit, and the rest of the model is the last one."""
    def build(model, adamw):
        mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return Training(model, model, torch.optim.AdamW(model.parameters(), **adamw))
    return build


def stage(package, name="DistributedOptimizer", prefetch=False, **settings):
    """`name`: of the class; "ShardedOptimizer" is a stage without its guard."""
    def build(model, adamw):
        optimizer = optimizer_class(package, name)(model.parameters(), torch.optim.AdamW, **settings, **adamw)
        if prefetch:
            optimizer.prefetch_params(model)
        return Training(model, model, optimizer)
    return build


stage_with_prefetch = functools.partial(stage, prefetch=True)
owner_reduce = functools.partial(stage, "harness.owner_reduce", "OwnerReduce")


RANKS = 64  # of a group of make plan: eight nodes of eight hold 1/64 of the state each, nearly all that sharding saves


def in_pairs(d):
    """-> ranks of a group of the row `variants hybrid`: 2, where that leaves several groups."""
    return 2 if d > 2 and d % 2 == 0 else 1


in_groups = functools.partial(math.gcd, RANKS)


def hybrid(ranks_of_group, bucket_cap_mb=None):
    """Stage 4 in groups of neighbours, replicated across them. `ranks_of_group(d)`: how many share the state."""
    def build(model, adamw):
        d = dist.get_world_size()
        shape = d // ranks_of_group(d), ranks_of_group(d)
        mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, shape)
        return stage_with_prefetch("variants.hybrid", mesh=mesh, bucket_cap_mb=bucket_cap_mb)(model, adamw)
    return build


def optimizer_class(package, name="DistributedOptimizer"):
    return getattr(importlib.import_module(package), name)




class Configuration(NamedTuple):
    """A row. Of a parameter, in bytes, with AdamW: `sends` times (d-1)/d is what a rank should send in a step, `whole`
    + `shared` / d what it should hold after one, its gradient included, beside the buffers of buckets."""
    name: str
    kind: str  # floor (learns nothing of other ranks), reference, stage, peer, or noise (the reference once more)
    build: Callable  # (model, AdamW's settings) -> Training
    sends: float
    whole: float
    shared: float = 0
    sharing: Callable = lambda d: d  # how many of d ranks share
    starts_apart: bool = True  # the constructor broadcasts rank 0's weights: tried by starting with others elsewhere
    dtype: str = "float32"  # of the parameters
    reference: Callable = ddp  # builds what it must agree with
    sized: Callable | None = None  # sized(bucket_cap_mb) -> build, where it has buckets
    inside: Callable = in_place_of_gloos  # the context in which it is measured: see exchange.py
    of_rest: tuple = ()  # `whole` and `shared` of what the second of two optimizers steps

    def wire_bytes(self, numel, d):
        return self.sends * numel * (d - 1) / d

    def bytes_per_param(self, numel, d, optimizer):
        held, both = self.whole + self.shared / self.sharing(d), getattr(optimizer, "optimizers", [optimizer])
        if self.of_rest:
            whole, shared = self.of_rest
            n_rest = sum(param.numel() for group in both[0].param_groups for param in group["params"])
            held += (whole + shared / d - held) * n_rest / numel
        return held + sum(getattr(one, "bucket_buffer_bytes", 0) for one in both) / numel


# --------------------------------------- Stage 4 without a part of it: one half of its overlap, or what of it is tuning


class LeavesLate(stage4_overlap.DistributedOptimizer):
    """Stage 4 whose buckets leave when the backward pass has ended, and none earlier."""

    pass_has_ended = False

    def send_full_buckets(self):
        if self.pass_has_ended:
            super().send_full_buckets()

    def _finish_round(self):
        self.pass_has_ended = True
        super()._finish_round()
        self.pass_has_ended = False


# A context in which stage 4's transport cuts nothing into pieces.
whole_messages = functools.partial(mock.patch.object, stage4_overlap.transport, "PIECE_BYTES", 1 << 40)


# ------------------------------ Rows that are asked for: 16 bits by --dtype, variants by --rows, and those of make plan


def rows_of_16_bits(dtype, short):
    """Parameters in 16 bits, AdamW on fp32 copies. Each row divides and sums as its reference does."""
    of_dtype = functools.partial(Configuration, dtype=dtype)
    stage_4 = stage_with_prefetch(FOUR, reduce_dtype=torch.float32)  # NCCL alone would sum in 16 bits
    return [
        of_dtype(f"compute only {short}", "floor", in_16_bits(alone=True), 0, 20, starts_apart=False,
                 reference=in_16_bits()),
        of_dtype(f"stage 3 {short}/fp32", "stage", stage(THREE, grad_dtype=torch.float32), 6, 6, 12,
                 reference=in_16_bits(divided_in=torch.float32)),
        of_dtype(f"stage 3 {short}/{short}", "stage", stage(THREE), 4, 4, 16, reference=in_16_bits(summed_in=None)),
        of_dtype(f"stage 4 overlap {short}", "stage", stage_4, 4, 2, 16, reference=in_16_bits()),
    ]


def variant(name, sends=8, whole=4, shared=12, build=None, **more):
    """A row of a file of variants/."""
    return Configuration(f"variants {name}", "stage", build or stage_with_prefetch(f"variants.{name}"), sends, whole,
                         shared, **more)


# Shown where --rows asks for them.
VARIANTS = [
    variant("per_parameter", 8, 8, 8, stage("variants.per_parameter")),
    *(Configuration(name, "stage" if name == "variants muon" else "peer", build, 8, *of_matrices, of_rest=of_rest,
                    starts_apart="ddp" not in name, reference=muon.ddp_and_muon)
      for name, (build, of_matrices, of_rest) in muon.ROWS.items()),
    variant("hybrid", build=hybrid(in_pairs), sharing=in_pairs),
    variant("wire16", 6, reference=rounded(divided_in=torch.bfloat16)),
    variant("moments16", shared=8, reference=rounded(moments_in=torch.bfloat16)),
    variant("finite"),
    variant("blocks"),
    variant("offload", shared=16),
    variant("remainder16", 4, 2, 14, reference=in_16_bits(ties_away=True), dtype="bfloat16"),
    Configuration("ddp summed in bf16", "peer", ddp_summed_in_bf16, 4, 16,
                  reference=rounded(divided_in=torch.bfloat16, summed_in=torch.bfloat16)),
]


def in_buckets(name, make, *costs, kind="stage", **more):
    """A row of which --sweep and make plan try several sizes of bucket: `make(bucket_cap_mb=…)` -> build."""
    return Configuration(name, kind, make(), *costs, sized=lambda mb: make(bucket_cap_mb=mb), **more)


planned = functools.partial(in_buckets, dtype="bfloat16")
# Rows of make plan: with 16-bit parameters, for GPUs.
PLANNED = [
    planned("ddp bf16", ddp_16bit, 4, 20),
    planned("owner reduce bf16", owner_reduce, 4, 2, 6),
    planned("stage 1 bf16", functools.partial(stage, ONE), 4, 4, 4),
    planned("stage 2 bf16", functools.partial(stage, TWO), 4, 4, 4),
    *rows_of_16_bits("bfloat16", "bf16")[1:3],
    planned("stage 4 bf16", functools.partial(stage_with_prefetch, FOUR), 4, 2, 16),
    planned(f"hybrid of {RANKS} bf16", functools.partial(hybrid, in_groups), 4, 2, 16, in_groups),
]


# The shortest names that say what a row is: the table has to fit a terminal.
ROWS = [
    Configuration("compute only", "floor", compute_only, 0, 16, starts_apart=False),
    Configuration("compute + bytes", "floor", ComputeAndBytes, 8, 16, starts_apart=False),
    in_buckets("ddp", functools.partial(with_ddp, torch.optim.AdamW), 8, 16, kind="reference"),
    in_buckets("ddp + stage 1", functools.partial(beneath_ddp, ONE), 12, 8, 8),
    in_buckets("ddp + stage 2", functools.partial(beneath_ddp, TWO), 12, 8, 8),
    Configuration("rung 0 replicated", "stage", stage("harness.reference"), 8, 16),
    Configuration("stage 1 naive broadcast", "stage", stage(ONE), 12, 8, 8),
    Configuration("stage 2 all-gather", "stage", stage(TWO), 12, 8, 8),
    Configuration("stage 3 grad buffer", "stage", stage(THREE), 8, 8, 8),
    in_buckets("stage 4 overlap", functools.partial(stage_with_prefetch, FOUR), 8, 4, 12),
    in_buckets("ddp + torch ZeRO", ddp_and_zero, 12, 8, 8, kind="peer"),
    in_buckets("owner reduce", owner_reduce, 8, 4, 12, kind="peer"),
    Configuration("fsdp2", "peer", fsdp2(reshard_after_forward=False), 8, 0, 16, starts_apart=False),
    Configuration("fsdp2 reshard", "peer", fsdp2(reshard_after_forward=True), 12, 0, 16, starts_apart=False),
    Configuration("stage 2, gloo's own", "stage", stage(TWO), 12, 8, 8, inside=contextlib.nullcontext),
    Configuration("stage 3, gloo's own", "stage", stage(THREE), 8, 8, 8, inside=contextlib.nullcontext),
    Configuration("fsdp2, gloo's own", "peer", fsdp2(reshard_after_forward=False), 8, 0, 16, starts_apart=False,
                  inside=contextlib.nullcontext),
    Configuration("ddp again", "noise", ddp, 8, 16),
    *rows_of_16_bits("bfloat16", "bf16"),
    *rows_of_16_bits("float16", "fp16"),
]
REFERENCE = next(row.name for row in ROWS if row.kind == "reference")
# The reference and the four stages by themselves: what one picture shows.
LADDER = [REFERENCE, "stage 1 naive broadcast", "stage 2 all-gather", "stage 3 grad buffer", "stage 4 overlap"]
# What each half of stage 4's overlap buys: measured on two hosts.
APART = [
    in_buckets(f"stage 4 {which}", make, 8, 4, 12) for which, make in (
        ("neither", functools.partial(stage, __name__, "LeavesLate")),
        ("only gradients", functools.partial(stage, FOUR)),
        ("only parameters", functools.partial(stage_with_prefetch, __name__, "LeavesLate")))
]
# What of stage 4 is tuning, and no idea, left out. Measured on two hosts, too.
UNTUNED = [
    Configuration("stage 4, whole messages", "stage", stage_with_prefetch(FOUR), 8, 4, 12, inside=whole_messages),
]


def find(base, bucket_mb=None):
    """The row of that name -> Configuration, with buckets of `bucket_mb` MiB; None: of its default size."""
    found = next((row for row in [*ROWS, *APART, *UNTUNED, *PLANNED, *VARIANTS] if row.name == base), None)
    if found is None or bucket_mb is not None and found.sized is None:
        raise LookupError(f"there is no row {RowId(base, bucket_mb).name!r}")
    kind = "peer" if found.kind == "reference" else found.kind
    return found if bucket_mb is None else found._replace(kind=kind, build=found.sized(bucket_mb))


def in_its_context(measure):
    """For a function (rank, settings, base, bucket_mb) that measures a row: it runs inside of its context."""
    @functools.wraps(measure)
    def measured(rank, settings, *row_id):
        with find(*row_id).inside():
            return measure(rank, settings, *row_id)
    return measured


# -------------------------------------------------- Bucket sizes: which are tried of which rows, and which was the best


TUNED = [REFERENCE, "ddp + torch ZeRO"]  # each is also measured with the size of buckets that is DDP's best
DEFAULT_MB = 25  # of DDP
OVERLAP = "stage 4 overlap"
SIZES = [ONE_PARAMETER, 0.25, 1, 2, 4, 8, 25, 100]
# The rows of a sweep, and of the one at each rate of the curve: DDP alone, in fewer sizes.
SWEPT = [*(RowId(REFERENCE, size) for size in (None, 0.25, 1, 2, 4, 8)), *(RowId(OVERLAP, size) for size in SIZES)]
SWEPT_FOR_CURVE = [RowId(REFERENCE, size) for size in (None, 0.25, 1, 4)]


def is_whole(sweep):
    """Whether there is one, of more than DDP: to be shown."""
    return sweep is not None and any(row.base == OVERLAP for row in sweep.rows)


def best(rows):
    """Of a sweep: each of TUNED with the size with which DDP is fastest; none where that is its default -> RowIds.

    Stage 4 keeps its default.
    """
    fastest = min((row for row in rows if row.base == REFERENCE), key=lambda row: row.median_ms, default=None)
    if fastest is None or fastest.bucket_mb is None or not fastest.rounds_ms:
        return []
    return [RowId(base, fastest.bucket_mb) for base in TUNED]


def beside(row_ids, tuned):
    """`row_ids`, with each of `tuned` behind the row that it is a variant of, or else at the end."""
    listed = [one for row_id in row_ids for one in (
        row_id, *(one for one in tuned if one.base == row_id.base and row_id.bucket_mb is None))]
    return listed + [one for one in tuned if one not in listed]


def tuned(result, base):
    """A result of two hosts -> the row `base` with the buckets that the sweep found best; None: not measured.

    Where the default was the best of those tried, the row itself.
    """
    sized = [row for row in result.rows if row.base == base and row.bucket_mb is not None and row.rounds_ms]
    if sized:
        return min(sized, key=lambda row: row.median_ms)
    is_default_best = result.sweep is not None and all(one.base != base for one in best(result.sweep.rows))
    return result.timed(base) if is_default_best else None
