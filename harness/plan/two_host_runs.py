"""Modelled beside measured: this project's runs on two hosts.

The rate of computing is calibrated on *compute only* of the same run.
"""

import json
import math
import statistics
from pathlib import Path

from harness.plan import dry_run, models
from harness.plan.calibration import calibrated
from harness.plan.replay import Hardware, replay
from harness.rows import bucket_sizes, catalogue

ROOT = Path(__file__).resolve().parents[2]
# Two hosts on one machine: bytes of memory a second for one core, seconds a message, TCP's payload in a full packet.
HOST_MEMORY_RATE, HOST_LATENCY, PAYLOAD = 5e9, 2e-4, 1448 / 1514

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
    spec = models.NAMED[c["model"]]
    cost = dry_run.cost_of(spec, "float32", c["batch_size"], c["sequence_length"])
    hosts = Hardware(1.0, HOST_MEMORY_RATE, math.inf, PAYLOAD * c["bits_per_second"] / 8, per_node=1,
                     latency_between=HOST_LATENCY, backend="gloo")
    alone = dry_run.record("compute only", spec, 1, cost).events
    hosts = calibrated("flops", lambda one: replay(alone, one, 1)["seconds"], hosts,
                       times.pop(("compute only", 1, False), only) / 1e3)
    for (name, k, exchange_each), ms in sorted(times.items()):
        if bucket_sizes.base_of(name) in (*catalogue.LADDER, "owner reduce"):
            events = dry_run.record(name, spec, c["ranks"], cost, gloo=True).events
            modelled = replay(events, hosts, c["ranks"], k, exchange_each)["seconds"] / k * 1e3
            way = f", {k} x {'each' if exchange_each else 'once'}" if "micro_batches" in part["rows"][0] else ""
            found.append((where, name + way, ms, modelled))
    return found
