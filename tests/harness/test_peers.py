"""The rows that are no stage as it is: replicated, tuned peers, overlap taken apart, gradients that go to an owner.

And the reduce-scatter and all-gather of all rows: gloo's results, and for the sum half of gloo's bytes.
"""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.measuring import examine
from harness.measuring.examine import Settings, adamw, make_batches, make_model
from harness.measuring.ledger import Ledger
from harness.measuring.memory import Memory
from harness.ranks import exchange
from harness.training import rows
from harness.training.baselines import owner_buckets
from harness.training.rows import ONE_PARAMETER, RowId
from stage4_overlap import optimizer
from tests.common import on_ranks, one_rank_of

SETTINGS = Settings("nano", 2, 16, 1, 1)
SIZED = [RowId("ddp", 0.01), RowId("ddp + torch ZeRO", 0.01), RowId("ddp + stage 1", ONE_PARAMETER),
         RowId("ddp + stage 2", 0.01), RowId("stage 4 overlap", ONE_PARAMETER), RowId("owner reduce", 0.01)]
OTHERS = [*map(RowId, (*rows.HALF_OVERLAPS, rows.REPLICATED, "stage 3 bf16/fp32", "stage 3 bf16/bf16"))]


@on_ranks(2, row_id=[*SIZED, *OTHERS, RowId("owner reduce")])
def test_a_row_is_ddp_to_the_bit_and_costs_what_it_says(rank, row_id):
    found = examine.examine(rank, SETTINGS, row_id)
    assert found.difference == 0 and found.movement > 0
    assert found.wire_bytes == pytest.approx(found.wire_bytes_theory, rel=0.01, abs=8 * 32)
    # Shares that differ, buckets that are padded: much in a tiny model.
    rel = 0.05 if row_id.base.startswith(("owner", "stage 4")) else 0.005
    assert found.bytes_per_param == pytest.approx(found.bytes_per_param_theory, rel=rel)


@on_ranks(3, row_id=[RowId("owner reduce"), SIZED[-1], RowId("stage 3 bf16/fp32"), RowId("stage 4 overlap bf16")])
def test_a_row_is_right_on_three_ranks(rank, row_id):
    """Demand equal bits if sums are in rank order. In 16 bits the reference divides as the stage does: 1/3 rounds."""
    found = examine.examine(rank, SETTINGS, row_id)
    allowed = 0 if row_id.base.startswith("stage 4") else examine.tolerance(3)
    assert found.difference <= allowed and found.movement > 0


@on_ranks(2)
def test_smaller_buckets_are_more_messages(rank):
    row_ids = [RowId("ddp"), SIZED[0], RowId("owner reduce"), SIZED[-1]]
    default, small, each, gathered = (examine.examine(rank, SETTINGS, row_id).collectives for row_id in row_ids)
    n_params = sum(1 for _ in make_model(SETTINGS, rank, "float32").parameters())
    assert default["all_reduce"] < small["all_reduce"]
    assert each["reduce"] == n_params and 2 < gathered["reduce"] < n_params


def test_a_bucket_has_one_owner_and_leaves_when_it_is_full():
    params = [torch.zeros(numel) for numel in (1, 2, 3, 4)]  # of 4 bytes each
    owners = dict(zip(params, (0, 1, 0, 1)))
    found = owner_buckets(params, owners, 16)
    assert [(owner, [param.numel() for param in bucket]) for owner, bucket in found] == [
        (1, [4]), (0, [3, 1]), (1, [2])]
    assert len(owner_buckets(params, owners, 0)) == 4


@on_ranks(2, case=[("stage 4 neither", True, False), ("stage 4 only gradients", False, False),
                   ("stage 4 only parameters", True, True), ("stage 4 overlap", False, True)])
def test_gradients_leave_late_and_parameters_come_late_where_the_row_says_so(rank, case):
    """By the order in which it happens: the first bucket leaves behind the last gradient, or before it."""
    name, leaves_late, prefetches = case
    training = rows.find(name, 0.01).build(make_model(SETTINGS, rank, "float32"), adamw(SETTINGS))
    optimizer, order = training.optimizer, []
    send_grads = optimizer.send_grads
    for param in training.model.parameters():
        param.register_hook(lambda grad: order.append("gradient"))
    optimizer.send_grads = lambda bucket: (order.append("leaves"), send_grads(bucket))
    training.step(make_batches(SETTINGS, rank)[0])
    assert any(bucket.param_sync is not None for bucket in optimizer.buckets) == prefetches
    training.finish()
    last_gradient = len(order) - 1 - order[::-1].index("gradient")
    assert (order.index("leaves") > last_gradient) == leaves_late


@on_ranks(2, name=["ddp", "stage 3 grad buffer", "stage 4 overlap"])
def test_in_no_sync_micro_batches_share_an_exchange(rank, name):
    def sent(exchanges_each):
        with Ledger() as ledger:
            examine.time_accumulation(rank, SETTINGS, RowId(name), 4, exchanges_each)
        return sum(entry.wire_bytes for entry in ledger.entries
                   if entry.kind in ("all_reduce", "reduce_scatter", "send"))
    once, each = sent(False), sent(True)
    assert each > (2 if name == "ddp" else 3) * once > 0 or name == "stage 3 grad buffer" and each == once


@pytest.mark.parametrize("model_mb, cap_mb", [(1, 1), (20, 1), (40, 2), (400, 20), (500, 25), (5000, 25)])
def test_a_bucket_is_a_twentieth_of_the_model_within_bounds(monkeypatch, model_mb, cap_mb):
    """Of two parameters that are as large together."""
    caps = []
    monkeypatch.setattr(optimizer, "bucket_layout", lambda sizes, dtypes, cap: caps.append(cap) or [range(len(sizes))])
    with one_rank_of(2), FakeTensorMode():
        optimizer.ShardedOptimizer([torch.zeros(model_mb * 2**17, requires_grad=True) for _ in range(2)])
    assert caps == [pytest.approx(cap_mb * 2**20)]


N = 700_003  # of fp32 a rank: three pieces, the last a short one


def both(rank, name, in_place, dtype=torch.float32, op=None):
    """-> what it makes, and the bytes that it sends, by gloo and by the exchange. `op`: of a reduce-scatter."""
    found = []
    for transport in (contextlib.nullcontext, exchange.in_place_of_gloos):
        torch.manual_seed(rank.number)
        whole = torch.randn(rank.world_size * N).to(dtype)
        part = whole.view(rank.world_size, N)[rank.number]
        part = part if in_place else part.clone()
        with transport(), Ledger() as ledger:
            output = part if op else whole
            getattr(dist, name)(*((part, whole) if op else (whole, part)), **({"op": op} if op else {}))
        found.append((output.clone(), ledger.wire_bytes))
    return found


@on_ranks(1, 2, 3, name=exchange.SCATTERS, dtype=[torch.float32, torch.bfloat16],
          how=[(dist.ReduceOp.SUM, True), (dist.ReduceOp.AVG, False)])
def test_a_sum_is_gloos_for_half_of_its_bytes(rank, name, dtype, how):
    """To the bit on two ranks; on three it differs by the order of sums, of numbers below 16."""
    op, in_place = how
    (gloos, its_bytes), (ours, our_bytes) = both(rank, name, in_place, dtype, op)
    atol = 16 * torch.finfo(dtype).eps if rank.world_size > 2 else 0
    torch.testing.assert_close(gloos, ours, rtol=0, atol=atol)
    assert its_bytes == 2 * our_bytes == 2 * (rank.world_size - 1) * N * dtype.itemsize


@on_ranks(1, 2, 3, name=exchange.GATHERS, in_place=[True, False])
def test_an_all_gather_is_gloos_with_as_many_bytes(rank, name, in_place):
    (gloos, its_bytes), (ours, our_bytes) = both(rank, name, in_place)
    assert torch.equal(gloos, ours) and its_bytes == our_bytes == (rank.world_size - 1) * N * 4


@on_ranks(2, 3)
def test_it_holds_pieces_and_no_second_input(rank):
    """Two pieces for each rank, and one while it adds; the input has 43 to 64 of them."""
    full = torch.ones(rank.world_size * N * 8)
    with Memory("cpu") as memory, exchange.in_place_of_gloos():
        dist.reduce_scatter_tensor(full.view(rank.world_size, -1)[rank.number], full)
    assert memory.peak - full.nbytes <= (2 * rank.world_size + 2) * exchange.PIECE_BYTES


@on_ranks(2)
def test_what_nothing_here_has_asked_for_is_refused_and_torch_is_as_it_was(rank):
    full = torch.ones(rank.world_size * 4)
    with exchange.in_place_of_gloos(), pytest.raises(NotImplementedError, match="waits, and sums or averages"):
        dist.reduce_scatter_tensor(torch.empty(4), full, op=dist.ReduceOp.MAX)
    with exchange.in_place_of_gloos(), pytest.raises(NotImplementedError, match="all-gather waits"):
        dist.all_gather_into_tensor(full, torch.empty(4), async_op=True)
    assert dist.reduce_scatter_tensor.__name__ == "reduce_scatter_tensor"
    assert dist.all_gather_into_tensor.__name__ == "all_gather_into_tensor"
