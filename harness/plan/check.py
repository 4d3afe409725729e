"""Modelled time beside runs: of this project on two hosts, and what Megatron-LLaMA and a user of it have published."""

from harness.plan.curve_lines import curve_lines
from harness.plan.published_runs import published
from harness.plan.two_host_runs import two_hosts
from harness.rows.plan_results import Check


def check(workers):
    """`workers`: a ProcessPoolExecutor."""
    here, elsewhere, lines = workers.submit(two_hosts), workers.submit(published), workers.submit(curve_lines)
    return Check(here.result(), *elsewhere.result(), lines.result())
