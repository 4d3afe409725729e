"""Modelled beside measured: runs of this project on two hosts, and what Megatron-LLaMA has published.

On two hosts the rate of computing is calibrated on *compute only* of the same run. Of the published figures one is used
to calibrate the rate of computing, and the others are predicted. A user of Megatron-LLaMA found the contrary of what is
published: of those runs two calibrate computing and the line, and the others are predicted.
"""

import functools
import json
import math
import statistics
from pathlib import Path

from harness import buckets, dryrun, llama, peers, tables
from harness.replay import Hardware, accumulated, replay

ROOT = Path(__file__).resolve().parents[1]
# Two hosts on one machine: bytes of memory a second for one core, seconds a message, TCP's payload in a full packet.
HOST_MEMORY_RATE, HOST_LATENCY, PAYLOAD = 5e9, 2e-4, 1448 / 1514
MIB = {"default": None, "one-parameter": peers.ONE_PARAMETER}
ALLOWED = 0.10


def calibrated(modelled, measured, low, high):
    """The rate between `low` and `high` at which modelled(rate), seconds that fall with the rate, are `measured`."""
    for _ in range(50):
        rate = math.sqrt(low * high)
        low, high = (rate, high) if modelled(rate) > measured else (low, rate)
    return rate


def two_hosts():
    """-> [(run, row, measured, modelled), …], seconds of a step, or of a micro-batch where a step has several."""
    found = []
    for path in sorted((ROOT / "results").glob("network*.json")):
        latest = json.loads(path.read_text(encoding="utf-8"))
        for result in (latest, *latest["other_rates"]):
            for part in (result, result.get("sweep", {}), result.get("accumulation", {})):
                found += of_a_part(path.stem, result, part)
    return found


def of_a_part(stem, result, part):
    """The rows of one of a result's tables. Of accumulation, its own run without communication calibrates, if any."""
    c, rows = part.get("conditions", {}), part.get("rows", [])
    times = {(row["name"], 1, True): row["step_ms"]["median"] / 1e3 for row in rows if row.get("step_ms")}
    for row in (row for row in rows if "micro_batches" in row):
        for key, name, is_each in (("no_sync_ms", "stage 4 overlap", False), ("each_ms", "stage 4 overlap", True),
                                   ("ddp_ms", part.get("ddp", "ddp"), False), ("compute_ms", "compute only", False),
                                   ("stage3_ms", "stage 3 grad buffer", False)):
            if row.get(key):
                times[name, row["micro_batches"], is_each] = statistics.median(row[key]) / 1e3
    known = {row.name for row in dryrun.ROWS}
    times = {key: seconds for key, seconds in times.items() if buckets.base_of(key[0]) in {*known, "compute only"}}
    if not times:
        return []
    only = times.get(("compute only", 1, True), times.get(("compute only", 1, False)))
    only = only or next(row["step_ms"]["median"] / 1e3 for row in result["rows"] if row["name"] == "compute only")
    spec, d = llama.NAMED[c["model"]], c["ranks"]
    cost = dryrun.cost_of(spec, dryrun.FP32, c["batch_size"], c["sequence_length"])
    hosts = Hardware(1.0, HOST_MEMORY_RATE, math.inf, PAYLOAD * result["conditions"]["bits_per_second"] / 8,
                     per_node=1, latency_between=HOST_LATENCY, backend="gloo")
    computes = dryrun.record(dryrun.find("ddp"), spec, 1, cost).events
    hosts = hosts._replace(flops=calibrated(
        lambda rate: replay(computes, hosts._replace(flops=rate), 1)["seconds"], only, 1e6, 1e15))
    found, recorded = [], {}
    for (name, k, is_each), seconds in times.items():
        if buckets.base_of(name) in known:
            if name not in recorded:
                size = buckets.size_of(name)
                cap_mb = MIB[size] if size in MIB else float(size.split()[0])
                recorded[name] = dryrun.record(dryrun.find(buckets.base_of(name)), spec, d, cost, cap_mb, gloo=True)
            modelled = replay(recorded[name].events, hosts, d, k, is_each)["seconds"] / k
            label = name if k == 1 and "step_ms" in rows[0] else f"{name}, {k} x {'each' if is_each else 'once'}"
            found.append((f"{stem} {result['conditions']['rate']}", label, seconds, modelled))
    return found


# LLaMA-13B, sequences of 2048 on 8 x A100-80GB a node, tokens/s a GPU: (optimizer, GPUs, sequences a step, sequences a
# micro-batch, tokens/s). Megatron-LLaMA's README; neither it nor the user's issue 22 there says how many GPUs share
# layers, and the README not how large a step is: both are assumed, as in LLaMA's paper and in issue 27 there.
PUBLISHED = [("overlapped", 256, 2048, 4, 1890), ("distributed", 256, 2048, 4, 1630),
             ("overlapped", 512, 2048, 4, 1845), ("distributed", 512, 2048, 4, 1430)]
A_USERS = [("distributed", 128, 1024, 2, 1885.8), ("distributed", 128, 2048, 2, 2045.4),
           ("overlapped", 128, 1024, 2, 1126.3), ("overlapped", 128, 2048, 2, 1142.1)]
SHARING, LENGTH, CAP_MB = 2, 2048, 400
A100 = Hardware(312e12, 2.0e12, 300e9, 100e9, sharing=SHARING)


def seconds_a_step(run, hardware, is_hidden=True):
    """`run`: of PUBLISHED. Our stage 4 stands for the overlapped optimizer, which sends fp32 gradients after each
    micro-batch; stage 3 for the distributed one. Not `is_hidden`: each message is waited for at once."""
    kind, gpus, sequences, batch, _ = run
    events = recorded_13b(kind, gpus // SHARING, batch)
    if not is_hidden:
        events = [one for event in events for one in (event, event._replace(what="wait"))[:1 + (event.what == "launch")]]
    return replay(events, hardware, gpus // SHARING, sequences * SHARING // gpus // batch, kind == "overlapped")["seconds"]


@functools.lru_cache
def recorded_13b(kind, d, batch):
    spec = llama.NAMED["13b"]._replace(tensor_parallel=SHARING)
    cost = dryrun.cost_of(spec, dryrun.BF16, batch, LENGTH)
    row = dryrun.find({"overlapped": "stage 4 bf16", "distributed": "stage 3 bf16/fp32"}[kind])
    events = dryrun.record(row, spec, d, cost, CAP_MB).events
    return [event._replace(n_bytes=2 * event.n_bytes) if kind == "overlapped" and event.kind == "reduce_scatter" else event
            for event in events]


def published():
    """-> {"tflops", "line": [the README's, the user's], "rows": [(what was done, *run, tokens/s), …]}."""
    def measured(run):
        return run[2] * LENGTH / run[1] / run[4]

    def rows(what, runs, hardware, is_hidden=True):
        return [(what, *run, run[2] * LENGTH / run[1] / seconds_a_step(run, hardware, is_hidden)) for run in runs]

    def with_flops(rate):
        return A100._replace(flops=rate)
    first = with_flops(calibrated(lambda rate: seconds_a_step(PUBLISHED[0], with_flops(rate)), measured(PUBLISHED[0]),
                                  1e12, 1e15))
    less, more = A_USERS[:2]  # differ in micro-batches alone: the line's part is equal
    user = with_flops(calibrated(lambda rate: seconds_a_step(more, with_flops(rate)) - seconds_a_step(less, with_flops(rate)),
                                 measured(more) - measured(less), 1e12, 1e15))
    user = user._replace(between=calibrated(lambda rate: seconds_a_step(less, user._replace(between=rate)), measured(less),
                                            1e9, 1e12))
    return {"hardware": [(one.flops / 1e12, one.between / 1e9) for one in (first, user)],
            "rows": [*rows("calibrated", PUBLISHED[:1], first), *rows("predicted", PUBLISHED[1:], first),
                     *rows("predicted", A_USERS, first), *rows("calibrated", A_USERS[:2], user),
                     *rows("predicted", A_USERS[2:], user), *rows("none hidden", A_USERS[2:], user, False)]}
