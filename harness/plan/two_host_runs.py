"""Modelled beside measured: this project's runs on two hosts.

The rate of computing is calibrated on *compute only* of the same run.
"""

import math
import statistics
from pathlib import Path
from typing import NamedTuple

from harness.plan import dry_run, models
from harness.plan.calibration import calibrated
from harness.plan.replay import Hardware, replay
from harness.rows import catalogue, saved
from harness.rows.choice import Choice
from harness.rows.plan_results import ModelledRun
from harness.rows.results import Conditions, Result

ROOT = Path(__file__).resolve().parents[2]
# Two hosts on one machine: bytes of memory a second for one core, seconds a message, TCP's payload in a full packet.
HOST_MEMORY_RATE, HOST_LATENCY, PAYLOAD = 5e9, 2e-4, 1448 / 1514

WAYS = {"no_sync_ms": ("stage 4 overlap", False), "each_ms": ("stage 4 overlap", True),
        "compute_ms": ("compute only", False), "ddp_ms": ("ddp", False), "stage3_ms": ("stage 3 grad buffer", False)}
ALONE = Choice("compute only")


class Part(NamedTuple):
    """The times of one table. `ms`: (Choice, micro-batches a step or None, whether each is exchanged) -> median."""
    conditions: Conditions
    ms: dict


def two_hosts():
    """-> list of ModelledRuns."""
    found = []
    for result in load():
        c = result.conditions
        parts = [Part(c, of_rows(result.rows))]
        parts += [Part(result.sweep.conditions, of_rows(result.sweep.rows))] if result.sweep else []
        parts += [Part(result.accumulation.conditions, of_accumulation(result.accumulation))
                  ] if result.accumulation else []
        for part in parts:
            found += modelled(c.rate, part, c.bits_per_second, parts[0].ms[ALONE, None, False])
    return found


def load():
    """-> list of Results of make network, a rate each."""
    path = ROOT / "results" / "network.json"
    return saved.from_json(Result, path.read_text(encoding="utf-8")).at_all_rates()


def line_of(bits_per_second, backend="exchange"):
    """-> Hardware. `backend`: "gloo" where its own reduce-scatter travels, which is an all-reduce."""
    return Hardware(1.0, HOST_MEMORY_RATE, math.inf, PAYLOAD * bits_per_second / 8, per_node=1,
                    latency_between=HOST_LATENCY, backend=backend)


def of_rows(rows):
    return {(row.choice, None, False): row.median_ms for row in rows if row.rounds_ms}


def of_accumulation(accumulation):
    """The rows that a step of one micro-batch stands for are named as in WAYS, DDP with its bucket size."""
    return {(Choice(base, accumulation.ddp_mb if base == "ddp" else None), row.micro_batches, exchange_each):
            statistics.median(getattr(row, field)) for row in accumulation.rows
            for field, (base, exchange_each) in WAYS.items() if getattr(row, field)}


def modelled(where, part, bits_per_second, alone_ms):
    """-> ModelledRuns of one table. `alone_ms`: of *compute only*, for where this table has no such row."""
    c, times = part.conditions, dict(part.ms)
    spec = models.NAMED[c.model]
    cost = dry_run.cost_of(spec, "float32", c.batch_size, c.sequence_length)
    hosts = line_of(bits_per_second)
    events = dry_run.record(ALONE, spec, 1, cost).events
    measured = next((times.pop((ALONE, k, False)) for k in (None, 1) if (ALONE, k, False) in times), alone_ms)
    hosts = calibrated("flops", lambda one: replay(events, one, 1).seconds, hosts, measured / 1e3)
    found = []
    for (choice, k, exchange_each), ms in times.items():
        if choice.base in (*catalogue.LADDER, "owner reduce"):
            events = dry_run.record(choice, spec, c.ranks, cost, gloo=True).events
            seconds = replay(events, hosts, c.ranks, k or 1, exchange_each).seconds / (k or 1)
            found.append(ModelledRun(where, *choice, ms, seconds * 1e3, k, exchange_each))
    return sorted(found, key=lambda run: run.label)
