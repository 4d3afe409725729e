"""What one rank finds wrong all ranks hear of: one line from rank 0, and every rank exits."""

import sys
from pathlib import Path

import torch.distributed as dist

from harness.run.meeting import disconnect


def on_all_ranks(function):
    """function(), or, if it raises ValueError on any rank: one line from rank 0, and every rank exits with code 2.

    The ranks agree first, because torchrun ends all of them as soon as one has ended: rank 0 must have printed by then.
    """
    result, error = None, None
    try:
        result = function()
    except ValueError as mistake:
        error = str(mistake)
    errors = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
    failed = [rank for rank, error in enumerate(errors) if error is not None]
    if not failed:
        return result
    if is_rank_0():
        where = "" if len(failed) == len(errors) else f"rank {failed[0]}: "
        print(f"{Path(sys.argv[0]).name}: error: {where}{errors[failed[0]]}", file=sys.stderr, flush=True)
    leave(2)


def is_rank_0():
    return not dist.is_initialized() or dist.get_rank() == 0


def leave(code):
    if dist.is_initialized():
        disconnect()
    sys.exit(code)
