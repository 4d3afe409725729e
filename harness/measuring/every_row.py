"""Measures rows, from the process that started the ranks: checks and counts each row, then times all in turn."""

import math
import statistics
from dataclasses import dataclass, field

from harness.measuring import examine
from harness.publishing.tables import METHODS, Marked, column, name_column, ratio, sheet_of, small
from harness.ranks.workers import WorkerError, on_rank_0
from harness.training import rows as catalogue
from harness.training.rows import RowId


@dataclass
class Row:
    """Holds the measurements of one row. A row with an `error` has no times.

    `is_wrong`: whether its parameters differ from the reference's, or have not moved. `step`: a RecordedStep of rank 0.
    """
    row_id: RowId
    error: str | None = None
    is_wrong: bool = False
    rounds_ms: list = field(default_factory=list)  # of a steady step, by round
    drain_ms: list = field(default_factory=list)  # after the last step of a round
    examined: examine.Examined | None = None  # over all ranks
    exposed_ms: float | None = None  # on the rank that has most
    step: object = None

    @property
    def configuration(self):
        return catalogue.find(*self.row_id)

    @property
    def median_ms(self):
        """Return the median of the rounds; infinite without times, so that such a row is never the fastest."""
        return statistics.median(self.rounds_ms) if self.rounds_ms else math.inf

    def over(self, other):
        """Return this row's time over the other row's; None if a row has no times."""
        return ratio(self.rounds_ms, other.rounds_ms) if other else None

    def fail(self, reason, is_wrong=False):
        self.error = reason
        self.is_wrong = is_wrong
        self.rounds_ms = []
        self.drain_ms = []


@dataclass
class Rows:
    """Holds measured rows, with the settings and the machine of the measurement."""
    settings: examine.Settings
    conditions: examine.Conditions
    world_size: int
    rows: list

    def find(self, base, bucket_mb=None):
        """Return the Row, or None."""
        return next((row for row in self.rows if row.row_id == (base, bucket_mb)), None)

    def timed(self, base, bucket_mb=None):
        """Return the Row if it has times, or None."""
        row = self.find(base, bucket_mb)
        return row if row and row.rounds_ms else None

    def failures(self):
        return [f"{row.row_id.name}: {row.error}" for row in self.rows if row.error]

    def is_wrong(self):
        """Return whether a program exits with 1: a stage has failed, or any row is wrong."""
        return any(row.error and (row.configuration.kind != "peer" or row.is_wrong) for row in self.rows)

    def words(self, hosts=""):
        """Return ranks, model, batch and rounds in words. `hosts`: words behind the ranks."""
        settings = self.settings
        dtypes = " and ".join(dict.fromkeys(row.configuration.dtype for row in self.rows))
        return " · ".join([
            f"{self.conditions.ranks}{hosts}",
            f"{settings.model}: {self.conditions.parameters:,} parameters, {dtypes}, AdamW",
            f"a rank's batch: {settings.batch_size} x {settings.sequence_length} bytes", rounds(settings)])


def rounds(settings):
    """Return in words how often rows were timed."""
    return f"{settings.rounds} round(s) of {settings.steps} steps"


def measure_rows(workers, settings, row_ids, progress=lambda text: None, after_round=lambda measured: None):
    """Measure rows of the catalogue, a list of RowIds. Returns Rows.

    A row gets an `error`, and no times, if it fails, if it differs from its reference by more than the tolerance, or if
    its weights never move. `progress(text)` is called before each of the `n_runs(settings, row_ids)` runs, and
    `after_round(Rows)` after each round.
    """
    conditions = on_rank_0(workers, examine.describe, settings)
    rows = []
    for row_id in row_ids:
        progress(f"check: {row_id.name}")
        rows.append(check(workers, settings, row_id))
    measured = Rows(settings, conditions, workers.world_size, rows)
    for turn in range(settings.rounds):
        first = turn % len(rows)  # no row always comes first
        for row in rows[first:] + rows[:first]:
            progress(f"round {turn + 1}: {row.row_id.name}")
            if not row.error:
                time_row(workers, settings, row)
        after_round(measured)
    return measured


def n_runs(settings, row_ids):
    return len(row_ids) * (1 + settings.rounds)


def check(workers, settings, row_id):
    """Check a row, and count its bytes. Returns a Row without times."""
    row = Row(row_id)
    try:
        row.examined = over_ranks(workers.run(examine.examine, settings, row_id))
    except WorkerError as error:
        row.fail(str(error))
        return row
    configuration = row.configuration
    allowed = examine.tolerance(workers.world_size)
    if configuration.kind == "floor":  # trains on the data of its own rank alone, so it agrees with no other row
        row.examined = row.examined._replace(difference=None)
    elif row.examined.difference > allowed:
        expected = "ddp" if configuration.dtype == "float32" else "replicated training with fp32 copies"
        row.fail(f"wrong: a parameter differs from {expected}'s by {row.examined.difference:.1e}, allowed {allowed:g}",
                 is_wrong=True)
    if row.examined.movement == 0:
        row.fail("wrong: its weights did not move", is_wrong=True)
    return row


def time_row(workers, settings, row):
    """Time a row once more; when a rank fails, write the reason into the row."""
    try:
        step_ms, drain_ms = on_rank_0(workers, examine.time_steps, settings, row.row_id)
        row.rounds_ms.append(step_ms)
        row.drain_ms.append(drain_ms)
    except WorkerError as error:
        row.fail(str(error))


def over_ranks(of_ranks):
    """Combine the Examined of each rank into one.

    For each phase, bytes in memory are those of the rank that holds most. Bytes on the wire and bytes per parameter are
    means over the ranks. Collectives are those of rank 0.
    """
    first = of_ranks[0]
    return first._replace(
        memory_bytes={phase: max(rank.memory_bytes[phase] for rank in of_ranks) for phase in first.memory_bytes},
        wire_bytes=round(statistics.mean(rank.wire_bytes for rank in of_ranks)),
        bytes_per_param=statistics.mean(rank.bytes_per_param for rank in of_ranks))


# ---------------------------------------------------------------------------------------------------------- Its tables


def counted(row, name):
    """Return a field of the row's Examined; None if the row couldn't be examined."""
    return getattr(row.examined, name) if row.examined else None


def beside_formula(name, mark, unit=1):
    """Return a function that reads a counted figure of a row, and marks the figure if the formula gives another."""
    def read(row):
        value = counted(row, name)
        theory = counted(row, f"{name}_theory")
        if value is None:
            return None
        if abs(value - theory) <= 0.005 * theory:
            return value / unit
        return Marked(value / unit, mark)
    return read


def noise_of(measured):
    """Return the time of ddp's second row over that of its first, by round."""
    again = next((row for row in measured.rows if row.configuration.kind == "noise"), None)
    reference = measured.timed(catalogue.REFERENCE)
    if not again or not reference:
        return []
    return [again_ms / ms for again_ms, ms in zip(again.rounds_ms, reference.rounds_ms)]


def rows_sheet(measured):
    """Make the table of time, traffic, memory and correctness."""
    reference = measured.timed(catalogue.REFERENCE)
    noise = noise_of(measured)
    farthest = max((abs(ratio_of_round - 1) for ratio_of_round in noise), default=0)

    def over_ddp(row):
        if not row.rounds_ms or not reference:
            return None
        over = row.over(reference)
        is_within_noise = row.configuration.kind != "reference" and abs(over - 1) <= farthest
        return Marked(over, "~") if is_within_noise else over

    def memory(row):
        return row.examined.memory_bytes["peak"] if row.examined else None

    def of_formula(row):
        return counted(row, "wire_bytes_theory")
    allowed = examine.tolerance(measured.world_size)
    return sheet_of(
        f"A step: time, traffic, memory in MB; {rounds(measured.settings)}", measured.rows, {
            "name": name_column(lambda row: row.row_id.label),
            "ms": column("ms/step\nmedian", "rounds_ms", "measured", ".0f"),
            "range": column("min–max", "rounds_ms", "measured", ".0f", shows="range"),
            "over_ddp": column("x ddp", over_ddp, "measured", ".2f"),
            "sent": column("MB sent\na rank", beside_formula("wire_bytes", "*", 1e6), "counted", ".1f"),
            "formula": column("", of_formula, "formula", ".1f", unit=1e6),
            "peak": column("peak", memory, "counted", ".1f", unit=1e6),
            "bytes": column("bytes a\nparam.", beside_formula("bytes_per_param", "†"), "counted", ".2f"),
            "difference": column("largest\n|Δ|", lambda row: counted(row, "difference"), "measured", "small")},
        ["x ddp: median of the ratios round by round. MB: 10⁶ bytes; sent: mean over the ranks; peak: of the rank that "
         "holds most. Bytes a parameter: parameters, gradients and optimizer state after a step. Largest |Δ|: of any "
         "parameter on any rank, from ddp, in 16 bits from replicated training with fp32 copies, after 3 steps; "
         f"allowed: {small(allowed)}. {METHODS}", *measured.failures()],
        {"~": f"within the noise: ddp, timed again, took {min(noise, default=1):.2f} to {max(noise, default=1):.2f} "
              "times as long.",
         "*": "more than the formula: padding, and flags on which the ranks agree.",
         "†": "not the formula's: padding, shards that are not equal, or tensors that live on after the step."})


def phases_sheet(measured):
    """Make the table of memory after each phase."""
    titles = {"model": "model\ninit", "optimizer": "optimizer\ninit", "backward": "forward\nbackward", "step": "step",
              "peak": "peak"}
    if measured.conditions.device == "cuda":
        titles["reserved"] = "reserved"
    rows = [row for row in measured.rows if row.configuration.kind != "noise"]

    def of_phase(phase):
        return lambda row: row.examined.memory_bytes[phase] if row.examined else None
    columns = {phase: column(title, of_phase(phase), "counted", ".1f", unit=1e6) for phase, title in titles.items()}
    return sheet_of("Memory of a rank after each phase, and its peak, MB", rows,
                    {"name": name_column(lambda row: row.row_id.label), **columns})


def times_sheet(measured):
    """Make the table of times: a variant's is divided by its base's, that of a row without a base is in ms."""
    def ms(row):
        return f"{row.median_ms:.0f} ms" if row.rounds_ms else None

    def time(row):
        base = row.configuration.base
        if not base:
            return ms(row)
        over_base = row.over(measured.timed(base))
        return None if over_base is None else f"× {over_base:.2f}"
    return sheet_of("Time per step: of a variant over its base's, of a base in ms", measured.rows, {
        "name": name_column(lambda row: row.row_id.base), "time": column("time", time, "measured"),
        "ms": column("ms", ms, "measured")})


def has_variants(measured):
    return any(row.configuration.base for row in measured.rows)
