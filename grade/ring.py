"""A reduce-scatter and an all-gather as a ring of sends and receives: each rank talks to its two neighbours alone.

Source of the idea: Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
"""

import torch
import torch.distributed as dist


def exchange(sent, received):
    """Send `sent` to the next rank, and fill `received` from the rank before. Both are (n,), in different memory."""
    rank = dist.get_rank()
    d = dist.get_world_size()
    send = dist.P2POp(dist.isend, sent, (rank + 1) % d)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % d)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def reduce_scatter(parts):
    """Return the part (n,) that this rank owns, summed over the ranks. parts: (d, n) of this rank, left unchanged."""
    rank = dist.get_rank()
    d = dist.get_world_size()
    total = parts[(rank - 1) % d]  # a part, summed over the ranks that it has been on
    for turn in range(1, d):
        received = torch.empty_like(total)
        exchange(total, received)
        total = received + parts[(rank - 1 - turn) % d]  # in the last turn this is part `rank`
    return total


def all_gather(part):
    """Return the parts of all ranks (d, n). part: (n,) of this rank."""
    rank = dist.get_rank()
    d = dist.get_world_size()
    gathered = part.new_empty(d, len(part))
    gathered[rank] = part  # in each turn a rank sends on what it has received in the turn before
    for turn in range(d - 1):
        exchange(gathered[(rank - turn) % d], gathered[(rank - turn - 1) % d])
    return gathered
