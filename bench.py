"""Trains the same model in every row of harness/training/rows.py, on ranks that it starts: time, traffic, memory.

    python bench.py [--ranks 2] [--model small] [--rows "stage 4"] [--quick] [--json measured/bench.json]

Each row is checked against replicated training first; one that computes something else gets no time. DDP and the four
stages come first, and their tables are printed after one round; Ctrl-C then keeps what was measured.
Exit code: 0; 1 when a stage is wrong or fails; 2 for bad input; 130 after Ctrl-C.
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from harness.publishing import row_names
from harness.ranks import command_line

if __name__ == "__main__":
    command_line.begin()

import rich.console
import rich.progress

from harness.measuring import every_row, examine, host_time, timeline
from harness.planning import alone
from harness.publishing import results
from harness.training import corpus
from harness.training import rows as catalogue
from harness.ranks.command_line import COUNT
from harness.measuring.examine import Settings
from harness.training.models import MODELS
from harness.publishing.row_names import RowId, is_asked
from harness.ranks.workers import WorkerError, Workers, on_rank_0

fail = functools.partial(command_line.fail, "bench.py")
FIRST = {row_names.COMPUTE_ONLY, *row_names.LADDER, "ddp again"}  # rows of the first tables


def parse():
    rows = [*catalogue.ROWS, *catalogue.VARIANTS]
    parser = command_line.Parser("bench.py", __doc__)
    add = parser.add_argument
    add("--ranks", type=COUNT, default=2, help="processes on this machine (default 2)")
    add("--model", choices=MODELS, help="(default: tiny, on a GPU medium)")
    command_line.add_sizes(add, batch_size=4)
    add("--rounds", type=COUNT, default=3, help="in each, every row is timed once (default 3)")
    add("--steps", type=COUNT, default=3, help="timed in a round, end to end (default 3)")
    add("--dtype", choices=["float32", "bfloat16"], default="float32",
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


class BenchPart(NamedTuple):
    """A part of the bench. `runs`: how many runs of a row take about as long, for the minutes that are printed."""
    title: str
    runs: float
    measure: Callable


class Bench:
    """Measures the parts of a bench in turn. `result` has all that was measured so far, and so has --json."""

    def __init__(self, args, workers, settings, row_ids, bar):
        self.args = args
        self.workers = workers
        self.settings = settings
        self.row_ids = row_ids
        self.bar = bar
        self.result = None
        self.parts = self.parts_to_measure()
        self.started_at = time.monotonic()
        self.n_runs = 0  # so far
        self.task = bar.add_task("starting the ranks", total=sum(part.runs for part in self.parts))

    def parts_to_measure(self):
        first = [row_id for row_id in self.row_ids if row_id.name in FIRST]
        later = [row_id for row_id in self.row_ids if row_id not in first]
        parts = [BenchPart("the first rows", every_row.n_runs(self.settings, first), lambda: self.measure_first(first))]
        if later:
            parts.append(BenchPart(f"{len(later)} more rows", every_row.n_runs(self.settings, [None, *later]),
                                   lambda: self.measure_more(later)))
        if not self.args.quick and on_rank_0(self.workers, examine.device_type) == "cpu":
            parts.append(BenchPart("exposed time of all rows", len(self.row_ids), self.record_steps))
        if not self.args.quick and not self.args.rows and self.args.dtype == "float32":  # what doesn't depend on these
            parts += [BenchPart("model state at any number of ranks", 20, self.count_state),
                      BenchPart("the host's time", 15, self.time_host)]
        return parts

    def measure(self):
        """Measure what is left to measure. Ctrl-C ends the program with what was measured."""
        try:
            while self.parts:
                self.parts[0].measure()
                del self.parts[0]
                self.save()
        except KeyboardInterrupt:
            self.bar.stop()
            if self.result:
                every_row.show(self.result)
                place = f", and in {self.args.json}" if self.args.json else ""
                left_out = ", ".join(part.title for part in self.parts)
                print(f"what was measured until Ctrl-C is above{place}; not all of: {left_out}", flush=True)
            raise

    def save(self):
        if self.args.json:
            command_line.write("--json", self.args.json, results.to_json(self.result), fail)

    def progress(self, text):
        self.n_runs += 1
        self.bar.update(self.task, advance=1, description=text)

    def measure_first(self, row_ids):
        self.result = every_row.measure_rows(self.workers, self.settings, row_ids, self.progress, self.show_first)

    def show_first(self, result):
        """Print the tables after the first round, and how many minutes the rest will take."""
        if self.result or len(self.parts) == 1:
            return
        self.result = result
        self.save()
        self.bar.stop()
        every_row.show(result)
        minutes = (time.monotonic() - self.started_at) / self.n_runs / 60
        more_rounds = self.settings.rounds - 1
        print(f"\nThis is round 1 of {self.settings.rounds}. Still to come (Ctrl-C keeps what was measured by then):")
        if more_rounds:
            print(f"{minutes * more_rounds * len(result.rows):6.1f} min  the other rounds")
        for part in self.parts[1:]:
            print(f"{minutes * part.runs:6.1f} min  {part.title}")
        print(flush=True)
        self.bar.start()

    def measure_more(self, row_ids):
        every_row.measure_more_rows(self.workers, self.settings, row_ids, self.result, self.progress)
        self.result.rows.sort(key=lambda row: self.row_ids.index(row.row_id))

    def record_steps(self):
        timeline.record_rows(self.workers, self.settings, self.result.rows, self.progress)
        results.keep_exposed_only(self.result.rows)

    def count_state(self):
        self.progress("model state at any number of ranks")
        self.result.sheets = {"model_state": alone.model_state(self.args.model),
                              "gathered": alone.gathered(self.args.model), "caps": alone.caps()}

    def time_host(self):
        self.result.host = host_time.measure_ranks(self.result.conditions.device, progress=self.progress)


def progress_bar():
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description:40}"), rich.progress.BarColumn(), rich.progress.TimeElapsedColumn(),
        console=rich.console.Console(stderr=True), transient=True)


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
        with Workers(args.ranks, args.timeout) as workers, progress_bar() as bar:
            args.model = args.model or on_rank_0(workers, examine.default_model)
            command_line.check_length(args.sequence_length, args.model, MODELS, fail)
            settings = Settings(args.model, args.batch_size, args.sequence_length, rounds, steps, args.data)
            bench = Bench(args, workers, settings, row_ids, bar)
            bench.measure()
    except WorkerError as error:
        sys.exit(f"bench.py: {error}")
    command_line.write_and_show(args.json, results.to_json(bench.result), fail, lambda: every_row.show(bench.result))
    sys.exit(every_row.is_wrong(bench.result))


if __name__ == "__main__":
    main()
