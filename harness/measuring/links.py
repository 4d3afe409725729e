"""Makes tables and pictures of rows measured on two hosts: compares their times with the least that a link allows.

two_hosts.py measures the rows and calls this file.

    row        a way to train; the catalogue, harness/training/rows.py, lists all rows. OVERLAP is stage 4's row. A
               variable `row` is a Row
    bucket     the unit in which DDP and stage 4 (stage4_overlap/) send gradients
    RowId      a row's name, `base`, and maybe a size of bucket, `bucket_mb`. In words: `size` is the size alone, `name`
               both in one line, `label` both in two lines
    round      the time of a few steps of every row, in turn; `rounds_ms` has a Row's ms a step in each round
    drain      the wait, after a row's last step, for what is still in flight; `drain_ms` has it for each round
    examine    to count, before the rounds, what a row sends and holds in a step; not possible if a rank fails
    Row        the measurements of one row. `over` divides its times by another Row's, round by round, and returns the
               median of the quotients. `figure` returns a count by name, or None if the row couldn't be examined
    Rows       all Rows of a measurement, here `measured` or `sweep`: `find` returns the Row of a name, `timed` returns
               it only if it has times; else they return None
    floor      the least time that a step can take: computing alone, or sending the row's bytes if that takes longer
    curve      a picture: the time of a step divided by the time of computing alone, on links of several rates
    ladder     the table in README.md; a rung is a line of that table
    sweep      a short measurement of DDP and of stage 4 with buckets of several sizes, to find DDP's best size
    tuned      DDP with the better of the default size and the size that a sweep has found
    exposed    time in which messages are in flight and the rank doesn't compute
    sheet_of   makes a table: a title, an object for each line, the columns by key, and notes
    column     describes a column: a title, a function of a line's object (or the name of its attribute), where the
               numbers come from, and their format. shows="both": the median, and the range over the rounds
    Report     what two_hosts.py saves: tables, and under `drawn` the raw numbers of pictures
"""

from typing import NamedTuple

from harness.measuring.every_row import rounds_in_words
from harness.publishing import pictures
from harness.publishing.tables import METHODS, NONE, cell_text, column, name_column, ratio, sheet_of
from harness.training import rows as catalogue
from harness.training.rows import (
    ALL_GATHER,
    COMPUTE_ONLY,
    DEFAULT_MB,
    FSDP2,
    GRAD_BUFFER,
    ONE_PARAMETER,
    OVERLAP,
    REFERENCE,
    REPLICATED,
    SIZES,
    RowId,
)

# Dtype of the parameters -> how the name of a row with this dtype ends, such as "stage 4 overlap bf16".
ENDINGS = {"float32": "", "bfloat16": " bf16"}
# CURVES below has these two texts in place of a row's name.
TUNED = "ddp, tuned"  # the row that `tuned_ddp` returns
FLOOR = "floor"


class Link(NamedTuple):
    """A link between two hosts."""
    rate: str  # as the command tc writes it, such as "300mbit"
    bits_per_second: float

    @property
    def words(self):
        """Write "300mbit" as "300 Mbit/s"."""
        return self.rate.replace("kbit", " Kbit/s").replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")

    def ms(self, row):
        """Return the ms that the link needs for a Row's bytes, by formula; None if the row couldn't be examined."""
        n_bytes = row.figure("wire_bytes_theory")
        return None if n_bytes is None else 1000 * 8 * n_bytes / self.bits_per_second


def tuned_ddp(measured, sweep):
    """Return the faster of DDP's two Rows: with buckets of the default size, or of the size that a sweep has chosen.

    A sweep is short, so its size may turn out to be slower. `sweep`: the Rows of a sweep, or None. Returns None if DDP
    has no times, or if there is neither a sweep nor, among the measured rows, a size that a sweep has chosen.
    """
    ddp_rows = [row for row in measured.rows if row.row_id.base == REFERENCE and row.rounds_ms]
    has_swept_size = any(row.row_id.bucket_mb is not None for row in ddp_rows)
    if not ddp_rows or not (sweep or has_swept_size):
        return None
    return min(ddp_rows, key=lambda row: row.median_ms)


def over_floor(measured, link, row):
    """Return a Row's time divided by the floor; None if the floor isn't known.

    The floor is the larger of the time of computing alone, in the row's dtype, and the time of sending the row's bytes.
    """
    link_ms = link.ms(row)
    compute_only = measured.timed(COMPUTE_ONLY + ENDINGS[row.configuration.dtype])
    if not compute_only or link_ms is None:
        return None
    # The median of the quotients, as `over` returns.
    return ratio(row.rounds_ms, [max(link_ms, ms) for ms in compute_only.rounds_ms])


def stage4_over(measured, row):
    """Return the time of stage 4, in a Row's dtype, divided by that Row's time; None if stage 4 wasn't timed."""
    stage4 = measured.timed(OVERLAP + ENDINGS[row.configuration.dtype])
    return stage4.over(row) if stage4 else None


def link_sheet(measured, link):
    """Make the table of a link: each row's time, the time divided by the floor, stage 4's time divided by the time."""
    # METHODS is a sentence: which page explains rows and columns.
    return sheet_of(
        f"A link of {link.words}, {rounds_in_words(measured.settings)}", measured.rows, {
            "name": name_column(lambda row: row.row_id.label),
            "ms": column("ms a step\nmedian (min–max)", "rounds_ms", "measured", ".0f", shows="both"),
            "exposed": column("exposed\nms", "exposed_ms", "measured", ".0f"),
            "over_floor": column("x floor", lambda row: over_floor(measured, link, row), "measured", ".2f"),
            "stage4_over": column("stage 4\nover this", lambda row: stage4_over(measured, row), "measured", ".2f")},
        [f"Ratios: medians, round by round. {METHODS}", *measured.failures()])


def ladder_sheet(measured, tuned):
    """Make the measured columns of README's ladder. `tuned`: the Row that `tuned_ddp` returns, or None."""
    ddp = tuned or measured.timed(REFERENCE)

    def row_of(rung):
        """Return the Row that a rung shows, or None. The tuned DDP is shown."""
        return ddp if rung.row == REFERENCE else measured.timed(rung.row)

    def peak(rung):
        row = row_of(rung)
        return row.memory("peak") if row else None

    def time(rung):
        row = row_of(rung)
        return row.over(ddp) if row else None
    # The first column has the heading "stage", and a rung's attribute `title` in each cell.
    return sheet_of("", catalogue.RUNGS, {
        "stage": name_column("title", "stage"), "peak": column("peak memory, MB", peak, form=".0f", unit=1e6),
        "time": column("time ÷ DDP's", time, form=".2f")})


# ------------------------------------------------------------------------------------------------------------ The curve


# Name in the curve's table and picture -> name of the row, TUNED or FLOOR. The slowest comes first.
CURVES = {"stage 2, all-gather": ALL_GATHER, REPLICATED: REPLICATED, "stage 3, grad buffer": GRAD_BUFFER,
          "FSDP2": FSDP2, "DDP, default buckets": REFERENCE, "DDP, tuned buckets": TUNED, "stage 4, overlap": OVERLAP,
          FLOOR: FLOOR}


def has_curve(measured):
    """Return whether all rows that a curve needs were timed."""
    return all(measured.timed(name) for name in (COMPUTE_ONLY, ALL_GATHER, OVERLAP))


def over_computing(measured, link, tuned):
    """Return {name in CURVES: the row's time divided by the time of computing alone; None where a time is missing}.

    Computing alone must have been timed, and stage 4 examined.
    """
    compute_only = measured.timed(COMPUTE_ONLY)

    def over_compute_only(row_name):
        if row_name == FLOOR:  # stage 4's floor: 1, or more if sending takes longer than computing alone
            return max(1.0, link.ms(measured.find(OVERLAP)) / compute_only.median_ms)
        row = tuned if row_name == TUNED else measured.timed(row_name)
        return row.over(compute_only) if row else None
    return {title: over_compute_only(row_name) for title, row_name in CURVES.items()}


def curve_sheet(measured, link, tuned):
    """Make this link's column of the curve's table. A page puts the columns of all links together.

    The table has a line for each name in CURVES, and for each of six facts of the measurement.
    """
    stage4 = measured.timed(OVERLAP)
    over_tuned = stage4_over(measured, tuned) if tuned else None
    stage4_over_floor = over_floor(measured, link, stage4) if stage4 else None
    drain_ms = stage4.drain_ms if stage4 else None
    settings = measured.settings
    # Name of the line -> text of its cell. The table's objects are these names, and texts.get returns a name's cell.
    texts = {title: cell_text(times, ".2f") for title, times in over_computing(measured, link, tuned).items()}
    texts |= {
        "stage 4 over tuned DDP": cell_text(over_tuned, ".2f"),
        "stage 4 over the floor": cell_text(stage4_over_floor, ".2f"),
        "DDP's best buckets": tuned.row_id.size if tuned else NONE,
        "compute only, ms": f"{measured.timed(COMPUTE_ONLY).median_ms:.0f}",
        "rounds x steps": f"{settings.rounds} x {settings.steps}",
        "stage 4's drain, ms": cell_text(drain_ms, ".0f")}
    return sheet_of("Time per step over computing alone", texts, {
        "name": name_column(str), link.rate: column(link.words.replace(" ", "\n"), texts.get, "measured")})


# ---------------------------------------------------------------------------------------------------- Sizes of buckets


def buckets_sheet(sweep, link):
    """Make the table of a sweep: DDP's and stage 4's times by size of bucket, and stage 4's messages and memory."""
    def cell_of(base, get):
        """Return a function that gets a size, and returns what `get` returns for the Row of that name and size.

        It returns None if there is no such Row.
        """
        def cell(size):
            row = sweep.find(base, size)
            return get(row) if row else None
        return cell

    def n_messages(row):
        n_by_kind = row.figure("collectives") or {}
        # On gloo stage 4 sends pieces from rank to rank in place of a reduce-scatter.
        return n_by_kind.get("send") or n_by_kind.get("reduce_scatter")
    sizes_of_rows = {row.row_id.bucket_mb for row in sweep.rows}
    # In the order of SIZES. None, the default size, comes last.
    tried = [size for size in (*SIZES, None) if size in sizes_of_rows]
    return sheet_of(
        f"Bucket size, ms a step, {link.words}, {rounds_in_words(sweep.settings)}", tried, {
            # The size in words. It doesn't depend on the row's name, so that is "" here.
            "size": name_column(lambda size: RowId("", size).size),
            "ddp": column("ddp\n", cell_of(REFERENCE, lambda row: row.rounds_ms), "measured", ".0f"),
            "stage4": column("stage 4\n", cell_of(OVERLAP, lambda row: row.rounds_ms), "measured", ".0f"),
            # "its": stage 4's.
            "messages": column("its messages\nof gradients", cell_of(OVERLAP, n_messages), "counted"),
            "bytes": column("its bytes a\nparameter", cell_of(OVERLAP, lambda row: row.figure("bytes_per_param")),
                            "counted", ".2f")},
        [f"DDP's default is {DEFAULT_MB} MiB. The model's gradients have {sweep.conditions.parameters * 4 / 1e6:.1f} "
         "MB.", *sweep.failures()])


def swept_times(sweep, base):
    """Return [(index of the size of bucket in SIZES, ms), …] of the Rows of a sweep with the name `base`, in order."""
    points = []
    for row in sweep.rows:
        if row.row_id.base == base and row.rounds_ms:
            size = DEFAULT_MB if row.row_id.bucket_mb is None else row.row_id.bucket_mb
            points.append((SIZES.index(size), row.median_ms))
    return sorted(points)


# ------------------------------------------------------------------------------------------------------------- Pictures


def to_draw(measured, link, sweep, tuned):
    """Return the raw numbers of this link's pictures, which pictures.py draws.

    The pictures show recorded steps of the ladder's rows, this link's points of the curve, and the sweep. What wasn't
    measured is left out.
    """
    drawn = {"rate": link.words, "bits_per_second": link.bits_per_second}
    ladder = {base: measured.find(base) for base in catalogue.LADDER}
    ladder[REFERENCE] = tuned or ladder[REFERENCE]  # DDP is shown at its best
    steps = [(row.row_id.name, row.step) for row in ladder.values() if row and row.step]
    if steps:
        drawn |= pictures.to_draw(steps, f"One recorded step of rank 0 on 2 hosts with a link of {link.words}, and "
                                         "its row's median")
    if has_curve(measured):
        drawn["curve"] = over_computing(measured, link, tuned)
    # A sweep for a curve is of DDP alone, with fewer sizes. It isn't drawn.
    if sweep and sweep.find(OVERLAP, ONE_PARAMETER):
        drawn["sweep"] = {base: swept_times(sweep, base) for base in (OVERLAP, REFERENCE)}
        drawn["sizes"] = ["1 par." if size == ONE_PARAMETER else f"{size:g}" for size in SIZES]
    return drawn
