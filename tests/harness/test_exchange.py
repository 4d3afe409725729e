"""The reduce-scatter and the all-gather of the rows: gloo's results, and for the sum half of gloo's bytes."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from harness import exchange
from harness.ledger import Ledger
from harness.memory import Memory
from tests.common import on_ranks

pytestmark = pytest.mark.waits

N = 700_003  # of fp32 a rank: three pieces, the last a short one


def both(rank, name, in_place, dtype=torch.float32, op=None):
    """-> what it makes, and the bytes that it sends, by gloo and by the exchange. `op`: of a reduce-scatter."""
    found = []
    for transport in (contextlib.nullcontext, exchange.in_place_of_gloos):
        torch.manual_seed(rank.rank)
        whole = torch.randn(rank.world_size * N).to(dtype)
        part = whole.view(rank.world_size, N)[rank.rank]
        part = part if in_place else part.clone()
        with transport(), Ledger() as ledger:
            output = part if op else whole
            getattr(dist, name)(*((part, whole) if op else (whole, part)), **({"op": op} if op else {}))
        found.append((output.clone(), ledger.wire_bytes))
    return found


@on_ranks(2, name=exchange.NAMES, dtype=[torch.float32, torch.bfloat16],
          how=[(dist.ReduceOp.SUM, True), (dist.ReduceOp.AVG, False)])
def test_to_the_bit_on_two_ranks_and_half_of_gloos_bytes(rank, name, dtype, how):
    op, in_place = how
    (gloos, its_bytes), (ours, our_bytes) = both(rank, name, in_place, dtype, op)
    assert torch.equal(gloos, ours) and its_bytes == 2 * our_bytes == 2 * N * dtype.itemsize


@on_ranks(1, 3)
def test_on_other_numbers_of_ranks_it_differs_by_the_order_of_sums(rank):
    (gloos, _), (ours, our_bytes) = both(rank, "reduce_scatter_tensor", True, op=dist.ReduceOp.SUM)
    torch.testing.assert_close(gloos, ours)
    assert our_bytes == (rank.world_size - 1) * N * 4


@on_ranks(1, 2, 3, name=exchange.GATHERS, in_place=[True, False])
def test_an_all_gather_is_gloos_with_as_many_bytes(rank, name, in_place):
    (gloos, its_bytes), (ours, our_bytes) = both(rank, name, in_place)
    assert torch.equal(gloos, ours) and its_bytes == our_bytes == (rank.world_size - 1) * N * 4


@on_ranks(2, 3)
def test_it_holds_pieces_and_no_second_input(rank):
    """Two pieces for each rank, and one while it adds; the input has 43 to 64 of them."""
    full = torch.ones(rank.world_size * N * 8)
    with Memory("cpu") as memory, exchange.in_place_of_gloos():
        dist.reduce_scatter_tensor(full.view(rank.world_size, -1)[rank.rank], full)
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
