"""Checks the time model of make plan: modelled seconds beside runs of this project, and beside published runs."""

import functools
import math
import statistics
from dataclasses import dataclass
from typing import NamedTuple

from harness import alone, models
from harness import results as saved
from harness import rows as catalogue
from harness.replay import DEVICES, Hardware, calibrated, replay
from harness.rows import HasRowId, RowId
from harness.tables import column, names, sheet_of
from stage4_overlap.transport import GlooTransport

ROWS = [*catalogue.LADDER, "owner reduce"]  # of the runs on two hosts
cost_of = functools.lru_cache(alone.cost_of)
record = functools.lru_cache(alone.record)


# ------------------------------------------------------------------------------------------- Two hosts on one machine


MEMORY_RATE = 5e9  # bytes per second, for one core
LATENCY_S = 2e-4  # of a message
PAYLOAD = 1448 / 1514  # TCP's bytes in a full packet


@dataclass
class ModelledRun(HasRowId):
    """A step on two hosts. `rate`: of the link between them."""
    rate: str
    base: str
    bucket_mb: float | None
    measured_ms: float
    modelled_ms: float

    @property
    def error(self):
        return self.modelled_ms / self.measured_ms - 1


def two_hosts():
    """Model this project's own runs, at each rate, and of sweeps of bucket size. Returns a list of ModelledRuns."""
    runs = []
    for result in saved.at_all_rates():
        alone_s = result.timed(catalogue.COMPUTE_ONLY).median_ms / 1e3
        for table in (result, result.sweep):
            if table:
                runs += runs_of(table, result.conditions, alone_s)
    return runs


def runs_of(table, link, alone_s):
    """Model the rows of a Result or Sweep on a `link`, calibrated by the seconds of computing alone."""
    conditions = table.conditions
    spec = models.NAMED[conditions.model]
    cost = cost_of(spec, "float32", conditions.batch_size, conditions.sequence_length)
    computing = record(RowId(catalogue.COMPUTE_ONLY), spec, 1, cost).events
    hosts = Hardware(1.0, MEMORY_RATE, math.inf, PAYLOAD * link.bits_per_second / 8, per_node=1,
                     latency_between=LATENCY_S, backend="exchange")
    hosts = calibrated("flops", lambda hardware: replay(computing, hardware, 1).seconds, hosts, alone_s)
    runs = []
    for row in sorted(table.rows, key=lambda row: row.name):
        if row.rounds_ms and row.base in ROWS:
            events = record(row.row_id, spec, conditions.ranks, cost, GlooTransport).events
            modelled_ms = 1e3 * replay(events, hosts, conditions.ranks).seconds
            runs.append(ModelledRun(link.rate, *row.row_id, row.median_ms, modelled_ms))
    return runs


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
    row_id = RowId(catalogue.STAGE_4_BF16, 400) if is_overlapped else RowId("stage 3 bf16/fp32")
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


# --------------------------------------------------------------------------------------------------------- Its tables


def add_to(report, own_runs, calibration):
    """Add the check to a Report of make plan: its two tables, and figures for sentences of a page."""
    report.sheets["two hosts"] = two_hosts_sheet(own_runs)
    report.sheets["published"] = published_sheet(calibration.runs)
    report.figures |= {
        "runs": len(own_runs), "runs within 10 %": sum(abs(run.error) <= 0.1 for run in own_runs),
        "publisher's TFLOP/s": calibration.publishers.flops / 1e12, "user's TFLOP/s": calibration.users.flops / 1e12,
        "user's GB/s of a node": calibration.users.between / 1e9}


def two_hosts_sheet(runs):
    """Make the table of the errors of each row, over all links and sizes of buckets."""
    errors = {}
    for run in runs:
        errors.setdefault(run.base, []).append(run.error)
    return sheet_of(
        "Two hosts: error of the model, all links and sizes of buckets", errors, {
            "name": names(str), "steps": column("steps", lambda base: len(errors[base])),
            "least": column("from\nerror", lambda base: min(errors[base]), "modelled", "+.1%"),
            "median": column("median\nerror", lambda base: statistics.median(errors[base]), "modelled", "+.1%"),
            "most": column("to\nerror", lambda base: max(errors[base]), "modelled", "+.1%")})


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
