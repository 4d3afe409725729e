"""The ladder of README.md: formulas, what was counted, and one column of measured time."""

import textwrap
from typing import NamedTuple

from harness.report import published
from harness.report.cells import rate_words
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
    formula: str  # of bytes a parameter after a step
    travels: int  # of Ψ parameters' bytes, of which (d-1)/d are sent


LADDER = [
    Rung("ddp", "", "DDP, replicated AdamW", "all-reduce, in buckets", "16", 2),
    Rung("rung 0 replicated", "", "0 replicated", "all-reduce", "16", 2),
    Rung("stage 1 naive broadcast", "stage1_naive_broadcast", "1 naive broadcast", "all-reduce, d broadcasts",
         "8 + 8/d", 3),
    Rung("stage 2 all-gather", "stage2_allgather", "2 all-gather", "all-reduce, all-gather", "8 + 8/d", 3),
    Rung("stage 3 grad buffer", "stage3_gradbuffer", "3 grad buffer", "reduce-scatter, all-gather", "8 + 8/d", 2),
    Rung("stage 4 overlap", "stage4_overlap", "4 overlap", "reduce-scatter, all-gather, in buckets", "4 + 12/d + b", 2),
]
RANKS = 2, 8, 64


def ladder_block():
    """What can be counted, and one column of time, measured on two hosts with the slowest line."""
    result = published.by_rate()[0]
    ddp = bucket_sizes.tuned(result, "ddp") or result.find("ddp")
    lines = [f"stage | collectives | bytes a parameter, {' · '.join(map(str, RANKS))} ranks | peak, MB | Ψ sent "
             "| code lines | time", "---|---|---|---|---|---|---"]
    for rung in LADDER:
        row = ddp if rung.row == "ddp" else result.find(rung.row) or Row(rung.row)
        lines.append(" | ".join([
            rung.title, rung.collectives, " · ".join(f"{held(rung, d):.1f}" for d in RANKS),
            f"{max(row.peak_bytes.values()) / 1e6:.0f}" if row.peak_bytes else NONE, f"{rung.travels}",
            str(core_lines(published.ROOT / rung.folder)) if rung.folder else NONE,
            f"{row.over(ddp):.2f}" if row.rounds_ms and ddp.rounds_ms else NONE]))
    return ["\n".join(lines), textwrap.fill(notes(result, ddp), 118)]


def held(rung, d):
    """Bytes a parameter after a step: of stages 3 and 4 counted in the bench's file, padding and buffers included."""
    for row in published.load_bench().model_state:
        if row.name == f"stage {rung.title[0]} float32/float32":
            return row.bytes_per_param[d]
    return 8 + 8 / d if rung.formula == "8 + 8/d" else float(rung.formula)


def notes(result, ddp):
    c = result.conditions
    return ("Counted: bytes a parameter after a step, AdamW, fp32 (1 to 3: 8 + 8/d; 4: 4 + 12/d + b; b: two bucket "
            f"buffers); peak in a step, with activations; Ψ: {c.parameters:,} parameters' bytes, of which (d-1)/d are "
            "sent. Code lines: of the core. Time: of a step, core and guard (2, 3: without gloo's own reduce-scatter "
            f"and all-gather), over that of {ddp_words(result)}, on two hosts with a line of {rate_words(c.rate)}, "
            f"median of {c.rounds} rounds ({c.machine}, {c.date}).")


def ddp_words(result):
    """Which DDP a sentence that says "ahead" speaks of."""
    tuned = bucket_sizes.tuned(result, "ddp")
    if tuned is None:
        return "DDP with its default buckets"
    size = "its default" if tuned.bucket_mb is None else tuned.size
    return f"DDP with {size} buckets, the best size tried"
