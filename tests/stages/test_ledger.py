"""The ledger: every kind of collective of every stage, its number and its bytes, against numbers written by hand.

The model is three parameters: 5 x 7, 11 and 4 x 3, of 58 elements. What follows is arithmetic on paper, for d ranks.
Stages 1 and 2 own whole parameters, the largest first to the rank that has least: with 3 ranks 35 | 12 | 11 elements,
with 4 the same and nothing. Stages 3 and 4 let each parameter begin at a multiple of 64 bytes: 16 elements in fp32,
where they take 48 + 16 + 16 = 80, and 32 where parameters have 16 bits, 64 + 32 + 32 = 128. And they pad these to d
shards of equal length, a multiple of 64 bytes too.
"""

import threading

import pytest
import torch
import torch.distributed as dist

from harness.measuring.ledger import Collective, Ledger, wire_bytes
from tests.common import STAGES, on_ranks, optimizer_of

SIZES = [(5, 7), (11,), (4, 3)]


def counted(rank, stage, dtype=torch.float32, clips=0, **kwargs):
    """-> {kind: (how many, bytes of their full tensors)} of one step, of which the first one has seen nothing."""
    params = [torch.nn.Parameter(torch.ones(size, dtype=dtype, device=rank.device)) for size in SIZES]
    optimizer = optimizer_of(stage)(params, torch.optim.AdamW, lr=0.1, **kwargs)
    for _ in range(2):
        with Ledger() as ledger:
            sum((param * (rank.rank + 1)).sum() for param in params).backward()
            for _ in range(clips):
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    sizes = ledger.message_bytes
    return {kind: (number, sizes[kind]) for kind, number in ledger.collectives.items()}, ledger.wire_bytes


FLAGS = 4 * (2 * 3 + 2 + 2)  # stage 4, int32: used, what is wrong, for each parameter; rounds; settings twice


def padded(d, itemsize):
    """80 elements of fp32, in d shards of multiples of 16; 128 of 16 bits, of multiples of 32."""
    return {(3, 4): 96, (4, 4): 128, (3, 2): 192, (4, 2): 128}[d, itemsize]


@on_ranks(3, 4, dtype=[torch.float32, torch.bfloat16])  # uneven shards; and a rank that owns nothing
def test_stages_1_and_2(rank, dtype):
    """Count an all-reduce of gradients and flags; then a broadcast by each owner, or an all-gather of padded shards."""
    d, itemsize = rank.world_size, dtype.itemsize
    grads = itemsize * (58 + 3)
    for stage, kind, number, params in ((STAGES[0], "broadcast", 3, itemsize * 58),
                                        (STAGES[1], "all_gather", 1, itemsize * d * 35)):
        found, sent = counted(rank, stage, dtype)
        assert found == {"all_reduce": (1, grads), kind: (number, params)}
        assert sent == round((2 * grads + params) * (d - 1) / d)


@on_ranks(3, 4, dtypes=[(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32)])
def test_stage_3(rank, dtypes):
    """One reduce-scatter and one all-gather of the padded buffer; gloo's reduce-scatter counts twice."""
    dtype, grad_dtype = dtypes
    d, grad, param = rank.world_size, (grad_dtype or dtype).itemsize, dtype.itemsize
    n, times = padded(d, param), 2 if rank.backend == "gloo" else 1
    found, sent = counted(rank, STAGES[2], dtype, grad_dtype=grad_dtype)
    assert found == {"reduce_scatter": (1, grad * n), "all_gather": (1, param * n)}
    assert sent == round((times * grad + param) * n * (d - 1) / d)


@on_ranks(3, 4, dtype=[torch.float32, torch.bfloat16])
def test_stage_4(rank, dtype):
    """One bucket: on gloo a part for each other rank and one from each, on NCCL one reduce-scatter, as many bytes.

    Then the flags of used parameters, and one all-gather, on gloo a broadcast of each part. Beside NCCL the flags
    travel between the hosts, which the ledger doesn't see.
    """
    d, n = rank.world_size, dtype.itemsize * padded(rank.world_size, dtype.itemsize)
    parts = d - 1, n * (d - 1) // d
    on_gloo = {"send": parts, "recv": parts, "broadcast": (d, n), "all_reduce": (1, FLAGS)}
    is_gloo = rank.backend == "gloo"
    found, sent = counted(rank, STAGES[3], dtype)
    assert found == (on_gloo if is_gloo else {"reduce_scatter": (1, n), "all_gather": (1, n)})
    assert sent == round((2 * n + 2 * FLAGS * is_gloo) * (d - 1) / d)


@on_ranks(3)
def test_one_rank_sends_or_gets_all_parts_but_its_own(rank):
    """3 fp32 elements are 12 bytes each, on average over the ranks."""
    part = torch.zeros(3, device=rank.device)
    parts = [torch.zeros_like(part) for _ in range(3)] if rank.rank == 0 else None
    with Ledger() as ledger:
        dist.scatter(part, parts, src=0)
        dist.gather(part, parts, dst=0)
    assert [(entry.kind, entry.wire_bytes) for entry in ledger.entries] == [("scatter", 8), ("gather", 8)]


def test_wire_bytes_by_hand():
    """100 bytes, 4 ranks, NCCL; gloo's reduce-scatter sends twice as much."""
    expected = {"all_reduce": 150, "reduce_scatter": 75, "all_gather": 75, "all_to_all": 75, "broadcast": 75,
                "reduce": 75, "scatter": 18.75, "gather": 18.75, "send": 100, "recv": 0, "barrier": 0}
    assert {kind: wire_bytes(kind, 100, 4, "nccl") for kind in expected} == expected
    assert {kind: wire_bytes(kind, 100, 4, "gloo") for kind in expected} == {**expected, "reduce_scatter": 150}


@on_ranks(2, stage=STAGES)
def test_gradients_travel_once_however_often_the_norm_is_asked_for(rank, stage):
    """From stage 3 on a rank has the average of its shard only: the norm of each is gathered."""
    (once, _), (twice, _) = counted(rank, stage), counted(rank, stage, clips=2)
    if stage in STAGES[2:]:
        number, size = once.pop("all_gather", (0, 0))
        assert twice.pop("all_gather") == (number + 2, size + 2 * 4 * 2)  # a float of each of two ranks
    assert once == twice


def test_the_ledger_does_not_wait_for_ever():
    with pytest.raises(TimeoutError, match="all_reduce of 4 bytes is not complete after 0.05 s"), Ledger() as ledger:
        ledger.limit_s = 0.05
        ledger.pending.append((Collective("all_reduce", 4, torch.float32, 2, "gloo", 4, 0.0), threading.Event()))
