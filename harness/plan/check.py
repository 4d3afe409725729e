"""Modelled beside measured: runs of this project on two hosts, and what Megatron-LLaMA has published.

On two hosts the rate of computing is calibrated on *compute only* of the same run. Of the published figures one is used
to calibrate the rate of computing, and the others are predicted. A user of Megatron-LLaMA found the contrary of what is
published: of those runs two calibrate computing and the line, and the others are predicted.
"""

from harness.plan.published_runs import published
from harness.plan.two_host_runs import two_hosts


def check(workers):
    """`workers`: a ProcessPoolExecutor."""
    here, elsewhere = workers.submit(two_hosts), workers.submit(published)
    return {"two_hosts": here.result(), "published": elsewhere.result()}
