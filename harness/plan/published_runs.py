"""Modelled beside published: Megatron-LLaMA's runs, and those of a user of it.

Of the published figures one is used to calibrate the rate of computing, and the others are predicted. A user found the
contrary of what is published: of those runs two calibrate computing and the line, and the others are predicted.
"""

import functools

from harness.plan import dry_run, models
from harness.plan.calibration import calibrated
from harness.plan.replay import Hardware, replay
from harness.rows.choice import Choice
from harness.rows.plan_results import PublishedRun

# LLaMA-13B, sequences of 2048 on 8 x A100-80GB a node, tokens/s a GPU: (optimizer, GPUs, sequences a step, sequences a
# micro-batch, tokens/s). Megatron-LLaMA's README; neither it nor the user's issue 22 there says how many GPUs share
# layers, and the README not how large a step is: both are assumed, as in LLaMA's paper and in issue 27 there.
PUBLISHED = [("overlapped", 256, 2048, 4, 1890), ("distributed", 256, 2048, 4, 1630),
             ("overlapped", 512, 2048, 4, 1845), ("distributed", 512, 2048, 4, 1430)]
A_USERS = [("distributed", 128, 1024, 2, 1885.8), ("distributed", 128, 2048, 2, 2045.4),
           ("overlapped", 128, 1024, 2, 1126.3), ("overlapped", 128, 2048, 2, 1142.1)]
SHARING, LENGTH = 2, 2048
A100 = Hardware(312e12, 2.0e12, 300e9, 100e9, sharing=SHARING)


def step_of(run, hardware, is_hidden=True):
    """-> modelled seconds. Our stage 4 stands for the overlapped optimizer, which sends fp32 gradients after each
    micro-batch; stage 3 for the distributed one. Not `is_hidden`: each message is waited for at once."""
    kind, gpus, sequences, batch, _ = run
    d, events = gpus // SHARING, []
    for event in recorded_13b(kind, d, batch):
        is_fp32 = kind == "overlapped" and event.kind == "reduce_scatter"
        events.append(event._replace(n_bytes=2 * event.n_bytes) if is_fp32 else event)
        events += [event._replace(what="wait")] if event.what == "launch" and not is_hidden else []
    return replay(events, hardware, d, sequences // d // batch, kind == "overlapped").seconds


@functools.lru_cache
def recorded_13b(kind, d, batch):
    spec = models.NAMED["13b"]._replace(tensor_parallel=SHARING)
    cost = dry_run.cost_of(spec, "bfloat16", batch, LENGTH)
    choice = {"overlapped": Choice("stage 4 bf16", 400), "distributed": Choice("stage 3 bf16/fp32")}[kind]
    return dry_run.record(choice, spec, d, cost).events


def tokens(run):
    """In a step, for each GPU."""
    return run[2] * LENGTH / run[1]


def published():
    """-> hardware and published runs of plan_results.Check."""
    def rows(what, runs, hardware, is_hidden=True):
        return [PublishedRun(what, *run, tokens(run) / step_of(run, hardware, is_hidden)) for run in runs]
    first, (less, more) = PUBLISHED[0], A_USERS[:2]
    theirs = calibrated("flops", lambda one: step_of(first, one), A100, tokens(first) / first[-1])
    # These two differ in micro-batches alone, which send nothing: they tell computing and the line apart.
    users = calibrated("flops", lambda one: step_of(more, one) - step_of(less, one), A100,
                       tokens(more) / more[-1] - tokens(less) / less[-1])
    users = calibrated("between", lambda one: step_of(less, one), users, tokens(less) / less[-1])
    return ([(one.flops / 1e12, one.between / 1e9) for one in (theirs, users)],
            [*rows("calibrated", PUBLISHED[:1], theirs), *rows("predicted", [*PUBLISHED[1:], *A_USERS], theirs),
             *rows("calibrated, user's", A_USERS[:2], users), *rows("predicted, user's", A_USERS[2:], users),
             *rows("none hidden", A_USERS[2:], users, False)])
