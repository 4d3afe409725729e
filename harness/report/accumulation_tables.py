"""Several micro-batches a step, and communication's share of it."""

import statistics
from typing import NamedTuple

from harness.report.sheet import Sheet
from harness.rows.choice import Choice


def accumulation_sheet(accumulation):
    """`accumulation`: AccumulatedRows."""
    def spread(times):
        return f"{statistics.median(times):.0f} ({min(times):.0f}–{max(times):.0f})"
    ratios = [[each / once for once, each in zip(one.no_sync_ms, one.each_ms)] for one in accumulation]
    noise = max(abs(ratio - 1) for ratio in ratios[0])  # with one micro-batch both ways are the same
    medians = [statistics.median(of_rounds) for of_rounds in ratios]
    rows = [[str(one.micro_batches), spread(one.no_sync_ms), spread(one.each_ms),
             f"{median:.2f}{'~' * (abs(median - 1) <= noise)}"] for one, median in zip(accumulation, medians)]
    counts = [one.micro_batches for one in accumulation]
    dearer = [count for i, count in enumerate(counts) if min(medians[i:]) > 1 + noise]
    where = f"from {dearer[0]} micro-batches a step on," if dearer else f"no number up to {counts[-1]} from which on"
    return Sheet(
        "Accumulation in stage 4, ms a micro-batch",
        [("micro-batches\na step", ""), ("in no_sync:\none exchange", "measured"),
         ("without:\nan exchange each", "measured"), ("x no_sync", "measured")], rows,
        ["Median (min–max). In no_sync whole gradients stay on each rank, 4 bytes a parameter in fp32; without, they "
         "are reduced into the shard.",
         f"Break-even: {where} an exchange each costs more time than the noise of this run.",
         f"~ within that noise: with one micro-batch both are the same, and were up to {noise:.0%} apart in a round."])


class Share(NamedTuple):
    """What communication takes of a step of DDP, stage 3, stage 4: medians over rounds."""
    DDP: float
    stage_3: float
    stage_4: float


SHOWN = ("DDP", "stage 3", "stage 4")  # the same, to be shown


def shares(one):
    """Of an AccumulatedRow -> Share."""
    return Share(*(statistics.median(1 - alone / mine for alone, mine in zip(one.compute_ms, times))
                   for times in (one.ddp_ms, one.stage3_ms, one.no_sync_ms)))


def has_shares(accumulation):
    """Whether more than stage 4 was timed."""
    return accumulation is not None and all(row.compute_ms for row in accumulation.rows)


def share_sheet(accumulation):
    """Of an Accumulation that has the time of computing alone."""
    rows = [[str(one.micro_batches), f"{statistics.median(one.compute_ms):.0f}",
             *(f"{share:.0%}" for share in shares(one))] for one in accumulation.rows]
    return Sheet(
        "What communication takes of a step, one exchange a step",
        [("micro-batches\na step", ""), ("compute only,\nms a micro-batch", "measured"),
         *((f"{name}\n", "measured") for name in SHOWN)], rows,
        ["1 - compute only / this row, of the time of a micro-batch; medians, round by round. "
         f"DDP: the row {Choice('ddp', accumulation.ddp_mb).name}."])
