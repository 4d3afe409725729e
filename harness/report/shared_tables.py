"""Tensor-parallel rows: time, memory, and what data and tensor parallelism send, apart."""

import statistics

from harness.report.cells import megabytes_cell, number_cell
from harness.report.sheet import NONE, Sheet
from harness.rows.kinds import KINDS


def shared_sheet(rows):
    """Of SharedRows, of one `tp`."""
    def cells(row):
        if row.error:
            return [row.name, *[NONE] * (len(KINDS) + 7)]
        ratio = statistics.median(mine / ddp for mine, ddp in zip(row.rounds_ms, row.ddp_ms))
        counted = [row.dp_bytes, row.tp_bytes, *(row.held_bytes[kind] for kind in KINDS), row.activation_bytes,
                   row.peak_bytes]
        return [row.name, f"{statistics.median(row.rounds_ms):.0f}", f"{ratio:.2f}", *map(megabytes_cell, counted),
                number_cell(row.max_abs_diff)]
    names = ("", "ms/step", "x ddp", "sent:\nDP", "\nTP", "held:\nparam.", "\ngrads", "\nstate", "\nbuffers",
             "activa-\ntions", "peak", "largest\n|Δ|")
    return Sheet(
        f"Layers shared by {rows[0].tp} ranks each: time measured, bytes counted, in MB a rank and step",
        [(name, "") for name in names], [cells(row) for row in rows],
        ["The batch is that of the other rows: ranks that share layers see their sequences together. Sent among "
         "data-parallel (DP) and among tensor-parallel ranks (TP). Held after a step, by the rank that holds most.",
         *(f"{row.name}: {row.error}" for row in rows if row.error)])
