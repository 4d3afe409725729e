"""The variants: each equals replicated training, sends and holds what its formula says, and takes the guard.

The contract of stages runs over each of them: `pytest tests/stages/test_contract.py --stage variants.finite`.
"""

import ast
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard, distribute_tensor

import stage4_overlap
from harness.measuring import two_hosts
from harness.measuring.ledger import Ledger
from harness.publishing.pages import rewritten
from harness.publishing.stages import code_lines
from harness.training import rows
from tests.common import error_of, mesh_of, on_ranks, one_rank_of, optimizer_of, situation
from tests.pairs import ADAMW, Pair
from tests.ranks import ROOT
from tests.stages import test_cores
from tests.stages.test_cores import core_of
from tests.stages.test_probe import BLOCKS as BLOCK_RULES
from tests.stages.test_probe import CountsCalls
from tests.variants import on_pairs
from variants import hybrid, wire16
from variants.__main__ import BLOCKS, ROWS, counted

FILES = sorted(path for path in (ROOT / "variants").glob("[a-z]*.py") if path.stem != "muon_rows")
# With fp32 parameters and AdamW each of these is replicated training, to the bit where sums allow it.
AS_REPLICATED = [*(f"variants.{name}" for name in ("per_parameter", "muon", "finite", "blocks", "offload")),
                 "tests.variants.on_pairs"]


class BlockSGD(torch.optim.SGD):
    """Divides each gradient by the largest in its block of 256 elements: element-wise it is not."""

    @torch.no_grad()
    def step(self):
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            for grad in param.grad.view(-1).split(256):
                grad /= grad.abs().max().clamp(min=1e-6)
        super().step()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_variant_has_thirty_lines_and_says_what_it_costs(path):
    most = {"muon": 66, "by_bucket": 48, "hybrid": 53, "finite": 40, "remainder16": 36, "same_bits": 130}
    assert len(code_lines(path)) <= most.get(path.stem, 30)
    if path.stem != "by_bucket":  # half of three
        opening = ast.get_docstring(ast.parse(path.read_text()))
        assert all(part in opening for part in ("Situation: ", "Called elsewhere: ", "Wire", "emory", "Costs: "))


# ------------------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("variant", AS_REPLICATED)
@on_ranks
def test_a_variant_equals_replicated_training(rank, variant):
    """The core of it, also of three micro-batches; tests/variants/test_matrix.py has it with the guard."""
    test_cores.equals_replicated(rank, variant, "AdamW", test_cores.by_dimension, False, 1)
    test_cores.equals_replicated(rank, variant, "AdamW", nn.Module.parameters, False, 3)


MATRICES = [(24, 16), (16, 24), (8, 8), (40, 16), (16, 3)]
ELEMENTWISE = [(40, 40), (10,), (513,), (300,)]
OWN = [  # variant, the optimizer, its arguments, shapes; what is allowed beyond two ranks
    ("muon", torch.optim.Muon, {"lr": 0.02}, MATRICES, 2e-3),
    ("blocks", BlockSGD, {"lr": 0.1}, ELEMENTWISE, 1e-6),
    *((name, torch.optim.AdamW, ADAMW, ELEMENTWISE, 0) for name in ("wire16", "moments16"))]


def drawn(generator, rank, dtype=torch.float32, shapes=ELEMENTWISE):
    """-> gradients of this rank, and of all; the same for the same state of the generator."""
    everyone = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(rank.world_size)]
    return everyone[rank.number], everyone


def ones(dtype=torch.float32, shapes=ELEMENTWISE):
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def step(optimizer, params, grads):
    for param, grad in zip(params, grads):
        (param * grad).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("of", [core_of, optimizer_of], ids=["core", "guard"])
@on_ranks(case=OWN)
def test_a_variant_of_another_optimizer_or_of_fewer_bits_equals_one_process(rank, of, case):
    """Compare with one process that rounds what the variant rounds, and adds in rank order: to the bit on two ranks.

    Beyond, the order of a sum is the variant's, and Newton–Schulz, which works in bf16, shows its last bit.
    """
    variant, optimizer_cls, kwargs, shapes, allowed = case
    on_wire = torch.bfloat16 if variant == "wire16" else torch.float32
    kept_in = torch.bfloat16 if variant == "moments16" else torch.float32
    generator = torch.Generator().manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    params = [nn.Parameter(param.detach().clone() if rank.number == 0 else torch.full_like(param, -1))
              for param in whole]
    optimizer = of(f"variants.{variant}")(params, optimizer_cls, bucket_cap_mb=2e-3, **kwargs)  # which broadcasts
    plain = optimizer_cls(whole, **kwargs)
    for _ in range(4):
        mine, everyone = drawn(generator, rank, shapes=shapes)
        step(optimizer, params, mine)
        for param, *grads in zip(whole, *everyone):
            param.grad = sum(grad.to(on_wire).float() / rank.world_size for grad in grads)
        plain.step()
        if kept_in == torch.bfloat16:
            for state in plain.state.values():
                state.update({name: state[name].to(kept_in).float() for name in ("exp_avg", "exp_avg_sq")})
        worst = max((a - b).abs().max() for a, b in zip(params, whole))
        assert worst <= (0 if rank.world_size <= 2 else allowed)
    assert {state["exp_avg"].dtype for state in optimizer.state.values() if "exp_avg" in state} <= {kept_in}


@pytest.mark.parametrize("stage, optimizer_cls, shape, words", [
    ("stage4_overlap", torch.optim.Muon, (8, 8), "is not element-wise"),
    ("variants.blocks", torch.optim.Muon, (8, 8), "is not element-wise"),
    ("variants.blocks", BLOCK_RULES["multiples of 256 from 4096 on"], (96, 64), "is not element-wise"),
    *((f"variants.{name}", CountsCalls, (8, 8), "CountsCalls") for name in ("muon", "moments16", "remainder16"))])
def test_optimizers_that_a_stage_or_a_variant_is_not_for_are_refused(stage, optimizer_cls, shape, words):
    """Where a class is called for each bucket, also one that counts its calls."""
    with one_rank_of(1), pytest.raises(ValueError, match=words):
        optimizer_of(stage)([nn.Parameter(torch.zeros(shape)) for _ in range(3)], optimizer_cls, lr=0.1)


# -------------------------------------------------------------------------------------------------------- with a guard


# ------------------------------------------------------------------------------------------------------- fewer bits


@pytest.mark.parametrize("of", [core_of, optimizer_of], ids=["core", "guard"])
@on_ranks
def test_a_remainder_and_a_parameter_are_the_main_parameter_to_the_bit(rank, of):
    """Step beside stage 4: every difference of a bf16 parameter is a tie, and one unit upwards.

    Gradients don't depend on parameters, steps are multiples of half a unit: many ties. Rank 0 has the gradient, d
    times: then d divides it.
    """
    generator = torch.Generator().manual_seed(0)
    n_ties = 0
    start = [1 + torch.randint(0, 128, shape, generator=generator) / 128 for shape in ELEMENTWISE]
    params_of = {name: [nn.Parameter(param.bfloat16()) for param in start]
                 for name in ("stage4_overlap", "variants.remainder16")}
    optimizers = [of(name)(params, torch.optim.SGD, lr=2**-8, bucket_cap_mb=2e-3) for name, params in params_of.items()]
    for _ in range(4):
        mine = [torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in ELEMENTWISE]
        factor = rank.world_size if rank.number == 0 else 0
        for optimizer, params in zip(optimizers, params_of.values()):
            step(optimizer, params, [grad * factor for grad in mine])
        for bucket, split in zip(*(optimizer.buckets for optimizer in optimizers)):
            main = bucket.parameter.main_shard
            assert split.parameter.main.untyped_storage().size() == 0
            assert torch.equal(split.parameter.main_shard, main)
            ours, theirs = (b.parameter.shard.view(torch.int16).int() for b in (split, bucket))
            is_tie = main.view(torch.int32) & 0xFFFF == 0x8000
            differs = ours != theirs
            assert torch.equal(ours - theirs, differs.int()) and not differs[~is_tie].any()
            n_ties += differs.sum()
    torch.distributed.all_reduce(n_ties)
    assert n_ties > 0


class HybridWire16(on_pairs.OnPairs, stage4_overlap.DistributedOptimizer, hybrid.Replicas,
                   wire16.ShardedOptimizer):
    """Two that combine, in a line."""


@on_ranks(4)
def test_hybrid_and_wire16_combine(rank):
    pair = Pair(rank, None, of=lambda _: HybridWire16)
    with Ledger() as ledger:
        pair.train(0, 1, 2)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-2) for a, b in zip(*(model.parameters() for model in pair.models)))
    assert {entry.dtype for entry in ledger.entries if entry.kind == "send"} == {torch.bfloat16}


# ------------------------------------------------------------------------------------------------------------- finite


@on_ranks(of=[core_of, optimizer_of], value=[math.nan, math.inf])
def test_what_is_not_finite_is_an_error_on_every_rank(rank, of, value):
    """The last rank has it, in one element of the second parameter. Momentum has nothing of it, either."""
    named = [(name, nn.Parameter(torch.ones(40))) for name in ("first", "second", "third")]
    params = dict(named)
    optimizer = of("variants.finite")(named, torch.optim.SGD, lr=1.0, momentum=0.5, bucket_cap_mb=1e-6)
    factor = torch.ones(40)
    factor[7] = value if rank.number == rank.world_size - 1 else 1
    (params["first"].sum() + (params["second"] * factor).sum() + params["third"].sum()).backward()
    line = f"a gradient is nan or inf: of parameter second on rank {rank.world_size - 1}"
    assert error_of(optimizer.step) == line
    assert all((param == 1).all() for param in params.values())
    for moved_to in (0, -1.5):
        sum(param.sum() for param in params.values()).backward()
        optimizer.step()
        assert all((param == moved_to).all() for param in params.values())


@on_ranks(4, accumulation_steps=[1, 3, math.inf], n_passes=[1, 3])
def test_hybrid_may_average_over_the_groups_in_the_last_pass_alone(rank, accumulation_steps, n_passes):
    """Four buckets, of which a rank has 16 elements each. What its host agrees on has integers."""
    params = [nn.Parameter(torch.zeros(16)) for _ in range(4)]
    optimizer = hybrid.DistributedOptimizer(params, torch.optim.SGD, lr=1.0, mesh=on_pairs.mesh(), bucket_cap_mb=1e-6,
                                            gradient_accumulation_steps=accumulation_steps)
    for _ in range(2):
        with Ledger() as ledger:
            for _ in range(n_passes):
                sum(param.sum() * rank.number for param in params).backward()
            optimizer.step()
        sizes = [entry.size for entry in ledger.entries if entry.kind == "all_reduce" and entry.dtype == torch.float32]
        assert sizes == [64] * 4 * (n_passes if accumulation_steps == 1 else 1)
    assert all((param == -2 * n_passes * 1.5).all() for param in params)


# -------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", ROWS)
def test_a_variant_sends_and_holds_what_its_formula_says(name):
    """To 1 %: what ranks agree on, the counts of steps, padding of blocks."""
    sent, _, held, sent_due, held_due = counted(name, 8)
    assert sent == pytest.approx(sent_due, rel=0.01)
    assert held == pytest.approx(held_due, rel=0.01)


def test_the_page_has_a_row_of_every_variant_as_the_command_prints_it():
    """And so do the bench and the network."""
    of_page = {name for name in ROWS if name.startswith("variants")}
    page = (ROOT / "variants" / "README.md").read_text()
    assert of_page == {f"variants {path.stem}" for path in FILES} - {"variants by_bucket"}
    assert rewritten(page, BLOCKS) == page and BLOCKS["table"]() in page
    measured_rows = [row.name for row in rows.VARIANTS]
    assert of_page <= set(measured_rows) and measured_rows == [row_id.name for row_id in two_hosts.VARIANTS]


# --------------------------------------------------------------------------------------------------------------- muon


def test_a_bucket_of_whole_matrices_has_no_padding_and_something_of_each_rank():
    """With fewer matrices than there are ranks it is no longer for that. Were all of it one rank's, it would go one
    way, and half of the link would be idle."""
    shapes = [(3 * 768, 768), (768, 768), (4 * 768, 768), (768, 4 * 768)] * 12
    for d in (2, 8, 32):
        with situation(d), one_rank_of(d), FakeTensorMode():
            params = [nn.Parameter(torch.empty(shape)) for shape in shapes]
            buckets = core_of("variants.muon")(params, torch.optim.SGD, lr=0.1).buckets
            assert len(buckets) > 10
            assert sum(bucket.numel for bucket in buckets) == sum(param.numel() for param in params)
            assert d > 2 or all(max(bucket.lengths) < 0.65 * bucket.numel for bucket in buckets)


@on_ranks(2)
def test_a_bucket_goes_back_while_the_next_one_is_stepped(rank):
    """In the order of the forward pass: when a matrix is stepped, those before it have left."""
    params = [nn.Parameter(torch.ones(8, 8)) for _ in range(6)]
    optimizer = optimizer_of("variants.muon")(params, torch.optim.Muon, bucket_cap_mb=1e-6)
    optimizer.prefetch_params(nn.ParameterList(params))
    left = []
    optimizer.optimizer.register_step_pre_hook(
        lambda *_: left.append([bucket.param_sync is not None for bucket in reversed(optimizer.buckets)]))
    sum((param * (1 + i)).sum() for i, param in enumerate(params)).backward()
    optimizer.step()
    assert left == [[i < step for i in range(6)] for step in range(6)]


@on_ranks(2, variant_and_own=[("variants.muon", {}), ("variants.same_bits", {"leaves": 1})])
def test_muon_refuses_a_dtensor_on_every_rank_before_anything_changes(rank, variant_and_own):
    """And so does same_bits."""
    variant, own = variant_and_own
    mesh = mesh_of("cpu", (1, 2), ("dp", "tp"))
    whole = nn.Parameter(torch.full((3,), float(rank.number)))
    spread = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    own["process_group"] = mesh["dp"].get_group()
    refusal = error_of(
        lambda: optimizer_of(variant)([("whole", whole), ("spread", spread)], torch.optim.SGD, **own), ValueError)
    assert "parameter spread is a DTensor" in refusal
    assert whole.eq(rank.number).all()


def test_offload_leaves_the_parameters_and_two_buffers_on_the_device():
    """Of a fake device: the shards, their gradients and the moments are on the host."""
    with one_rank_of(4), FakeTensorMode():
        params = [nn.Parameter(torch.empty(64, 64, device="meta")) for _ in range(8)]
        optimizer = core_of("variants.offload")(params, torch.optim.AdamW, bucket_cap_mb=0.03)
        for param in reversed(params):
            param.grad = torch.empty_like(param)
            optimizer.on_grad_ready(param)
        optimizer.step()
        held = [shard for bucket in optimizer.buckets for shard in (bucket.parameter.main_shard, bucket.gradient.shard)]
        held += [tensor for state in optimizer.optimizer.state.values() for tensor in state.values()]
        assert all(tensor.device.type == "cpu" for tensor in held)
        assert sum(tensor.nbytes for tensor in held if tensor.dim()) == 16 * 8 * 64 * 64 / 4
        assert all(tensor.device.type == "meta" for tensor in (*params, *(buffer.sent for buffer in optimizer.idle)))
