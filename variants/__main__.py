"""Prints a table of variants: bytes that one of eight ranks sends and holds (counted), and times (measured).

    python -m variants [--page]

With --page each table replaces the block of the same name in README.md.
"""

import functools
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from harness import STAGE_3, STAGE_4
from harness.ranks import command_line

if __name__ == "__main__":
    command_line.begin()

import torch

from harness.measuring.examine import Settings, adamw
from harness.measuring.ledger import Ledger
from harness.measuring.memory import Memory
from harness.publishing.pages import BLOCKS as PAGES_BLOCKS
from harness.publishing.pages import rewritten
from harness.publishing.stages import code_lines, core_lines
from harness.publishing.tables import ROOT, column, load, markdown, name_column, sheet_of
from harness.ranks.meeting import rank_0_of
from harness.training import rows as catalogue
from harness.training.models import GPT, MODELS
from harness.training.rows import DDP_AND_MUON, GRAD_BUFFER, OVERLAP, OVERLAP_BF16
from stage4_overlap.transport import GlooTransport, Transport
from variants.muon import UNEVEN, owners
from variants.muon_rows import MUON

PAGE = Path(__file__).with_name("README.md")


class TableRow(NamedTuple):
    """What the table of all variants says of a row in words."""
    elsewhere: str  # other systems' names for the idea
    take_it_when: str


ROWS = {  # name of a row of the bench, in harness/training/rows.py -> its words
    GRAD_BUFFER: TableRow("", "the base of the next row"),
    "variants per_parameter": TableRow("modded-nanogpt, nanochat", "few, large parameters"),
    OVERLAP: TableRow("", "the base of all that follow"),
    "variants muon": TableRow("Megatron-LM's layer-wise optimizer, Owned of torchtitan",
                              "Muon, SOAP, Shampoo"),
    "variants hybrid": TableRow("num_distributed_optimizer_instances, HSDP",
                                "slow links between nodes, or latency decides"),
    "variants wire16": TableRow("bf16_compress_hook, communication_data_type", "the link decides"),
    "variants moments16": TableRow("use_precision_aware_optimizer", "the state decides, beta2 ≤ 0.99"),
    "variants same_bits": TableRow("–", "the bits must not depend on the number of ranks"),
    "variants finite": TableRow("check_for_nan_in_grad", "which rank has the nan?"),
    "variants blocks": TableRow("torchao with FSDP2", "8-bit states"),
    "variants offload": TableRow("offload_optimizer, CPUOffloadPolicy", "the GPU's memory decides"),
    OVERLAP_BF16: TableRow("", "the base of the next row"),
    "variants remainder16": TableRow("store_param_remainders", "bf16, and no fp32 copies"),
}
MUONS = {DDP_AND_MUON: "replicated, DDP", "variants muon": "muon"}
GPTS = {"GPT-2, 124M": (12, 768), "GPT-2, 1.5B": (48, 1600), "GPT, 7B": (32, 4096)}  # layers, width


class Counted(NamedTuple):
    """A rank's counts of a step; bytes are per parameter. A `_theory` is what the formula gives."""
    sent: float
    messages: int
    held: float  # after the step, without bucket buffers
    sent_theory: float
    held_theory: float


@functools.cache
def counted(name, d):
    """Count a row's step on rank 0 of d. Returns Counted."""
    configuration = catalogue.find(name)
    exchanged = mock.patch.dict(UNEVEN, {Transport: GlooTransport})  # the fake group can only gather equal parts
    # The counts don't depend on the rounds of Newton–Schulz, which take minutes where a CPU has no bf16.
    no_rounds = mock.patch.dict(MUON, ns_steps=0)
    with rank_0_of(d), exchanged, no_rounds, Memory("cpu") as memory:
        model = GPT(MODELS["tiny"]).to(getattr(torch, configuration.dtype))
        training = configuration.build(model, adamw(Settings(model="tiny")))
        for _ in range(2):
            with Ledger() as ledger:
                training.step(torch.zeros(2, 1, 8, dtype=torch.int64))
                training.finish()
        held_bytes = memory.settle()
        numel = sum(param.numel() for param in model.parameters())
        optimizers = getattr(training.optimizer, "optimizers", [training.optimizer])  # of Chained
        buffer_bytes = sum(getattr(optimizer, "bucket_buffer_bytes", 0) for optimizer in optimizers)
        return Counted(
            sent=ledger.wire_bytes / numel,
            messages=len(ledger.entries),
            held=(held_bytes - buffer_bytes) / numel,
            sent_theory=configuration.wire_bytes(numel, d) / numel,
            held_theory=configuration.bytes_per_param(numel, d, training.optimizer) - buffer_bytes / numel)


def times(kind, rate, key="time"):
    """Return {name of a row: time on two hosts with a link of this rate}, from a file of results/."""
    return load(f"network_{kind}_{rate}.json").sheets["times"].numbers(key)


def table():
    """Make the table of all variants. muon and hybrid were measured in runs of their own."""
    time_of = times("variants", "300mbit")
    for kind in ("muon", "hybrid"):
        name = f"variants {kind}"
        time_of[name] = times(kind, "300mbit")[name]

    def lines(name):
        idea = PAGE.with_name(f"{name.removeprefix('variants ')}.py")
        stage = STAGE_3 if name == GRAD_BUFFER else STAGE_4
        return len(code_lines(idea)) if idea.exists() else core_lines(ROOT / stage)
    return sheet_of("", ROWS, {
        "idea": name_column(lambda name: name.removeprefix("variants "), "idea"),
        "lines": column("lines", lines, "counted"),
        "elsewhere": name_column(lambda name: ROWS[name].elsewhere, "called elsewhere"),
        "sent": column("sent", lambda name: counted(name, 8).sent, "counted", ".2f"),
        "messages": column("messages", lambda name: counted(name, 8).messages, "counted"),
        "held": column("held", lambda name: counted(name, 8).held, "counted", ".2f"),
        "time": column("time, 300 Mbit/s", time_of.get, "measured"),
        "when": name_column(lambda name: ROWS[name].take_it_when, "take it when")})


class Balance(NamedTuple):
    """Newton–Schulz products of the busiest rank, over the mean of all ranks."""
    model: str
    d: int
    muon: float  # as variants/muon.py deals the matrices
    least: float  # a lower bound: some rank has the largest matrix


def balance(model, d):
    """Return the Balance of a GPT's matrices."""
    layers, width = GPTS[model]
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    matrices = [torch.empty(shape, device="meta") for _ in range(layers) for shape in shapes]
    products = {matrix: matrix.numel() * min(matrix.shape) for matrix in matrices}
    mean = sum(products.values()) / d
    of_ranks = [0] * d
    for matrix, owner in owners([{"params": matrices}], d).items():
        of_ranks[owner] += products[matrix]
    return Balance(model, d, max(of_ranks) / mean, max(1, max(products.values()) / mean))


def balance_table():
    return sheet_of("", [balance(model, d) for model in GPTS for d in (2, 8, 64)], {
        "model": name_column("model", "model"), "d": column("d", "d", "counted"),
        "muon": column("muon", "muon", "counted", ".2f"), "at least": column("at least", "least", "counted", ".2f")})


def muon_table():
    """Make the table of Muon's rows. DDP doesn't run in the fake group: its row has the formula in place of a count."""
    def sent(d):
        return lambda name: 8 * (d - 1) / d if name == DDP_AND_MUON else counted(name, d).sent

    def held(d):
        return lambda name: None if name == DDP_AND_MUON else counted(name, d).held
    return sheet_of("", MUONS, {
        "name": name_column(MUONS.get, "matrices by Muon"),
        "sent 8": column("sent, d = 8", sent(8), "counted", ".2f"),
        "sent 64": column("64", sent(64), "counted", ".2f"), "held 8": column("held, d = 8", held(8), "counted", ".2f"),
        "held 64": column("64", held(64), "counted", ".2f"),
        "time 1gbit": column("time, d = 2, 1 Gbit/s", times("muon", "1gbit", "ms").get, "measured"),
        "time 300mbit": column("time, d = 2, 300 Mbit/s", times("muon", "300mbit", "ms").get, "measured")})


BLOCKS = {"table": lambda: markdown(table()), "balance": lambda: markdown(balance_table()),
          "muon": lambda: markdown(muon_table()), "losses": PAGES_BLOCKS["losses"]}


def main():
    parser = command_line.Parser("variants", __doc__)
    parser.add_argument("--page", action="store_true", help="put the tables into variants/README.md")
    if parser.parse_args().page:
        command_line.write("--page", PAGE, rewritten(PAGE.read_text(encoding="utf-8"), BLOCKS), parser.error)
    else:
        print(*(make() for make in BLOCKS.values()), sep="\n\n")


if __name__ == "__main__":
    main()
