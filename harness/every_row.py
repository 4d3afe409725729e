"""Measures rows: each is checked and counted, then all are timed in turn. Runs where the ranks were started."""

import dataclasses
import gc
import importlib
import statistics

import torch

from harness import examine
from harness import rows as catalogue
from harness.examine import adamw, make_batches, reference_params, time_steps, tolerance
from harness.gpt import share_layers
from harness.ledger import Ledger
from harness.memory import Memory
from harness.reference import as_tensor
from harness.results import Result, Row, SharedRow
from harness.training import Training
from harness.workers import WorkerError, on_rank_0


def measure_rows(workers, settings, choices, progress=lambda text: None):
    """Measures rows of the catalogue, a list of Choices -> Result; bench.py and two_hosts add the rest.

    `progress(text)` is called before each of `n_runs(settings, choices)` runs. A row that fails, that differs from ddp
    by more than the tolerance, or whose weights never moved, has an `error` that says so, and no times.
    """
    conditions = on_rank_0(workers, examine.describe, settings)
    conditions.dtype = " and ".join(dict.fromkeys(catalogue.find(*choice).dtype for choice in choices))
    rows = [_examine(workers, settings, choice, progress) for choice in choices]
    for turn in range(settings.rounds):
        for row in rows[turn % len(rows):] + rows[:turn % len(rows)]:  # nobody always comes first
            progress(f"round {turn + 1}: {row.name}")
            if not row.error:
                attempt(row, lambda: row.time(*on_rank_0(workers, time_steps, settings, *row.choice)))
    reference = next((row for row in rows if row.choice == (catalogue.REFERENCE, None)), None)
    for row in rows:
        if reference and row.rounds_ms and len(row.rounds_ms) == len(reference.rounds_ms):
            row.vs_reference = row.over(reference)
            if row.kind == "noise":
                conditions.noise = [one / other for one, other in zip(row.rounds_ms, reference.rounds_ms)]
    return Result(conditions, rows)


def is_wrong(result):
    """Whether a stage has failed, or whatever row computes something else than it should: exit code 1."""
    wrong = [row for row in result.rows if row.error and (row.kind != "peer" or row.is_wrong)]
    return bool(wrong or any(row.error for row in result.shared))


def n_runs(settings, choices):
    return len(choices) * (1 + settings.rounds)


def _examine(workers, settings, choice, progress):
    """Checks and counts a row -> Row, without times."""
    configuration = catalogue.find(*choice)
    row = Row(*choice, configuration.kind, configuration.dtype)
    progress(f"check: {row.name}")
    try:
        found = workers.run(examine.examine, settings, *choice)
    except WorkerError as error:
        row.fail(str(error))
        return row
    row, movement = over_ranks([of_rank for of_rank, _ in found]), found[0][1]
    allowed = tolerance(workers.world_size)
    if row.kind == "floor":  # sees its own rank's data and nothing else: nobody could agree with it
        row.max_abs_diff = None
    elif row.max_abs_diff > allowed:
        whose = "ddp" if row.dtype == "float32" else "replicated training with fp32 copies"
        row.fail(f"wrong: a parameter differs from {whose}'s by {row.max_abs_diff:.1e}, allowed {allowed:g}", True)
    if movement == 0:
        row.fail("wrong: its weights did not move", True)
    return row


def attempt(row, run):
    """-> True, or, when a rank fails, False, with the reason in the row."""
    try:
        run()
        return True
    except WorkerError as error:
        row.fail(str(error))
        return False


def over_ranks(rows):
    """A row as each rank sees it -> Row. Bytes in memory: of the rank that holds most, in each phase; by kind: of the
    one that holds most after a step. Bytes on the wire and bytes a parameter: the mean. Collectives: of rank 0.
    """
    def most(of_ranks):
        return {phase: max(of_rank[phase] for of_rank in of_ranks) for phase in of_ranks[0]}

    def mean(of_ranks):
        return None if of_ranks[0] is None else round(statistics.mean(of_ranks))
    return dataclasses.replace(
        rows[0],
        memory_bytes=most([row.memory_bytes for row in rows]), peak_bytes=most([row.peak_bytes for row in rows]),
        held_bytes=max((row.held_bytes for row in rows), key=lambda kinds: sum(kinds.values())),
        activation_bytes=max(row.activation_bytes for row in rows),
        wire_bytes=mean([row.wire_bytes for row in rows]), line_bytes=mean([row.line_bytes for row in rows]),
        bytes_per_param=statistics.mean(row.bytes_per_param for row in rows))


PACKAGES = {"rung 0": "harness.reference", "stage 4": catalogue.STAGE_4}


def build(rank, settings, tp, package):
    """-> a Training, its batches, and the process group of its data-parallel ranks."""
    model = examine.make_model(settings, rank, "float32")
    group = share_layers(model, tp, rank)
    optimizer_cls = importlib.import_module(package).DistributedOptimizer
    optimizer = optimizer_cls(model.parameters(), torch.optim.AdamW, process_group=group, **adamw(settings))
    if hasattr(optimizer, "prefetch_params"):
        optimizer.prefetch_params(model)
    together = rank._replace(rank=rank.rank // tp, world_size=rank.world_size // tp)
    batches = make_batches(settings._replace(batch_size=settings.batch_size * tp), together)
    return Training(model, model, optimizer), batches, group


def examine_shared(rank, settings, tp, name):
    """-> what this rank holds and sends, and by how much a parameter differs from the reference's, of all ranks."""
    _, reference = reference_params(settings, rank, catalogue.find(catalogue.REFERENCE).reference, "float32")
    gc.collect()
    with Memory(rank.device) as memory:
        training, batches, group = build(rank, settings, tp, PACKAGES[name])
        _, _, peaks, activations, held = examine.memory_of_steps(memory, training, batches)
    with Ledger() as ledger:
        training.step(batches[2])
        training.finish()
    sent = {True: 0, False: 0}
    for entry in ledger.entries:
        sent[entry.group_name == group.group_name] += entry.wire_bytes
    params = [as_tensor(param.detach()) for param in training.full_params()]
    return SharedRow(name, tp, max_abs_diff=examine.largest_difference(params, reference),
                     dp_bytes=round(sent[True]), tp_bytes=round(sent[False]), peak_bytes=max(peaks.values()),
                     held_bytes=held, activation_bytes=activations)


def time_shared(rank, settings, tp, name):
    """-> milliseconds of a steady step, and of the drain."""
    training, batches, _ = build(rank, settings, tp, PACKAGES[name])
    return examine.time_training(rank, settings, training, batches)


def measure_shared(workers, settings, tp, progress=lambda text: None):
    """-> list of SharedRows. Each round times DDP and then these. One that is wrong or fails has an `error`."""
    rows = []
    for name in PACKAGES:
        progress(f"check: {name}, tp {tp}")
        try:
            found = workers.run(examine_shared, settings, tp, name)
        except WorkerError as error:
            rows.append(SharedRow(name, tp, error=str(error)))
            continue
        rows.append(max(found, key=lambda row: sum(row.held_bytes.values())))
        if rows[-1].max_abs_diff > tolerance(max(3, workers.world_size)):  # sums are in other orders with two, too
            rows[-1].error = f"wrong: a parameter differs from ddp's by {rows[-1].max_abs_diff:.1e}"
    for turn in range(settings.rounds):
        progress(f"round {turn + 1}: tensor-parallel rows")
        ddp_ms, _ = on_rank_0(workers, time_steps, settings, catalogue.REFERENCE, None)
        for row in rows:
            if not row.error:
                row.ddp_ms.append(ddp_ms)
                row.rounds_ms.append(on_rank_0(workers, time_shared, settings, tp, row.name)[0])
    return rows
