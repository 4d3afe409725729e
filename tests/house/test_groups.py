"""What a test leaves behind on the ranks, which the next tests share."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from harness.workers import Workers
from tests.common import in_groups_of_its_own, mesh_of


def make_groups(rank):
    """Make a group on one rank alone, and a mesh that torch's caches remember."""
    if rank.rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    distribute_tensor(torch.ones(4), mesh_of("cpu", (2,)), [Shard(0)]).full_tensor()


def count_loops(rank):
    """Return how many threads wait for gloo's messages."""
    return sum(Path(task, "comm").read_text() == "gloo_tcp_loop\n" for task in Path("/proc/self/task").iterdir())


def test_a_group_that_a_test_makes_ends_with_it():
    """On ranks of its own: others may have left a reference to a group, whose threads live as long."""
    with Workers(2) as workers:
        for _ in range(2):
            workers.run(in_groups_of_its_own, make_groups)
            assert workers.run(in_groups_of_its_own, count_loops) == [1, 1]
