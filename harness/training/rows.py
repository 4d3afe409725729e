"""Lists the rows of bench.py's tables: ways to train a model, by name.

For each row this file says how it is set up, with which other training its parameters must agree, and how many bytes it
should send and hold. Programs that measure compare that with what a row does.

Words that are used below:
    stage N         one of the four optimizers of this repository, in a folder stage*/ with two classes:
                    ShardedOptimizer, its core, is the algorithm; DistributedOptimizer also refuses wrong use
    variant         a file of variants/ that changes a stage
    peer            an optimizer of torch, or another scheme; stages are compared with it
    main parameter  the fp32 copy of a 16-bit parameter, which AdamW updates
    bucket          parameters whose gradients travel in one message
    overlap         messages travel while a rank computes
    d               the number of ranks
"""

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

# --------------------------------------------------- The names of rows, which are short because tables fit a terminal


COMPUTE_ONLY = "compute only"  # nothing is sent
REFERENCE = "ddp"  # torch's DistributedDataParallel with AdamW, with which times are compared
REPLICATED = "replicated"  # every rank updates all parameters, like DDP, but by this repository's code
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
GRADIENT_OVERLAP = "stage 4 only gradients"  # only gradients do
PARAMETER_OVERLAP = "stage 4 only parameters"  # only parameters do
HALF_OVERLAPS = [NO_OVERLAP, GRADIENT_OVERLAP, PARAMETER_OVERLAP]
# Only `make plan`, which calculates training on many GPUs, uses the next three names. In the hybrid row 64 ranks share
# a state, because a rank that holds 1/64 saves nearly everything that sharding can save.
HYBRID_RANKS = 64
STAGE_4_BF16 = "stage 4 bf16"
HYBRID_BF16 = f"hybrid of {HYBRID_RANKS} bf16"
# The ladder, a table in README.md: the reference, and then the stages in their order.
LADDER = [REFERENCE, NAIVE_BROADCAST, ALL_GATHER, GRAD_BUFFER, OVERLAP]

ONE_PARAMETER = 1e-6  # MiB: so small that each bucket has one parameter
DEFAULT_MB = 25  # MiB: DDP's default size of a bucket
SIZES = [ONE_PARAMETER, 0.25, 1, 2, 4, 8, 25, 100]  # sizes of buckets, in MiB, all of which a sweep measures


class RowId(NamedTuple):
    """Names a row of this file together with a size of buckets."""
    base: str  # name of the row
    bucket_mb: float | None = None  # size of buckets in MiB; None: the default size of this row

    @property
    def name(self):
        """Return the name in one line, such as "ddp, 4 MiB buckets"."""
        return self.base if self.bucket_mb is None else f"{self.base}, {self.size} buckets"

    @property
    def label(self):
        """Return the name, in two lines if it has a size of buckets, because tables have to fit a terminal."""
        return self.base if self.bucket_mb is None else f"{self.base},\n  {self.size} buckets"

    @property
    def size(self):
        """Return the size of buckets in words."""
        if self.bucket_mb is None:
            return "default"
        return "one-parameter" if self.bucket_mb == ONE_PARAMETER else f"{self.bucket_mb:g} MiB"


# ------------------------------------------------------------------------------------------------------ Ways to train
# Each way to train is a function build(model, adamw, bucket_mb=None), called on every rank, which returns a Training:
# the model with its optimizer, ready for the training loop (baselines.py).
#   adamw: AdamW's settings, {"lr": …, …}
#   bucket_mb: the size of buckets in MiB; None: the default size, also for ways that have no buckets
# A function below that takes other arguments returns such a function `build`.


def compute_only(model, adamw, bucket_mb=None):
    """Set up a rank that trains on its own, and sends nothing."""
    return Training(model, model, torch.optim.AdamW(model.parameters(), **adamw))


def with_ddp(make, hook=None, is_alone=False):
    """Let DDP average the gradients in buckets while backward() runs. `make(params, **adamw)` makes the optimizer.

    hook: a communication hook: DDP calls it to send a bucket of gradients.
    is_alone: whether DDP gets a gloo group with only this rank in it, for programs that run one rank whose messages go
        nowhere. DDP can't work with such messages.
    """
    def build(model, adamw, bucket_mb=None):
        group = dist.new_group([0], backend="gloo") if is_alone else None
        wrapped = in_ddp(model, bucket_mb, hook, process_group=group)
        return Training(model, wrapped, make(model.parameters(), **adamw))
    return build


def beneath_ddp(package):
    """Let DDP average the gradients, and a stage update the parameters. `package`: the folder of stage 1 or 2."""
    return with_ddp(lambda params, **adamw: optimizer_class(package)(params, average_gradients=False, **adamw))


# Two of the ways to train.
ddp = with_ddp(torch.optim.AdamW)
ddp_summed_in_bf16 = with_ddp(torch.optim.AdamW, hook=bf16_sum)


def ddp_and_zero(model, adamw, bucket_mb=None, is_alone=False):
    """Set up DDP and torch's ZeroRedundancyOptimizer, "ZeRO", as its documentation says.

    Each rank updates some parameters and broadcasts them. With a `bucket_mb`, ZeRO is tuned, too: the parameters of a
    rank are views of one tensor, which is broadcast as a whole.
    """
    def make_zero(params, **adamw):
        is_tuned = bucket_mb is not None
        return ZeroRedundancyOptimizer(params, torch.optim.AdamW, parameters_as_bucket_view=is_tuned, **adamw)
    return with_ddp(make_zero, is_alone=is_alone)(model, adamw, bucket_mb)


def fsdp2(reshard_after_forward):
    """Set up FSDP2, torch's fully_shard, as its documentation says: by block, and then the rest of the model.

    reshard_after_forward: whether a rank drops the gathered parameters after forward, and gathers them once more.
    """
    def build(model, adamw, bucket_mb=None):
        mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        for module in [*model.blocks, model]:
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return Training(model, model, torch.optim.AdamW(model.parameters(), **adamw))
    return build


def stage(optimizer, name="DistributedOptimizer", prefetch=False, **settings):
    """Set up a stage or a variant.

    Args:
        optimizer: its class; or the name of a package that has the class `name`.
        prefetch: whether parameters arrive during the next forward pass, which stage 4 and its variants can do.
        settings: other arguments of the class.
    """
    def build(model, adamw, bucket_mb=None):
        cls = optimizer_class(optimizer, name) if isinstance(optimizer, str) else optimizer
        arguments = {**settings, **adamw}
        if bucket_mb is not None:  # asked for only in rows whose `has_buckets` is True
            arguments["bucket_cap_mb"] = bucket_mb
        optimizer_of_model = cls(model.parameters(), torch.optim.AdamW, **arguments)
        if prefetch:
            optimizer_of_model.prefetch_params(model)
        return Training(model, model, optimizer_of_model)
    return build


def hybrid(group_size):
    """Set up variants/hybrid.py: a group of neighbouring ranks shares a state as in stage 4; each group has a copy.

    `group_size(d)` returns how many of d ranks are in a group.
    """
    def build(model, adamw, bucket_mb=None):
        d = dist.get_world_size()
        n_groups = d // group_size(d)
        mesh = dist.device_mesh.init_device_mesh(next(model.parameters()).device.type, (n_groups, group_size(d)))
        return stage("variants.hybrid", prefetch=True, mesh=mesh)(model, adamw, bucket_mb)
    return build


def size_of_pairs(d):
    """Return how many of d ranks share a state in the row "variants hybrid": 2 if that makes several groups, else 1."""
    return 2 if d > 2 and d % 2 == 0 else 1


def size_of_hybrid_groups(d):
    """Return how many of d ranks share a state in `make plan`: HYBRID_RANKS, or fewer if that doesn't divide d."""
    return math.gcd(HYBRID_RANKS, d)


def same_bits(model, adamw, bucket_mb=None):
    """Set up variants/same_bits.py, with one leaf on each rank. So it computes as much as the other rows do.

    A leaf is a part of a batch. The gradients of leaves are added up as in a tree.
    """
    return stage("variants.same_bits", prefetch=True, leaves=dist.get_world_size())(model, adamw, bucket_mb)


def optimizer_class(package, name="DistributedOptimizer"):
    """Import a package, and return its class of that name."""
    return getattr(importlib.import_module(package), name)


def by_muon_rows(name):
    """Return a `build` that calls the function `name` of variants/muon_rows.py.

    That module is imported when `build` is called, because it imports harness/ itself.
    """
    def build(model, adamw, bucket_mb=None):
        return getattr(importlib.import_module("variants.muon_rows"), name)(model, adamw)
    return build


ddp_and_muon = by_muon_rows("ddp_and_muon")
owner_reduce = stage(OwnerReduce)
overlap = stage(STAGE_4, prefetch=True)


class Configuration(NamedTuple):
    """A row: a way to train, another training with which it must agree, and the bytes that it should send and hold.

    There are d ranks, of which n share a state. In "bytes per parameter", a parameter is one element of a tensor. With
    AdamW a rank
        sends in a step        sends * (d-1)/d bytes per parameter
        holds after a step     whole + shared / n bytes per parameter, with gradients, and its buckets' buffers

    For example, with DDP in fp32 each rank holds all parameters, gradients, and both moments of AdamW, each of 4 bytes:
    whole=16.
    """
    name: str
    # "floor": it learns nothing from other ranks; "reference": DDP; "noise": DDP measured once more; "stage": a stage
    # or a variant; "peer".
    kind: str
    build: Callable  # (model, AdamW's settings, bucket_mb=None) -> Training
    sends: float  # bytes per parameter, before they are multiplied by (d-1)/d
    whole: float  # bytes per parameter of what every rank holds
    shared: float = 0  # bytes per parameter of what n ranks share, so that a rank holds 1/n of them
    # If a row has two optimizers, the next two fields are the `whole` and `shared` of the first optimizer, which has
    # the rest of the parameters. None: the row has one optimizer.
    rest_whole: float | None = None
    rest_shared: float = 0
    sharing: Callable = lambda d: d  # a function: d -> n
    starts_apart: bool = True  # ranks begin with different weights, so that the row has to broadcast rank 0's weights
    dtype: str = "float32"  # of the parameters
    reference: Callable = ddp  # the `build` of the training with which this row must agree
    has_buckets: bool = False  # whether `build` takes a size of buckets
    base: str | None = None  # name of the row with which a variant's time is compared

    def wire_bytes(self, numel, d):
        """Return how many bytes a rank should send in a step, for `numel` elements of parameters on d ranks."""
        return self.sends * numel * (d - 1) / d

    def bytes_per_param(self, numel, d, optimizer):
        """Return how many bytes per parameter a rank should hold after a step. `optimizer`: what `build` has made."""
        # An optimizer that consists of two has the attribute `optimizers`.
        optimizers = getattr(optimizer, "optimizers", [optimizer])
        held = self.whole + self.shared / self.sharing(d)
        if self.rest_whole is not None:
            rest_held = self.rest_whole + self.rest_shared / d
            # The number of elements in the parameters of the first optimizer.
            n_rest = sum(param.numel() for group in optimizers[0].param_groups for param in group["params"])
            held = (held * (numel - n_rest) + rest_held * n_rest) / numel  # the average over all elements
        # An optimizer with buckets, such as stage 4's, says how many bytes its buffers have.
        buffer_bytes = sum(getattr(part, "bucket_buffer_bytes", 0) for part in optimizers)
        return held + buffer_bytes / numel


# ---------------------------------------------------------------------- Stage 4 with gradients that don't overlap


class LateSender(stage4_overlap.DistributedOptimizer):
    """Does what stage 4 does, but sends no bucket of gradients before the backward pass has ended."""

    pass_has_ended = False

    def send_full_buckets(self):  # stage 4 calls it whenever a gradient is ready, and at the end of the pass
        if self.pass_has_ended:
            super().send_full_buckets()

    def _finish_round(self):  # stage 4 calls it at the end of the pass, to send what is left
        self.pass_has_ended = True
        super()._finish_round()
        self.pass_has_ended = False


# ----------------------------------------------------------------------------------------------------------- The rows


def variant(name, build=None, sends=8, whole=4, shared=12, base=OVERLAP, **fields):
    """Return the row of variants/`name`.py. By default it is set up as stage 4 is, and sends and holds as much.

    `fields`: other fields of the Configuration.
    """
    build = build or stage(f"variants.{name}", prefetch=True)
    return Configuration(f"variants {name}", "stage", build, sends, whole, shared, base=base, **fields)


# Rows with parameters in bfloat16. In "stage 3 bf16/fp32" parameters are bf16 and gradients fp32. Each rank divides its
# gradient by d before the ranks add. A row and its reference divide in the same dtype, and add in the same dtype:
# `divided_in` and `summed_in`, fp32 by default.
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
    # Without reduce_dtype, NCCL would add gradients in 16 bits, and gloo in fp32.
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
# Rows that are measured only if the option --rows asks for them.
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
# Rows that are measured on two hosts. They show how much time it saves that gradients travel during the backward pass,
# and that parameters travel during the forward pass.
BUILD_HALF = {NO_OVERLAP: stage(LateSender), GRADIENT_OVERLAP: stage(STAGE_4),
              PARAMETER_OVERLAP: stage(LateSender, prefetch=True)}
HALVES = [Configuration(name, "stage", build, sends=8, whole=4, shared=12, has_buckets=True)
          for name, build in BUILD_HALF.items()]
# Rows of `make plan`, which all have 16-bit parameters, as training on GPUs has.
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


# "--rows variants" asks for these rows, too, because the variants are compared with them.
BASES_OF_VARIANTS = GRAD_BUFFER, OVERLAP, OVERLAP_BF16, DDP_BF16_SUM


def is_asked(text, name):
    """Return whether the option --rows asks for the row `name`. `text`: parts of names, with commas between them."""
    if text == "variants" and name in BASES_OF_VARIANTS:
        return True
    return any(part in name for part in text.split(","))


class Rung(NamedTuple):
    """A line of README's table, which is called the ladder."""
    row: str  # name of the row that was measured
    title: str  # what the table calls it
    collectives: str  # what is sent in a step, in words


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
    """Return the Configuration of the row `base`, with buckets of `bucket_mb` MiB; None: of the default size.

    Raises LookupError if there is no such row, or if the row has no buckets whose size could be chosen.
    """
    by_name = {row.name: row for row in [*ROWS, *HALVES, *PLANNED, *VARIANTS]}
    configuration = by_name[base]
    if bucket_mb is None:
        return configuration
    if not configuration.has_buckets:
        raise LookupError(f"there is no row {RowId(base, bucket_mb).name!r}")
    # Only DDP with its default size is the reference.
    kind = "peer" if configuration.kind == "reference" else configuration.kind
    # functools.partial fixes the argument bucket_mb of `build`.
    return configuration._replace(kind=kind, build=functools.partial(configuration.build, bucket_mb=bucket_mb))
