"""The ledger: every kind of collective of every stage, its number and its bytes, against numbers written by hand.

The model is three parameters: 5 x 7, 11 and 4 x 3, of 58 elements in fp32. What follows is arithmetic on paper, for
three ranks on gloo. Stages 1 and 2 own whole parameters, the largest first to the rank that has least: 35 | 12 | 11
elements. Stages 3 and 4 let each parameter begin at a multiple of 64 bytes, which are 16 elements: they take 48 + 16 +
16 = 80. And they pad these to three shards of equal length, a multiple of 64 bytes too: 96.
"""

import torch

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.measuring.ledger import Ledger, wire_bytes
from tests.common import STAGES, on_ranks, optimizer_of

GRADS = 4 * 58  # bytes in fp32
PADDED = 4 * 96
LARGEST = 4 * 35  # bytes of the largest share of a rank
USED = 4 * 3  # a flag for each parameter
NORMS = 4 * 3  # the norm of each rank's shard
# Stage 4 has int32: for each parameter whether it was used, and what is wrong; rounds, settings twice each.
AGREED = 4 * (2 * 3 + 2 + 2)
SENT = PADDED * 2 // 3  # to two other ranks
MESSAGES = {  # kind -> (number, bytes of the full tensors) in a step that asks for the norm twice
    STAGE_1: {"all_reduce": (1, GRADS + USED), "broadcast": (3, GRADS)},
    STAGE_2: {"all_reduce": (1, GRADS + USED), "all_gather": (1, 3 * LARGEST)},
    STAGE_3: {"reduce_scatter": (1, PADDED), "all_gather": (3, 2 * NORMS + PADDED)},
    STAGE_4: {"send": (2, SENT), "recv": (2, SENT), "all_reduce": (1, AGREED), "all_gather": (2, 2 * NORMS),
              "broadcast": (3, PADDED)},
}
WIRE_BYTES = {  # of a rank: an all-reduce sends its tensor twice, and so does gloo's reduce-scatter
    STAGE_1: (2 * (GRADS + USED) + GRADS) * 2 / 3,
    STAGE_2: (2 * (GRADS + USED) + 3 * LARGEST) * 2 / 3,
    STAGE_3: (2 * PADDED + 2 * NORMS + PADDED) * 2 / 3,
    STAGE_4: (2 * PADDED + 2 * AGREED + 2 * NORMS) * 2 / 3,
}


@on_ranks(3, stage=STAGES)
def test_a_step_sends_what_is_counted_by_hand(rank, stage):
    """Send gradients and flags; and then parameters. Stage 4 has a bucket of three parts.

    Gradients travel once, however often the norm is asked for. From stage 3 on a rank has the average of its shard
    only, so the norms of the shards are gathered each time.
    """
    params = [torch.nn.Parameter(torch.ones(size, device=rank.device)) for size in ((5, 7), (11,), (4, 3))]
    optimizer = optimizer_of(stage)(params, torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        with Ledger() as ledger:
            sum(param.sum() for param in params).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    counted = {kind: (number, sum(entry.size for entry in ledger.entries if entry.kind == kind))
               for kind, number in ledger.collectives.items()}
    assert counted == MESSAGES[stage]
    assert ledger.wire_bytes == round(WIRE_BYTES[stage])


def test_wire_bytes_by_hand():
    """100 bytes, 4 ranks, NCCL; gloo's reduce-scatter sends twice as much."""
    expected = {"all_reduce": 150, "reduce_scatter": 75, "all_gather": 75, "all_to_all": 75, "broadcast": 75,
                "reduce": 75, "scatter": 18.75, "gather": 18.75, "send": 100, "recv": 0, "barrier": 0}
    assert {kind: wire_bytes(kind, 100, 4, "nccl") for kind in expected} == expected
    assert wire_bytes("reduce_scatter", 100, 4, "gloo") == 150
