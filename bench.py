"""Trains the same model in each of several ways, the rows of its tables, and measures time, traffic and memory.

    python bench.py [--ranks 2] [--model small] [--rows "stage 4"] [--quick] [--json measured/bench.json]

The rows are listed in harness/training/rows.py. The program starts --ranks processes, which train each row. First it
checks that a row gets the parameters that replicated training gets. A row with other parameters gets no time.
Exit code: 0; 1 when a row is wrong or fails; 2 for bad input; 130 after Ctrl-C.
"""

import functools
import sys
from pathlib import Path

from harness.ranks import command_line
from harness.ranks.command_line import COUNT
from harness.training.options import MODELS

TIMEOUT_S = 600  # of a collective, and of one part of the measurement
# fail(message) prints the message and ends the program.
fail = functools.partial(command_line.fail, "bench.py")


def options():
    """Read the command line. Ends the program if there is a mistake."""
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
    args = parser.parse_args()
    longest_default = "medium"  # of the default models, the one with the longest sequences
    command_line.check_length(args.sequence_length, args.model or longest_default, MODELS, fail)
    return args


if __name__ == "__main__":
    command_line.begin()
    options()  # so that a mistake is told before the imports below load torch, which takes seconds

from harness.measuring import every_row, examine, overhead
from harness.measuring.examine import Settings
from harness.planning import alone
from harness.publishing.tables import Report, save_and_show
from harness.ranks.workers import WorkerError, Workers, on_rank_0
from harness.training import rows as catalogue
from harness.training.rows import RowId, is_asked


def rows_to_measure(args):
    """Return the names of the rows that --rows and --dtype ask for, as RowIds.

    ddp is added twice: as the reference, and once more, because the difference of the two measurements is the noise.
    """
    rows = [*catalogue.ROWS, *catalogue.VARIANTS]
    asked = [row for row in rows if is_asked(args.rows, row.name)]
    if args.rows != "variants":
        asked = [row for row in asked if row.dtype == args.dtype]
    if not args.rows:
        asked = [row for row in asked if row not in catalogue.VARIANTS]
    if not asked:
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(row.name for row in rows)}")
    return [RowId(row.name) for row in rows if row in asked or row.kind in ("reference", "noise")]


def report_of(args, measured):
    """Make the tables of the measured rows. Unless --rows, --quick or --dtype is given, make all other tables, too."""
    # A sheet is a table of the report. say() shows what the program does now.
    sheets = {"rows": every_row.rows_sheet(measured), "phases": every_row.phases_sheet(measured)}
    if every_row.has_variants(measured):
        sheets["times"] = every_row.times_sheet(measured)
    if not args.quick and not args.rows and args.dtype == "float32":
        every_row.say("model state at any number of ranks")
        sheets["model_state"] = alone.model_state(args.model)
        sheets["ladder"] = alone.ladder(args.model)
        every_row.say("host time as rank 0 of 8")
        sheets["host"] = overhead.measure_host(measured.conditions.device)
        every_row.say("")
    return Report(measured.conditions.made, sheets, measured.words())


def main():
    args = options()
    row_ids = rows_to_measure(args)
    if args.json:
        command_line.check_writable("--json", args.json, fail)
    if args.quick:
        args.rounds = 1
        args.steps = 2
    try:
        with Workers(args.ranks, TIMEOUT_S) as workers:
            args.model = args.model or on_rank_0(workers, examine.default_model)
            command_line.check_length(args.sequence_length, args.model, MODELS, fail)
            settings = Settings(args.model, args.batch_size, args.sequence_length, args.rounds, args.steps)
            measured = every_row.measure_rows(workers, settings, row_ids)
            report = report_of(args, measured)
    except WorkerError as error:
        sys.exit(f"bench.py: {error}")
    save_and_show(args.json, report, fail)
    sys.exit(measured.exit_code())


if __name__ == "__main__":
    main()
