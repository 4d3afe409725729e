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

from harness.plan import dryrun, llama
from harness.plan.replay import Hardware, replay
from harness.rows import buckets, peers

ROOT = Path(__file__).resolve().parents[2]
# Two hosts on one machine: bytes of memory a second for one core, seconds a message, TCP's payload in a full packet.
HOST_MEMORY_RATE, HOST_LATENCY, PAYLOAD = 5e9, 2e-4, 1448 / 1514


def calibrated(rate, modelled, hardware, measured):
    """`hardware` with that `rate` ("flops", "between") at which modelled(hardware) takes `measured` seconds."""
    low, high = 1e6, 1e16
    for _ in range(50):
        middle = math.sqrt(low * high)
        found = hardware._replace(**{rate: middle})
        low, high = (middle, high) if modelled(found) > measured else (low, middle)
    if abs(modelled(found) / measured - 1) > 1e-3:
        raise ValueError(f"no {rate} gives {measured:.3g} s: the model takes {modelled(found):.3g} s")
    return found


WAYS = {"no_sync_ms": ("stage 4 overlap", False), "each_ms": ("stage 4 overlap", True),
        "compute_ms": ("compute only", False), "ddp_ms": ("ddp", False), "stage3_ms": ("stage 3 grad buffer", False)}


def two_hosts():
    """-> [(run, row, measured, modelled), …], ms of a step, or of a micro-batch where a step has several."""
    found = []
    for path in sorted((ROOT / "results").glob("network*.json")):
        latest = json.loads(path.read_text(encoding="utf-8"))
        for result in (latest, *latest["other_rates"]):
            c, only = result["conditions"], times_of(result)["compute only", 1, False]
            for part in (result, *(result[name] for name in ("sweep", "accumulation") if name in result)):
                part = {**part, "conditions": {**c, **part["conditions"]}}
                found += of_a_part(f"{path.stem} {c['rate']}", part, only)
    return found


def times_of(part):
    """-> {(row, micro-batches a step, whether each is exchanged): ms}."""
    found = {(row["name"], 1, False): row["step_ms"]["median"] for row in part["rows"] if row.get("step_ms")}
    for row in part["rows"]:
        for key in WAYS.keys() & row.keys():
            name, exchange_each = WAYS[key]
            name = part.get("ddp", name) if name == "ddp" else name
            found[name, row["micro_batches"], exchange_each] = statistics.median(row[key])
    return found


def of_a_part(where, part, only):
    """The rows of one table. `only`: ms of *compute only*, for where this table has no such row."""
    c, times, found = part["conditions"], times_of(part), []
    spec = llama.NAMED[c["model"]]
    cost = dryrun.cost_of(spec, "float32", c["batch_size"], c["sequence_length"])
    hosts = Hardware(1.0, HOST_MEMORY_RATE, math.inf, PAYLOAD * c["bits_per_second"] / 8, per_node=1,
                     latency_between=HOST_LATENCY, backend="gloo")
    alone = dryrun.record("compute only", spec, 1, cost).events
    hosts = calibrated("flops", lambda one: replay(alone, one, 1)["seconds"], hosts,
                       times.pop(("compute only", 1, False), only) / 1e3)
    for (name, k, exchange_each), ms in sorted(times.items()):
        if buckets.base_of(name) in (*peers.LADDER, "owner reduce"):
            events = dryrun.record(name, spec, c["ranks"], cost, gloo=True).events
            modelled = replay(events, hosts, c["ranks"], k, exchange_each)["seconds"] / k * 1e3
            way = f", {k} x {'each' if exchange_each else 'once'}" if "micro_batches" in part["rows"][0] else ""
            found.append((where, name + way, ms, modelled))
    return found


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
    return replay(events, hardware, d, sequences // d // batch, kind == "overlapped")["seconds"]


@functools.lru_cache
def recorded_13b(kind, d, batch):
    spec = llama.NAMED["13b"]._replace(tensor_parallel=SHARING)
    cost = dryrun.cost_of(spec, "bfloat16", batch, LENGTH)
    row = {"overlapped": "stage 4 bf16, 400 MB buckets", "distributed": "stage 3 bf16/fp32"}[kind]
    return dryrun.record(row, spec, d, cost).events


def tokens(run):
    """In a step, for each GPU."""
    return run[2] * LENGTH / run[1]


def published():
    """-> {"hardware": [(TFLOP/s, GB/s of a node), …] as calibrated, "rows": [(what was done, *run, modelled), …]}."""
    def rows(what, runs, hardware, is_hidden=True):
        return [(what, *run, tokens(run) / step_of(run, hardware, is_hidden)) for run in runs]
    first, (less, more) = PUBLISHED[0], A_USERS[:2]
    theirs = calibrated("flops", lambda one: step_of(first, one), A100, tokens(first) / first[-1])
    # These two differ in micro-batches alone, which send nothing: they tell computing and the line apart.
    users = calibrated("flops", lambda one: step_of(more, one) - step_of(less, one), A100,
                       tokens(more) / more[-1] - tokens(less) / less[-1])
    users = calibrated("between", lambda one: step_of(less, one), users, tokens(less) / less[-1])
    return {"hardware": [(one.flops / 1e12, one.between / 1e9) for one in (theirs, users)],
            "rows": [*rows("calibrated", PUBLISHED[:1], theirs), *rows("predicted", [*PUBLISHED[1:], *A_USERS], theirs),
                     *rows("calibrated, user's", A_USERS[:2], users), *rows("predicted, user's", A_USERS[2:], users),
                     *rows("none hidden", A_USERS[2:], users, False)]}


def check(workers):
    """`workers`: a ProcessPoolExecutor."""
    here, elsewhere = workers.submit(two_hosts), workers.submit(published)
    return {"two_hosts": here.result(), "published": elsewhere.result()}
