"""The variants: each equals replicated training, and takes the guard. What each sends and holds: harness/test_rows.py.

The contract of stages runs over each of them: `pytest tests/stages/test_contract.py --stage variants.finite`.
"""

import ast
import math
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor

import checkpoint
from harness import STAGE_4
from harness.measuring.ledger import Ledger
from harness.publishing.pages import TAKE_IT_WHEN
from harness.publishing.stages import code_lines
from tests.common import error_of, mesh_of, on_ranks, one_rank_of, optimizer_of
from tests.pairs import SMALL, parameter_of, sgd_of
from tests.ranks import ROOT
from tests.stages import test_cores
from tests.stages.test_cores import core_of
from tests.stages.test_probe import CountsCalls
from tests.variants import on_pairs
from variants import hybrid

FILES = sorted(path for path in (ROOT / "variants").glob("[a-z]*.py") if path.stem != "muon_rows")
# With fp32 parameters and AdamW each of these is replicated training, to the bit where sums allow it.
AS_REPLICATED = ["variants.per_parameter", "variants.muon", "variants.finite", "variants.blocks", "variants.offload",
                 "tests.variants.on_pairs"]


def test_most_variants_have_35_lines_and_each_says_what_it_costs():
    long_files = {path.stem for path in FILES if len(code_lines(path)) > 35}
    assert long_files == {"by_bucket", "finite", "hybrid", "muon", "same_bits"}
    for path in FILES:
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        for part in ("Situation: ", "Names in other libraries: ", "Wire", "emory", "Costs: "):  # Memory, or memory
            assert part in docstring or path.stem == "by_bucket"  # the base of three variants


def test_the_page_has_a_row_of_every_variant():
    of_page = {name for name in TAKE_IT_WHEN if name.startswith("variants")}
    assert of_page == {f"variants {path.stem}" for path in FILES} - {"variants by_bucket"}


# ------------------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("variant", AS_REPLICATED)
@on_ranks
def test_a_variant_equals_replicated_training(rank, variant):
    """Train the variant's core on steps of one and of three micro-batches. test_matrix.py trains it with the guard."""
    test_cores.equals_replicated(rank, variant, "AdamW", test_cores.by_dimension, False, 1)
    test_cores.equals_replicated(rank, variant, "AdamW", nn.Module.parameters, False, 3)


class BlockSGD(torch.optim.SGD):
    """Divides each gradient by the largest in its block of 256 elements: element-wise it is not."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    for block in param.grad.view(-1).split(256):
                        block /= block.abs().max().clamp(min=1e-6)
        super().step()


class Case(NamedTuple):
    variant: str
    optimizer_cls: type
    tolerance: float  # on three ranks, where sums have another order


CASES = [
    Case("muon", torch.optim.Muon, 2e-3),  # Newton–Schulz works in bf16, which shows the last bit of a sum
    Case("blocks", BlockSGD, 1e-6), Case("wire16", torch.optim.AdamW, 0), Case("moments16", torch.optim.AdamW, 0)]
SHAPES = [(24, 16), (16, 24), (8, 8), (40, 16), (16, 3)]


def step(optimizer, params, grads):
    """Take a step in which this rank's gradients are `grads`."""
    sum((param * grad).sum() for param, grad in zip(params, grads)).backward()
    optimizer.step()


@pytest.mark.parametrize("class_of", [core_of, optimizer_of], ids=["core", "guard"])
@on_ranks(case=CASES)
def test_a_variant_of_another_optimizer_or_of_fewer_bits_equals_one_process(rank, class_of, case):
    """The one process rounds what the variant rounds, and adds in rank order. On two ranks all bits are equal."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    expected_params = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = class_of(f"variants.{case.variant}")(params, case.optimizer_cls, bucket_cap_mb=2e-3, lr=0.01)
    plain = case.optimizer_cls(expected_params, lr=0.01)
    for _ in range(4):
        grads_of_ranks = []
        for _ in range(rank.world_size):
            grads_of_ranks.append([torch.randn(shape, generator=generator) for shape in SHAPES])
        step(optimizer, params, grads_of_ranks[rank.number])
        for param, *grads in zip(expected_params, *grads_of_ranks):
            if case.variant == "wire16":
                grads = [grad.bfloat16().float() for grad in grads]
            param.grad = sum(grad / rank.world_size for grad in grads)
        plain.step()
        if case.variant == "moments16":
            for entries in plain.state.values():
                for name in ("exp_avg", "exp_avg_sq"):
                    entries[name] = entries[name].bfloat16().float()
        tolerance = 0 if rank.world_size <= 2 else case.tolerance
        torch.testing.assert_close(params, expected_params, rtol=0, atol=tolerance)


@pytest.mark.parametrize("variant, optimizer_cls, words", [
    ("blocks", torch.optim.Muon, "is not element-wise"),
    *((variant, CountsCalls, "CountsCalls") for variant in ("muon", "moments16", "remainder16"))])
def test_optimizers_that_a_variant_is_not_for_are_refused(variant, optimizer_cls, words):
    """muon, moments16 and remainder16 call a class once for each bucket, and refuse a class that counts its calls."""
    params = [nn.Parameter(torch.zeros(8, 8)) for _ in range(3)]
    with one_rank_of(1), pytest.raises(ValueError, match=words):
        optimizer_of(f"variants.{variant}")(params, optimizer_cls, lr=0.1)


# ------------------------------------------------------------------------------------------------------- fewer bits


@pytest.mark.parametrize("class_of", [core_of, optimizer_of], ids=["core", "guard"])
@on_ranks
def test_a_remainder_and_a_parameter_are_the_main_parameter_to_the_bit(rank, class_of):
    """Step beside stage 4: every difference of a bf16 parameter is a tie, and one unit upwards.

    Gradients don't depend on parameters, and steps are multiples of half a unit: many ties. Rank 0 alone has gradients,
    d times as large, because d divides them.
    """
    generator = torch.Generator().manual_seed(0)
    start = [1 + torch.randint(0, 128, shape, generator=generator) / 128 for shape in SHAPES]
    factor = rank.world_size if rank.number == 0 else 0

    def make(package):
        params = [nn.Parameter(values.bfloat16()) for values in start]
        return params, class_of(package)(params, torch.optim.SGD, lr=2**-8, bucket_cap_mb=2e-3)

    params, optimizer = make("variants.remainder16")
    params_of_stage_4, stage_4 = make(STAGE_4)
    n_ties = torch.tensor(0)
    for _ in range(4):
        grads = [factor * torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in SHAPES]
        step(optimizer, params, grads)
        step(stage_4, params_of_stage_4, grads)
        for bucket, bucket_of_stage_4 in zip(optimizer.buckets, stage_4.buckets):
            main_shard = bucket_of_stage_4.parameter.main_shard
            assert bucket.parameter.main.untyped_storage().size() == 0
            assert torch.equal(bucket.parameter.main_shard, main_shard)
            bits = bucket.parameter.shard.view(torch.int16)
            units = bits - bucket_of_stage_4.parameter.shard.view(torch.int16)  # by which the parameters differ
            lower_bits = main_shard.view(torch.int32) & 0xFFFF
            is_tie = lower_bits == 0x8000
            assert units.min() >= 0 and units.max() <= 1 and not units[~is_tie].any()
            n_ties += units.sum()
    dist.all_reduce(n_ties)
    assert n_ties > 0


# ------------------------------------------------------------------------------------------------- finite, hybrid


@on_ranks(class_of=[core_of, optimizer_of], value=[math.nan, math.inf])
def test_what_is_not_finite_is_an_error_on_every_rank(rank, class_of, value):
    """One element of a gradient on the last rank is not finite. No parameter and no momentum keeps a trace of it."""
    named = {name: parameter_of(0, rank, n=40) for name in ("first", "second", "third")}
    optimizer = class_of("variants.finite")([*named.items()], torch.optim.SGD, lr=1.0, momentum=0.5, **SMALL)
    factors = torch.ones(40)
    if rank.number == rank.world_size - 1:
        factors[7] = value
    (named["first"].sum() + (named["second"] * factors).sum() + named["third"].sum()).backward()
    line = f"a gradient is nan or inf: of parameter second on rank {rank.world_size - 1}"
    assert error_of(optimizer.step) == line
    for moved_to in (-1, -2.5):
        sum(param.sum() for param in named.values()).backward()
        optimizer.step()
        assert all((param == moved_to).all() for param in named.values())


@on_ranks(4, accumulation_steps=[1, 3, math.inf], n_passes=[1, 3])
def test_hybrid_may_average_over_the_groups_in_the_last_pass_alone(rank, accumulation_steps, n_passes):
    """Count the all-reduces of fp32: those of the groups. A rank has 16 elements, 64 bytes, of each of four buckets.

    With math.inf the second group of ranks runs a pass more.
    """
    params = [parameter_of(0, rank, n=16) for _ in range(4)]
    optimizer = hybrid.DistributedOptimizer(params, torch.optim.SGD, lr=1.0, mesh=on_pairs.mesh(), **SMALL,
                                            gradient_accumulation_steps=accumulation_steps)
    passes_of_ranks = [n_passes] * 4
    if accumulation_steps == math.inf:
        passes_of_ranks = [n_passes, n_passes, n_passes + 1, n_passes + 1]
    for _ in range(2):
        with Ledger() as ledger:
            for _ in range(passes_of_ranks[rank.number]):
                sum(param.sum() * rank.number for param in params).backward()
            optimizer.step()
        sizes = [entry.size for entry in ledger.entries if entry.kind == "all_reduce" and entry.dtype == torch.float32]
        n_averages = n_passes if accumulation_steps == 1 else 1
        assert sizes == [64] * 4 * n_averages
    mean = sum(number * passes for number, passes in enumerate(passes_of_ranks)) / 4
    assert all((param == -2 * mean).all() for param in params)


@on_ranks(4)
def test_hybrid_saves_on_the_ranks_of_one_group(rank, tmp_path):
    """Here the other group saves, too, into another folder."""
    param = parameter_of(3, rank)
    model = nn.ParameterList([param])
    optimizer = sgd_of("tests.variants.on_pairs", [param], momentum=0.9)
    folder = tmp_path / f"group {rank.number // 2}"
    checkpoint.save(folder, model, optimizer)
    param.data.zero_()
    checkpoint.load(folder, model, optimizer)
    assert param.eq(3).all()


# --------------------------------------------------------------------------------------------------------------- muon


def test_a_bucket_of_whole_matrices_has_something_of_each_rank():
    """If one rank owned a whole bucket, all bytes would go in one direction, and half of the link would be idle."""
    shapes = [(3 * 768, 768), (768, 768), (4 * 768, 768), (768, 4 * 768)] * 12
    with one_rank_of(2), FakeTensorMode():
        params = [nn.Parameter(torch.empty(shape)) for shape in shapes]
        buckets = core_of("variants.muon")(params, torch.optim.SGD, lr=0.1).buckets
    assert len(buckets) > 10
    assert all(max(bucket.lengths) < 0.65 * bucket.numel for bucket in buckets)


@on_ranks(2)
def test_a_bucket_goes_back_while_the_next_one_is_stepped(rank):
    """Matrices are stepped in the order of the forward pass. When one is stepped, those before it have left."""
    params = [nn.Parameter(torch.ones(8, 8)) for _ in range(6)]
    optimizer = optimizer_of("variants.muon")(params, torch.optim.Muon, **SMALL)
    optimizer.prefetch_params(nn.ParameterList(params))
    have_left = []  # for each step of a bucket, whether the buckets have left

    def note(*_):
        have_left.append([bucket.param_sync is not None for bucket in reversed(optimizer.buckets)])

    optimizer.optimizer.register_step_pre_hook(note)
    sum((param * (1 + number)).sum() for number, param in enumerate(params)).backward()
    optimizer.step()
    assert have_left == [[number < step for number in range(6)] for step in range(6)]


@on_ranks(2, variant_and_arguments=[("muon", {}), ("same_bits", {"leaves": 1})])
def test_muon_and_same_bits_refuse_a_dtensor_on_every_rank_before_anything_changes(rank, variant_and_arguments):
    variant, arguments = variant_and_arguments
    mesh = mesh_of("cpu", (1, 2), ("dp", "tp"))
    whole = parameter_of(rank.number, rank)
    spread = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    named = [("whole", whole), ("spread", spread)]
    make = optimizer_of(f"variants.{variant}")
    line = error_of(lambda: make(named, torch.optim.SGD, process_group=mesh["dp"].get_group(), **arguments), ValueError)
    assert "parameter spread is a DTensor" in line
    assert whole.eq(rank.number).all()


# ------------------------------------------------------------------------------------------------------------ offload


def test_offload_leaves_the_parameters_and_two_buffers_on_the_device():
    """Step parameters of a fake device. The shards, their gradients and the moments are on the host."""
    with one_rank_of(4), FakeTensorMode():
        params = [nn.Parameter(torch.empty(64, 64, device="meta")) for _ in range(8)]
        optimizer = core_of("variants.offload")(params, torch.optim.AdamW, bucket_cap_mb=0.03)
        for param in reversed(params):
            param.grad = torch.empty_like(param)
            optimizer.on_grad_ready(param)
        optimizer.step()
        on_host = []
        for bucket in optimizer.buckets:
            on_host += [bucket.parameter.main_shard, bucket.gradient.shard]
        for entries in optimizer.optimizer.state.values():
            on_host += entries.values()
        assert all(tensor.device.type == "cpu" for tensor in on_host)
        on_device = [*params, *(buffer.sent for buffer in optimizer.idle)]
        assert all(tensor.device.type == "meta" for tensor in on_device)
