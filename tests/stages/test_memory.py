"""The memory counter: against bytes that are known, and against what Linux says of the process."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.measuring.memory import REST, Memory
from tests.common import on_its_device, on_ranks
from tests.ranks import ROOT

MIB = 2**20


@on_ranks(1)
@on_its_device
def test_tensors_views_and_ends(rank):
    """Count bytes by hand. A storage counts once, under its first kind, while a view needs it."""
    before = torch.ones(1000)
    with Memory(rank.device) as memory:
        a = torch.ones(1000)  # 4000 bytes
        b = a.view(10, 100)[3:]  # nothing
        assert memory.live == 4000
        c = torch.cat([a, before])  # 8000
        assert (memory.live, memory.peak) == (12000, 12000)
        memory.mark("one", [b])
        memory.mark("other", [a, c])
        assert memory.by_kind() == {"one": 4000, "other": 8000, REST: 0}
        del a
        assert memory.live == 12000  # the view still needs it
        del b
        assert (memory.live, memory.peak) == (8000, 12000)
        assert memory.by_kind() == {"other": 8000, REST: 0}
        memory.reset_peak()
        c.untyped_storage().resize_(0)
        assert (memory.live, memory.peak) == (0, 8000)
        memory.track([before])
        assert memory.live == 4000
        assert rank.device.type != "cuda" or memory.reserved >= memory.live


# In a process of its own: its peak is not yet somebody else's. Before the counted part all code has run once, so that
# what Linux counts besides (libraries, code, threads) doesn't grow any more.
PROGRAM = """
import torch
from harness.measuring.memory import Memory

def peak_rss():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

def train(width):
    layer = torch.nn.Linear(width, width, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    for _ in range(2):
        layer(torch.ones(8, width)).sum().backward()
        optimizer.step()

torch.set_num_threads(1)
with Memory("cpu"):
    train(64)
before = peak_rss()
with Memory("cpu") as memory:
    train(4096)
print(memory.peak, peak_rss() - before)
"""


@pytest.mark.waits
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux for the peak of the process")
def test_the_peak_is_that_of_the_process():
    """Count weights, a gradient and one to be added, two moments: 64 MiB each. Allow 16 MiB, 5 %, for all else."""
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    counted, measured = map(int, run.stdout.split())
    assert 5 * 64 * MIB <= counted < 5 * 64 * MIB + MIB
    assert abs(measured - counted) < 16 * MIB
