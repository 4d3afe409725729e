"""Rows run dry and replayed: what a rank would hold, how long a step would take."""

import functools
from types import SimpleNamespace

from harness.plan import dry_run, published_runs
from harness.plan.replay import Hardware, replay
from harness.rows import catalogue
from harness.rows.choice import Choice
from harness.rows.plan_results import PlanConditions, PlanResult, PlanRow, PlanSize

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
ROWS = {"fp32": [*catalogue.LADDER, "owner reduce"], "bf16": [row.name for row in catalogue.PLANNED]}
# By dtype: the row that is ours, the one that sends to owners, and DDP.
COMPARED = {"fp32": ("stage 4 overlap", "owner reduce", "ddp"),
            "bf16": ("stage 4 bf16", "owner reduce bf16", "ddp bf16")}
HYBRID = catalogue.PLANNED[-1].name
STAGE_4, BUCKETED = ({COMPARED[dtype][i] for dtype in DTYPES for i in places} | {HYBRID} for places in ((0,), (0, 2)))
RANKS = (1, 8, 64, 1024)  # that all rows are counted at
CAPS_MB = (100, 400, 1600, 6400)  # buckets that are tried beside the default
AS_FAST = 1.02  # times that differ by less are equal: the model is no better than that
EFFICIENCY = 0.4  # what computing reaches of the device's FLOPs
# As makers state them: 16-bit FLOPs, bytes of memory, bytes to a neighbour in the node, bytes of a node to others.
DEVICES = {"h100": Hardware(989e12, 3.35e12, 450e9, 400e9), "a100": published_runs.A100}


class Planner:
    """Runs rows dry, in processes of their own, and replays them: `workers` is a ProcessPoolExecutor.

    `recorded`: (Choice, d) -> dry_run.Recorded, of all that were run.
    """

    def __init__(self, args, workers):
        self.args, self.workers, self.recorded, device = args, workers, {}, DEVICES[args.device]
        self.spec, self.room = args.spec._replace(tensor_parallel=args.tensor_parallel), args.device_memory * 1e9
        flops = device.flops * EFFICIENCY / (2 if args.dtype == "fp32" else 1)  # TF32 is half as fast as 16 bits
        self.hardware = device._replace(flops=flops, sharing=args.tensor_parallel, trees=args.trees)
        self.cost = workers.submit(dry_run.cost_of, self.spec, DTYPES[args.dtype], args.batch_size,
                                   args.sequence_length).result()

    def run(self, choices, ranks):
        """Each row on each number of ranks."""
        found = {(choice, d): self.workers.submit(dry_run.record, choice, self.spec, d, self.cost)
                 for choice in choices for d in ranks if (choice, d) not in self.recorded}
        self.recorded.update((task, one.result()) for task, one in found.items())

    def fits(self, choice, d):
        return self.recorded[choice, d].peak <= self.room

    def is_bucket(self, choice):
        """Two buffers take at most half of what whole gradients would: stage 3 keeps those, and has no buckets."""
        held = self.recorded[choice, self.args.world].held
        return held["buffers"] <= held["parameters"] / 2

    def ms(self, choice, d, micro_batches=None, exchange_each=False, **hardware):
        """Of a micro-batch, of which a step has `micro_batches`, or else --accumulate. `hardware`: what is replaced."""
        k, hardware = micro_batches or self.args.accumulate, self.hardware._replace(**hardware)
        return 1e3 * replay(self.recorded[choice, d].events, hardware, d, k, exchange_each).seconds / k

    def sizes(self, base):
        """-> Choices of a size of bucket, the default first; few rows have buckets."""
        caps_mb = [self.args.bucket_cap_mb] if self.args.bucket_cap_mb else [None, *CAPS_MB]
        return [Choice(base, cap_mb) for cap_mb in (caps_mb if base in BUCKETED else [None])]

    def tuned(self, base, **hardware):
        """-> the smallest size with which it is as fast as with any, of those that are buckets and fit."""
        sizes = [choice for choice in self.sizes(base) if self.is_bucket(choice)] or self.sizes(base)
        fitting = [choice for choice in sizes if self.fits(choice, self.args.world)] or sizes
        ms = {choice: self.ms(choice, self.args.world, **hardware) for choice in fitting}
        return next(choice for choice in fitting if ms[choice] <= AS_FAST * min(ms.values()))


def plan(planner):
    """-> PlanResult: counts at several d, and the step at --world."""
    args = planner.args
    ranks = sorted({d for d in RANKS if d < args.world} | {args.world})
    planner.run([choice for base in ROWS[args.dtype] for choice in planner.sizes(base)], [args.world])  # all at once
    choices = [planner.tuned(base) for base in ROWS[args.dtype]]
    planner.run(choices, ranks)
    apart = ("json", "svg", "check", "advise", "spec", "trees")
    asked = {key: value for key, value in vars(args).items() if key not in apart}
    numel = planner.recorded[choices[-1], args.world].numel
    conditions = PlanConditions(**asked, parameters=numel, activations=planner.cost.activations,
                                efficiency=EFFICIENCY, **planner.hardware._asdict())
    tried = [choice for base in ROWS[args.dtype] if base in STAGE_4 for choice in planner.sizes(base)]
    sizes = [PlanSize(*choice, **both_ms(planner, choice), peak=planner.recorded[choice, args.world].peak,
                      is_bucket=planner.is_bucket(choice)) for choice in tried]
    return PlanResult(conditions, [plan_row(planner, choice, ranks) for choice in choices], sizes)


def both_ms(planner, choice):
    return {f"in_{name}_ms": planner.ms(choice, planner.args.world, trees=trees)
            for name, trees in (("rings", False), ("trees", True))}


def plan_row(planner, choice, ranks):
    counted = {d: planner.recorded[choice, d] for d in ranks}
    last, formula = counted[planner.args.world], functools.partial(catalogue.find(*choice).bytes_per_param, 1)
    all_of_it, of_two = (formula(d, SimpleNamespace(bucket_buffer_bytes=0)) for d in (1, 2))
    shared, whole = 2 * (all_of_it - of_two), 2 * of_two - all_of_it
    return PlanRow(
        *choice, formula=f"{whole:g}{f' + {shared:g}/d' * bool(shared)}{' + b' * (choice.base in STAGE_4)}",
        held=last.held, padding=sum(last.held.values()) - last.theory, peak=last.peak,
        fits_from=next((d for d in ranks if all(planner.fits(choice, more) for more in ranks if more >= d)), 0),
        bytes_per_param={d: sum(one.held.values()) / one.numel for d, one in counted.items()},
        bytes_per_param_theory={d: one.theory / one.numel for d, one in counted.items()},
        **both_ms(planner, choice),
        step=replay(last.events, planner.hardware, planner.args.world, planner.args.accumulate))
