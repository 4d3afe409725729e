"""The rows of the bench: right to the bit, with bytes by formula. And the exchange that replaces gloo's collectives."""

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.measuring import examine
from harness.measuring.examine import Settings, adamw, make_batches, make_model
from harness.measuring.ledger import Ledger
from harness.measuring.memory import Memory
from harness.publishing.pages import TAKE_IT_WHEN
from harness.ranks import exchange
from harness.training import rows
from harness.training.models import GPT, MODELS
from harness.training.rows import ONE_PARAMETER, RowId
from stage4_overlap import optimizer
from stage4_overlap.transport import GlooTransport, Transport
from tests.common import on_ranks, one_rank_of
from variants import muon
from variants.muon_rows import MUON

SETTINGS = Settings("nano", 2, 16, 1, 1)
OF_DEFAULT_SIZE = [RowId(row.name) for row in (*rows.ROWS, *rows.HALVES) if row.kind != "noise"]
OF_A_SIZE = [RowId("ddp", 0.01), RowId("ddp + torch ZeRO", 0.01), RowId("ddp + stage 1", ONE_PARAMETER),
             RowId("ddp + stage 2", 0.01), RowId("stage 4 overlap", ONE_PARAMETER), RowId("owner reduce", 0.01)]


@on_ranks(2, row_id=[*OF_DEFAULT_SIZE, *OF_A_SIZE])
def test_a_row_is_ddp_to_the_bit_and_costs_what_it_says(rank, row_id):
    """Rows of kind "floor" train on the data of one rank, so they agree with no other row."""
    examined = examine.examine(rank, SETTINGS, row_id)
    assert examined.difference == 0 or rows.find(*row_id).kind == "floor"
    assert examined.wire_bytes == pytest.approx(examined.wire_bytes_theory, rel=0.01, abs=8 * 32)
    # Shares of unequal length, and padded buckets, are much in a tiny model.
    rel = 0.05 if row_id.base.startswith(("owner", "stage 4")) else 0.005
    assert examined.bytes_per_param == pytest.approx(examined.bytes_per_param_theory, rel=rel)


@on_ranks(3, row_id=[RowId("owner reduce"), RowId("owner reduce", 0.01), RowId("stage 3 bf16/fp32"),
                     RowId("stage 4 overlap bf16")])
def test_a_row_is_right_on_three_ranks(rank, row_id):
    """Stage 4 adds up in rank order, and so does the reference of the row, so the bits are equal."""
    examined = examine.examine(rank, SETTINGS, row_id)
    allowed = 0 if row_id.base.startswith("stage 4") else examine.tolerance(3)
    assert examined.difference <= allowed


@on_ranks(2)
def test_smaller_buckets_are_more_messages(rank):
    def n_messages(row_id, kind):
        return examine.examine(rank, SETTINGS, row_id).collectives[kind]
    n_params = len(list(make_model(SETTINGS, rank, "float32").parameters()))
    assert n_messages(RowId("ddp"), "all_reduce") < n_messages(RowId("ddp", 0.01), "all_reduce")
    assert n_messages(RowId("owner reduce"), "reduce") == n_params
    assert 2 < n_messages(RowId("owner reduce", 0.01), "reduce") < n_params


@on_ranks(2, case=[("stage 4 neither", True, False), ("stage 4 only gradients", False, False),
                   ("stage 4 only parameters", True, True), ("stage 4 overlap", False, True)])
def test_gradients_leave_late_and_parameters_come_late_where_the_row_says_so(rank, case):
    """The first bucket leaves after the last gradient, or before. Parameters are still on the way after the step."""
    name, leaves_late, prefetches = case
    training = rows.find(name, 0.01).build(make_model(SETTINGS, rank, "float32"), adamw(SETTINGS))
    stage_4 = training.optimizer
    events = []
    for param in training.model.parameters():
        param.register_hook(lambda grad: events.append("gradient"))
    send_grads = stage_4.send_grads

    def noted_send_grads(bucket):
        events.append("leaves")
        send_grads(bucket)
    stage_4.send_grads = noted_send_grads
    training.step(make_batches(SETTINGS, rank)[0])
    assert any(bucket.param_sync is not None for bucket in stage_4.buckets) == prefetches
    training.finish()
    gradients_after = events[events.index("leaves") :].count("gradient")
    assert (gradients_after == 0) == leaves_late


@pytest.mark.parametrize("name", TAKE_IT_WHEN)
def test_a_variant_sends_and_holds_what_its_formula_says(name):
    """Count the second step of rank 0 of 8. Formulas leave out the agreement of ranks, counts of steps, and padding."""
    configuration = rows.find(name)
    equal_parts = mock.patch.dict(muon.UNEVEN, {Transport: GlooTransport})  # the fake group can gather no others
    no_rounds = mock.patch.dict(MUON, ns_steps=0)  # of Newton–Schulz: they take minutes where a CPU has no bf16
    with one_rank_of(8), equal_parts, no_rounds, Memory() as memory:
        model = GPT(MODELS["tiny"]).to(getattr(torch, configuration.dtype))
        training = configuration.build(model, adamw(SETTINGS))
        for _ in range(2):
            with Ledger() as ledger:
                training.step(torch.zeros(2, 1, 8, dtype=torch.int64))
                training.finish()
        numel = sum(param.numel() for param in model.parameters())
        held_by_formula = configuration.bytes_per_param(numel, 8, training.optimizer)
        assert ledger.wire_bytes == pytest.approx(configuration.wire_bytes(numel, 8), rel=0.005)
        assert memory.settle() / numel == pytest.approx(held_by_formula, rel=0.005)


@pytest.mark.parametrize("model_mb, cap_mb", [(1, 1), (20, 1), (40, 2), (400, 20), (500, 25), (5000, 25)])
def test_a_bucket_of_stage_4_is_a_twentieth_of_the_model_within_bounds(monkeypatch, model_mb, cap_mb):
    caps = []

    def bucket_layout(sizes, dtypes, cap):
        caps.append(cap)
        return [range(len(sizes))]
    monkeypatch.setattr(optimizer, "bucket_layout", bucket_layout)
    numel_of_half = model_mb * 2**17
    with one_rank_of(2), FakeTensorMode():
        optimizer.ShardedOptimizer([torch.zeros(numel_of_half, requires_grad=True) for _ in range(2)])
    assert caps == [pytest.approx(cap_mb * 2**20)]


# ------------------------------------------------------------------------- The exchange in place of gloo's collectives


N = 700_003  # of fp32 on a rank: two whole pieces, and a short third one


@on_ranks(1, 2, 3, names=list(zip(exchange.SCATTERS, exchange.GATHERS)), op=[dist.ReduceOp.SUM, dist.ReduceOp.AVG])
def test_large_tensors_are_summed_and_gathered_in_pieces(rank, names, op):
    """Sums are in rank order, to the bit. A rank sends its part to each other rank, once in each direction."""
    scatter, gather = names
    d = rank.world_size
    inputs = [torch.randn(d * N, generator=torch.Generator().manual_seed(number), device="cpu").to(rank.device)
              for number in range(d)]
    total = functools.reduce(torch.add, inputs)
    if op == dist.ReduceOp.AVG:
        total /= d
    whole = inputs[rank.number]
    part = whole.view(d, N)[rank.number]
    with exchange.in_place_of_gloos(), Ledger() as ledger:
        getattr(dist, scatter)(part, whole, op=op)
        getattr(dist, gather)(whole, part)
    if rank.backend == "gloo":
        assert torch.equal(whole, total)
        assert ledger.wire_bytes == 2 * (d - 1) * N * 4
    else:
        torch.testing.assert_close(whole, total)


@on_ranks(2, 3)
def test_a_sum_holds_pieces_and_no_second_input(rank):
    """A rank holds two pieces of each rank, and one more while it adds up. The input has 43 pieces or more."""
    whole = torch.ones(rank.world_size * N * 8)
    with Memory("cpu") as memory, exchange.in_place_of_gloos():
        dist.reduce_scatter_tensor(whole.view(rank.world_size, -1)[rank.number], whole)
    assert memory.peak - whole.nbytes <= (2 * rank.world_size + 2) * exchange.PIECE_BYTES
