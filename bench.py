"""Trains the same model in every row of harness/training/rows.py, on ranks that it starts: time, traffic, memory.

    python bench.py [--ranks 2] [--model small] [--rows "stage 4"] [--quick] [--json measured/bench.json]

Each row is checked against replicated training first; one that computes something else gets no time. After the first
round the table of time is printed, so that Ctrl-C leaves a look at all rows.
Exit code: 0; 1 when a stage is wrong or fails; 2 for bad input; 130 after Ctrl-C.
"""

import functools
import sys
from pathlib import Path

from harness.ranks import command_line
from harness.ranks.command_line import COUNT
from harness.training.options import MODELS

fail = functools.partial(command_line.fail, "bench.py")


def options():
    parser = command_line.Parser("bench.py", __doc__)
    add = parser.add_argument
    add("--ranks", type=COUNT, default=2, help="processes on this machine (default 2)")
    add("--model", choices=MODELS, help="(default: tiny, on a GPU medium)")
    command_line.add_sizes(add, batch_size=8)
    add("--rounds", type=COUNT, default=3, help="in each, every row is timed once (default 3)")
    add("--steps", type=COUNT, default=3, help="timed in a round, end to end (default 3)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32",
        help="rows with such parameters, and ddp (default float32)")
    add("--rows", default="", metavar="TEXT", help="only rows whose name holds TEXT, and ddp, twice")
    add("--quick", action="store_true", help="1 round of 2 steps, no model state, no host time: a look")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    add("--timeout", type=COUNT, default=120, help="seconds that one part of the measurement may take (default 120)")
    args = parser.parse_args()
    command_line.check_length(args.sequence_length, args.model or "medium", MODELS, fail)  # the longest default
    return args


if __name__ == "__main__":
    command_line.begin()
    options()  # a mistake is told before torch is loaded, which takes seconds

import rich.console
import rich.progress

from harness.measuring import every_row, examine, host_time
from harness.measuring.examine import Settings
from harness.planning import alone
from harness.publishing.tables import Report, save_and_show, sheet_text
from harness.ranks.workers import WorkerError, Workers, on_rank_0
from harness.training import rows as catalogue
from harness.training.rows import RowId, is_asked


def parse():
    args = options()
    rows = [*catalogue.ROWS, *catalogue.VARIANTS]
    return args, rows_to_measure(args, rows)


def rows_to_measure(args, rows):
    """Return the RowIds that --rows and --dtype ask for, and ddp, twice."""
    asked = [row for row in rows if is_asked(args.rows, row.name)]
    if args.rows != "variants":
        asked = [row for row in asked if row.dtype == args.dtype]
    if not args.rows:
        asked = [row for row in asked if row not in catalogue.VARIANTS]
    if not asked:
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(row.name for row in rows)}")
    return [RowId(row.name) for row in rows if row in asked or row.kind in ("reference", "noise")]


def report_of(args, measured, progress):
    """Make all tables; those that don't depend on --rows, --dtype and --quick are counted and timed here."""
    sheets = {"rows": every_row.rows_sheet(measured), "phases": every_row.phases_sheet(measured)}
    if every_row.has_variants(measured):
        sheets["times"] = every_row.times_sheet(measured)
    if not args.quick and not args.rows and args.dtype == "float32":
        progress("model state at any number of ranks")
        sheets |= {"model_state": alone.model_state(args.model), "gathered": alone.gathered(args.model),
                   "ladder": alone.ladder(args.model)}
        progress("host time as rank 0 of 8")
        sheets["host"] = host_time.measure_host(340, 8, device=measured.conditions.device)
    return Report(measured.conditions.made, sheets, measured.words())


def progress_bar():
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description:40}"), rich.progress.BarColumn(), rich.progress.TimeElapsedColumn(),
        console=rich.console.Console(stderr=True), transient=True)


def measure(args, row_ids, workers, settings, bar):
    """Measure all rows. Returns (Rows, Report)."""
    task = bar.add_task("starting the ranks", total=every_row.n_runs(settings, row_ids) + 2)

    def progress(text):
        bar.update(task, advance=1, description=text)

    n_rounds = 0

    def show_first(measured):
        nonlocal n_rounds
        n_rounds += 1
        if n_rounds == 1 and settings.rounds > 1:
            bar.stop()
            print(f"{sheet_text(every_row.rows_sheet(measured))}\nThis is round 1 of {settings.rounds}.\n", flush=True)
            bar.start()
    measured = every_row.measure_rows(workers, settings, row_ids, progress, show_first)
    return measured, report_of(args, measured, progress)


def main():
    args, row_ids = parse()
    rounds, steps = (1, 2) if args.quick else (args.rounds, args.steps)
    if args.json:
        command_line.check_writable("--json", args.json, fail)
    try:
        with Workers(args.ranks, args.timeout) as workers, progress_bar() as bar:
            args.model = args.model or on_rank_0(workers, examine.default_model)
            command_line.check_length(args.sequence_length, args.model, MODELS, fail)
            settings = Settings(args.model, args.batch_size, args.sequence_length, rounds, steps)
            measured, report = measure(args, row_ids, workers, settings, bar)
    except WorkerError as error:
        sys.exit(f"bench.py: {error}")
    save_and_show(args.json, report, fail)
    sys.exit(1 if measured.is_wrong() else 0)


if __name__ == "__main__":
    main()
