"""Measures rows: each is checked and counted, then all are timed in turn. Runs in the process that started the ranks.

Each check and each timing is a run of its own: a row that fails, dies or hangs becomes a row with the reason in it, and
the others go on.
"""

import statistics

from harness.measure.conditions import describe
from harness.measure.examine import examine, tolerance
from harness.measure.step_time import time_steps
from harness.rows import catalogue
from harness.run.workers import WorkerError, on_rank_0


def measure_rows(workers, settings, names, progress=lambda text: None):
    """Measures the rows `names` of peers.ROWS -> {"conditions": {…}, "rows": [{…}, …]}; bench.py adds the rest.

    `progress(text)` is called before each of `n_runs(settings, names)` runs. A row that fails, that differs from ddp by
    more than the tolerance, or whose weights never moved, has an "error" that says so, and no step time.
    """
    conditions = on_rank_0(workers, describe, settings)
    conditions["dtype"] = " and ".join(dict.fromkeys(catalogue.find(name).dtype for name in names))
    rows = [_examine(workers, settings, name, progress) for name in names]
    times = {name: [] for name in names}  # row -> milliseconds a step, by round
    for turn in range(settings.rounds):
        for name in names[turn % len(names):] + names[:turn % len(names)]:  # nobody always comes first
            row = rows[names.index(name)]
            progress(f"round {turn + 1}: {name}")
            if "error" not in row:
                attempt(row, lambda: times[name].append(on_rank_0(workers, time_steps, settings, name)))
    for row in rows:
        if "error" not in row:
            add_times(row, times[row["name"]], times[catalogue.REFERENCE])
            if row["kind"] == "noise":
                pairs = zip(times[row["name"]], times[catalogue.REFERENCE])
                conditions["noise"] = [one / other for one, other in pairs]
    return {"conditions": conditions, "rows": rows}


def is_wrong(result):
    """Whether a stage has failed, or whatever row computes something else than it should: exit code 1."""
    return any("error" in row and (row["kind"] != "peer" or row["error"].startswith("wrong")) for row in result["rows"])


def n_runs(settings, names):
    return len(names) * (1 + settings.rounds)


def _examine(workers, settings, name, progress):
    """Checks and counts a row -> its part of the result."""
    row = {"name": name, "kind": catalogue.find(name).kind, "dtype": catalogue.find(name).dtype, "step_ms": None,
           "vs_reference": None, "max_abs_diff": None}
    progress(f"check: {name}")
    if attempt(row, lambda: row.update(over_ranks(workers.run(examine, settings, name)))):
        movement, allowed = row.pop("movement"), tolerance(workers.world_size)
        if row["kind"] == "floor":  # sees its own rank's data and nothing else: nobody could agree with it
            row["max_abs_diff"] = None
        elif row["max_abs_diff"] > allowed:
            whose = "ddp" if row["dtype"] == "float32" else "replicated training with fp32 copies"
            _fail(row, f"wrong: a parameter differs from {whose}'s by {row['max_abs_diff']:.1e}, allowed {allowed:g}")
        if movement == 0:
            _fail(row, "wrong: its weights did not move")
    return row


def _fail(row, reason):
    row.update(error=reason, step_ms=None)


def attempt(row, run):
    """-> True, or, when a rank fails, False, with the reason in the row."""
    try:
        run()
        return True
    except WorkerError as error:
        _fail(row, str(error))
        return False


def over_ranks(parts):
    """Bytes in memory: of the rank that holds most, in each phase; by kind: of the one that holds most after a step.

    Bytes on the wire and bytes a parameter: the mean over ranks. Collectives: of rank 0.
    """
    def most(key):
        return {phase: max(part[key][phase] for part in parts) for phase in parts[0][key]}
    return {**parts[0], "memory_bytes": most("memory_bytes"), "peak_bytes": most("peak_bytes"),
            "held_bytes": max((part["held_bytes"] for part in parts), key=lambda kinds: sum(kinds.values())),
            "activation_bytes": max(part["activation_bytes"] for part in parts),
            **{key: round(statistics.mean(part[key] for part in parts))
               for key in ("wire_bytes", "line_bytes") if key in parts[0]},
            "bytes_per_param": statistics.mean(part["bytes_per_param"] for part in parts)}


def add_times(row, times, reference):
    row["step_ms"] = {"median": statistics.median(times), "min": min(times), "max": max(times), "rounds": times}
    if len(reference) == len(times):  # round by round: both ran within seconds of each other
        row["vs_reference"] = statistics.median(one / other for one, other in zip(times, reference))
