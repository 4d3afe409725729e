"""Plans before you rent: what a rank of 1024 holds, how long a step takes, and how far this is from measured runs."""

import functools
import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from harness import alone, command_line, models, pictures, plan_check
from harness import results as saved
from harness import rows as catalogue
from harness.command_line import COUNT, number
from harness.examine import made_here
from harness.replay import DEVICES, replay
from harness.results import RecordedStep, Report
from harness.rows import HasRowId, RowId
from harness.tables import column, label_of, names, sheet_of, sheet_text

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ROWS = {"fp32": plan_check.ROWS, "bf16": [row.name for row in catalogue.PLANNED]}
STAGE_4 = {catalogue.OVERLAP, catalogue.STAGE_4_BF16, catalogue.PLANNED[-1].name}  # their bucket sizes have a table
BUCKETED = STAGE_4 | {catalogue.REFERENCE, "ddp bf16"}
RANKS = (1, 8, 64, 1024)  # that all rows are counted at
CAPS_MB = (None, 100, 400, 1600, 6400)  # buckets that are tried, the default first
AS_FAST = 1.02  # times that differ by less are equal: the model is no better than that
MICRO_BATCHES = 8  # of the step that accumulates
EFFICIENCY = 0.4  # what computing reaches of the device's FLOPs


@dataclass
class PlanRow(HasRowId):
    """What was counted and modelled of a row, on rank 0."""
    base: str
    bucket_mb: float | None
    formula: str  # of bytes per parameter
    held: dict  # bytes after a step, by kind
    padding: float  # bytes, in all of these
    peak: float  # bytes
    fits_from: int  # number of ranks from which on it fits; 0: with none
    counted: dict  # bytes per parameter, by number of ranks
    theory: dict  # the same by the formula
    ms: dict  # per micro-batch, by number of ranks
    once_ms: float  # of one of MICRO_BATCHES, with one exchange per step
    each_ms: float  # with an exchange for each micro-batch
    step: RecordedStep  # modelled


@dataclass
class SizeRow(HasRowId):
    """A size of bucket that was tried."""
    base: str
    bucket_mb: float | None
    ms: float
    peak: float
    saves_memory: bool  # two of them take at most half of what whole gradients would


class Planner:
    """Chooses sizes of buckets, and makes rows. `recorded`: (RowId, d) -> alone.Recorded, of all that was run dry."""

    def __init__(self, args, recorded=()):
        self.args = args
        self.recorded = dict(recorded)
        self.device_bytes = args.device_memory * 1e9
        flops = DEVICES[args.device].flops * EFFICIENCY
        if args.dtype == "fp32":  # TF32 has half the rate of 16 bits
            flops /= 2
        self.hardware = DEVICES[args.device]._replace(flops=flops, sharing=args.tensor_parallel)

    def ms(self, row_id, d, micro_batches=None, exchange_each=False):
        """Model the ms of a micro-batch, of which a step has `micro_batches`, or else --accumulate."""
        n = micro_batches or self.args.accumulate
        return 1e3 * replay(self.recorded[row_id, d].events, self.hardware, d, n, exchange_each).seconds / n

    def sizes(self, base):
        """Return RowIds of the sizes of bucket that are tried; a row without buckets has one."""
        if base not in BUCKETED:
            return [RowId(base)]
        caps_mb = [self.args.bucket_cap_mb] if self.args.bucket_cap_mb else CAPS_MB
        return [RowId(base, cap_mb) for cap_mb in caps_mb]

    def saves_memory(self, row_id):
        """Return whether two buffers take at most half of whole gradients, which are as large as the parameters."""
        held = self.recorded[row_id, self.args.world].held
        return held["buffers"] <= held["parameters"] / 2

    def tuned(self, base):
        """Return the smallest size that is about as fast as the fastest, among those that save memory and fit."""
        sizes = [row_id for row_id in self.sizes(base) if self.saves_memory(row_id)] or self.sizes(base)
        fitting = [row_id for row_id in sizes if self.recorded[row_id, self.args.world].peak <= self.device_bytes]
        ms = {row_id: self.ms(row_id, self.args.world) for row_id in fitting or sizes}
        return next(row_id for row_id in ms if ms[row_id] <= AS_FAST * min(ms.values()))

    def row(self, row_id, ranks):
        world = self.args.world
        recorded = {d: self.recorded[row_id, d] for d in ranks}
        last = recorded[world]
        too_few = [d for d in ranks if recorded[d].peak > self.device_bytes]
        return PlanRow(
            *row_id, formula=formula_of(row_id), held=last.held, padding=sum(last.held.values()) - last.theory,
            peak=last.peak, fits_from=next((d for d in ranks if d > max(too_few, default=0)), 0),
            counted={d: part.bytes_per_param for d, part in recorded.items()},
            theory={d: part.theory / part.numel for d, part in recorded.items()},
            ms={d: self.ms(row_id, d) for d in ranks}, once_ms=self.ms(row_id, world, MICRO_BATCHES),
            each_ms=self.ms(row_id, world, MICRO_BATCHES, exchange_each=True),
            step=replay(last.events, self.hardware, world, self.args.accumulate))

    def size_row(self, row_id):
        return SizeRow(*row_id, self.ms(row_id, self.args.world), self.recorded[row_id, self.args.world].peak,
                       self.saves_memory(row_id))


def formula_of(row_id):
    """Write bytes per parameter, such as "4 + 12/d + b"; b: stage 4's two bucket buffers."""
    configuration = catalogue.find(*row_id)
    terms = [f"{configuration.whole:g}"]
    if configuration.shared:
        terms.append(f"{configuration.shared:g}/d")
    if row_id.base in STAGE_4:
        terms.append("b")
    return " + ".join(terms)


def plan(args, workers):
    """Count and time all rows at several d, and the step at --world. Returns a Report. `workers` run the rows dry."""
    planner, bases = Planner(args), ROWS[args.dtype]
    ranks = [*(d for d in RANKS if d < args.world), args.world]
    cost = workers.submit(alone.cost_of, args.spec, DTYPES[args.dtype], args.batch_size, args.sequence_length).result()

    def run_dry(tasks):
        futures = {(row_id, d): workers.submit(alone.record, row_id, args.spec, d, cost) for row_id, d in tasks}
        planner.recorded.update((task, future.result()) for task, future in futures.items())
    run_dry((row_id, args.world) for base in bases for row_id in planner.sizes(base))
    row_ids = [planner.tuned(base) for base in bases]
    run_dry((row_id, d) for row_id in row_ids for d in ranks[:-1])
    rows = [planner.row(row_id, ranks) for row_id in row_ids]
    sizes = [planner.size_row(row_id) for base in bases if base in STAGE_4 for row_id in planner.sizes(base)]
    numel = planner.recorded[row_ids[-1], args.world].numel
    assumed = SimpleNamespace(**vars(args), **planner.hardware._asdict(), parameters=numel,
                              activations=cost.activations, efficiency=EFFICIENCY)
    return report_of(made_here(), assumed, rows, sizes)


# ---------------------------------------------------------------------------------------------- Its tables and pictures


def report_of(origin, assumed, rows, sizes):
    """Make the Report. `assumed`: options, Hardware, `parameters`, `activations` in bytes and `efficiency`."""
    longest = 4 * min(row.step.seconds for row in rows)  # slower rows aren't in the picture
    stage4 = next(row for row in rows if row.base in STAGE_4)
    return Report(origin, {
        "memory": memory_sheet(assumed, rows), "state": alone.state_sheet(rows), "time": time_sheet(assumed, rows),
        "ranks": ranks_sheet(assumed, rows), "sizes": sizes_sheet(assumed, sizes)},
        figures={"buckets of stage 4": stage4.size},
        steps={row.name: row.step for row in rows if row.step.seconds <= longest},
        title=f"One step on rank 0 of {assumed.world}, modelled: {assumed.model}, {assumed.batch_size} x "
              f"{assumed.sequence_length}")


def memory_sheet(c, rows):
    """Make the table of what a rank holds."""
    held = dict(zip(rows[0].held, ("params", "grads", "main", "moments", "buffers")))
    return sheet_of(
        f"GB on a rank of {c.world}: {c.model}, {c.parameters:,} parameters a rank", rows, {
            "name": names(lambda row: label_of(row).replace("\n  ", "\n")),
            **{kind: column(title, lambda row, kind=kind: row.held[kind], "counted", ".2f", unit=1e9)
               for kind, title in held.items()},
            "padding": column("padding", "padding", "counted", ".2f", unit=1e9),
            "activations": column("activ.", lambda row: c.activations, "counted", ".2f", unit=1e9),
            "peak": column("peak", "peak", "counted", ".2f", unit=1e9),
            "fits_from": column("fits\nfrom d", lambda row: row.fits_from or None, "counted")},
        ["After a step, on rank 0. main: fp32 copies of 16-bit parameters. padding: what is more than the formula. "
         f"activ.: of a micro-batch of {c.batch_size} x {c.sequence_length}. peak: the most at one moment of a step. "
         f"fits from d: from this number of ranks on the peak is at most {c.device_memory:g} GB; torch's allocator "
         "takes more, and stage 4 that accumulates in no_sync() whole gradients."], row_key=lambda row: row.base)


def time_sheet(c, rows):
    """Make the table of a step at --world."""
    tokens = c.batch_size * c.sequence_length * c.accumulate / c.tensor_parallel
    return sheet_of(
        f"A step of {c.model} on {c.world * c.tensor_parallel} x {c.device}", rows, {
            "name": names(), "ms": column("ms\na step", lambda row: 1e3 * row.step.seconds, "modelled", ",.0f"),
            "exposed": column("exposed\nms", lambda row: 1e3 * row.step.exposed_seconds, "modelled", ",.0f"),
            "tokens": column("tokens/s\na device", lambda row: tokens / row.step.seconds, "modelled", ",.0f"),
            "once": column(f"1 of {MICRO_BATCHES}:\nonce", "once_ms", "modelled", ",.0f"),
            "each": column("\neach", "each_ms", "modelled", ",.0f"),
            "peak": column("GB at\nthe peak", "peak", "counted", ".1f", unit=1e9)},
        [f"Assumed: {c.flops / 1e12:.0f} TFLOP/s, {c.efficiency:.0%} of what the maker states, "
         f"{c.memory_rate / 1e12:.2f} TB/s of memory, rings of {c.in_node / 1e9:.0f} GB/s in a node and "
         f"{c.between / 1e9:.0f} GB/s between nodes of {c.per_node}, {c.latency_in_node * 1e6:.0f} and "
         f"{c.latency_between * 1e6:.0f} µs a hop. Nobody is late, Python takes no time, tensor parallelism sends "
         f"nothing. {c.accumulate} micro-batch(es) a step. 1 of 8: ms of one of eight micro-batches, with one exchange "
         "a step, as in no_sync(), or with one each."], row_key=lambda row: row.base)


def ranks_sheet(c, rows):
    """Make the table of time by number of ranks."""
    return sheet_of(
        "ms a micro-batch, by number of ranks", rows, {
            "name": names(), **{f"{d}": column(f"d = {d}", lambda row, d=d: row.ms[d], "modelled", ",.0f")
                                for d in rows[0].ms if d > 1}},
        [f"Buckets are those that are best on {c.world}."], row_key=lambda row: row.base)


def sizes_sheet(c, sizes):
    """Make the table of the sizes of bucket that were tried."""
    return sheet_of(
        f"Sizes of buckets: {c.model} on {c.world} ranks", sizes, {
            "name": names("base"),
            "size": column("bucket", lambda row: row.size if row.saves_memory else f"{row.size} *"),
            "ms": column("ms\n", "ms", "modelled", ",.0f"),
            "peak": column("GB at\nthe peak", "peak", "counted", ".1f", unit=1e9)},
        ["Taken: the smallest that is at most 2 % slower than the fastest."],
        ["* not taken: two such buffers exceed half of all gradients."])


fail = functools.partial(command_line.fail, "plan")
SIZE = number(float, 0.001, 10**6)


def gigabytes(text):
    """Parse "80g"."""
    return SIZE(text.removesuffix("g"))


def parse():
    parser = command_line.Parser("plan", __doc__)
    add = parser.add_argument
    add("--model", default="7b", choices=models.NAMED, help="(default 7b)")
    add("--layers", type=number(int, 0, 1000), default=0, metavar="N", help="in place of --model: layers of a LLaMA")
    add("--width", type=number(int, 0, 2**17), default=0, metavar="N", help="of that LLaMA, a multiple of 128")
    add("--world", type=number(int, 1, 4096), default=1024, help="data-parallel ranks (default 1024)")
    add("--dtype", choices=DTYPES, default="bf16", help="of the parameters (default bf16)")
    add("--device", choices=DEVICES, default="h100", help="(default h100)")
    add("--device-memory", type=gigabytes, default=80.0, metavar="80g", help="of one device (default 80g: 10⁹ bytes)")
    add("--batch-size", type=COUNT, default=1, help="sequences of a micro-batch (default 1)")
    add("--sequence-length", type=COUNT, default=1024, help="tokens of a sequence (default 1024)")
    add("--accumulate", type=COUNT, default=1, help="micro-batches a step, exchanged once (default 1)")
    add("--tensor-parallel", type=COUNT, default=1, help="devices that share each layer of a LLaMA (default 1)")
    add("--bucket-cap-mb", type=SIZE, help="of stage 4 and DDP (default: the best of a few sizes)")
    add("--check", action="store_true", help="also compare modelled with measured runs, here and elsewhere")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    args = parser.parse_args()
    if args.width % 128 or (args.layers > 0) != (args.width > 0):
        fail("--layers and --width: give both, and a width that is a multiple of 128")
    spec = models.of_size(args.layers, args.width) if args.layers else models.NAMED[args.model]
    if args.tensor_parallel > 1 and any(n == 0 or n % args.tensor_parallel for n in (spec.n_heads, spec.n_kv_heads)):
        fail(f"--tensor-parallel {args.tensor_parallel}: the heads of {args.model} can't be shared out so")
    if not spec.n_kv_heads and args.sequence_length > spec.positions:
        fail(f"--sequence-length {args.sequence_length}: {args.model} takes at most {spec.positions}")
    if args.json:
        command_line.check_writable("--json", args.json, fail)
    args.model = f"a LLaMA of {args.layers} x {args.width}" if args.layers else args.model
    args.spec = spec._replace(tensor_parallel=args.tensor_parallel)
    return args


def main():
    args = parse()
    with ProcessPoolExecutor(min(4, os.cpu_count()), multiprocessing.get_context("spawn"), gc.disable) as workers:
        report = plan(args, workers)
        if args.check:
            own_runs, published_runs = workers.submit(plan_check.two_hosts), workers.submit(plan_check.published)
            plan_check.add_to(report, own_runs.result(), published_runs.result())
    texts = [*(f"{sheet_text(sheet)}\n" for sheet in report.sheets.values()), pictures.text(list(report.steps.items()))]
    command_line.write_and_show(args.json, saved.to_json(report), fail, lambda: print("\n".join(texts)))


if __name__ == "__main__":
    main()
