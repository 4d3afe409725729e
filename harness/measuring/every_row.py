"""Measures rows, from the process that started the ranks: checks and counts each row, then times all rows in turn.

    row            a way to train, with a name; the catalogue, harness/training/rows.py, lists all rows
    Configuration  what the catalogue says of a row: how to build the training, and what a rank should send and hold
    RowId          the name of a row, and maybe a size of bucket, the unit in which DDP and stage 4 send gradients
    reference      the training with whose parameters a row's must agree: the row "ddp", or where parameters have 16
                   bits, replicated training with fp32 copies
    round          the time of a few steps of each row; `over` and `ratio` divide the times of two rows round by round,
                   and return the median of the quotients
    drain          the wait, after a row's last step, for what is still in flight
    Sheet          a table; `column` describes a column of it: a title, a function of a row (or the name of a row's
                   attribute), where the numbers come from, and their format

examine.py has the functions that measure a row on a rank.
"""

import math
import statistics
import sys
from dataclasses import dataclass, field

from harness.measuring import examine
from harness.publishing.tables import METHODS, Marked, column, name_column, ratio, sheet_of, small
from harness.ranks.workers import WorkerError, on_rank_0
from harness.training import rows as catalogue
from harness.training.rows import RowId


@dataclass
class Row:
    """Holds the measurements of one row. `measure_rows` fills the fields. A row with an `error` has no times."""
    row_id: RowId
    error: str | None = None  # why the row is wrong, or has failed
    rounds_ms: list = field(default_factory=list)  # for each round the time of a step
    drain_ms: list = field(default_factory=list)  # for each round the drain
    examined: examine.Examined | None = None  # what was counted, over all ranks; None: a rank has failed
    # The next two fields are of one recorded step; None: no step was recorded.
    exposed_ms: float | None = None  # how long the rank communicates and doesn't compute, on the rank with most
    step: object = None  # the RecordedStep of rank 0

    @property
    def configuration(self):
        """Return the row's Configuration in the catalogue."""
        return catalogue.find(*self.row_id)

    @property
    def median_ms(self):
        """Return the median time of a step over the rounds; infinity if the row has no times."""
        return statistics.median(self.rounds_ms) if self.rounds_ms else math.inf

    def over(self, other):
        """Return this row's time divided by the other Row's; None if one of them has no times, or `other` is None."""
        return ratio(self.rounds_ms, other.rounds_ms) if other else None

    def figure(self, name):
        """Return the field `name` of `examined`; None if the row couldn't be examined."""
        return getattr(self.examined, name) if self.examined else None

    def memory(self, phase):
        """Return the bytes in memory after `phase` of a step, or at the "peak"; None if the row wasn't examined."""
        return self.examined.memory_bytes[phase] if self.examined else None

    def run(self, workers, function, settings):
        """Run `function(rank, settings, row_id)` on every rank. Returns the results by rank.

        If a rank fails, the row gets an error. If the row has an error, nothing is run. In both cases returns [].
        """
        if self.error:
            return []
        try:
            return workers.run(function, settings, self.row_id)
        except WorkerError as error:
            self.fail(str(error))
            return []

    def fail(self, reason):
        """Give the row an error, and take the row's times away."""
        self.error = reason
        self.rounds_ms = []
        self.drain_ms = []


@dataclass
class Rows:
    """Holds measured rows, with the settings and the machine of the measurement."""
    settings: examine.Settings  # model, batch, rounds and steps
    conditions: examine.Conditions  # the machine, and the ranks in words
    world_size: int  # number of ranks
    rows: list  # of Rows

    def find(self, base, bucket_mb=None):
        """Return the Row whose RowId has the name `base` and that size of bucket (None: the default), or None."""
        return next((row for row in self.rows if row.row_id == (base, bucket_mb)), None)

    def timed(self, base, bucket_mb=None):
        """Return the Row that `find` finds if it has times, or None."""
        row = self.find(base, bucket_mb)
        return row if row and row.rounds_ms else None

    def failures(self):
        """Return a line for each row with an error."""
        return [f"{row.row_id.name}: {row.error}" for row in self.rows if row.error]

    def exit_code(self):
        """Return the exit code of a program that has measured these rows."""
        return 1 if self.failures() else 0

    def words(self, hosts=""):
        """Say in words which ranks, model, batch and rounds were measured. `hosts`: words about the hosts."""
        settings = self.settings
        # Each dtype once.
        dtypes = " and ".join(dict.fromkeys(row.configuration.dtype for row in self.rows))
        return " · ".join([
            f"{self.conditions.ranks}{hosts}",
            f"{settings.model}: {self.conditions.parameters:,} parameters, {dtypes}, AdamW",
            f"a rank's batch: {settings.batch_size} x {settings.sequence_length} bytes", rounds_in_words(settings)])


def rounds_in_words(settings):
    """Say in words how often each row was timed."""
    return f"{settings.rounds} round(s) of {settings.steps} steps"


def say(text):
    """Write what is measured now, `text`, over the last line of the terminal."""
    # \r goes to the start of the line. The text is filled up to 60 characters, to cover the text before.
    print(f"\r{text:60}\r", end="", file=sys.stderr, flush=True)


def measure_rows(workers, settings, row_ids, recorded=()):
    """Measure rows of the catalogue, a list of RowIds, on the ranks that `workers` has started. Returns Rows.

    A row gets an `error`, and no times, if a rank fails, or if the row's parameters differ too much from the
    reference's. After all rounds a step is recorded of each row whose name is in `recorded`.
    """
    conditions = on_rank_0(workers, examine.describe, settings)
    rows = [checked_row(workers, settings, row_id) for row_id in row_ids]
    for number in range(settings.rounds):
        first = number % len(rows)  # each round begins with another row
        for row in rows[first:] + rows[:first]:
            say(f"round {number + 1}: {row.row_id.name}")
            times = row.run(workers, examine.time_steps, settings)
            if times:  # [] if the row has failed
                step_ms, drain_ms = times[0]  # rank 0's; all ranks return the same
                row.rounds_ms.append(step_ms)
                row.drain_ms.append(drain_ms)
    for row in rows:
        if row.row_id.base in recorded:
            say(f"record a step: {row.row_id.name}")
            steps = row.run(workers, examine.record, settings)
            if steps:
                row.step = steps[0]
                row.exposed_ms = max(1000 * step.exposed_seconds for step in steps)
    say("")
    return Rows(settings, conditions, workers.world_size, rows)


def checked_row(workers, settings, row_id):
    """Examine a row. Returns a Row without times, which has an error if the row is wrong."""
    say(f"check: {row_id.name}")
    row = Row(row_id)
    examined_by_rank = row.run(workers, examine.examine, settings)
    if not examined_by_rank:
        return row
    examined = over_ranks(examined_by_rank)
    configuration = row.configuration
    allowed = examine.tolerance(workers.world_size)
    # In a row of the kind "floor" each rank trains on its own data, so its parameters agree with no other row's.
    if configuration.kind == "floor":
        examined = examined._replace(difference=None)
    elif examined.difference > allowed:
        expected = "ddp" if configuration.dtype == "float32" else "replicated training with fp32 copies"
        row.fail(f"wrong: a parameter differs from {expected}'s by {examined.difference:.1e}, allowed {allowed:g}")
    row.examined = examined
    return row


def over_ranks(examined_by_rank):
    """Combine the Examined of all ranks into one.

    The bytes in memory after a phase are those of the rank with most. The bytes sent, and the bytes per parameter, are
    means over the ranks. Everything else is rank 0's.
    """
    memory_bytes = {}
    for phase in examined_by_rank[0].memory_bytes:
        memory_bytes[phase] = max(examined.memory_bytes[phase] for examined in examined_by_rank)
    return examined_by_rank[0]._replace(
        memory_bytes=memory_bytes,
        wire_bytes=round(statistics.mean(examined.wire_bytes for examined in examined_by_rank)),
        bytes_per_param=statistics.mean(examined.bytes_per_param for examined in examined_by_rank))


# ------------------------------------------------------------------------------------------------- Tables of rows


def beside_formula(name, mark, unit=1):
    """Return a function of a row that reads the counted figure `name`, and divides it by `unit`.

    The figure gets the `mark` if it differs from what the row's formula gives by more than 0.5 %.
    """
    def read(row):
        counted = row.figure(name)
        if counted is None:
            return None
        formula = row.figure(f"{name}_theory")
        if abs(counted - formula) <= 0.005 * formula:
            return counted / unit
        return Marked(counted / unit, mark)
    return read


def noise_of(measured):
    """Return for each round the time of the row "ddp again" divided by ddp's time; [] if a time is missing.

    Both rows train in the same way, so the quotients say how much a time varies by chance.
    """
    ddp = measured.timed(catalogue.REFERENCE)
    # Only "ddp again" is of the kind "noise".
    ddp_again = next((row for row in measured.rows if row.configuration.kind == "noise"), None)
    if not ddp_again or not ddp:
        return []
    return [again_ms / ms for again_ms, ms in zip(ddp_again.rounds_ms, ddp.rounds_ms)]


def rows_sheet(measured):
    """Make the table of time, traffic, memory and correctness."""
    ddp = measured.timed(catalogue.REFERENCE)
    noise = noise_of(measured)
    largest_noise = max((abs(ddp_again_over_ddp - 1) for ddp_again_over_ddp in noise), default=0)

    def over_ddp(row):
        """Return the row's time divided by ddp's, with the mark ~ if the difference may be chance."""
        times_as_long = row.over(ddp)
        if times_as_long is None or row is ddp:
            return times_as_long
        is_noise = abs(times_as_long - 1) <= largest_noise
        return Marked(times_as_long, "~") if is_noise else times_as_long
    allowed = examine.tolerance(measured.world_size)
    return sheet_of(
        f"A step: time, traffic, memory in MB; {rounds_in_words(measured.settings)}", measured.rows, {
            "name": name_column(lambda row: row.row_id.label),
            "ms": column("ms/step\nmedian", "rounds_ms", "measured", ".0f"),
            "range": column("min–max", "rounds_ms", "measured", ".0f", shows="range"),
            "over_ddp": column("x ddp", over_ddp, "measured", ".2f"),
            "sent": column("MB sent\na rank", beside_formula("wire_bytes", "*", 1e6), "counted", ".1f"),
            # This column has the heading of the column before: "MB sent a rank", by formula.
            "formula": column("", lambda row: row.figure("wire_bytes_theory"), "formula", ".1f", unit=1e6),
            "peak": column("peak", lambda row: row.memory("peak"), "counted", ".1f", unit=1e6),
            "bytes": column("bytes a\nparam.", beside_formula("bytes_per_param", "†"), "counted", ".2f"),
            "difference": column("largest\n|Δ|", lambda row: row.figure("difference"), "measured", "small")},
        ["x ddp: median of the ratios round by round. MB: 10⁶ bytes; sent: mean over the ranks; peak: of the rank that "
         "holds most. Bytes a parameter: parameters, gradients and optimizer state after a step. Largest |Δ|: of any "
         "parameter on any rank, from ddp, in 16 bits from replicated training with fp32 copies, after 3 steps; "
         f"allowed: {small(allowed)}. {METHODS}", *measured.failures()],
        {"~": f"within the noise: ddp, timed again, took {min(noise, default=1):.2f} to {max(noise, default=1):.2f} "
              "times as long.",
         "*": "more than the formula: padding, and flags on which the ranks agree.",
         "†": "not the formula's: padding, shards that are not equal, or tensors that live on after the step."})


def phases_sheet(measured):
    """Make the table of memory after each phase of a step: see `examine.count_memory`."""
    # Phase -> title of its column.
    titles = {"model": "model\ninit", "optimizer": "optimizer\ninit", "backward": "forward\nbackward", "step": "step",
              "peak": "peak"}
    if measured.conditions.device == "cuda":
        titles["reserved"] = "reserved"
    rows = [row for row in measured.rows if row.configuration.kind != "noise"]

    def bytes_after(phase):
        """Return a function of a row: the bytes that the rank with most held after this phase."""
        return lambda row: row.memory(phase)
    columns = {"name": name_column(lambda row: row.row_id.label)}
    for phase, title in titles.items():
        columns[phase] = column(title, bytes_after(phase), "counted", ".1f", unit=1e6)
    return sheet_of("Memory of a rank after each phase, and its peak, MB", rows, columns)


def times_sheet(measured):
    """Make the table of times. A variant's time is divided by its base's time; any other row's time is in ms.

    A variant is a changed stage, from variants/. Its base is the row of that stage.
    """
    def ms(row):
        return f"{row.median_ms:.0f} ms" if row.rounds_ms else None

    def time(row):
        compared_with = row.configuration.base  # the name of the base; None: this row is no variant
        if not compared_with:
            return ms(row)
        times_as_long = row.over(measured.timed(compared_with))
        return None if times_as_long is None else f"× {times_as_long:.2f}"

    return sheet_of("Time per step: of a variant over its base's, of a base in ms", measured.rows, {
        "name": name_column(lambda row: row.row_id.base), "time": column("time", time, "measured"),
        "ms": column("ms", ms, "measured")})


def has_variants(measured):
    """Return whether a variant was measured. Only variants have a base, with which they are compared."""
    return any(row.configuration.base for row in measured.rows)
