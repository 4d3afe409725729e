"""The ledger: every kind of collective of every stage, its number and its bytes, against numbers written by hand.

The model is three parameters: 5 x 7, 11 and 4 x 3, of 58 elements. What follows is arithmetic on paper, for d ranks.
Stages 1 and 2 own whole parameters, the largest first to whoever has the least: with 2 ranks 35 | 12 + 11 elements,
with 3 ranks 35 | 12 | 11, with 4 the same and nothing. Stages 3 and 4 let each parameter begin at a multiple of 64
bytes: 16 elements in fp32, where they take 48 + 16 + 16 = 80, and 32 where parameters have 16 bits, 64 + 32 + 32 = 128.
And they pad these to d shards of equal length, a multiple of 64 bytes too.
"""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from harness.measure.ledger import Ledger, wire_bytes
from tests.common import optimizer_of

SIZES = [(5, 7), (11,), (4, 3)]
N = 58  # elements


def counted(rank, stage, dtype="float32", **kwargs):
    """-> {kind: (how many, bytes of their full tensors)} of one step, of which the first one has seen nothing."""
    params = [torch.nn.Parameter(torch.ones(size, dtype=getattr(torch, dtype), device=rank.device)) for size in SIZES]
    optimizer = optimizer_of(stage)(params, torch.optim.AdamW, lr=0.1, **kwargs)
    for _ in range(2):
        with Ledger() as ledger:
            sum((param * (rank.rank + 1)).sum() for param in params).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = {}
    for entry in ledger.entries:
        number, size = found.get(entry.kind, (0, 0))
        found[entry.kind] = number + 1, size + entry.size
    return found, ledger.wire_bytes


LARGEST = 35  # elements of the rank that owns most
OWNERS = {2: 2, 3: 3, 4: 3}  # ranks that own something
PADDED = {2: 96, 3: 96, 4: 128}  # 80 elements, in d shards of multiples of 16
PADDED_16BIT = {2: 128, 3: 192, 4: 128}  # 128, of multiples of 32
FLAGS = 4 * (2 * 3 + 2 + 2)  # stage 4, int32: used, what is wrong, for each parameter; rounds; settings twice
N_FLAGS = 3  # stages 1 and 2, as gradients: whether each parameter was used


def backend(rank):
    return rank.backend


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_stage_1(run, world_size):
    """One all-reduce of all gradients, with flags of what is used and set; each owner broadcasts what it stepped."""
    d = world_size
    for found, sent in run(counted, "stage1_naive_broadcast"):
        assert found == {"all_reduce": (1, 4 * (N + N_FLAGS)), "broadcast": (OWNERS[d], 4 * N)}
        assert sent == round((2 * 4 * (N + N_FLAGS) + 4 * N) * (d - 1) / d)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_stage_2(run, world_size):
    """One all-reduce of all gradients and flags, one all-gather of d shards as long as the longest."""
    d = world_size
    for found, sent in run(counted, "stage2_allgather"):
        assert found == {"all_reduce": (1, 4 * (N + N_FLAGS)), "all_gather": (1, 4 * d * LARGEST)}
        assert sent == round((2 * 4 * (N + N_FLAGS) + 4 * d * LARGEST) * (d - 1) / d)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype, grad_dtype, itemsizes", [("float32", None, (4, 4)), ("bfloat16", None, (2, 2)),
                                                          ("bfloat16", torch.float32, (4, 2))])
def test_stage_3(run, world_size, dtype, grad_dtype, itemsizes):
    """One reduce-scatter and one all-gather of the padded buffer; gloo's reduce-scatter counts twice."""
    d, (grad, param) = world_size, itemsizes
    n, is_gloo = (PADDED if dtype == "float32" else PADDED_16BIT)[d], run(backend)[0] == "gloo"
    for found, sent in run(counted, "stage3_gradbuffer", dtype=dtype, grad_dtype=grad_dtype):
        assert found == {"reduce_scatter": (1, grad * n), "all_gather": (1, param * n)}
        assert sent == round(((2 if is_gloo else 1) * grad + param) * n * (d - 1) / d)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("dtype, itemsize", [("float32", 4), ("bfloat16", 2)])
def test_stage_4(run, world_size, dtype, itemsize):
    """One bucket: on gloo a part for each other rank and one from each, on NCCL one reduce-scatter, as many bytes.

    Then the flags of used parameters, and one all-gather, on gloo a broadcast of each part.
    """
    d, n = world_size, (PADDED if itemsize == 4 else PADDED_16BIT)[world_size]
    parts = d - 1, itemsize * n * (d - 1) // d
    if run(backend)[0] == "gloo":
        expected = {"send": parts, "recv": parts, "broadcast": (d, itemsize * n)}
    else:
        expected = {"reduce_scatter": (1, itemsize * n), "all_gather": (1, itemsize * n)}
    for found, sent in run(counted, "stage4_overlap", dtype=dtype):
        assert found == {**expected, "all_reduce": (1, FLAGS)}
        assert sent == round((2 * itemsize * n + 2 * FLAGS) * (d - 1) / d)


def scatter_and_gather(rank):
    """-> {kind: bytes on the wire}; rank 0 has, and gets, 3 fp32 elements for each rank."""
    part = torch.zeros(3, device=rank.device)
    parts = [torch.zeros_like(part) for _ in range(rank.world_size)] if rank.rank == 0 else None
    with Ledger() as ledger:
        dist.scatter(part, parts, src=0)
        dist.gather(part, parts, dst=0)
    return {entry.kind: entry.wire_bytes for entry in ledger.entries}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_rank_sends_or_gets_all_parts_but_its_own(run, world_size):
    """12 bytes each, on average over the ranks."""
    for found in run(scatter_and_gather):
        assert found == {kind: pytest.approx(12 * (world_size - 1) / world_size) for kind in ("scatter", "gather")}


@pytest.mark.parametrize("kind, expected", [("all_reduce", 150), ("reduce_scatter", 75), ("all_gather", 75),
                                            ("all_to_all", 75), ("broadcast", 75), ("reduce", 75), ("scatter", 18.75),
                                            ("gather", 18.75), ("send", 100), ("recv", 0), ("barrier", 0)])
def test_wire_bytes_by_hand(kind, expected):
    """100 bytes, 4 ranks, NCCL; gloo's reduce-scatter sends twice as much."""
    assert wire_bytes(kind, 100, 4, "nccl") == expected
    assert wire_bytes(kind, 100, 4, "gloo") == {"reduce_scatter": 150}.get(kind, expected)


def clipped(rank, stage, clip):
    """-> {kind: how many} of one step, after a norm was taken, twice."""
    params = [torch.nn.Parameter(torch.ones(size, device=rank.device)) for size in SIZES]
    optimizer = optimizer_of(stage)(params, torch.optim.AdamW, lr=0.1)
    with Ledger() as ledger:
        sum(param.sum() for param in params).backward()
        for _ in range(clip):
            optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return Counter(ledger.collectives)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("stage, norms", [("stage1_naive_broadcast", 0), ("stage2_allgather", 0),
                                          ("stage3_gradbuffer", 1), ("stage4_overlap", 1)])
def test_gradients_travel_once_however_often_the_norm_is_asked_for(run, stage, norms):
    """From stage 3 on a rank has the average of its shard only: the norm of each is gathered."""
    for without, with_norms in zip(run(clipped, stage, 0), run(clipped, stage, 2)):
        assert with_norms == without + Counter(all_gather=2 * norms)
