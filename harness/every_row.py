"""Measures rows: each is checked and counted, then all are timed in turn. Runs where the ranks were started."""

import dataclasses
import statistics

from harness import examine
from harness import rows as catalogue
from harness.results import Result, Row
from harness.workers import WorkerError, on_rank_0


def measure_rows(workers, settings, row_ids, progress=lambda text: None):
    """Measures rows of the catalogue, a list of RowIds -> Result; bench.py and two_hosts add the rest. A row that
    fails, that differs from ddp by more than the tolerance, or whose weights never moved, has an `error` that says so,
    and no times. `progress(text)` is called before each of `n_runs(settings, row_ids)` runs."""
    conditions = on_rank_0(workers, examine.describe, settings)
    conditions.dtype = " and ".join(dict.fromkeys(catalogue.find(*row_id).dtype for row_id in row_ids))
    rows = [_examine(workers, settings, row_id, progress) for row_id in row_ids]
    for turn in range(settings.rounds):
        for row in rows[turn % len(rows):] + rows[:turn % len(rows)]:  # nobody always comes first
            progress(f"round {turn + 1}: {row.name}")
            if not row.error:
                attempt(row, lambda: row.time(*on_rank_0(workers, examine.time_steps, settings, *row.row_id)))
    result = Result(conditions, rows)
    reference = result.timed(catalogue.REFERENCE)
    for row in rows:
        if reference and row.rounds_ms:
            row.vs_reference = row.over(reference)
            if row.kind == "noise":
                conditions.noise = [one / other for one, other in zip(row.rounds_ms, reference.rounds_ms)]
    return result


def is_wrong(result):
    """Whether a stage has failed, or whatever row computes something else than it should: exit code 1."""
    return any(row.error and (row.kind != "peer" or row.is_wrong) for row in result.rows)


def n_runs(settings, row_ids):
    return len(row_ids) * (1 + settings.rounds)


def _examine(workers, settings, row_id, progress):
    """Checks and counts a row -> Row, without times."""
    configuration = catalogue.find(*row_id)
    row = Row(*row_id, configuration.kind, configuration.dtype)
    progress(f"check: {row.name}")
    try:
        found = workers.run(examine.examine, settings, *row_id)
    except WorkerError as error:
        row.fail(str(error))
        return row
    row, movement = over_ranks([of_rank for of_rank, _ in found]), found[0][1]
    allowed = examine.tolerance(workers.world_size)
    if row.kind == "floor":  # sees its own rank's data and nothing else: nobody could agree with it
        row.max_abs_diff = None
    elif row.max_abs_diff > allowed:
        whose = "ddp" if row.dtype == "float32" else "replicated training with fp32 copies"
        row.fail(f"wrong: a parameter differs from {whose}'s by {row.max_abs_diff:.1e}, allowed {allowed:g}", True)
    if movement == 0:
        row.fail("wrong: its weights did not move", True)
    return row


def attempt(row, run):
    """Calls `run()`; when a rank fails the reason is in the row."""
    try:
        run()
    except WorkerError as error:
        row.fail(str(error))


def over_ranks(rows):
    """A row as each rank sees it -> Row. Bytes in memory: of the rank that holds most, in each phase; by kind: of the
    one that holds most after a step. Bytes on the wire and bytes a parameter: the mean. Collectives: of rank 0."""
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
