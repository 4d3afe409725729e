"""Plans before you rent: what a rank of 1024 holds, how long a step takes, how far estimates are from real runs."""

import argparse
import functools
import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

from harness.ranks import command_line
from harness.ranks.command_line import COUNT, number
from harness.training.options import PLANNED_MODELS, LlamaConfig

fail = functools.partial(command_line.fail, "plan")
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
DEVICE_BYTES = 80e9  # of an H100 and of an A100


def options():
    parser = command_line.Parser("plan", __doc__)
    add = parser.add_argument
    add("--model", default="7b", choices=PLANNED_MODELS, help="(default 7b)")
    add("--world", type=number(int, 1, 4096), default=1024, help="data-parallel ranks (default 1024)")
    add("--dtype", choices=DTYPES, default="bf16", help="of the parameters (default bf16)")
    add("--device", choices=["h100", "a100"], default="h100", help="(default h100)")
    add("--batch-size", type=COUNT, default=1, help="sequences of a micro-batch (default 1)")
    add("--sequence-length", type=COUNT, default=1024, help="tokens of a sequence (default 1024)")
    add("--tensor-parallel", type=COUNT, default=1, help="devices that share each layer of a LLaMA (default 1)")
    add("--bucket-cap-mb", type=number(float, 0.001, 10**6),
        help="of stage 4 and DDP (default: the best of a few sizes)")
    add("--check", action="store_true", help="also compare modelled with published runs")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    return parser.parse_args()


if __name__ == "__main__":
    options()  # reports a mistake at once: the imports below load torch, which takes seconds

from harness.planning import alone
from harness.planning.replay import DEVICES, Hardware, add_published, published, replay
from harness.publishing import pictures
from harness.publishing.pictures import RecordedStep
from harness.publishing.tables import Marked, Report, column, made_here, name_column, save_and_show, sheet_of
from harness.training import rows as catalogue
from harness.training.rows import RowId

ROWS = {"fp32": [*catalogue.LADDER, "owner reduce"], "bf16": [row.name for row in catalogue.PLANNED]}
STAGE_4 = {catalogue.OVERLAP, catalogue.STAGE_4_BF16, catalogue.HYBRID_BF16}  # rows whose bucket sizes get a table
BUCKETED = STAGE_4 | {catalogue.REFERENCE, "ddp bf16"}  # rows for which several bucket sizes are tried
RANKS = (1, 8, 64, 1024)  # numbers of ranks for which all rows are counted
CAPS_MB = (None, 100, 400, 1600, 6400)  # bucket sizes that are tried; None: the default, which is at most 25
AS_FAST = 1.02  # a size is as fast as another size if its modelled step takes at most this many times as long
MICRO_BATCHES = 8  # of the step that accumulates
EFFICIENCY = 0.4  # assumed part of a device's FLOPs that computing reaches
SLOWEST_DRAWN = 4  # times the fastest step; a longer step in the picture would leave the others no room
HELD_TITLES = {"parameters": "params", "gradients": "grads", "main parameters": "main", "state": "moments",
               "buffers": "buffers"}  # kind of memory -> title of its column


class PlanRow(NamedTuple):
    """The counted and modelled figures of a row, at --world ranks unless a comment says "by number of ranks"."""
    row_id: RowId
    held: dict  # bytes on rank 0 after a step, by kind
    padding: float  # bytes in `held` beyond those of the row's formula
    peak: float  # the most bytes on rank 0 at one moment of a step
    fits_from: int  # the least of the counted numbers of ranks from which on the row fits into a device; 0: none
    ms: dict  # of a step, by number of ranks
    once_ms: float  # of one of MICRO_BATCHES, if gradients are exchanged once per step
    each_ms: float  # of one of MICRO_BATCHES, if each micro-batch exchanges gradients
    step: RecordedStep  # modelled


class SizeRow(NamedTuple):
    """A bucket size that was tried. `saves_memory`: see Planner."""
    row_id: RowId
    ms: float
    peak: float
    saves_memory: bool


class Plan(NamedTuple):
    """All that the tables are made of."""
    args: argparse.Namespace
    hardware: Hardware
    numel: int  # of the parameters on a rank
    activations: float  # bytes, of a micro-batch
    rows: list  # PlanRows
    sizes: list  # SizeRows


class Planner:
    """Chooses bucket sizes, and makes rows. `recorded`: {(RowId, d): alone.Recorded}, of the dry runs."""

    def __init__(self, args, recorded):
        self.args = args
        self.recorded = recorded
        flops = DEVICES[args.device].flops * EFFICIENCY
        if args.dtype == "fp32":  # TF32 has half the rate of 16 bits
            flops /= 2
        self.hardware = DEVICES[args.device]._replace(flops=flops, sharing=args.tensor_parallel)

    def ms(self, row_id, d, micro_batches=1, exchange_each=False):
        """Model the ms of a micro-batch, in a step of `micro_batches`."""
        step = replay(self.recorded[row_id, d].events, self.hardware, d, micro_batches, exchange_each)
        return 1e3 * step.seconds / micro_batches

    def saves_memory(self, row_id):
        """Return whether the buffers, stage 4's two for example, take at most half of what all gradients would."""
        held = self.recorded[row_id, self.args.world].held
        return held["buffers"] <= held["parameters"] / 2  # gradients take as much as parameters: they have one dtype

    def best_size(self, base):
        """Return the RowId of the smallest bucket size that saves memory, fits, and is as fast as any of these.

        If none saves memory, all sizes are candidates; if none of the candidates fits, all of them are.
        """
        sizes = sizes_to_try(base, self.args.bucket_cap_mb)
        candidates = [row_id for row_id in sizes if self.saves_memory(row_id)] or sizes
        fitting = [row_id for row_id in candidates if self.recorded[row_id, self.args.world].peak <= DEVICE_BYTES]
        ms = {row_id: self.ms(row_id, self.args.world) for row_id in fitting or candidates}  # in order of size
        fast_ms = AS_FAST * min(ms.values())
        return next(row_id for row_id in ms if ms[row_id] <= fast_ms)

    def fits_from(self, row_id, ranks):
        """Return the first of the ascending numbers of ranks from which on a row fits into a device; 0 if none is."""
        first = 0
        for d in reversed(ranks):
            if self.recorded[row_id, d].peak > DEVICE_BYTES:
                break
            first = d
        return first

    def row(self, row_id, ranks):
        world = self.args.world
        at_world = self.recorded[row_id, world]
        return PlanRow(
            row_id, held=at_world.held, padding=sum(at_world.held.values()) - at_world.theory, peak=at_world.peak,
            fits_from=self.fits_from(row_id, ranks), ms={d: self.ms(row_id, d) for d in ranks},
            once_ms=self.ms(row_id, world, MICRO_BATCHES),
            each_ms=self.ms(row_id, world, MICRO_BATCHES, exchange_each=True),
            step=replay(at_world.events, self.hardware, world))

    def size_row(self, row_id):
        peak = self.recorded[row_id, self.args.world].peak
        return SizeRow(row_id, self.ms(row_id, self.args.world), peak, self.saves_memory(row_id))


def sizes_to_try(base, cap_mb):
    """Return a RowId for each bucket size that is tried, in order of size. `cap_mb`: the one size, or None.

    A row without buckets has one RowId.
    """
    if base not in BUCKETED:
        return [RowId(base)]
    sizes_mb = [cap_mb] if cap_mb else CAPS_MB
    return [RowId(base, size_mb) for size_mb in sizes_mb]


def make_plan(args, config, workers):
    """Return the Plan for all rows, at several numbers of ranks. `workers` run the rows dry."""
    bases = ROWS[args.dtype]
    ranks = [*(d for d in RANKS if d < args.world), args.world]
    sizes_of = {base: sizes_to_try(base, args.bucket_cap_mb) for base in bases}
    cost = workers.submit(alone.cost_of, config, DTYPES[args.dtype], args.batch_size, args.sequence_length).result()

    def run_dry(row_ids, numbers_of_ranks):
        """Return {(RowId, d): alone.Recorded}."""
        futures = {(row_id, d): workers.submit(alone.record, row_id, config, d, cost)
                   for row_id in row_ids for d in numbers_of_ranks}
        return {key: future.result() for key, future in futures.items()}

    # Only --world ranks try all bucket sizes. The other numbers of ranks take the size that is best there.
    at_world = run_dry([row_id for row_ids in sizes_of.values() for row_id in row_ids], [args.world])
    planner = Planner(args, at_world)
    best_row_ids = [planner.best_size(base) for base in bases]
    planner = Planner(args, {**at_world, **run_dry(best_row_ids, ranks[:-1])})
    return Plan(
        args, planner.hardware, at_world[best_row_ids[-1], args.world].numel, cost.activations,
        rows=[planner.row(row_id, ranks) for row_id in best_row_ids],
        sizes=[planner.size_row(row_id) for base in bases if base in STAGE_4 for row_id in sizes_of[base]])


# ---------------------------------------------------------------------------------------------- Its tables and pictures


def report_of(plan):
    """Make the Report of a Plan."""
    args = plan.args
    title = (f"One step on rank 0 of {args.world}, modelled: {args.model}, "
             f"{args.batch_size} x {args.sequence_length}")
    sheets = {"memory": memory_sheet(plan), "time": time_sheet(plan), "ranks": ranks_sheet(plan),
              "sizes": sizes_sheet(plan)}
    figures = {"fitting": f"{sum(row.fits_from > 0 for row in plan.rows)}"}
    return Report(made_here(), sheets, figures=figures, drawn=pictures.to_draw(steps_to_draw(plan.rows), title))


ROW_NAME = name_column(lambda row: row.row_id.name)


def base_of(row):
    """Return the key of a row: its name without the size of buckets."""
    return row.row_id.base


def memory_sheet(plan):
    """Make the table of the bytes that a rank holds."""
    args = plan.args
    kinds = plan.rows[0].held
    return sheet_of(
        f"GB on a rank of {args.world}: {args.model}, {plan.numel:,} parameters a rank", plan.rows, {
            "name": name_column(lambda row: row.row_id.label.replace("\n  ", "\n")),  # narrower: without the indent
            **{kind: column(HELD_TITLES[kind], lambda row, kind=kind: row.held[kind], "counted", ".2f", unit=1e9)
               for kind in kinds},
            "padding": column("padding", "padding", "counted", ".2f", unit=1e9),
            "activations": column("activ.", lambda row: plan.activations, "counted", ".2f", unit=1e9),
            "peak": column("peak", "peak", "counted", ".2f", unit=1e9),
            "fits_from": column("fits\nfrom d", lambda row: row.fits_from or None, "counted")},
        ["After a step, on rank 0. main: fp32 copies of 16-bit parameters. padding: what is more than the formula. "
         f"activ.: of a micro-batch of {args.batch_size} x {args.sequence_length}. peak: the most at one moment "
         f"of a step. fits from d: from this number of ranks on the peak is at most {DEVICE_BYTES / 1e9:g} GB; "
         "torch's allocator takes more, and stage 4 holds whole gradients, too, if it accumulates in no_sync()."],
        row_key=base_of)


def time_sheet(plan):
    """Make the table of a step at --world."""
    args = plan.args
    hardware = plan.hardware
    tokens = args.batch_size * args.sequence_length / args.tensor_parallel
    return sheet_of(
        f"A step of {args.model} on {args.world * args.tensor_parallel} x {args.device}", plan.rows, {
            "name": ROW_NAME,
            "ms": column("ms\na step", lambda row: 1e3 * row.step.seconds, "modelled", ",.0f"),
            "exposed": column("exposed\nms", lambda row: 1e3 * row.step.exposed_seconds, "modelled", ",.0f"),
            "tokens": column("tokens/s\na device", lambda row: tokens / row.step.seconds, "modelled", ",.0f"),
            # The next two columns share a heading: "1 of 8: once, each".
            "once": column(f"1 of {MICRO_BATCHES}:\nonce", "once_ms", "modelled", ",.0f"),
            "each": column("\neach", "each_ms", "modelled", ",.0f"),
            "peak": column("GB at\nthe peak", "peak", "counted", ".1f", unit=1e9)},
        [f"Assumed: {hardware.flops / 1e12:.0f} TFLOP/s, {EFFICIENCY:.0%} of what the maker states, "
         f"{hardware.memory_rate / 1e12:.2f} TB/s of memory, rings of {hardware.in_node / 1e9:.0f} GB/s in a node and "
         f"{hardware.between / 1e9:.0f} GB/s between nodes of {hardware.per_node}, "
         f"{hardware.latency_in_node * 1e6:.0f} and {hardware.latency_between * 1e6:.0f} µs a hop. Nobody is late, "
         "Python takes no time, tensor parallelism sends nothing. One micro-batch a step. 1 of 8: ms of one of eight "
         "micro-batches, with one exchange a step, as in no_sync(), or with one each."], row_key=base_of)


def ranks_sheet(plan):
    """Make the table of time by number of ranks."""
    several_ranks = [d for d in plan.rows[0].ms if d > 1]
    return sheet_of(
        "ms a micro-batch, by number of ranks", plan.rows, {
            "name": ROW_NAME,
            **{f"{d}": column(f"d = {d}", lambda row, d=d: row.ms[d], "modelled", ",.0f") for d in several_ranks}},
        [f"Buckets are those that are best on {plan.args.world}."], row_key=base_of)


def sizes_sheet(plan):
    """Make the table of the bucket sizes that were tried."""
    def size(row):
        return row.row_id.size if row.saves_memory else Marked(row.row_id.size, " *")
    return sheet_of(
        f"Sizes of buckets: {plan.args.model} on {plan.args.world} ranks", plan.sizes, {
            "name": name_column(base_of),
            "size": column("bucket", size),
            "ms": column("ms\n", "ms", "modelled", ",.0f"),
            "peak": column("GB at\nthe peak", "peak", "counted", ".1f", unit=1e9)},
        ["Taken: the smallest that is at most 2 % slower than the fastest."],
        {" *": "not taken: two such buffers exceed half of all gradients."})


def steps_to_draw(rows):
    """Return [(name of the row, step)], without steps that are much longer than the fastest."""
    longest = SLOWEST_DRAWN * min(row.step.seconds for row in rows)
    return [(row.row_id.name, row.step) for row in rows if row.step.seconds <= longest]


# --------------------------------------------------------------------------------------------------------- The program


def parse():
    """Return the options, and the config of the model."""
    args = options()
    config = PLANNED_MODELS[args.model]
    if args.tensor_parallel > 1:
        if not can_share_layers(config, args.tensor_parallel):
            fail(f"--tensor-parallel {args.tensor_parallel}: the heads of {args.model} can't be shared out so")
        config = config._replace(tensor_parallel=args.tensor_parallel)
    longest = getattr(config, "block_size", None)  # a LLaMA takes sequences of any length
    if longest is not None and args.sequence_length > longest:
        fail(f"--sequence-length {args.sequence_length}: {args.model} takes at most {longest}")
    if args.json:
        command_line.check_writable("--json", args.json, fail)
    return args, config


def can_share_layers(config, n_ranks):
    """Return whether each of `n_ranks` can have as many heads as the others."""
    return isinstance(config, LlamaConfig) and config.n_heads % n_ranks == 0 and config.n_kv_heads % n_ranks == 0


def main():
    args, config = parse()
    # Without garbage collection, which would take a fifth of the time of a dry run.
    with ProcessPoolExecutor(min(4, os.cpu_count()), multiprocessing.get_context("spawn"), gc.disable) as workers:
        report = report_of(make_plan(args, config, workers))
        if args.check:
            report = add_published(report, workers.submit(published).result())
    save_and_show(args.json, report, fail)


if __name__ == "__main__":
    main()
