"""The curve between its points: rows run dry, and replayed on two hosts with a line of any rate."""


from harness.plan import dry_run, models
from harness.plan.calibration import calibrated
from harness.plan.replay import replay
from harness.plan.two_host_runs import ALONE, line_of, load
from harness.report.curve import CURVES, TUNED
from harness.rows import bucket_sizes
from harness.rows.choice import Choice
from harness.rows.plan_results import CurveLine

N_POINTS = 25  # of a line, at equal ratios of rates
NOT_RUN_DRY = ("fsdp2",)  # it needs tensors with values


def curve_lines():
    """-> list of CurveLines. Computing is calibrated on *compute only* of the run at the slowest line."""
    results = sorted(load(), key=lambda result: result.conditions.bits_per_second)
    c, rates = results[0].conditions, [result.conditions.bits_per_second for result in results]
    spec = models.NAMED[c.model]
    cost = dry_run.cost_of(spec, "float32", c.batch_size, c.sequence_length)
    alone = dry_run.record(ALONE, spec, 1, cost).events
    hosts = calibrated("flops", lambda one: replay(alone, one, 1).seconds, line_of(rates[0]),
                       results[0].timed(ALONE.base).median_ms / 1e3)
    computing = replay(alone, hosts, 1).seconds
    grid = [rates[0] * (rates[-1] / rates[0]) ** (i / (N_POINTS - 1)) for i in range(N_POINTS)]

    def line(base, step):
        return CurveLine(base, [(rate, step(rate) / computing) for rate in grid])

    def replayed(choice):
        events = dry_run.record(choice, spec, c.ranks, cost, gloo=True).events
        return lambda rate: replay(events, hosts._replace(between=line_of(rate).between), c.ranks).seconds
    tuned = [one for result in results if (one := bucket_sizes.tuned(result, "ddp"))]
    sizes = [replayed(row.choice) for row in {row.choice: row for row in tuned}.values()] or [replayed(Choice("ddp"))]
    n_bytes = results[0].find(bucket_sizes.STAGE_4).wire_bytes_theory
    found = [line("floor", lambda rate: max(computing, n_bytes * 8 / rate)),
             line(TUNED, lambda rate: min(step(rate) for step in sizes))]
    return found + [line(base, replayed(Choice(base))) for _, base, *_ in CURVES
                    if base not in (TUNED, "floor", *NOT_RUN_DRY)]
