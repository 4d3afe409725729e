"""The table of harness/measure/losses.py."""

import statistics

from harness.report.conditions_line import commit_of
from harness.report.sheet import Sheet


def loss_sheet(result):
    """-> a Sheet: a row for each way to train, a pair of columns for each beta2."""
    betas = list(dict.fromkeys(row.beta2 for row in result.rows))
    rows = [[name, *(cell for beta2 in betas for cell in _cells(result, name, beta2))]
            for name in dict.fromkeys(row.name for row in result.rows)]
    columns = [(text.format(beta2), "measured") for beta2 in betas for text in ("beta2 {}\nloss", "more, by seed")]
    c = result.conditions
    return Sheet(
        f"Losses after {c.steps} steps", [("", ""), *columns], rows,
        ["Loss: nats a byte of text that no step has seen, the median over the seeds. More: than stage 4 of the same "
         "dtype, same seed.",
         f"{c.machine} · torch {c.torch} · {c.backend}, {c.ranks} ranks · {c.model}: {c.parameters:,} parameters, "
         f"AdamW · a rank's batch: {c.batch_size} x {c.sequence_length} bytes of the source of Python's standard "
         f"library · {c.date}{commit_of(c)}"])


def _cells(result, name, beta2):
    row = next(row for row in result.rows if (row.name, row.beta2) == (name, beta2))
    return f"{statistics.median(row.losses):.4f}", " ".join(f"{more:+.4f}" for more in result.more(row))
