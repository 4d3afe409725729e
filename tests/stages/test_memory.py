"""The memory counter: against bytes that are known, and against what Linux says of the process."""

import queue
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from harness.measuring.memory import REST, Memory, mark_grads, mark_state
from tests.common import on_ranks

ROOT = Path(__file__).resolve().parents[2]
MB = 2**20  # a MiB


def test_tensors_views_and_ends():
    """Count bytes by hand. A storage counts once, under its first kind, while a view needs it."""
    before = torch.ones(1000)
    with Memory("cpu") as memory:
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


def test_other_threads_may_let_go_of_tensors():
    """As gloo's do, at any moment: here three of them, which take turns as often as Python lets them."""
    tensors, interval = queue.SimpleQueue(), sys.getswitchinterval()
    with Memory("cpu") as memory:
        try:
            sys.setswitchinterval(1e-6)
            with ThreadPoolExecutor(3) as threads:
                for _ in range(3):
                    threads.submit(lambda: all(tensor is not None for tensor in iter(tensors.get, None)))
                for _ in range(3000):
                    tensors.put(torch.empty(1000))
                for _ in range(3):
                    tensors.put(None)
        finally:
            sys.setswitchinterval(interval)
    assert memory.live == 0 and memory.peak >= 4000


def test_a_storage_in_the_memory_of_another_counts_as_that_one():
    """As torch.from_dlpack makes them."""
    with Memory("cpu") as memory:
        whole = torch.ones(1000)
        parts = [torch.from_dlpack(part) for part in whole.split(250)]
        memory.mark("parts", parts[:1])
        memory.track(parts)
        assert memory.live == memory.peak == 4000 and memory.by_kind() == {"parts": 4000, REST: 0}
        del whole, parts[1]
        assert memory.live == 4000  # the parts keep it alive
        parts.clear()
        assert memory.live == 0


class Around(torch.optim.Optimizer):
    """Steps an fp32 copy, by an optimizer inside; `main_grad` has what `grad` can't be."""

    def __init__(self, param):
        super().__init__([param], {})
        self.param, self.copy, self.spare = param, param.detach().float(), torch.zeros(5)
        self.optimizer = torch.optim.SGD([self.copy], lr=0.1, momentum=0.9)

    def step(self):
        self.param.main_grad = self.copy.grad = self.param.grad.float()
        self.optimizer.step()


@on_ranks(1)
def test_kinds_of_a_step(rank):
    """A 16-bit parameter of 100: its gradient twice, momentum and a copy as state, and 20 bytes that are neither.

    A GPU, where there is one, is counted as a CPU is; the rest of these tests run on a CPU.
    """
    with Memory(rank.device) as memory:
        param = torch.nn.Parameter(torch.ones(100, dtype=torch.bfloat16, device=rank.device))
        optimizer = Around(param)
        memory.mark("parameters", [param])
        (2 * param).sum().backward()
        optimizer.step()
        mark_grads(memory, [param])
        mark_state(memory, optimizer)
        assert memory.by_kind() == {"parameters": 200, "gradients": 200 + 400, "state": 400 + 400, REST: 20}
        assert rank.device.type != "cuda" or memory.reserved >= memory.live


# In a process of its own: its peak is not yet somebody else's. Before the counted part all code has run once, so that
# what Linux counts besides (libraries, code, threads) doesn't grow any more.
PROGRAM = """
import torch
from harness.measuring.memory import REST, Memory, mark_grads, mark_state

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
    assert 5 * 64 * MB <= counted < 5 * 64 * MB + MB
    assert abs(measured - counted) < 16 * MB
