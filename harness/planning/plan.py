"""Plans before you rent: what a rank of 1024 holds, how long a step takes, how far estimates are from real runs."""
# The words of this file:
#   row      a way to train; the catalogue, harness/training/rows.py, lists all rows
#   RowId    the name of a row, and maybe the size of a bucket
#   bucket   the unit in which DDP, stage 4 and the hybrid, a variant of stage 4, send gradients
#   stage    an optimizer of this project, in a folder stage*/
#   device   a GPU, with a rank; a rank is a process that trains. "A rank of 1024" is any one of 1024 ranks
#   Report   what is saved and shown: tables, and `figures`, numbers for the sentences of a page
#   dry run  alone.py trains a row as one rank of many, on tensors without memory: it counts the bytes that the rank
#            holds, and lists what the rank does
#   replay   replay.py models how long the listed events take on given machines

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

fail = functools.partial(command_line.fail, "plan")  # ends the program, with a message and exit code 2
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}  # value of --dtype -> torch's name
DEVICE_BYTES = 80e9  # memory of an H100, and of an A100


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
        help="of stage 4, the hybrid and DDP (default: Megatron-LM's)")
    add("--check", action="store_true", help="also compare modelled with published runs")
    add("--json", type=Path, metavar="PATH", help="write the result there as well")
    return parser.parse_args()


if __name__ == "__main__":
    options()  # reports a mistake at once: the imports below load torch, which takes seconds

from harness.planning import alone
from harness.planning.replay import DEVICES, ModelledStep, check, replay
from harness.publishing.tables import Report, column, made_here, name_column, save_and_show, sheet_of
from harness.training import rows as catalogue
from harness.training.rows import RowId

# Value of --dtype -> names of the rows that are planned. LADDER: DDP and the four stages. "owner reduce": each gradient
# is sent only to the rank that updates its parameter. PLANNED: all rows with 16-bit parameters.
ROWS = {"fp32": [*catalogue.LADDER, "owner reduce"], "bf16": [row.name for row in catalogue.PLANNED]}
# Names of the rows with buckets, whose size may be chosen.
BUCKETED = {catalogue.OVERLAP, catalogue.STAGE_4_BF16, catalogue.HYBRID_BF16, catalogue.REFERENCE, "ddp bf16"}
MICRO_BATCHES = 8  # in a step that adds up the gradients of several micro-batches
EFFICIENCY = 0.4  # assumed: computing reaches 40% of the FLOP/s that the device's maker states


class PlanRow(NamedTuple):
    """A way to train, with its counted and modelled numbers."""
    name: str
    counted: alone.Recorded  # what a dry run has counted
    step: ModelledStep  # a step of one micro-batch
    once: ModelledStep  # a step of MICRO_BATCHES, if gradients are exchanged once
    each: ModelledStep  # a step of MICRO_BATCHES, if gradients are exchanged after each micro-batch


def hardware_of(args):
    """Return the Hardware that the options ask for, with the FLOP/s that computing reaches."""
    hardware = DEVICES[args.device]
    flops = hardware.flops * EFFICIENCY
    if args.dtype == "fp32":  # matrix products are then assumed to be in TF32, at half the rate of 16 bits
        flops /= 2
    # sharing: how many devices share a layer. Their data-parallel groups compete for the links of a node.
    return hardware._replace(flops=flops, sharing=args.tensor_parallel)


def default_bucket_mb(d, dtype):
    """Return Megatron-LM's default size of a bucket on d data-parallel ranks, in whole MiB.

    The documentation of Megatron-LM's DistributedDataParallelConfig.bucket_size gives the default as
    max(40000000, 1000000 * d) parameters.
    """
    n_params = max(40_000_000, 1_000_000 * d)
    bytes_per_param = 4 if dtype == "fp32" else 2
    return round(n_params * bytes_per_param / 2**20)


def make_report(args, config, workers):
    """Count and model all rows. Returns a Report.

    `workers`: a pool of processes, in which the dry runs run. `config`: the sizes of the model.
    """
    # What a micro-batch costs: bytes of activations, and FLOPs. Counted in the pool, where garbage collection is off.
    cost = workers.submit(alone.cost_of, config, DTYPES[args.dtype], args.batch_size, args.sequence_length).result()
    hardware = hardware_of(args)
    bucket_mb = args.bucket_cap_mb or default_bucket_mb(args.world, args.dtype)
    row_ids = [RowId(name, bucket_mb if name in BUCKETED else None) for name in ROWS[args.dtype]]
    run_dry = functools.partial(alone.record, config=config, d=args.world, cost=cost)
    rows = []
    for row_id, counted in zip(row_ids, workers.map(run_dry, row_ids)):
        step = replay(counted.events, hardware)
        once = replay(counted.events, hardware, MICRO_BATCHES)
        each = replay(counted.events, hardware, MICRO_BATCHES, exchange_each=True)
        rows.append(PlanRow(row_id.base, counted, step, once, each))
    buckets = f"buckets of {bucket_mb:g} MiB"
    # In how many rows the peak fits into a device's memory. A sentence of docs/plan.md says it.
    n_fitting = sum(row.counted.peak <= DEVICE_BYTES for row in rows)
    sheets = {"memory": memory_sheet(args, rows, buckets, cost.activations),
              "time": time_sheet(args, rows, buckets, hardware)}
    # made_here: this machine, the release of torch, the commit and the date.
    return Report(made_here(), sheets, figures={"fitting": f"{n_fitting}"})


# -------------------------------------------------------------------------------------------------- The plan's tables
# `column` describes a column by a title, a function of a row (a PlanRow), where the numbers come from, and their
# format.


def held_column(kind):
    """Describe the column of the bytes of this kind, such as "gradients", that a rank holds."""
    return column(kind.replace(" ", "\n"), lambda row: row.counted.held[kind], "counted", ".2f", unit=1e9)


def padding(row):
    """Return how many bytes a rank holds beyond `theory`, which the row's formula in the catalogue gives."""
    return sum(row.counted.held.values()) - row.counted.theory


def memory_sheet(args, rows, buckets, activations):
    """Make the table of the bytes that a rank holds.

    `buckets`: the size of buckets in words. `activations`: bytes that the activations of a micro-batch take.
    """
    any_row = rows[0].counted  # all rows have the same model and the same kinds of memory
    return sheet_of(
        f"GB on a rank of {args.world}: {args.model}, {any_row.numel:,} parameters a rank, {buckets}", rows, {
            "name": name_column(),
            **{kind: held_column(kind) for kind in any_row.held},
            "padding": column("padding", padding, "counted", ".2f", unit=1e9),
            "activations": column("activ.", lambda row: activations, "counted", ".2f", unit=1e9),
            "peak": column("peak", lambda row: row.counted.peak, "counted", ".2f", unit=1e9)},
        ["After a step, on rank 0. main parameters: fp32 copies of 16-bit parameters. state: AdamW's moments. padding: "
         f"what is more than the formula. activ.: of a micro-batch of {args.batch_size} x {args.sequence_length}. "
         f"peak: the most at one moment of a step. A device has {DEVICE_BYTES / 1e9:g} GB; torch's allocator takes "
         "more than the peak, and stage 4 holds whole gradients, too, if it accumulates in no_sync(). DDP, stage 4 and "
         "the hybrid have buckets, by default of Megatron-LM's size."])


def time_sheet(args, rows, buckets, hardware):
    """Make the table of the time of a step. `buckets`: the size of buckets in words.

    Its note says "Nobody is late": no rank waits for a slower rank. "One each": one exchange each micro-batch.
    """
    n_devices = args.world * args.tensor_parallel
    tokens = args.batch_size * args.sequence_length / args.tensor_parallel  # in a step, for each device
    return sheet_of(
        f"A step of {args.model} on {n_devices} x {args.device}, {buckets}", rows, {
            "name": name_column(),
            "ms": column("ms\na step", lambda row: row.step.seconds, "modelled", ",.0f", unit=1e-3),
            "exposed": column("exposed\nms", lambda row: row.step.exposed_seconds, "modelled", ",.0f", unit=1e-3),
            "tokens": column("tokens/s\na device", lambda row: tokens / row.step.seconds, "modelled", ",.0f"),
            # The next two columns share the heading "1 of 8". Both are the ms of one of eight micro-batches: "once" if
            # gradients are exchanged once a step, "each" if they are exchanged after each micro-batch.
            "once": column(f"1 of {MICRO_BATCHES}:\nonce", lambda row: row.once.seconds / MICRO_BATCHES, "modelled",
                           ",.0f", unit=1e-3),
            "each": column("\neach", lambda row: row.each.seconds / MICRO_BATCHES, "modelled", ",.0f", unit=1e-3),
            "peak": column("GB at\nthe peak", lambda row: row.counted.peak, "counted", ".1f", unit=1e9)},
        [f"Assumed: {hardware.flops / 1e12:.0f} TFLOP/s, {EFFICIENCY:.0%} of what the maker states, "
         f"{hardware.memory_rate / 1e12:.2f} TB/s of memory, rings of {hardware.in_node / 1e9:.0f} GB/s in a node and "
         f"{hardware.between / 1e9:.0f} GB/s between nodes of {hardware.per_node}, "
         f"{hardware.latency_in_node * 1e6:.0f} and {hardware.latency_between * 1e6:.0f} µs a hop. Nobody is late, "
         "Python takes no time, tensor parallelism sends nothing. One micro-batch a step. 1 of 8: ms of one of eight "
         "micro-batches, with one exchange a step, as in no_sync(), or with one each."])


# --------------------------------------------------------------------------------------------------------- The program


def parse():
    """Return the options, and the config of the model: its sizes. Wrong options end the program."""
    args = options()
    config = PLANNED_MODELS[args.model]
    if args.tensor_parallel > 1:
        if not can_share_layers(config, args.tensor_parallel):
            fail(f"--tensor-parallel {args.tensor_parallel}: the heads of {args.model} can't be shared out so")
        config = config._replace(tensor_parallel=args.tensor_parallel)
    # A LLaMA has no longest sequence: it takes any length.
    longest = getattr(config, "block_size", args.sequence_length)
    if args.sequence_length > longest:
        fail(f"--sequence-length {args.sequence_length}: {args.model} takes at most {longest}")
    if args.json:
        command_line.check_writable("--json", args.json, fail)
    return args, config


def can_share_layers(config, n_ranks):
    """Return whether each of `n_ranks` ranks can have as many of a layer's attention heads as any other rank."""
    return isinstance(config, LlamaConfig) and config.n_heads % n_ranks == 0 and config.n_kv_heads % n_ranks == 0


def main():
    args, config = parse()
    # Each process of the pool begins with gc.disable(), because garbage collection would take a fifth of the time of a
    # dry run.
    with ProcessPoolExecutor(min(4, os.cpu_count()), multiprocessing.get_context("spawn"), gc.disable) as workers:
        report = make_report(args, config, workers)
        if args.check:
            report.sheets["published"], figures = workers.submit(check).result()
            report.figures.update(figures)
    save_and_show(args.json, report, fail)


if __name__ == "__main__":
    main()
