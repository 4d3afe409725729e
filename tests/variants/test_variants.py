"""The variants: each equals replicated training, sends and holds what its formula says, and takes the guard.

The contract of stages runs over each of them: `pytest tests/stages/test_contract.py --stage variants.finite`.
"""

import ast
import math

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import stage4_overlap
from checkpoint import full_state_dict, load_full_state_dict
from grade.variants import BlockSGD
from harness.measuring import two_hosts
from harness.measuring.ledger import Ledger
from harness.publishing.pages import rewritten
from harness.publishing.stages import code_lines
from harness.training import rows
from tests.checkpoint import test_full_state
from tests.common import error_of, on_ranks, one_rank_of, optimizer_of, situation
from tests.pairs import ADAMW, Pair
from tests.ranks import ROOT
from tests.stages import test_contract, test_cores
from tests.stages.test_cores import core_of
from tests.stages.test_probe import BLOCKS as BLOCK_RULES
from tests.stages.test_probe import CountsCalls
from tests.variants import on_pairs
from variants import hybrid, moments16, remainder16, wire16
from variants.__main__ import BLOCKS, ROWS, counted

FILES = sorted(path for path in (ROOT / "variants").glob("[a-z]*.py") if path.stem != "muon_rows")
# With fp32 parameters and AdamW each of these is replicated training, to the bit where sums allow it.
AS_REPLICATED = [*(f"variants.{name}" for name in ("per_parameter", "muon", "finite", "blocks", "offload")),
                 "tests.variants.on_pairs_of_stage_3", "tests.variants.on_pairs"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_variant_has_thirty_lines_and_says_what_it_is_called_where_and_what_it_costs(path):
    most = {"muon": 73, "by_bucket": 45, "hybrid": 60,  # hybrid is for two stages
            "finite": 40, "remainder16": 36, "same_bits": 130}
    assert len(code_lines(path)) <= most.get(path.stem, 30)
    if path.stem == "by_bucket":  # half of three
        return
    opening = ast.get_docstring(ast.parse(path.read_text()))
    assert all(word in opening.lower() for word in ("situation: ", "called elsewhere: ", "wire", "memory", "costs: "))
    elsewhere = opening.partition("Called elsewhere: ")[2].partition("\nWire")[0]
    assert all(system in elsewhere for system in ("Megatron-LM", "DeepSpeed", "FSDP2", "modded-nanogpt"))


# ------------------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("variant", AS_REPLICATED)
@on_ranks
def test_a_variant_equals_replicated_training(rank, variant):
    """The core of it, also of three micro-batches; and with the guard, which accumulates and clips."""
    test_cores.equals_replicated(rank, variant, "AdamW", test_cores.by_dimension, False, 1)
    test_cores.equals_replicated(rank, variant, "AdamW", nn.Module.parameters, False, 3)
    for with_no_sync in (True, False):
        with situation(f"guarded, no_sync: {with_no_sync}"):
            test_contract.accumulate(rank, variant, with_no_sync)
    with situation("guarded, clipped"):
        test_contract.clip(rank, variant, 2.0, 0.05)


MATRICES = [(24, 16), (16, 24), (8, 8), (40, 16), (16, 3)]
ELEMENTWISE = [(40, 40), (10,), (513,), (300,)]
OWN = [  # variant, MB of a bucket, the optimizer, its arguments, shapes; what is allowed beyond two ranks
    *(("muon", cap_mb, torch.optim.Muon, {"lr": 0.02}, MATRICES, 2e-3) for cap_mb in (1e-6, 2e-3, 1)),
    ("blocks", 2e-3, BlockSGD, {"lr": 0.1}, ELEMENTWISE, 1e-6),
    *((name, 2e-3, torch.optim.AdamW, ADAMW, ELEMENTWISE, 0) for name in ("wire16", "moments16"))]


def drawn(generator, rank, dtype=torch.float32, shapes=ELEMENTWISE):
    """-> gradients of this rank, and of all; the same for the same state of the generator."""
    everyone = [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(rank.world_size)]
    return everyone[rank.rank], everyone


def ones(dtype=torch.float32, shapes=ELEMENTWISE):
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


def step(optimizer, params, grads):
    for param, grad in zip(params, grads):
        (param * grad).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("of", [core_of, optimizer_of], ids=["core", "guard"])
@on_ranks(case=OWN)
def test_a_variant_of_another_optimizer_or_of_fewer_bits_equals_one_process(rank, of, case):
    """Which rounds what the variant rounds, and adds in rank order. With two ranks to the bit; beyond, the order of a
    sum is the variant's, and Newton–Schulz, which works in bf16, shows its last bit."""
    variant, cap_mb, optimizer_cls, kwargs, shapes, allowed = case
    on_wire = torch.bfloat16 if variant == "wire16" else torch.float32
    kept_in = torch.bfloat16 if variant == "moments16" else torch.float32
    generator = torch.Generator().manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    params = [nn.Parameter(torch.where(torch.tensor(rank.rank == 0), param, -1.0).detach()) for param in whole]
    optimizer = of(f"variants.{variant}")(params, optimizer_cls, bucket_cap_mb=cap_mb, **kwargs)  # which broadcasts
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


def test_optimizers_that_a_stage_or_a_variant_is_not_for_are_refused():
    """Where it is called for each bucket, also one that counts its calls."""
    for stage, optimizer_cls, shape in [
            ("stage4_overlap", torch.optim.Muon, (8, 8)), ("stage4_overlap", BlockSGD, (40, 40)),
            ("variants.blocks", torch.optim.Muon, (8, 8)),
            ("variants.blocks", BLOCK_RULES["multiples of 256 from 4096 on"], (96, 64)),
            *((f"variants.{name}", CountsCalls, (8, 8)) for name in ("muon", "moments16", "remainder16"))]:
        line = "CountsCalls" if optimizer_cls is CountsCalls else "is not element-wise"
        with situation(stage), one_rank_of(1), pytest.raises(ValueError, match=line):
            optimizer_of(stage)([nn.Parameter(torch.zeros(shape)) for _ in range(3)], optimizer_cls, lr=0.1)


# -------------------------------------------------------------------------------------------------------- with a guard


@pytest.mark.parametrize("variant", AS_REPLICATED)
@pytest.mark.parametrize("world_size", [3, 4])
def test_a_guarded_variant_goes_on_in_plain_torch_and_back(run, variant):
    run(test_full_state.to_plain_and_back, variant)


# ------------------------------------------------------------------------------------------------------- fewer bits


@pytest.mark.parametrize("of", [core_of, optimizer_of], ids=["core", "guard"])
@on_ranks
def test_a_remainder_and_a_parameter_are_the_main_parameter_to_the_bit(rank, of):
    """Beside stage 4: every difference of a bf16 parameter is a tie, and one unit upwards.

    Gradients don't depend on parameters, steps are multiples of half a unit: many ties. Rank 0 has the gradient, d
    times: then d divides it.
    """
    generator, ties = torch.Generator().manual_seed(0), 0
    start = [1 + torch.randint(0, 128, shape, generator=generator) / 128 for shape in ELEMENTWISE]
    both = [[nn.Parameter(param.bfloat16()) for param in start] for _ in range(2)]
    stage, variant = [of(name)(params, torch.optim.SGD, lr=2**-8, bucket_cap_mb=2e-3)
                      for name, params in zip(("stage4_overlap", "variants.remainder16"), both)]
    for _ in range(4):
        mine = [torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in ELEMENTWISE]
        for optimizer, params in zip((stage, variant), both):
            step(optimizer, params, [grad * (rank.world_size if rank.rank == 0 else 0) for grad in mine])
        for bucket, split in zip(stage.buckets, variant.buckets):
            assert split.parameter.main.untyped_storage().size() == 0
            main = bucket.parameter.main_shard
            assert torch.equal(split.parameter.main_shard, main)
            ours, theirs = (b.parameter.shard.view(torch.int16).int() for b in (split, bucket))
            is_tie = main.view(torch.int32) & 0xFFFF == 0x8000
            assert torch.equal(ours - theirs, (ours != theirs).int()) and not (ours != theirs)[~is_tie].any()
            ties += (ours != theirs).sum()
    torch.distributed.all_reduce(ties)
    assert ties > 0


LESS = [f"variants.{name}" for name in ("wire16", "moments16", "remainder16")]


@on_ranks(variant=LESS)
def test_fewer_bits_go_on_from_a_checkpoint(rank, variant):
    """Three steps, a checkpoint, two more; and the same two in a new instance that has loaded it: to the bit."""
    dtype = torch.bfloat16 if variant == "variants.remainder16" else torch.float32
    generator, params, others = torch.Generator().manual_seed(0), ones(dtype), ones(dtype)
    optimizer = optimizer_of(variant)(params, torch.optim.AdamW, **ADAMW)
    for _ in range(3):
        step(optimizer, params, drawn(generator, rank, dtype)[0])
    kept = full_state_dict(optimizer, to_all=True)
    torch.optim.AdamW([nn.Parameter(param.detach().clone()) for param in params], **ADAMW).load_state_dict(kept)
    for param, other in zip(params, others):
        other.data.copy_(param.data)
    again = optimizer_of(variant)(others, torch.optim.AdamW, **ADAMW)
    load_full_state_dict(again, kept if rank.rank == 0 else None)
    for _ in range(2):
        grads = drawn(generator, rank, dtype)[0]
        step(optimizer, params, grads)
        step(again, others, grads)
    assert all(map(torch.equal, params, others))


@on_ranks(2)
def test_moments_of_fp64_parameters_are_stepped_in_fp64(rank):
    """AdamW moves by lr in each step while the gradient is the same."""
    params = ones(torch.float64)
    optimizer = optimizer_of("variants.moments16")(params, torch.optim.AdamW, lr=0.1, betas=(0.5, 0.5), weight_decay=0)
    for _ in range(3):
        step(optimizer, params, [1.0] * len(params))
    assert all(torch.allclose(param, torch.full_like(param, 0.7), atol=1e-6) for param in params)


class HybridWire16(on_pairs.OnPairs, stage4_overlap.DistributedOptimizer, hybrid.ReplicasOfStage4,
                   wire16.ShardedOptimizer):
    """Two that combine, in a line."""


@on_ranks(4)
def test_hybrid_and_wire16_combine(rank):
    pair = Pair(rank, None, of=lambda _: HybridWire16)
    with Ledger() as ledger:
        pair.train(0, 1, 2)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-2) for a, b in zip(*(model.parameters() for model in pair.models)))
    assert {entry.dtype for entry in ledger.entries if entry.kind == "send"} == {torch.bfloat16}


class Moments16Remainder16(stage4_overlap.DistributedOptimizer, moments16.ShardedOptimizer,
                           remainder16.ShardedOptimizer):
    """What Megatron-LM's precision-aware optimizer keeps."""


@on_ranks
def test_moments16_and_remainder16_combine(rank):
    """Gradients don't depend on parameters: main parameters are those of moments16, to the bit."""
    generator, both = torch.Generator().manual_seed(0), [ones(torch.bfloat16) for _ in range(2)]
    optimizers = [cls(params, torch.optim.AdamW, bucket_cap_mb=2e-3, **ADAMW) for cls, params in zip(
        (moments16.DistributedOptimizer, Moments16Remainder16), both)]
    for _ in range(3):
        mine, _ = drawn(generator, rank, torch.bfloat16)
        for optimizer, params in zip(optimizers, both):
            step(optimizer, params, mine)
    for one, other in zip(*(optimizer.buckets for optimizer in optimizers)):
        assert other.parameter.main.untyped_storage().size() == 0
        assert torch.equal(one.parameter.main_shard, other.parameter.main_shard)
    assert {state["exp_avg"].dtype for state in optimizers[1].state.values()} <= {torch.bfloat16}


# ------------------------------------------------------------------------------------------------------------- finite


@on_ranks(of=[core_of, optimizer_of], value=[math.nan, math.inf])
def test_what_is_not_finite_is_an_error_on_every_rank(rank, of, value):
    """The last rank has it, in one element of the second parameter."""
    weights = [(name, nn.Parameter(torch.ones(40))) for name in ("first", "second", "third")]
    optimizer = of("variants.finite")(weights, torch.optim.SGD, lr=1.0, bucket_cap_mb=1e-6)
    factor = torch.ones(40)
    factor[7] = value if rank.rank == rank.world_size - 1 else 1
    sum((param * factor if name == "second" else param).sum() for name, param in weights).backward()
    line = f"a gradient is nan or inf: of parameter second on rank {rank.world_size - 1}"
    assert error_of(optimizer.step) == line
    assert all((param == 1).all() for _, param in weights)
    sum(param.sum() for _, param in weights).backward()
    optimizer.step()
    assert all((param == 0).all() for _, param in weights)  # nothing is left of it


@on_ranks(of=[core_of, optimizer_of])
def test_finite_leaves_out_and_counts_a_step_on_all_ranks(rank, of):
    """The last rank has a nan in the first step of two, which moves nothing, nor the state: momentum begins later."""
    weights = [nn.Parameter(torch.ones(40)) for _ in range(3)]
    optimizer = of("variants.finite")(weights, torch.optim.SGD, lr=1.0, momentum=0.5, bucket_cap_mb=1e-6, skip=True)
    for step, moved_to in enumerate([1, 0, -1.5]):
        factor = math.nan if step == 0 and rank.rank == rank.world_size - 1 else 1
        sum((param * factor).sum() for param in weights).backward()
        optimizer.step()
        assert all((param == moved_to).all() for param in weights) and optimizer.n_skipped == 1


@on_ranks(4, accumulation_steps=[1, 3, math.inf], n_passes=[1, 3])
def test_hybrid_may_average_over_the_groups_in_the_last_pass_alone(rank, accumulation_steps, n_passes):
    """Four buckets, of which a rank has 16 elements each. What its host agrees on has integers."""
    params = [nn.Parameter(torch.zeros(16)) for _ in range(4)]
    optimizer = hybrid.DistributedOptimizer(params, torch.optim.SGD, lr=1.0, mesh=on_pairs.mesh(), bucket_cap_mb=1e-6,
                                            gradient_accumulation_steps=accumulation_steps)
    for _ in range(2):
        with Ledger() as ledger:
            for _ in range(n_passes):
                sum(param.sum() * rank.rank for param in params).backward()
            optimizer.step()
        sizes = [entry.size for entry in ledger.entries if entry.kind == "all_reduce" and entry.dtype == torch.float32]
        assert sizes == [64] * 4 * (n_passes if accumulation_steps == 1 else 1)
    assert all((param == -2 * n_passes * 1.5).all() for param in params)


# -------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("d", [2, 8])
def test_a_variant_sends_and_holds_what_its_formula_says(name, d):
    """To 1 %: what ranks agree on, the counts of steps, padding of blocks."""
    sent, _, held, sent_due, held_due = counted(name, d)
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


@on_ranks(2)
def test_muon_refuses_a_dtensor_on_every_rank_before_anything_changes(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    own = nn.Parameter(torch.full((3,), float(rank.rank)))
    spread = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["tp"], [Shard(0)]))
    refusal = error_of(lambda: optimizer_of("variants.muon")(
        [("own", own), ("spread", spread)], torch.optim.SGD, process_group=mesh["dp"].get_group()), ValueError)
    assert "parameter spread is a DTensor, of which a rank has a part" in refusal
    assert own.eq(rank.rank).all()


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
