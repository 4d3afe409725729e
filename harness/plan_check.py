"""Checks the time model of make plan: modelled seconds beside published runs."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from harness import alone, models, row_names
from harness.replay import DEVICES, Hardware, calibrated, replay
from harness.row_names import RowId
from harness.tables import column, names, sheet_of

cost_of = functools.lru_cache(alone.cost_of)
record = functools.lru_cache(alone.record)


# -------------------------------------------------------------------------------------------------- Published runs


class Run(NamedTuple):
    """A published run of LLaMA-13B, sequences of 2048 tokens on nodes of 8 x A100-80GB."""
    optimizer: str  # overlapped, or distributed
    gpus: int
    sequences: int  # per step
    batch: int  # sequences of a micro-batch
    tokens_per_s: float  # and GPU

    @property
    def tokens(self):
        """Return tokens per step and GPU."""
        return self.sequences * LENGTH / self.gpus

    @property
    def seconds(self):
        return self.tokens / self.tokens_per_s


# Megatron-LLaMA's README; neither it nor the user's issue 22 there says how many GPUs share layers, and the README not
# how large a step is: both are assumed, as in LLaMA's paper and in issue 27 there.
PUBLISHED = [Run("overlapped", 256, 2048, 4, 1890), Run("distributed", 256, 2048, 4, 1630),
             Run("overlapped", 512, 2048, 4, 1845), Run("distributed", 512, 2048, 4, 1430)]
OF_USER = [Run("distributed", 128, 1024, 2, 1885.8), Run("distributed", 128, 2048, 2, 2045.4),
           Run("overlapped", 128, 1024, 2, 1126.3), Run("overlapped", 128, 2048, 2, 1142.1)]
SHARING, LENGTH = 2, 2048  # GPUs that share a layer; tokens of a sequence


@dataclass
class PublishedRun:
    """A Run, and what was modelled for it. `calibration`: how the hardware was calibrated."""
    calibration: str
    run: Run
    modelled: float  # tokens per second and GPU

    @property
    def error(self):
        return self.modelled / self.run.tokens_per_s - 1


def step_of(run, hardware, is_hidden=True):
    """Model the seconds of a step. Not `is_hidden`: each message is waited for at once.

    Our stage 4 stands for the overlapped optimizer, which sends fp32 gradients after each micro-batch; stage 3 stands
    for the distributed one.
    """
    is_overlapped = run.optimizer == "overlapped"
    row_id = RowId(row_names.STAGE_4_BF16, 400) if is_overlapped else RowId("stage 3 bf16/fp32")
    d = run.gpus // SHARING
    spec = models.NAMED["13b"]._replace(tensor_parallel=SHARING)
    events = []
    for event in record(row_id, spec, d, cost_of(spec, "bfloat16", run.batch, LENGTH)).events:
        is_fp32 = is_overlapped and event.kind == "reduce_scatter"
        events.append(event._replace(n_bytes=2 * event.n_bytes) if is_fp32 else event)
        if event.what == "launch" and not is_hidden:
            events.append(event._replace(what="wait"))
    return replay(events, hardware, d, run.sequences // d // run.batch, is_overlapped).seconds


class Calibration(NamedTuple):
    """Hardware as calibrated by the publisher's runs and by the user's, and all PublishedRuns."""
    publishers: Hardware
    users: Hardware
    runs: list


def published():
    """Calibrate two clusters, and model all published runs. Returns a Calibration."""
    def modelled(calibration, runs, hardware, is_hidden=True):
        return [PublishedRun(calibration, run, run.tokens / step_of(run, hardware, is_hidden)) for run in runs]
    small, large, *overlapped = OF_USER  # the first two differ in micro-batches alone, which send nothing
    a100 = DEVICES["a100"]._replace(sharing=SHARING)
    publishers = calibrated("flops", lambda hardware: step_of(PUBLISHED[0], hardware), a100, PUBLISHED[0].seconds)
    users = calibrated("flops", lambda hardware: step_of(large, hardware) - step_of(small, hardware), a100,
                       large.seconds - small.seconds)
    users = calibrated("between", lambda hardware: step_of(small, hardware), users, small.seconds)
    return Calibration(publishers, users, [
        *modelled("calibrated", PUBLISHED[:1], publishers), *modelled("predicted", PUBLISHED[1:] + OF_USER, publishers),
        *modelled("calibrated, user's", [small, large], users), *modelled("predicted, user's", overlapped, users),
        *modelled("none hidden", overlapped, users, is_hidden=False)])


# ---------------------------------------------------------------------------------------------------------- Its table


def add_to(report, calibration):
    """Add the check to a Report of make plan: its table, and figures for sentences of a page."""
    report.sheets["published"] = published_sheet(calibration.runs)
    report.figures |= {
        "publisher's TFLOP/s": calibration.publishers.flops / 1e12, "user's TFLOP/s": calibration.users.flops / 1e12,
        "user's GB/s of a node": calibration.users.between / 1e9}


def published_sheet(runs):
    """Make the table of PublishedRuns."""
    return sheet_of(
        "LLaMA-13B on 8 x A100 a node: tokens/s a GPU", runs, {
            "calibration": names("calibration"), "optimizer": names(lambda run: run.run.optimizer),
            "gpus": column("GPUs", lambda run: run.run.gpus),
            "sequences": column("sequences\na step", lambda run: run.run.sequences),
            "published": column("", lambda run: run.run.tokens_per_s, "published", ",.0f"),
            "modelled": column("", "modelled", "modelled", ",.0f"),
            "error": column("error", "error", "modelled", "+.1%")},
        ["What is assumed, and calibrated on which rows: results/methods.md."])
