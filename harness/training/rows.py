"""Lists the rows of the bench: ways to train a model, by name, with what each row must agree with, send and hold."""

import functools
import importlib
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

import stage4_overlap
from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.training import baselines
from harness.training.baselines import OwnerReduce, Training, bf16_sum, ddp_16bit, in_16_bits, in_ddp

# ------------------------------------------------------------ The names of rows, short because tables fit a terminal


COMPUTE_ONLY = "compute only"
REFERENCE = "ddp"
REPLICATED = "replicated"
NAIVE_BROADCAST = "stage 1 naive broadcast"
ALL_GATHER = "stage 2 all-gather"
GRAD_BUFFER = "stage 3 grad buffer"
OVERLAP = "stage 4 overlap"
OVERLAP_BF16 = "stage 4 overlap bf16"
FSDP2 = "fsdp2"
FSDP2_RESHARD = "fsdp2 reshard"
ZERO = "ddp + torch ZeRO"
DDP_AND_MUON = "ddp + muon"
DDP_BF16_SUM = "ddp summed in bf16"
NO_OVERLAP = "stage 4 neither"  # neither gradients nor parameters travel while a rank computes
GRADIENT_OVERLAP = "stage 4 only gradients"
PARAMETER_OVERLAP = "stage 4 only parameters"
HALF_OVERLAPS = [NO_OVERLAP, GRADIENT_OVERLAP, PARAMETER_OVERLAP]
# Names in make plan. HYBRID_RANKS ranks, eight nodes of eight, share the state: 1/64 is nearly all that sharding saves.
HYBRID_RANKS = 64
STAGE_4_BF16 = "stage 4 bf16"
HYBRID_BF16 = f"hybrid of {HYBRID_RANKS} bf16"
# The reference and the stages: what one picture shows.
LADDER = [REFERENCE, NAIVE_BROADCAST, ALL_GATHER, GRAD_BUFFER, OVERLAP]

ONE_PARAMETER = 1e-6  # MiB: a bucket is closed by the first parameter in it
DEFAULT_MB = 25  # of a bucket of DDP
SIZES = [ONE_PARAMETER, 0.25, 1, 2, 4, 8, 25, 100]  # of buckets, in MiB, that a sweep tries


class RowId(NamedTuple):
    """Names a row of the catalogue, with buckets of `bucket_mb` MiB; None: with buckets of the default size."""
    base: str
    bucket_mb: float | None = None

    @property
    def name(self):
        return self.base if self.bucket_mb is None else f"{self.base}, {self.size} buckets"

    @property
    def label(self):
        """Return the name, in two lines if there is a bucket size, because a table has to fit a terminal."""
        return self.base if self.bucket_mb is None else f"{self.base},\n  {self.size} buckets"

    @property
    def size(self):
        """Write the size of a bucket in words."""
        if self.bucket_mb is None:
            return "default"
        return "one-parameter" if self.bucket_mb == ONE_PARAMETER else f"{self.bucket_mb:g} MiB"


# ------------------------------------------------ Ways to train: build(model, AdamW's settings, bucket_mb) -> Training
# `bucket_mb` is the size of a bucket in MiB. None is the default size, or says that there are no buckets.


def compute_only(model, adamw, bucket_mb=None):
    return Training(model, model, torch.optim.AdamW(model.parameters(), **adamw))


def with_ddp(make, hook=None, is_alone=False):
    """Let DDP average the gradients while backward runs, in buckets; `make(params, **adamw)` makes the optimizer.

    `is_alone`: DDP has a gloo group of this rank alone, because DDP can't work with ranks whose messages go nowhere.
    """
    def build(model, adamw, bucket_mb=None):
        group = dist.new_group([0], backend="gloo") if is_alone else None
        wrapped = in_ddp(model, bucket_mb, hook, process_group=group)
        return Training(model, wrapped, make(model.parameters(), **adamw))
    return build


def beneath_ddp(package):
    """Let DDP average the gradients, and stage 1 or 2 update the parameters."""
    return with_ddp(lambda params, **adamw: optimizer_class(package)(params, average_gradients=False, **adamw))


ddp = with_ddp(torch.optim.AdamW)
ddp_summed_in_bf16 = with_ddp(torch.optim.AdamW, hook=bf16_sum)


def ddp_and_zero(model, adamw, bucket_mb=None, is_alone=False):
    """Set up ZeroRedundancyOptimizer as its documentation says: each rank broadcasts the parameters that it updates.

    With a bucket size ZeRO is tuned, too: the parameters of a rank are views of one tensor, which is sent as a whole.
    """
    def make_zero(params, **adamw):
        is_tuned = bucket_mb is not None
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, parameters_as_bucket_view=is_tuned, **adamw)
    return with_ddp(make_zero, is_alone=is_alone)(model, adamw, bucket_mb)


def fsdp2(reshard_after_forward):
    """Set up FSDP2 as its documentation says: each block is a unit, and the rest of the model is the last one."""
    def build(model, adamw, bucket_mb=None):
        mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return Training(model, model, torch.optim.AdamW(model.parameters(), **adamw))
    return build


def stage(optimizer, name="DistributedOptimizer", prefetch=False, **settings):
    """Set up an optimizer: a class, or the class `name` of a package. A ShardedOptimizer is a stage without its guard.

    `settings`: other arguments of the class.
    """
    def build(model, adamw, bucket_mb=None):
        cls = optimizer_class(optimizer, name) if isinstance(optimizer, str) else optimizer
        arguments = {**settings, **adamw}
        if bucket_mb is not None:
            arguments["bucket_cap_mb"] = bucket_mb
        optimizer_of_model = cls(model.parameters(), torch.optim.AdamW, **arguments)
        if prefetch:
            optimizer_of_model.prefetch_params(model)
        return Training(model, model, optimizer_of_model)
    return build


def hybrid(group_size):
    """Set up stage 4 in groups of neighbours, replicated across them. `group_size(d)`: ranks that share a state."""
    def build(model, adamw, bucket_mb=None):
        d = dist.get_world_size()
        n_groups = d // group_size(d)
        mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (n_groups, group_size(d)))
        return stage("variants.hybrid", prefetch=True, mesh=mesh)(model, adamw, bucket_mb)
    return build


def size_of_pairs(d):
    """Return how many ranks share the state in the row `variants hybrid`: 2 where that leaves several groups, or 1."""
    return 2 if d > 2 and d % 2 == 0 else 1


def size_of_hybrid_groups(d):
    """Return how many ranks share the state in make plan: HYBRID_RANKS, or fewer where d is no multiple of them."""
    return math.gcd(HYBRID_RANKS, d)


def same_bits(model, adamw, bucket_mb=None):
    """Set up variants/same_bits.py with one leaf on each rank, which is as much work as in the other rows."""
    return stage("variants.same_bits", prefetch=True, leaves=dist.get_world_size())(model, adamw, bucket_mb)


def optimizer_class(package, name="DistributedOptimizer"):
    return getattr(importlib.import_module(package), name)


def by_muon_rows(name):
    """Return a `build` that calls `name` of variants/muon_rows.py, imported only then: variants/ imports harness/."""
    def build(model, adamw, bucket_mb=None):
        return getattr(importlib.import_module("variants.muon_rows"), name)(model, adamw)
    return build


ddp_and_muon = by_muon_rows("ddp_and_muon")
owner_reduce = stage(OwnerReduce)
overlap = stage(STAGE_4, prefetch=True)


class Configuration(NamedTuple):
    """A row: a way to train, with what it must agree with, and what it should send and hold.

    Costs are bytes per parameter, with AdamW. In a step a rank sends `sends` times (d-1)/d. After a step it holds
    `whole` + `shared` / n, where n ranks share the state, and the buffers of buckets. Gradients are included.
    """
    name: str
    kind: str  # floor (learns nothing of other ranks), reference, stage, peer, or noise (the reference once more)
    build: Callable  # (model, AdamW's settings, bucket_mb=None) -> Training
    sends: float
    whole: float
    shared: float = 0
    rest_whole: float | None = None  # `whole` for the parameters of the first of two optimizers; None: there is one
    rest_shared: float = 0  # `shared` for these parameters
    sharing: Callable = lambda d: d  # d -> n
    starts_apart: bool = True  # each rank begins with other weights, and the constructor must broadcast those of rank 0
    dtype: str = "float32"  # of the parameters
    reference: Callable = ddp  # builds the training that this row must agree with
    has_buckets: bool = False  # whether a size of buckets may be chosen
    base: str | None = None  # the row that a variant's time is compared with

    def wire_bytes(self, numel, d):
        return self.sends * numel * (d - 1) / d

    def bytes_per_param(self, numel, d, optimizer):
        optimizers = getattr(optimizer, "optimizers", [optimizer])
        held = self.whole + self.shared / self.sharing(d)
        if self.rest_whole is not None:
            rest_held = self.rest_whole + self.rest_shared / d
            n_rest = sum(param.numel() for group in optimizers[0].param_groups for param in group["params"])
            held = (held * (numel - n_rest) + rest_held * n_rest) / numel  # the average over all elements
        buffer_bytes = sum(getattr(part, "bucket_buffer_bytes", 0) for part in optimizers)
        return held + buffer_bytes / numel


# --------------------------------------------------------------------------- Stage 4 without one half of its overlap


class LateSender(stage4_overlap.DistributedOptimizer):
    """Does what stage 4 does, but sends no bucket before the backward pass has ended."""

    pass_has_ended = False

    def send_full_buckets(self):
        if self.pass_has_ended:
            super().send_full_buckets()

    def _finish_round(self):
        self.pass_has_ended = True
        super()._finish_round()
        self.pass_has_ended = False



# ----------------------------------------------------------------------------------------------------------- The rows


def variant(name, build=None, sends=8, whole=4, shared=12, base=OVERLAP, **fields):
    """Make the row of a file of variants/; by default it sends and holds what stage 4 does."""
    build = build or stage(f"variants.{name}", prefetch=True)
    return Configuration(f"variants {name}", "stage", build, sends, whole, shared, base=base, **fields)


# With parameters in 16 bits, and AdamW on fp32 copies. Each divides and sums as its reference does.
STAGE_3_IN_BF16 = [
    Configuration("stage 3 bf16/fp32", "stage", stage(STAGE_3, grad_dtype=torch.float32), sends=6, whole=6, shared=12,
                  dtype="bfloat16", reference=in_16_bits(divided_in=torch.float32)),
    Configuration("stage 3 bf16/bf16", "stage", stage(STAGE_3), sends=4, whole=4, shared=16, dtype="bfloat16",
                  reference=in_16_bits(summed_in=None)),
]
IN_BF16 = [
    Configuration(f"{COMPUTE_ONLY} bf16", "floor", in_16_bits(alone=True), sends=0, whole=20, starts_apart=False,
                  dtype="bfloat16", reference=in_16_bits()),
    *STAGE_3_IN_BF16,
    # NCCL alone would sum in 16 bits.
    Configuration(OVERLAP_BF16, "stage", stage(STAGE_4, prefetch=True, reduce_dtype=torch.float32), sends=4, whole=2,
                  shared=16, dtype="bfloat16", reference=in_16_bits(divided_in=torch.float32)),
]
ROWS = [
    Configuration(COMPUTE_ONLY, "floor", compute_only, sends=0, whole=16, starts_apart=False),
    Configuration(REFERENCE, "reference", ddp, sends=8, whole=16, has_buckets=True),
    Configuration("ddp + stage 1", "stage", beneath_ddp(STAGE_1), sends=12, whole=8, shared=8, has_buckets=True),
    Configuration("ddp + stage 2", "stage", beneath_ddp(STAGE_2), sends=12, whole=8, shared=8, has_buckets=True),
    Configuration(REPLICATED, "stage", stage(baselines.DistributedOptimizer), sends=8, whole=16),
    Configuration(NAIVE_BROADCAST, "stage", stage(STAGE_1), sends=12, whole=8, shared=8),
    Configuration(ALL_GATHER, "stage", stage(STAGE_2), sends=12, whole=8, shared=8),
    Configuration(GRAD_BUFFER, "stage", stage(STAGE_3), sends=8, whole=8, shared=8),
    Configuration(OVERLAP, "stage", overlap, sends=8, whole=4, shared=12, has_buckets=True),
    Configuration(ZERO, "peer", ddp_and_zero, sends=12, whole=8, shared=8, has_buckets=True),
    Configuration("owner reduce", "peer", owner_reduce, sends=8, whole=4, shared=12, has_buckets=True),
    Configuration(FSDP2, "peer", fsdp2(reshard_after_forward=False), sends=8, whole=0, shared=16, starts_apart=False),
    Configuration(FSDP2_RESHARD, "peer", fsdp2(reshard_after_forward=True), sends=12, whole=0, shared=16,
                  starts_apart=False),
    Configuration("ddp again", "noise", ddp, sends=8, whole=16),
    *IN_BF16,
]
# Shown where --rows asks for them.
VARIANTS = [
    variant("per_parameter", stage("variants.per_parameter"), whole=8, shared=8, base=GRAD_BUFFER),
    Configuration(DDP_AND_MUON, "peer", ddp_and_muon, sends=8, whole=12, rest_whole=16, starts_apart=False,
                  reference=ddp_and_muon),
    Configuration("variants muon", "stage", by_muon_rows("whole_matrices"), sends=8, whole=4, shared=8, rest_whole=4,
                  rest_shared=12, reference=ddp_and_muon, base=DDP_AND_MUON),
    variant("hybrid", hybrid(size_of_pairs), sharing=size_of_pairs),
    variant("wire16", sends=6, reference=in_16_bits(divided_in=torch.bfloat16)),
    variant("moments16", shared=8, reference=in_16_bits(divided_in=torch.float32, moments_in=torch.bfloat16)),
    variant("same_bits", same_bits),
    variant("finite"),
    variant("blocks"),
    variant("offload", shared=16),
    variant("remainder16", sends=4, whole=2, shared=14, dtype="bfloat16", base=OVERLAP_BF16,
            reference=in_16_bits(divided_in=torch.float32, ties_away=True)),
    Configuration(DDP_BF16_SUM, "peer", ddp_summed_in_bf16, sends=4, whole=16,
                  reference=in_16_bits(divided_in=torch.bfloat16, summed_in=torch.bfloat16)),
]
# Rows of two hosts, which show how much time each half of the overlap saves.
BUILD_HALF = {NO_OVERLAP: stage(LateSender), GRADIENT_OVERLAP: stage(STAGE_4),
              PARAMETER_OVERLAP: stage(LateSender, prefetch=True)}
HALVES = [Configuration(name, "stage", build, sends=8, whole=4, shared=12, has_buckets=True)
          for name, build in BUILD_HALF.items()]
# Rows of make plan: with 16-bit parameters, for GPUs.
PLANNED = [
    Configuration("ddp bf16", "stage", ddp_16bit, sends=4, whole=20, dtype="bfloat16", has_buckets=True),
    Configuration("owner reduce bf16", "stage", owner_reduce, sends=4, whole=2, shared=6, dtype="bfloat16",
                  has_buckets=True),
    Configuration("stage 1 bf16", "stage", stage(STAGE_1), sends=4, whole=4, shared=4, dtype="bfloat16"),
    Configuration("stage 2 bf16", "stage", stage(STAGE_2), sends=4, whole=4, shared=4, dtype="bfloat16"),
    *STAGE_3_IN_BF16,
    Configuration(STAGE_4_BF16, "stage", overlap, sends=4, whole=2, shared=16, dtype="bfloat16", has_buckets=True),
    Configuration(HYBRID_BF16, "stage", hybrid(size_of_hybrid_groups), sends=4, whole=2, shared=16, dtype="bfloat16",
                  sharing=size_of_hybrid_groups, has_buckets=True),
]


# --rows variants also measures these rows, with which the variants are compared.
BASES_OF_VARIANTS = GRAD_BUFFER, OVERLAP, OVERLAP_BF16, DDP_BF16_SUM


def is_asked(text, name):
    """Return whether --rows `text`, parts of names with commas between them, asks for the row of that name."""
    if text == "variants" and name in BASES_OF_VARIANTS:
        return True
    return any(part in name for part in text.split(","))


class Rung(NamedTuple):
    """A row of README's ladder."""
    row: str
    title: str
    collectives: str


RUNGS = [
    Rung(REFERENCE, "DDP, replicated AdamW", "all-reduce, in buckets"),
    Rung(REPLICATED, "replicated", "all-reduce"),
    Rung(NAIVE_BROADCAST, "1 naive broadcast", "all-reduce, d broadcasts"),
    Rung(ALL_GATHER, "2 all-gather", "all-reduce, all-gather"),
    Rung(GRAD_BUFFER, "3 grad buffer", "reduce-scatter, all-gather"),
    Rung(OVERLAP, "4 overlap", "reduce-scatter, all-gather, in buckets"),
    Rung(FSDP2, "FSDP2, `reshard_after_forward=False`", "reduce-scatter, all-gather, by module"),
    Rung(FSDP2_RESHARD, "FSDP2, parameters dropped after forward", "reduce-scatter, 2 all-gathers, by module"),
]


def find(base, bucket_mb=None):
    """Return the Configuration of that name, with buckets of `bucket_mb` MiB; None: with buckets of the default size.

    Raises LookupError: there is no such row.
    """
    by_name = {row.name: row for row in [*ROWS, *HALVES, *PLANNED, *VARIANTS]}
    configuration = by_name[base]
    if bucket_mb is None:
        return configuration
    if not configuration.has_buckets:
        raise LookupError(f"there is no row {RowId(base, bucket_mb).name!r}")
    # The reference is the row with the default size.
    kind = "peer" if configuration.kind == "reference" else configuration.kind
    return configuration._replace(kind=kind, build=functools.partial(configuration.build, bucket_mb=bucket_mb))
