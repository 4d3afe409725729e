"""What each variant sends and holds: counted on one rank of eight whose messages go nowhere, and as its formula says.

    python -m variants
"""

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.measure.ledger import Ledger
from harness.measure.memory import Memory
from harness.report.reading_time import code_lines, core_lines

ROOT = Path(__file__).resolve().parents[1]
RANKS = 8
SHAPES = [(64, 64)] * 16  # of the counted model: no size needs padding
N_REPLICAS = 2  # of hybrid


class Row(NamedTuple):
    """`sends(d)`, `holds(d)`: bytes a parameter that a rank sends in a step, and has after it, as the docstring derives
    them; without bucket buffers. `dtype`: of parameters."""

    name: str
    elsewhere: str
    sends: Callable
    holds: Callable
    when: str
    dtype: torch.dtype = torch.float32

    @property
    def module(self):
        return self.name if self.name.startswith("stage") else f"variants.{self.name}"


def travels(*sizes):
    return lambda d: sum(sizes) * (d - 1) / d


def shared(whole, part):
    return lambda d: whole + part / d


def on_two_lines(d):
    """Within a group, and across."""
    s, r = d // N_REPLICAS, N_REPLICAS
    return 8 * (s - 1) / s + 2 * 4 / s * (r - 1) / r


ROWS = [
    Row("stage3_gradbuffer", "", travels(4, 4), shared(8, 8), "the base of the next row"),
    Row("per_parameter", "modded-nanogpt, nanochat", travels(4, 4), shared(8, 8), "few, large parameters"),
    Row("stage4_overlap", "", travels(4, 4), shared(4, 12), "the base of all that follow"),
    Row("whole_matrices", "Megatron-LM's layer-wise optimizer, RaggedShard", travels(4, 4), shared(4, 12),
        "Muon, SOAP, Shampoo"),
    Row("hybrid", "num_distributed_optimizer_instances, HSDP", on_two_lines, lambda d: 4 + 12 * N_REPLICAS / d,
        "slow lines between nodes, or latency decides"),
    Row("wire16", "bf16_compress_hook, communication_data_type", travels(2, 4), shared(4, 12), "the line decides"),
    Row("moments16", "use_precision_aware_optimizer", travels(4, 4), shared(4, 8), "the state decides, beta2 ≤ 0.99"),
    Row("finite", "check_for_nan_in_grad", lambda d: travels(4, 4)(d) + (d - 1) / 4096, shared(4, 12),
        "which rank has the nan?"),
    Row("blocks", "torchao with FSDP2", travels(4, 4), shared(4, 12), "8-bit states"),
    Row("offload", "offload_optimizer, CPUOffloadPolicy", travels(4, 4), shared(4, 16), "the GPU's memory decides"),
    Row("stage4_overlap", "", travels(2, 2), shared(2, 16), "the base of the next row", torch.bfloat16),
    Row("remainder16", "store_param_remainders", travels(2, 2), shared(2, 14), "bf16, and no fp32 copies",
        torch.bfloat16),
]


def optimizer_of(row, params, d):
    """Its core: the guard sends, and holds, what it does for any stage."""
    package = importlib.import_module(row.module)
    kwargs = {}
    if row.name == "hybrid":
        kwargs["mesh"] = torch.distributed.init_device_mesh("cpu", (N_REPLICAS, d // N_REPLICAS))
    return package.ShardedOptimizer(params, torch.optim.AdamW, **kwargs)


def one_of(d):
    """This process plays rank 0 of d, and sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=d)


def counted(row, d=RANKS):
    """-> (bytes a parameter sent, in how many messages, bytes a parameter held), of the third step."""
    one_of(d)
    try:
        with Memory("cpu") as memory:
            params = [torch.nn.Parameter(torch.ones(shape, dtype=row.dtype)) for shape in SHAPES]
            optimizer = optimizer_of(row, params, d)
            for _ in range(3):
                with Ledger() as ledger:
                    sum(param.sum() for param in params).backward()
                    optimizer.step()
            buffers = {memory for buffer in getattr(optimizer, "idle", ()) for memory in (buffer.sent, buffer.received)}
            held = memory.settled() - sum(tensor.nbytes for tensor in buffers)
        numel = sum(param.numel() for param in params)
        return sum(entry.wire_bytes for entry in ledger.entries) / numel, len(ledger.entries), held / numel
    finally:
        dist.destroy_process_group()


def gathered(n_matrices, d, hidden=768, layers=12):
    """-> elements gathered over Ψ: whole matrices of a GPT, in buckets of so many of the largest."""
    one_of(d)
    try:
        with FakeTensorMode():
            shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)] * layers
            params = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
            whole = importlib.import_module("variants.whole_matrices").ShardedOptimizer
            cap_mb = n_matrices * 4 * 4 * hidden * hidden / 2**20
            buckets = whole(params, torch.optim.SGD, lr=0.1, bucket_cap_mb=cap_mb).buckets
        return sum(bucket.numel for bucket in buckets) / sum(param.numel() for param in params)
    finally:
        dist.destroy_process_group()


def lines_of(row):
    path = ROOT / row.name
    return core_lines(path) if path.is_dir() else len(code_lines(ROOT / "variants" / f"{row.name}.py"))


def table():
    """-> lines of Markdown."""
    lines = ["| idea | lines | called elsewhere | sent | messages | held | take it when |",
             "|---|--:|---|--:|--:|--:|---|"]
    for row in ROWS:
        sent, messages, held = counted(row)
        name = f"{row.name}, bf16" if row.dtype == torch.bfloat16 else row.name
        cells = name, lines_of(row), row.elsewhere, f"{sent:.2f}", messages, f"{held:.2f}", row.when
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "| matrices a bucket | d = 2 | d = 8 | d = 32 |", "|--:|--:|--:|--:|"]
    for n_matrices in (1, 8, 32, 64):
        cells = " | ".join(f"{gathered(n_matrices, d):.2f}" for d in (2, 8, 32))
        lines.append(f"| {n_matrices} | {cells} |")
    return lines


def main():
    warnings.filterwarnings("ignore", category=FutureWarning)
    print("\n".join(table()))


if __name__ == "__main__":
    main()
