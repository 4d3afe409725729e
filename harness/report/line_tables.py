"""What a line allows: no row can be faster than that, and how near is it?"""

import statistics
from typing import NamedTuple

from harness.report.cells import EXPOSED, exposed_cell, failures, label_of, time_cells
from harness.report.sheet import NONE, Sheet
from harness.rows import bucket_sizes


def line_cells(result, base, bucket_mb=None):
    """What the line says of one row, with stage 4 beside it: ratios round by round. Of no row: dashes."""
    row = result.find(base, bucket_mb)
    if row is None or row.wire_bytes_theory is None:  # it was not measured, or has failed
        return LineCells(*[NONE] * 8)
    bf16 = " bf16" if row.dtype == "bfloat16" else ""
    compute, stage4 = (_rounds(result.find(other + bf16)) for other in ("compute only", bucket_sizes.STAGE_4))
    mine, rate = row.rounds_ms, result.conditions.bits_per_second
    counted = row.wire_bytes if row.line_bytes is None else row.line_bytes
    by_formula, sent = (n_bytes * 8 / rate * 1000 for n_bytes in (row.wire_bytes_theory, counted))
    floors, floors_sent = ([max(line_ms, one) for one in compute] for line_ms in (by_formula, sent))
    median, spread, _ = time_cells(row, result.conditions)
    return LineCells(median, f"{median} ({spread})" if mine else NONE, exposed_cell(row), f"{by_formula:.0f}",
                     f"{sent:.0f}", _ratio(mine, floors), _ratio(mine, floors_sent), _ratio(stage4, mine))


class LineCells(NamedTuple):
    median: str
    spread: str
    exposed: str
    line: str
    as_sent: str
    over_floor: str
    over_floor_as_sent: str
    stage4_over: str


def _rounds(row):
    return row.rounds_ms if row else []


def _ratio(ones, others):
    pairs = list(zip(ones, others))
    return f"{statistics.median(one / other for one, other in pairs):.2f}" if pairs else NONE


def line_sheet(result):
    """What no row can be faster than, and stage 4 beside each row."""
    is_line_counted = any(row.line_bytes is not None for row in result.rows)
    rows = [[label_of(row), *line_cells(result, *row.choice)[1:]] for row in result.rows]
    how = ("as its interface counted them, with headers" if is_line_counted else
           "as counted by the collectives, gloo's reduce-scatter twice")
    return Sheet(
        f"What the line of {result.conditions.rate} allows",
        [("", ""), ("ms a step\nmedian (min–max)", "measured"), ("exposed\nms", "measured"),
         ("line\nms", "formula"), ("as sent\nms", "measured" if is_line_counted else "counted"),
         ("x floor", "measured"), ("x floor\nas sent", "measured"), ("stage 4\nx this", "measured")], rows,
        [EXPOSED,
         f"Line: bytes by the formula, over the rate. As sent: the bytes that were really sent, {how}, over the rate. "
         "Floor: the larger of compute only, of the same dtype, and the line's time, by one or the other. Ratios: "
         "medians, round by round.",
         *(["compute + bytes: while it computes as many bytes travel as in stage 4, and nothing waits for them before "
            "the step ends."] if result.timed("compute + bytes") else []), *failures(result.rows)])


def machines_sheet(results):
    """Of results of make network on several machines, what `line_cells` say of stage 4: a row each."""
    rows = []
    for result in results:
        tuned = bucket_sizes.tuned(result, "ddp")
        best = line_cells(result, *tuned.choice).stage4_over if tuned else NONE
        compute, ddp, zero, fsdp2, stage4 = (line_cells(result, base) for base in (
            "compute only", "ddp", "ddp + torch ZeRO", "fsdp2", bucket_sizes.STAGE_4))
        rows.append([result.conditions.rate, result.conditions.machine, compute.median, stage4.line, best,
                     ddp.stage4_over, zero.stage4_over, fsdp2.stage4_over, stage4.over_floor])
    return Sheet(
        "Stage 4 on several machines",
        [("", ""), ("", ""), ("compute\nonly ms", "measured"), ("the line\nms", "formula"),
         ("x ddp\ntuned", "measured"), ("x ddp\ndefault", "measured"), ("x torch\nZeRO", "measured"),
         ("x fsdp2", "measured"), ("x floor", "measured")], rows,
        ["x: the time of stage 4 over that of this row, as in each machine's own table above. Tuned: DDP with the "
         "bucket size that was best on this line; – where none was tried."])
