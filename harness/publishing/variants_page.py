"""Makes the table of variants/README.md: how long each variant is, what it sends, holds and takes, and when to take it.

Variants are named as their rows of the bench are, in harness/training/rows.py, which isn't imported: it loads torch.
"""

import dataclasses
from typing import NamedTuple

from harness import STAGE_3, STAGE_4
from harness.publishing import tables
from harness.publishing.stages import code_lines, core_lines
from harness.publishing.tables import column, load, name_column, sheet_of

STAGE_3_ROW = "stage 3 grad buffer"


class Words(NamedTuple):
    """What the table says of a row in words."""
    elsewhere: str  # other systems' names for the idea
    take_it_when: str


WORDS = {  # name of a row -> its words
    STAGE_3_ROW: Words("", "the base of the next row"),
    "variants per_parameter": Words("modded-nanogpt, nanochat", "few, large parameters"),
    "stage 4 overlap": Words("", "the base of all that follow"),
    "variants muon": Words("Megatron-LM's layer-wise optimizer, Owned of torchtitan", "Muon, SOAP, Shampoo"),
    "variants hybrid": Words("num_distributed_optimizer_instances, HSDP",
                             "slow links between nodes, or latency decides"),
    "variants wire16": Words("bf16_compress_hook, communication_data_type", "the link decides"),
    "variants moments16": Words("use_precision_aware_optimizer", "the state decides, beta2 ≤ 0.99"),
    "variants same_bits": Words("–", "the bits must not depend on the number of ranks"),
    "variants finite": Words("check_for_nan_in_grad", "which rank has the nan?"),
    "variants blocks": Words("torchao with FSDP2", "8-bit states"),
    "variants offload": Words("offload_optimizer, CPUOffloadPolicy", "the GPU's memory decides"),
    "stage 4 overlap bf16": Words("", "the base of the next row"),
    "variants remainder16": Words("store_param_remainders", "bf16, and no fp32 copies"),
}


def short_name(row_name):
    return row_name.removeprefix("variants ")


def lines_of(row_name):
    """Count the code lines of a variant's file, or of the core of a stage."""
    path = tables.ROOT / "variants" / f"{short_name(row_name)}.py"
    if path.exists():
        return len(code_lines(path))
    return core_lines(tables.ROOT / (STAGE_3 if row_name == STAGE_3_ROW else STAGE_4))


def sheet_with(row_name, key):
    """Return the table `key` of two hosts that has a row: muon and hybrid were measured in runs of their own."""
    of_its_own = row_name in ("variants muon", "variants hybrid")
    kind = short_name(row_name) if of_its_own else "variants"
    return load(f"network_{kind}_300mbit.json").sheets[key]


def table():
    """Return the table as markdown, with the marks of counts that differ from their formulas."""
    def cell_of(key, column_key):
        return lambda row_name: sheet_with(row_name, key).cells(column_key)[row_name]

    sheet = sheet_of("", WORDS, {
        "idea": name_column(short_name, "idea"),
        "lines": column("lines", lines_of, "counted"),
        "elsewhere": name_column(lambda row_name: WORDS[row_name].elsewhere, "called elsewhere"),
        "sent": column("sent", cell_of("rows", "sent"), "counted", ".1f"),
        "held": column("held", cell_of("rows", "bytes"), "counted", ".2f"),
        "time": column("time, 300 Mbit/s", cell_of("times", "time"), "measured"),
        "when": name_column(lambda row_name: WORDS[row_name].take_it_when, "take it when")})
    explained = [footnote for row_name in WORDS for footnote in sheet_with(row_name, "rows").footnotes
                 if not footnote.startswith("~")]  # ~ is a mark of times
    return tables.markdown(dataclasses.replace(sheet, footnotes=list(dict.fromkeys(explained))))
