"""Measures rows, in the process that started the ranks: each is checked and counted, then all are timed in turn."""

import dataclasses
import itertools
import statistics

from harness.measuring import examine
from harness.measuring.memory import KINDS
from harness.publishing import row_names, tables
from harness.publishing.results import Marked, Result, Row
from harness.publishing.row_names import RowId
from harness.publishing.tables import TEXT, column, names, sheet_of
from harness.ranks.workers import WorkerError, on_rank_0
from harness.training import rows as catalogue


def measure_rows(workers, settings, row_ids, progress=lambda text: None, after_round=lambda result: None):
    """Measure rows of the catalogue, a list of RowIds. Returns a Result, to which programs add what else they measure.

    A row that fails, that differs from ddp by more than the tolerance, or whose weights never moved, has an `error`
    that says so, and no times. `progress(text)` is called before each of `n_runs(settings, row_ids)` runs, and
    `after_round(result)` when all rows were timed once more.
    """
    conditions = on_rank_0(workers, examine.describe, settings)
    conditions.dtype = dtypes_of(row_ids)
    rows = [_examine(workers, settings, row_id, progress) for row_id in row_ids]
    result = Result(conditions, rows)
    for turn in range(settings.rounds):
        first = turn % len(rows)  # no row always comes first
        for row in rows[first:] + rows[:first]:
            progress(f"round {turn + 1}: {row.name}")
            if not row.error:
                attempt(row, lambda: row.time(*on_rank_0(workers, examine.time_steps, settings, *row.row_id)))
        compare(result)
        after_round(result)
    return result


def measure_more_rows(workers, settings, row_ids, result, progress=lambda text: None):
    """Measure further rows and add them to `result`. ddp is timed again among them: ratios are of the same minutes."""
    _, *rows = measure_rows(workers, settings, [RowId(row_names.REFERENCE), *row_ids], progress).rows
    result.rows += rows
    result.conditions.dtype = dtypes_of(row.row_id for row in result.rows)


def compare(result):
    """Set each row's ratio to ddp, and how far ddp was from itself in each round."""
    reference = result.timed(row_names.REFERENCE)
    for row in result.rows:
        if reference and row.rounds_ms:
            row.vs_reference = row.over(reference)
            if row.kind == "noise":
                result.conditions.noise = [again / ms for again, ms in zip(row.rounds_ms, reference.rounds_ms)]


def dtypes_of(row_ids):
    return " and ".join(dict.fromkeys(catalogue.find(*row_id).dtype for row_id in row_ids))


def is_wrong(result):
    """Return whether a stage has failed, or any row computes something else than it should: exit code 1."""
    return any(row.error and (row.kind != "peer" or row.is_wrong) for row in result.rows)


def n_runs(settings, row_ids):
    return len(row_ids) * (1 + settings.rounds)


def _examine(workers, settings, row_id, progress):
    """Check and count a row. Returns a Row without times."""
    configuration = catalogue.find(*row_id)
    row = Row(*row_id, configuration.kind, configuration.dtype)
    progress(f"check: {row.name}")
    try:
        of_ranks = workers.run(examine.examine, settings, *row_id)
    except WorkerError as error:
        row.fail(str(error))
        return row
    row = over_ranks([row_of_rank for row_of_rank, _ in of_ranks])
    _, movement = of_ranks[0]
    allowed = examine.tolerance(workers.world_size)
    if row.kind == "floor":  # it sees the data of its own rank only, so no other row agrees with it
        row.max_abs_diff = None
    elif row.max_abs_diff > allowed:
        expected = "ddp" if row.dtype == "float32" else "replicated training with fp32 copies"
        row.fail(f"wrong: a parameter differs from {expected}'s by {row.max_abs_diff:.1e}, allowed {allowed:g}", True)
    if movement == 0:
        row.fail("wrong: its weights did not move", True)
    return row


def attempt(row, run):
    """Call `run()`; when a rank fails, write the reason into the row."""
    try:
        run()
    except WorkerError as error:
        row.fail(str(error))


def over_ranks(rows):
    """Combine a row as each rank sees it into one Row.

    Bytes in memory are those of the rank that holds most, in each phase; by kind, those of the rank that holds most
    after a step. Bytes on the wire and bytes per parameter are means. Collectives are those of rank 0.
    """
    def most(field):
        return {phase: max(getattr(row, field)[phase] for row in rows) for phase in getattr(rows[0], field)}

    def mean(field):
        of_ranks = [getattr(row, field) for row in rows]
        return None if None in of_ranks else round(statistics.mean(of_ranks))
    return dataclasses.replace(
        rows[0], memory_bytes=most("memory_bytes"), peak_bytes=most("peak_bytes"),
        held_bytes=max((row.held_bytes for row in rows), key=lambda kinds: sum(kinds.values())),
        activation_bytes=max(row.activation_bytes for row in rows),
        wire_bytes=mean("wire_bytes"), line_bytes=mean("line_bytes"),
        bytes_per_param=statistics.mean(row.bytes_per_param for row in rows))


# ---------------------------------------------------------------------------------------------------------- Its tables


def beside_formula(field, footnotes, mark, reason, unit=1):
    """Return functions of a row that read what was counted, marked where it differs from the formula, and the formula.

    `footnotes`: {reason: line that begins with the mark}, to which the first function adds.
    """
    def counted(row):
        value = getattr(row, field)
        theory = getattr(row, f"{field}_theory")
        if value is None:
            return None
        if abs(value - theory) <= 0.005 * theory:
            return value / unit
        footnotes[reason] = f"{mark} {reason}"
        return Marked(value / unit, mark)

    def formula(row):
        return None if getattr(row, field) is None else getattr(row, f"{field}_theory") / unit
    return counted, formula


def time_sheet(result):
    """Make the table of time and traffic."""
    conditions, footnotes = result.conditions, {}
    noise = max((abs(again - 1) for again in conditions.noise), default=0)  # how far ddp was from itself in any round

    def over_ddp(row):
        if not row.rounds_ms or row.vs_reference is None:
            return None
        is_within_noise = row.kind != "reference" and abs(row.vs_reference - 1) <= noise
        return Marked(row.vs_reference, "~") if is_within_noise else row.vs_reference

    def collectives(row):
        return "\n".join(f"{count} {kind.replace('_', '-')}" for kind, count in row.collectives.items()) or None
    sent, formula = beside_formula(
        "wire_bytes", footnotes, "*", "more than the formula: padding, and flags on which the ranks agree.", 1e6)
    least, most = min(conditions.noise, default=1), max(conditions.noise, default=1)
    of_noise = f"~ within the noise: ddp, timed again, took {least:.2f} to {most:.2f} times as long."
    return sheet_of(
        "Time and traffic of a step", result.rows, {
            "name": names(tables.label_of), "ms": column("ms/step\nmedian", "rounds_ms", "measured", ".0f"),
            "range": column("min–max", "rounds_ms", "measured", ".0f", shows="range"),
            "over_ddp": column("x ddp", over_ddp, "measured", ".2f"),
            "exposed": column("exposed\nms", "exposed_ms", "measured", ".0f"),
            "collectives": column("collectives", collectives, "counted", TEXT),
            "sent": column("MB sent\na rank", sent, "counted", ".1f"),
            "formula": column("", formula, "formula", ".1f")},
        [f"x ddp: median of the ratios round by round. MB: 10⁶ bytes, mean over the ranks. {tables.METHODS}",
         *tables.failures(result.rows)], itertools.chain([of_noise] if conditions.noise else [], footnotes.values()))


def memory_sheets(result):
    """Make the tables of memory and correctness, and of the kinds of memory where these were counted."""
    conditions, footnotes = result.conditions, {}
    rows = [row for row in result.rows if row.kind != "noise"]
    is_16_bits = any(row.dtype != "float32" for row in rows)
    reference = "ddp, in 16 bits from replicated training with fp32 copies" if is_16_bits else "ddp"
    phases = {"model": "model\ninit", "optimizer": "optimizer\ninit", "backward": "forward\nbackward", "step": "step",
              "peak": "peak"}
    if conditions.device == "cuda":
        phases["reserved"] = "reserved"
    counted, formula = beside_formula(
        "bytes_per_param", footnotes, "†",
        "not the formula's: padding, shards that are not equal, or tensors that live on after the step.")
    memory = sheet_of(
        "Memory of a rank, and the difference from ddp", rows, {
            "name": names(tables.label_of),
            **{phase: column(title, lambda row, phase=phase: row.memory_bytes.get(phase), "counted", ".1f", unit=1e6)
               for phase, title in phases.items()},
            "bytes": column("bytes a\nparam.", counted, "counted", ".2f"),
            "formula": column("", formula, "formula", ".2f"),
            "difference": column("largest\n|Δ|", "max_abs_diff", "measured", "small")},
        ["Memory after each phase in MB, of the rank that holds most. Bytes a parameter: parameters, gradients and "
         "optimizer state after a step, mean over the ranks.",
         f"Largest |Δ|: of any parameter on any rank, from {reference}, after 3 steps; "
         f"allowed: {tables.small(conditions.tolerance)}."], footnotes.values())
    if not any(row.held_bytes for row in rows):
        return [memory]
    peaks = {"build": "peak:\nbuild", "forward": "\nforward", "backward": "\nbackward", "step": "\nstep"}
    held = dict(zip(KINDS, ("held:\nparam.", "\ngrads", "\nstate", "\nbuffers")))
    kinds = sheet_of(
        "Peak within each phase, and what a rank holds after a step, counted, in MB", rows, {
            "name": names(tables.label_of),
            **{phase: column(title, lambda row, phase=phase: row.peak_bytes.get(phase), "", "megabytes", unit=1e6)
               for phase, title in peaks.items()},
            **{kind: column(title, lambda row, kind=kind: row.held_bytes.get(kind), "", "megabytes", unit=1e6)
               for kind, title in held.items()},
            "activations": column("activa-\ntions", "activation_bytes", "", "megabytes", unit=1e6)},
        ["Peaks: of the second step. Held: on the rank that holds most; buffers are what is none of the other kinds. "
         "Activations: what the forward pass leaves for the backward pass."])
    return [memory, kinds]


def sheets(result):
    """Return all tables of a bench: time and traffic, memory and correctness, model state, the host's time."""
    return [time_sheet(result), *memory_sheets(result), *result.sheets.values(), *result.host.values()]


def show(result):
    """Print all tables of a bench."""
    tables.print_sheets(sheets(result), tables.conditions_line(result.conditions))
