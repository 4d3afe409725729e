"""What a line allows: no row can be faster than that, and how near is it?"""

import statistics
from typing import NamedTuple

from harness.report.cells import EXPOSED, exposed_cell, failures, label_of, rate_words, time_cells
from harness.report.sheet import NONE, Sheet
from harness.rows import bucket_sizes

SHORT = {"float32": "", "bfloat16": " bf16", "float16": " fp16"}  # behind the name of a row
DRAIN = ("A step: from one point of the loop to the same point of the next, so with its waits for parameters. Drain: "
         "what the last one has left under way, which a run pays once; – where it is in each step's time still.")


def line_cells(result, base, bucket_mb=None):
    """What the line says of one row, with stage 4 beside it: ratios round by round. Of no row: dashes."""
    row = result.find(base, bucket_mb)
    if row is None or row.wire_bytes_theory is None:  # it was not measured, or has failed
        return LineCells(*[NONE] * 7)
    short = SHORT[row.dtype]
    compute, stage4 = (_rounds(result.find(other + short)) for other in ("compute only", bucket_sizes.STAGE_4))
    mine, line_ms = row.rounds_ms, row.wire_bytes_theory * 8 / result.conditions.bits_per_second * 1000
    median, spread, _ = time_cells(row, result.conditions)
    return LineCells(median, f"{median} ({spread})" if mine else NONE, drain_cell(row), exposed_cell(row),
                     f"{line_ms:.0f}", _ratio(mine, [max(line_ms, one) for one in compute]), _ratio(stage4, mine))


class LineCells(NamedTuple):
    median: str
    spread: str
    drain: str
    exposed: str
    line: str
    over_floor: str
    stage4_over: str


def drain_cell(row):
    """A run pays it once, at its end. Older results have it in each step."""
    return f"{statistics.median(row.drain_ms):.0f}" if row.drain_ms else NONE


def _rounds(row):
    return row.rounds_ms if row else []


def _ratio(ones, others):
    pairs = list(zip(ones, others))
    return f"{statistics.median(one / other for one, other in pairs):.2f}" if pairs else NONE


def line_sheet(result):
    """What no row can be faster than, and stage 4 beside each row."""
    rows = [[label_of(row), *line_cells(result, *row.choice)[1:]] for row in result.rows]
    return Sheet(
        f"What the line of {rate_words(result.conditions.rate)} allows",
        [("", ""), ("ms a step\nmedian (min–max)", "measured"), ("drain\nms", "measured"),
         ("exposed\nms", "measured"), ("line\nms", "formula"), ("x floor", "measured"),
         ("stage 4\nx this", "measured")], rows,
        [DRAIN, EXPOSED,
         "Line: bytes by the formula, over the rate. Floor: the larger of compute only, of the same dtype, and the "
         "line's time. Ratios: medians, round by round.",
         *(["compute + bytes: while it computes as many bytes travel as in stage 4, and nothing waits for them before "
            "the step ends."] if result.timed("compute + bytes") else []), *failures(result.rows)])
