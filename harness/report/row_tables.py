"""Time, traffic and memory of a step: the tables of every bench."""

from harness.report.cells import (
    EXPOSED,
    bytes_per_param_cells,
    collectives_cell,
    difference_cell,
    exposed_cell,
    failures,
    label_of,
    megabytes_cell,
    memory_cells,
    noise_note,
    number_cell,
    peaks_of,
    time_cells,
    wire_cells,
)
from harness.report.sheet import NONE, Notes, Sheet
from harness.rows.kinds import KINDS


def time_sheet(result):
    rows, conditions, wire_notes = result.rows, result.conditions, Notes()
    return Sheet(
        "Time and traffic of a step",
        [("", ""), ("ms/step\nmedian", "measured"), ("min–max", "measured"), ("x ddp", "measured"),
         ("exposed\nms", "measured"), ("collectives", "counted"), ("MB sent\na rank", "counted"), ("", "formula")],
        [[label_of(row), *time_cells(row, conditions), exposed_cell(row), collectives_cell(row),
          *wire_cells(row, conditions, wire_notes)]
         for row in rows],
        ["x ddp: median of the ratios round by round. MB: 10⁶ bytes, mean over the ranks.",
         *[EXPOSED] * any(row.timeline for row in rows), *noise_note(conditions), *wire_notes, *failures(rows)])


def memory_sheets(result):
    """-> Sheets: memory and correctness; and of what kind it is, where that was counted: older results lack it."""
    rows, conditions, memory_notes = result.rows, result.conditions, Notes()
    has_16_bits = any(row.dtype != "float32" for row in rows)
    of_16_bits = ", in 16 bits from replicated training with fp32 copies" * has_16_bits
    memory = Sheet(
        "Memory of a rank, and the difference from ddp",
        [("", ""), ("model\ninit", "counted"), ("optimizer\ninit", "counted"), ("forward\nbackward", "counted"),
         ("step", "counted"), *((key, "counted") for key in peaks_of(conditions)), ("bytes a\nparam.", "counted"),
         ("", "formula"), ("largest\n|Δ|", "measured")],
        [[label_of(row), *memory_cells(row, conditions), *bytes_per_param_cells(row, memory_notes),
          difference_cell(row)]
         for row in rows if row.kind != "noise"],
        ["Memory after each phase in MB, of the rank that holds most. Bytes a parameter: parameters, gradients and "
         "optimizer state after a step, mean over the ranks.",
         f"Largest |Δ|: of any parameter on any rank, from ddp{of_16_bits}, after 3 steps; "
         f"allowed: {number_cell(conditions.tolerance)}.",
         *memory_notes])
    return [memory, *[kinds_sheet(rows)] * any(row.held_bytes for row in rows)]


def kinds_sheet(rows):
    """The peak within each phase of a step, and what it comes from. Counted."""
    def cells(row):
        peaks, held = row.peak_bytes, row.held_bytes
        found = [*(peaks.get(phase) for phase in ("build", "forward", "backward", "step")),
                 *(held.get(kind) for kind in KINDS), row.activation_bytes]
        return [label_of(row), *(NONE if n_bytes is None else megabytes_cell(n_bytes) for n_bytes in found)]
    return Sheet(
        "Peak within each phase, and what a rank holds after a step, counted, in MB",
        [(name, "") for name in ("", "peak:\nbuild", "\nforward", "\nbackward", "\nstep", "held:\nparam.", "\ngrads",
                                 "\nstate", "\nbuffers", "activa-\ntions")],
        [cells(row) for row in rows if row.kind != "noise"],
        ["Forward, backward and step: of the second step, which finds a state. The four kinds add up to all that is "
         "held, on the rank that holds most. State: moments and main parameters. Buffers: what is left, such as the "
         "bucket buffers of stage 4; the one buffer of stage 3 and DDP's buckets are gradients. Activations: what the "
         "forward pass leaves for the backward pass."])
