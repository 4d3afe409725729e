"""Tensor-parallel rows: the same model with each layer shared by `tp` ranks, beside DDP. Runs in who starts the ranks.

All rows see the same batch: ranks that share layers take their sequences together.
"""

import gc
import importlib

import torch
import torch.distributed as dist

from harness.measure.examine import memory_of_step, reference_params, tolerance
from harness.measure.ledger import Ledger
from harness.measure.memory import Memory
from harness.measure.setup import WARMUP_STEPS, adamw, make_batches, make_model
from harness.measure.step_time import steady, time_steps
from harness.rows import catalogue, ways
from harness.rows.dtensors import as_tensor
from harness.rows.kinds import KINDS
from harness.rows.shared_results import SharedRow
from harness.rows.training import Training
from harness.run.workers import WorkerError, on_rank_0
from harness.train.tensor_parallel import share_layers

PACKAGES = {"rung 0": "harness.rows.replicated", "stage 4": ways.STAGE_4}


def build(rank, settings, tp, package):
    """-> a Training, its batches, and the process group of its data-parallel ranks."""
    model = make_model(settings, rank, "float32")
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
        memory_of_step(memory, training, batches[0])
        training.zero_grad()
        peaks, _, activations = memory_of_step(memory, training, batches[1])
        held = {kind: memory.by_kind().get(kind, 0) for kind in KINDS}
        training.zero_grad()
    with Ledger() as ledger:
        training.step(batches[2])
        training.finish()
    sent = {True: 0, False: 0}
    for entry in ledger.entries:
        sent[entry.group_name == group.group_name] += entry.wire_bytes
    differences = [(as_tensor(param.detach()) - expected).abs().max()
                   for param, expected in zip(training.full_params(), reference, strict=True)]
    largest = torch.stack(differences).max()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return SharedRow(name, tp, max_abs_diff=largest.item(), dp_bytes=round(sent[True]), tp_bytes=round(sent[False]),
                     peak_bytes=max(peaks.values()), held_bytes=held, activation_bytes=activations)


def time_shared(rank, settings, tp, name):
    """-> milliseconds of a steady step, and of the drain."""
    gc.collect()
    training, batches, _ = build(rank, settings, tp, PACKAGES[name])
    for batch in batches[:WARMUP_STEPS]:
        training.step(batch)
    return steady(rank, training.step, batches[WARMUP_STEPS:WARMUP_STEPS + settings.steps], training.finish)


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
