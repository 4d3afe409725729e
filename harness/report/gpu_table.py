"""The table of make cuda."""

from harness.report.conditions_line import commit_of
from harness.report.sheet import NONE, Sheet
from harness.rows.formulas import UPDATE_BYTES


def gpu_sheet(result):
    """The table of a result."""
    plain = {row.model: row.step_ms for row in result.rows if row.stage == "fused AdamW"}
    rate, rows = result.conditions.copy_bytes_per_s, []
    for row in result.rows:
        name = [f"{row.model}: {row.stage}", str(row.d)]
        if row.error:
            rows.append([*name, "out of memory", *[NONE] * 6])
            continue
        base = plain[row.model]
        beside = f"{row.step_ms / base:.2f}" if base and row.d == 1 else NONE
        rows.append([*name, f"{row.step_ms:.2f}", beside, f"{row.bytes_per_s / 1e9:.0f}",
                     f"{row.bytes_per_s / rate:.2f}", str(row.allocations),
                     *(NONE if n_bytes is None else f"{n_bytes / 1e6:.0f}"
                       for n_bytes in (row.peak_bytes, row.reserved_bytes))])
    c = result.conditions
    return Sheet(
        "The sharded update on a GPU",
        [("", ""), ("d", ""), ("step\nms", "measured"), ("x AdamW", "measured"), ("GB/s", "measured"),
         ("x copy", "measured"), ("new", "counted"), ("peak", "counted"), ("reserved", "counted")], rows,
        [f"GB/s: {UPDATE_BYTES} bytes for each parameter that this rank owns, over the whole step; a copy on the "
         f"device moves {rate / 1e9:.0f}. new: allocations in one step. Peak and reserved in MB. "
         "What a stage does in the backward pass is not in these times.",
         f"{c.machine} · torch {c.torch} · {c.dtype} · median of {c.steps} steps, no communication · "
         f"{c.date}{commit_of(c)}"])
