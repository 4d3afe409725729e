"""The ledger: every kind of collective of every stage, its number and its bytes, against numbers written by hand.

The model is three parameters: 5 x 7, 11 and 4 x 3, of 58 elements in fp32. What follows is arithmetic on paper, for
three ranks on gloo. Stages 1 and 2 own whole parameters, the largest first to the rank that has least: 35 | 12 | 11
elements. Stages 3 and 4 let each parameter begin at a multiple of 64 bytes, which are 16 elements: they take 48 + 16 +
16 = 80. And they pad these to three shards of equal length, a multiple of 64 bytes too: 96.
"""

import threading

import pytest
import torch
import torch.distributed as dist

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.measuring.ledger import Collective, Ledger, wire_bytes
from tests.common import STAGES, on_ranks, optimizer_of

SIZES = [(5, 7), (11,), (4, 3)]


def counted(rank, stage, clips=0):
    """-> {kind: (how many, bytes of their full tensors)} of the second of two steps, and its wire bytes."""
    params = [torch.nn.Parameter(torch.ones(size, device=rank.device)) for size in SIZES]
    optimizer = optimizer_of(stage)(params, torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        with Ledger() as ledger:
            sum((param * (rank.number + 1)).sum() for param in params).backward()
            for _ in range(clips):
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    sizes = ledger.message_bytes
    return {kind: (number, sizes[kind]) for kind, number in ledger.collectives.items()}, ledger.wire_bytes


@on_ranks(3, stage=STAGES)
def test_a_step_sends_what_is_counted_by_hand(rank, stage):
    """Gradients and flags; then parameters. gloo's reduce-scatter sends twice. Stage 4 has a bucket of three parts."""
    collectives, wire_bytes_of_rank = COLLECTIVES[stage]
    assert counted(rank, stage) == (collectives, round(wire_bytes_of_rank))


FLAGS = 4 * (2 * 3 + 2 + 2)  # stage 4, int32: used, what is wrong, for each parameter; rounds; settings twice
GRADS, PADDED = 4 * 58, 4 * 96  # bytes in fp32; on 3 ranks 80 elements are padded to 96
COLLECTIVES = {  # of a step on 3 ranks: kind -> (how many, bytes of their full tensors); and wire bytes of a rank
    STAGE_1: ({"all_reduce": (1, GRADS + 4 * 3), "broadcast": (3, GRADS)}, (2 * (GRADS + 4 * 3) + GRADS) * 2 / 3),
    STAGE_2: ({"all_reduce": (1, GRADS + 4 * 3), "all_gather": (1, 4 * 3 * 35)},
                (2 * (GRADS + 4 * 3) + 4 * 3 * 35) * 2 / 3),
    STAGE_3: ({"reduce_scatter": (1, PADDED), "all_gather": (1, PADDED)}, 3 * PADDED * 2 / 3),
    STAGE_4: ({"send": (2, PADDED * 2 // 3), "recv": (2, PADDED * 2 // 3), "all_reduce": (1, FLAGS),
                 "broadcast": (3, PADDED)}, (2 * PADDED + 2 * FLAGS) * 2 / 3),
}


@on_ranks(3)
def test_one_rank_sends_or_gets_all_parts_but_its_own(rank):
    """3 fp32 elements are 12 bytes each, on average over the ranks."""
    part = torch.zeros(3, device=rank.device)
    parts = [torch.zeros_like(part) for _ in range(3)] if rank.number == 0 else None
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
    if stage in (STAGE_3, STAGE_4):
        number, size = once.pop("all_gather", (0, 0))
        assert twice.pop("all_gather") == (number + 2, size + 2 * 4 * 2)  # a float of each of two ranks
    assert once == twice


def test_the_ledger_does_not_wait_for_ever():
    with pytest.raises(TimeoutError, match="all_reduce of 4 bytes is not complete after 0.05 s"), Ledger() as ledger:
        ledger.limit_s = 0.05
        ledger.pending.append((Collective("all_reduce", 4, torch.float32, 2, "gloo", 4, 0.0), threading.Event()))
