"""The ladder of README.md: formulas, what was counted, and one column of measured time."""

import textwrap
from typing import NamedTuple

from harness.report import published
from harness.report.reading_time import core_lines
from harness.report.sheet import NONE
from harness.rows import bucket_sizes
from harness.rows.results import Row


class Rung(NamedTuple):
    """A row of README's ladder: that of the bench, its stage's folder, and the formulas that its chapter derives."""
    row: str
    folder: str
    title: str
    collectives: str
    bytes_per_param: str
    sent: str


LADDER = [
    Rung("ddp", "", "DDP, replicated AdamW", "all-reduce", "16", "2·4Ψ"),
    Rung("stage 1 naive broadcast", "stage1_naive_broadcast", "1 naive broadcast", "all-reduce, d broadcasts",
         "8 + 8/d", "3·4Ψ"),
    Rung("stage 2 all-gather", "stage2_allgather", "2 all-gather", "all-reduce, all-gather", "8 + 8/d", "3·4Ψ"),
    Rung("stage 3 grad buffer", "stage3_gradbuffer", "3 grad buffer", "reduce-scatter, all-gather", "8 + 8/d", "2·4Ψ"),
    Rung("stage 4 overlap", "stage4_overlap", "4 overlap", "reduce-scatter, all-gather, for each bucket",
         "4 + 12/d + b", "2·4Ψ"),
]


def ladder_block():
    """Formulas, what was counted on two hosts with the slowest line, and one column of measured time."""
    result = published.by_rate()[0]
    c, ddp = result.conditions, bucket_sizes.tuned(result, "ddp") or result.find("ddp")
    lines = ["stage | collectives | bytes a parameter | MB a rank sends | code lines | time", "---|---|---|---|---|---"]
    for rung in LADDER:
        row = ddp if rung.row == "ddp" else result.find(rung.row) or Row(rung.row)
        sent, held = row.wire_bytes, row.bytes_per_param
        mark = "\\*" if sent and sent > 1.01 * row.wire_bytes_theory else ""  # what gloo's reduce-scatter sends
        lines.append(" | ".join([
            rung.title, rung.collectives,
            rung.bytes_per_param + (f" = {held:.2f}" if held and rung.folder else ""),
            f"{rung.sent}: {sent / 1e6:.1f}{mark}" if sent else rung.sent,
            str(core_lines(published.ROOT / rung.folder)) if rung.folder else NONE,
            f"{row.over(ddp):.2f}" if row.rounds_ms and ddp.rounds_ms else NONE]))
    notes = (f"Counted: on {c.ranks} ranks, {c.parameters:,} parameters, AdamW, fp32. Ψ: parameters, of whose "
             "bytes (d-1)/d are sent. \\* gloo's reduce-scatter sends twice its bytes. b: two bucket buffers. Code "
             f"lines: of the core. Measured: time of a step over that of {ddp_words(result)}, on two hosts "
             f"with a line of {c.rate}, median of {c.rounds} rounds ({c.machine}, {c.date}).")
    return ["\n".join(lines), textwrap.fill(notes, 118)]


def ddp_words(result):
    """Which DDP a sentence that says "ahead" speaks of."""
    tuned = bucket_sizes.tuned(result, "ddp")
    if tuned is None:
        return "DDP with its default buckets"
    size = "its default" if tuned.bucket_mb is None else tuned.size
    return f"DDP with {size} buckets, the best size tried"
