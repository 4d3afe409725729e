"""Trains the same model in every row of harness/rows.py, on ranks that it starts: time, traffic, memory.

    python bench.py [--ranks 2] [--model small] [--rows "stage 4"] [--quick] [--json measured/bench.json]

Each row is checked against replicated training first; one that computes something else gets no time.
Exit code: 0; 1 when a stage is wrong or fails; 2 for bad input.
"""

import functools
import sys
from pathlib import Path

from harness import command_line

if __name__ == "__main__":
    command_line.begin()

import rich.console
import rich.progress

from harness import alone, corpus, every_row, examine, host_time, results, tables, timeline
from harness import rows as catalogue
from harness.command_line import COUNT
from harness.examine import Settings
from harness.gpt import MODELS
from harness.rows import RowId, is_asked
from harness.workers import WorkerError, Workers, on_rank_0

fail = functools.partial(command_line.fail, "bench.py")


def parse():
    rows = [*catalogue.ROWS, *catalogue.VARIANTS]
    parser = command_line.Parser("bench.py", __doc__)
    add = parser.add_argument
    add("--ranks", type=COUNT, default=2, help="processes on this machine (default 2)")
    add("--model", choices=MODELS, help="(default: tiny, on a GPU medium)")
    command_line.add_sizes(add, batch_size=4)
    add("--rounds", type=COUNT, default=3, help="in each, every row is timed once (default 3)")
    add("--steps", type=COUNT, default=3, help="timed in a round, end to end (default 3)")
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32",
        help="rows with such parameters, and ddp (default float32)")
    add("--rows", default="", metavar="TEXT", help="only rows whose name holds TEXT, and ddp, twice")
    add("--quick", action="store_true", help="1 round of 2 steps, no exposed time, no model state: a look")
    add("--data", metavar="PATH", help="text file or folder (default: the source of Python's standard library)")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    add("--timeout", type=COUNT, default=120, help="seconds that one part of the measurement may take (default 120)")
    args = parser.parse_args()
    command_line.check_length(args.sequence_length, args.model or "medium", MODELS, fail)  # the longest default
    of_dtype = [row for row in rows if row.dtype == args.dtype or args.rows == "variants"]
    row_ids = [RowId(row.name) for row in rows if is_asked(args.rows, row.name) and row in of_dtype
               and (args.rows or row not in catalogue.VARIANTS) or row.kind in ("reference", "noise")]
    if args.rows and not any(is_asked(args.rows, row_id.name) for row_id in row_ids):
        fail(f"--rows {args.rows!r}: no row has that in its name; there are {', '.join(row.name for row in rows)}")
    return args, row_ids


def main():
    args, row_ids = parse()
    rounds, steps = (1, 2) if args.quick else (args.rounds, args.steps)
    try:
        train, _ = corpus.split(corpus.load_bytes(args.data))
        corpus.Batches(train, args.batch_size, args.sequence_length, 0, args.ranks)
    except (ValueError, OSError) as error:
        fail(error)
    if args.json:
        command_line.check_writable("--json", args.json, fail)
    try:
        with Workers(args.ranks, args.timeout) as workers, rich.progress.Progress(
                rich.progress.TextColumn("{task.description:40}"), rich.progress.BarColumn(),
                rich.progress.MofNCompleteColumn(), rich.progress.TimeElapsedColumn(),
                console=rich.console.Console(stderr=True), transient=True) as bar:
            args.model = args.model or on_rank_0(workers, examine.default_model)
            command_line.check_length(args.sequence_length, args.model, MODELS, fail)
            settings = Settings(args.model, args.batch_size, args.sequence_length, rounds, steps, args.data)
            more = 0 if args.quick else len(row_ids) + 4
            task = bar.add_task("starting the ranks", total=every_row.n_runs(settings, row_ids) + more)

            def progress(text):
                bar.update(task, advance=1, description=text)
            result = every_row.measure_rows(workers, settings, row_ids, progress)
            if not args.quick and result.conditions.device == "cpu":  # of a GPU: when kernels are launched
                timeline.record_rows(workers, settings, result.rows, progress)
                results.keep_exposed_only(result.rows)
            if not args.quick and not args.rows and args.dtype == "float32":  # what doesn't depend on these
                progress("model state at any number of ranks")
                result.model_state = alone.model_state(args.model)
                result.gathered = alone.gathered(args.model)
                result.caps = alone.caps()
                result.host = host_time.measure_ranks(result.conditions.device, progress=progress)
    except WorkerError as error:
        sys.exit(f"bench.py: {error}")
    command_line.write_and_show(args.json, results.to_json(result), fail, lambda: tables.show(result))
    sys.exit(every_row.is_wrong(result))


if __name__ == "__main__":
    main()
