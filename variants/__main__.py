"""What each variant sends and holds: counted on one rank of eight whose messages go nowhere, and as its formula says.

    python -m variants [--page]

Beside that what was measured of them, where results/ has it: times, and losses. --page puts the tables into README.md.
"""

import argparse
import collections
import functools
import importlib
import re
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness import command_line
from harness import results as saved
from harness.command_line import write
from harness.ledger import Ledger
from harness.memory import Memory
from harness.results import LossResult
from harness.tables import NONE, code_lines, core_lines, loss_sheet, rate_words

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
    def base(self):
        """-> the name of its base in the bench, and its own."""
        of_16_bits = " bf16" * (self.dtype == torch.bfloat16)
        base = "stage 3 grad buffer" if self.name in ("stage3_gradbuffer", "per_parameter") else "stage 4 overlap"
        return base + of_16_bits, f"variants {self.name}" if self.module.startswith("variants.") else base + of_16_bits

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
    Row("muon", "Megatron-LM's layer-wise optimizer, RaggedShard", travels(4, 4), shared(4, 12),
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


@functools.cache
def counted(row, d=RANKS):
    """-> (bytes a parameter sent, by line: within a group of ranks, and across; in how many messages; bytes a parameter
    held), of the third step."""
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
        sent = collections.Counter()
        for entry in ledger.entries:
            sent[entry.group_size] += entry.wire_bytes / numel
        return [sent[size] for size in sorted(sent, reverse=True)], len(ledger.entries), held / numel
    finally:
        dist.destroy_process_group()


@functools.cache
def gathered(n_matrices, d, hidden=768, layers=12):
    """-> elements gathered over Ψ: whole matrices of a GPT, in buckets of so many of the largest."""
    one_of(d)
    try:
        with FakeTensorMode():
            shapes = [(3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)] * layers
            params = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
            whole = importlib.import_module("variants.muon").ShardedOptimizer
            cap_mb = n_matrices * 4 * 4 * hidden * hidden / 2**20
            buckets = whole(params, torch.optim.SGD, lr=0.1, bucket_cap_mb=cap_mb).buckets
        return sum(bucket.numel for bucket in buckets) / sum(param.numel() for param in params)
    finally:
        dist.destroy_process_group()


def lines_of(row):
    path = ROOT / row.name
    return core_lines(path) if path.is_dir() else len(code_lines(ROOT / "variants" / f"{row.name}.py"))


def is_published(name):
    return (saved.ROOT / "results" / name).exists()


def measured_times():
    """-> {where: what was measured there, a Result}."""
    found = {}
    if is_published("bench_variants.json"):
        found["one machine"] = saved.load("bench_variants.json")
    if is_published("network_variants.json"):
        results = saved.load("network_variants.json").at_all_rates()
        found.update({rate_words(result.conditions.rate): result for result in results})
    return found


def time_cell(row, result):
    """Of a base milliseconds a step, of a variant how many times its base takes, round by round."""
    base, own = (result.timed(name) for name in row.base)
    if base is None or own is None:
        return NONE
    return f"{own.median_ms:.0f} ms" if own is base else f"× {own.over(base):.2f}"


def markdown(titles, rows):
    """`titles`: of columns; what ends with a colon is text."""
    return [f"| {' | '.join(title.rstrip(':') for title in titles)} |",
            f"|{'|'.join('---' if title.endswith(':') else '--:' for title in titles)}|",
            *(f"| {' | '.join(map(str, cells))} |" for cells in rows)]


def table():
    """-> lines of Markdown."""
    times = measured_times()
    titles = ["idea:", "lines", "called elsewhere:", "sent", "messages", "held", *(f"time, {where}" for where in times),
              "take it when:"]
    rows = []
    for row in ROWS:
        sent, messages, held = counted(row)
        name = f"{row.name}, bf16" if row.dtype == torch.bfloat16 else row.name
        rows.append([name, lines_of(row), row.elsewhere, " + ".join(f"{one:.2f}" for one in sent), messages,
                     f"{held:.2f}", *(time_cell(row, result) for result in times.values()), row.when])
    return markdown(titles, rows)


def padding_table():
    ranks = 2, 8, 32
    return markdown(["matrices a bucket", *(f"d = {d}" for d in ranks)],
                    [[n, *(f"{gathered(n, d):.2f}" for d in ranks)] for n in (1, 8, 32, 64)])


def loss_table():
    """-> lines of Markdown; none where nothing was measured."""
    if not is_published("losses.json"):
        return []
    sheet = loss_sheet(saved.load("losses.json", LossResult))
    titles = [f"{sheet.title}:", *(" ".join(name.split()) for name, _ in sheet.columns[1:])]
    return [*markdown(titles, sheet.rows), *(line for note in sheet.notes for line in ("", *textwrap.wrap(note, 120)))]


def spread(result):
    """-> how far the rounds of a row lie apart, over their median: of the row with most."""
    return max((max(row.rounds_ms) - min(row.rounds_ms)) / row.median_ms for row in result.rows if row.rounds_ms)


def times_beside():
    """-> lines: the noise; and DDP with bf16 gradients, which wire16 is compared with, where that was measured."""
    times = measured_times()
    noise = [f"{where} {spread(result):.0%} in {result.conditions.rounds}" for where, result in times.items()]
    pairs = {where: [result.timed(name) for name in ("ddp summed in bf16", "stage 4 overlap", "variants wire16")]
             for where, result in times.items()}
    said = [f"{where}: × {ddp.over(base):.2f}, wire16 × {wire16.over(base):.2f}"
            for where, (ddp, base, wire16) in pairs.items() if ddp and base and wire16]
    lines = [f"Rounds differ by up to: {'; '.join(noise)} rounds."] if noise else []
    lines += [f"DDP with bf16 gradients, over stage 4: {'; '.join(said)}."] if said else []
    return "\n\n".join(textwrap.fill(line, 118) for line in lines).splitlines()


TABLES = {"table": table, "padding": padding_table, "losses": loss_table, "times": times_beside}
PAGE = ROOT / "variants" / "README.md"


def with_tables(text):
    """A page: what stands between <!-- variants: NAME --> and <!-- end --> anew."""
    def block(match):
        lines = TABLES[match[2]]()
        return "\n".join([match[1], *["", *lines, ""] * bool(lines), "<!-- end -->"])
    return re.sub(r"(<!-- variants: (\w+) -->)\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail = functools.partial(command_line.fail, "variants")
    parser.add_argument("--page", action="store_true", help="put the tables into variants/README.md")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    if not args.page:
        return print("\n".join(line for one in TABLES.values() if (lines := one()) for line in [*lines, ""]))
    before = PAGE.read_text(encoding="utf-8")
    after = with_tables(before)
    if after != before:
        write("--page", PAGE, after, fail)
    print(f"variants/README.md: {'unchanged' if after == before else 'rewritten'}")


if __name__ == "__main__":
    main()
