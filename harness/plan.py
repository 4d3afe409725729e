"""Plan before you rent: what a rank of 1024 holds, how long a step takes, and how far that model is from runs."""

import functools
import gc
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from harness import alone, command_line, models, pictures
from harness import results as saved
from harness import rows as catalogue
from harness.command_line import COUNT, number
from harness.examine import made_here
from harness.replay import Hardware, calibrated, replay
from harness.results import Check, ModelledRun, PlanResult, PlanRow, PlanSize, PublishedRun
from harness.rows import RowId
from harness.tables import plan_sheets, sheet_text
from stage4_overlap.transport import GlooTransport

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ROWS = {"fp32": [*catalogue.LADDER, "owner reduce"], "bf16": [row.name for row in catalogue.PLANNED]}
STAGE_4 = {"stage 4 overlap", "stage 4 bf16", catalogue.PLANNED[-1].name}  # whose buckets' sizes have a table
BUCKETED = STAGE_4 | {"ddp", "ddp bf16"}
RANKS = (1, 8, 64, 1024)  # that all rows are counted at
CAPS_MB = (None, 100, 400, 1600, 6400)  # buckets that are tried, the default first
AS_FAST = 1.02  # times that differ by less are equal: the model is no better than that
MICRO_BATCHES = 8  # of the step that accumulates
EFFICIENCY = 0.4  # what computing reaches of the device's FLOPs
# As makers state them: 16-bit FLOPs, bytes of memory, bytes to a neighbour in the node, bytes of a node to others.
DEVICES = {"h100": Hardware(989e12, 3.35e12, 450e9, 400e9), "a100": Hardware(312e12, 2.0e12, 300e9, 100e9)}


class Planner:
    """`recorded`: (RowId, d) -> alone.Recorded, of all rows that were run dry."""

    def __init__(self, args, recorded=()):
        self.args, self.recorded, self.device_bytes = args, dict(recorded), args.device_memory * 1e9
        flops = DEVICES[args.device].flops * EFFICIENCY / (2 if args.dtype == "fp32" else 1)  # TF32: half of 16 bits
        self.hardware = DEVICES[args.device]._replace(flops=flops, sharing=args.tensor_parallel)

    def ms(self, row_id, d, micro_batches=None, exchange_each=False):
        """Of a micro-batch, of which a step has `micro_batches`, or else --accumulate."""
        k = micro_batches or self.args.accumulate
        return 1e3 * replay(self.recorded[row_id, d].events, self.hardware, d, k, exchange_each).seconds / k

    def sizes(self, base):
        """-> RowIds of a size of bucket; few rows have buckets."""
        caps_mb = [self.args.bucket_cap_mb] if self.args.bucket_cap_mb else CAPS_MB
        return [RowId(base, cap_mb) for cap_mb in (caps_mb if base in BUCKETED else [None])]

    def is_bucket(self, row_id):
        """Two buffers take at most half of what whole gradients would: stage 3 keeps those, and has no buckets."""
        held = self.recorded[row_id, self.args.world].held
        return held["buffers"] <= held["parameters"] / 2

    def tuned(self, base):
        """-> the smallest size with which it is as fast as with any, of those that are buckets and fit."""
        sizes = [row_id for row_id in self.sizes(base) if self.is_bucket(row_id)] or self.sizes(base)
        fitting = [one for one in sizes if self.recorded[one, self.args.world].peak <= self.device_bytes] or sizes
        ms = {row_id: self.ms(row_id, self.args.world) for row_id in fitting}
        return next(row_id for row_id in fitting if ms[row_id] <= AS_FAST * min(ms.values()))

    def row(self, row_id, ranks):
        counted, configuration = {d: self.recorded[row_id, d] for d in ranks}, catalogue.find(*row_id)
        world = self.args.world
        last, shared = counted[world], f" + {configuration.shared:g}/d" if configuration.shared else ""
        too_few = [d for d in ranks if counted[d].peak > self.device_bytes]
        return PlanRow(
            *row_id, formula=f"{configuration.whole:g}{shared}{' + b' * (row_id.base in STAGE_4)}", held=last.held,
            padding=sum(last.held.values()) - last.theory, peak=last.peak,
            fits_from=next((d for d in ranks if d > max(too_few, default=0)), 0),
            bytes_per_param={d: sum(one.held.values()) / one.numel for d, one in counted.items()},
            bytes_per_param_theory={d: one.theory / one.numel for d, one in counted.items()},
            ms={d: self.ms(row_id, d) for d in ranks}, once_ms=self.ms(row_id, world, MICRO_BATCHES),
            each_ms=self.ms(row_id, world, MICRO_BATCHES, exchange_each=True),
            step=replay(last.events, self.hardware, world, self.args.accumulate))


def plan(args, workers):
    """-> PlanResult: counts and times at several d, and the step at --world. Rows are run dry by `workers`."""
    planner, bases, spec = Planner(args), ROWS[args.dtype], args.spec
    ranks = [*(d for d in RANKS if d < args.world), args.world]
    cost = workers.submit(alone.cost_of, spec, DTYPES[args.dtype], args.batch_size, args.sequence_length).result()

    def run(tasks):
        found = {(row_id, d): workers.submit(alone.record, row_id, spec, d, cost) for row_id, d in tasks}
        planner.recorded.update((task, one.result()) for task, one in found.items())
    run((row_id, args.world) for base in bases for row_id in planner.sizes(base))
    row_ids = [planner.tuned(base) for base in bases]
    run((row_id, d) for row_id in row_ids for d in ranks[:-1])
    asked = {key: value for key, value in vars(args).items() if key not in ("json", "check", "spec")}
    conditions = {**asked, "parameters": planner.recorded[row_ids[-1], args.world].numel,
                  "activations": cost.activations, "efficiency": EFFICIENCY, **planner.hardware._asdict(),
                  "made": made_here()}
    return PlanResult(conditions, [planner.row(row_id, ranks) for row_id in row_ids], [
        PlanSize(*row_id, planner.ms(row_id, args.world), planner.recorded[row_id, args.world].peak,
                 planner.is_bucket(row_id)) for base in bases if base in STAGE_4 for row_id in planner.sizes(base)])


# The check, modelled time beside runs. Of two hosts on one machine: bytes of memory a second for one core, seconds a
# message, TCP's payload in a full packet.
HOST_MEMORY_RATE, HOST_LATENCY, PAYLOAD = 5e9, 2e-4, 1448 / 1514
cost_of, record = map(functools.lru_cache, (alone.cost_of, alone.record))


def two_hosts():
    """This project's own runs, at each rate, and of sweeps of bucket size -> list of ModelledRuns."""
    found = []
    for result, table in ((one, table) for one in saved.at_all_rates() for table in (one, one.sweep) if table):
        line, c, alone_ms = result.conditions, table.conditions, result.timed("compute only").median_ms
        spec = models.NAMED[c.model]
        cost = cost_of(spec, "float32", c.batch_size, c.sequence_length)
        computing = record(RowId("compute only"), spec, 1, cost).events
        hosts = calibrated("flops", lambda one: replay(computing, one, 1).seconds, Hardware(
            1.0, HOST_MEMORY_RATE, math.inf, PAYLOAD * line.bits_per_second / 8, per_node=1,
            latency_between=HOST_LATENCY, backend="exchange"), alone_ms / 1e3)
        for row in sorted(table.rows, key=lambda row: row.name):
            if row.rounds_ms and row.base in ROWS["fp32"]:
                events = record(row.row_id, spec, c.ranks, cost, GlooTransport).events
                found.append(ModelledRun(line.rate, *row.row_id, row.median_ms,
                                         1e3 * replay(events, hosts, c.ranks).seconds))
    return found


# LLaMA-13B, sequences of 2048 on 8 x A100-80GB a node, tokens/s a GPU: (optimizer, GPUs, sequences a step, sequences a
# micro-batch, tokens/s). Megatron-LLaMA's README; neither it nor the user's issue 22 there says how many GPUs share
# layers, and the README not how large a step is: both are assumed, as in LLaMA's paper and in issue 27 there.
PUBLISHED = [("overlapped", 256, 2048, 4, 1890), ("distributed", 256, 2048, 4, 1630),
             ("overlapped", 512, 2048, 4, 1845), ("distributed", 512, 2048, 4, 1430)]
A_USERS = [("distributed", 128, 1024, 2, 1885.8), ("distributed", 128, 2048, 2, 2045.4),
           ("overlapped", 128, 1024, 2, 1126.3), ("overlapped", 128, 2048, 2, 1142.1)]
SHARING, LENGTH = 2, 2048


def step_of(run, hardware, is_hidden=True):
    """-> modelled seconds. Our stage 4 stands for the overlapped optimizer, which sends fp32 gradients after each
    micro-batch; stage 3 for the distributed one. Not `is_hidden`: each message is waited for at once."""
    kind, gpus, sequences, batch, _ = run
    d, spec, events = gpus // SHARING, models.NAMED["13b"]._replace(tensor_parallel=SHARING), []
    row_id = {"overlapped": RowId("stage 4 bf16", 400), "distributed": RowId("stage 3 bf16/fp32")}[kind]
    for event in record(row_id, spec, d, cost_of(spec, "bfloat16", batch, LENGTH)).events:
        is_fp32 = kind == "overlapped" and event.kind == "reduce_scatter"
        events.append(event._replace(n_bytes=2 * event.n_bytes) if is_fp32 else event)
        events += [event._replace(what="wait")] if event.what == "launch" and not is_hidden else []
    return replay(events, hardware, d, sequences // d // batch, kind == "overlapped").seconds


def published():
    """-> hardware and published runs of results.Check."""
    def tokens(run):  # in a step, for each GPU
        return run[2] * LENGTH / run[1]

    def seconds(run):
        return tokens(run) / run[-1]

    def rows(what, runs, hardware, is_hidden=True):
        return [PublishedRun(what, *run, tokens(run) / step_of(run, hardware, is_hidden)) for run in runs]
    less, more = A_USERS[:2]  # these differ in micro-batches alone, which send nothing: computing and the line apart
    a100 = DEVICES["a100"]._replace(sharing=SHARING)
    theirs = calibrated("flops", lambda one: step_of(PUBLISHED[0], one), a100, seconds(PUBLISHED[0]))
    users = calibrated("flops", lambda one: step_of(more, one) - step_of(less, one), a100,
                       seconds(more) - seconds(less))
    users = calibrated("between", lambda one: step_of(less, one), users, seconds(less))
    return ([(one.flops / 1e12, one.between / 1e9) for one in (theirs, users)],
            [*rows("calibrated", PUBLISHED[:1], theirs), *rows("predicted", [*PUBLISHED[1:], *A_USERS], theirs),
             *rows("calibrated, user's", A_USERS[:2], users), *rows("predicted, user's", A_USERS[2:], users),
             *rows("none hidden", A_USERS[2:], users, False)])


fail = functools.partial(command_line.fail, "plan")
SIZE = number(float, 0.001, 10**6)


def gigabytes(text):
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
        result = plan(args, workers)
        if args.check:
            here, elsewhere = workers.submit(two_hosts), workers.submit(published)
            result.check = Check(here.result(), *elsewhere.result())
    texts = [*(f"{sheet_text(sheet)}\n" for sheet in plan_sheets(result)),
             pictures.text(pictures.planned_steps(result)[0])]
    command_line.write_and_show(args.json, saved.to_json(result), fail, lambda: print("\n".join(texts)))


if __name__ == "__main__":
    main()
