"""What a test leaves behind on the ranks, which the next tests share."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from stage4_overlap.optimizer import ShardedOptimizer
from tests.common import mesh_of


def make_groups(rank):
    """Make a group on one rank alone, a mesh that torch's caches remember, and a core that its parameter keeps."""
    if rank.number == 0:
        dist.new_group([0], use_local_synchronization=True)
    distribute_tensor(torch.ones(4), mesh_of("cpu", (2,)), [Shard(0)]).full_tensor()
    params = [torch.nn.Parameter(torch.ones(4))]
    ShardedOptimizer(params, process_group=mesh_of("cpu", (2,)).get_group())


def count_loops(rank):
    """Return how many threads wait for gloo's messages."""
    return sum(Path(task, "comm").read_text() == "gloo_tcp_loop\n" for task in Path("/proc/self/task").iterdir())


@pytest.mark.parametrize("world_size", [2])
def test_a_group_that_a_test_makes_ends_with_it(run):
    """A few tests leave a reference to a group of theirs, whose threads live as long: those were there before."""
    n_before = run(count_loops)
    for _ in range(2):
        run(make_groups)
        assert all(n_loops <= n for n_loops, n in zip(run(count_loops), n_before))
