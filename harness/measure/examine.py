"""Is a row right, what does it send, what does it hold: three steps beside the reference. Runs on every rank."""

import functools
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist

from harness.measure.ledger import Ledger
from harness.measure.memory import Memory, mark_grads, mark_state
from harness.measure.setup import CHECKED_STEPS, adamw, make_batches, make_model
from harness.rows import catalogue
from harness.rows.kinds import KINDS
from harness.rows.results import Row


def tolerance(world_size):
    """The largest difference from ddp that a right row may show in a parameter, after CHECKED_STEPS steps in fp32.

    One or two ranks: a + b = b + a, every order of summation gives the same bits, and the difference is 0.
    More ranks: (a + b) + c and a + (b + c) differ in the last bits, and who adds what first depends on the layout.
    AdamW divides a gradient by its own size: one that is rounding error and nothing else (of the bias of the keys in
    attention, which softmax cancels) would become a step of up to lr. With eps = 1e-6 such noise, about 1e-10, is a
    ten-thousandth of lr at most; with 1e-8 it is a hundredth. Measured at d = 3 and 4: 2e-7 (4e-6 with 1e-8).
    The tolerance leaves room for larger models. What a stage does wrong shows as differences like lr: 1e-4 to 1e-3.
    """
    return 0.0 if world_size <= 2 else 1e-5


@functools.lru_cache(maxsize=2)  # one a dtype
def reference_params(settings, rank, build, dtype):
    """The parameters before and after CHECKED_STEPS plain steps of the reference; rank 0's, on every rank."""
    model = make_model(settings, rank, dtype)
    before = [param.detach().clone() for param in model.parameters()]
    training = build(model, adamw(settings))
    for batch in make_batches(settings, rank)[:CHECKED_STEPS]:
        training.step(batch)
    after = training.full_params()
    for param in after:
        dist.broadcast(param, src=0)
    return before, after


@catalogue.in_its_context
def examine(rank, settings, base, bucket_mb=None):
    """Three steps: two under the memory counter, one under the ledger; then the parameters, beside the reference's.

    -> (Row, movement). The Row is as this rank sees it; but `max_abs_diff` and movement, the largest difference of any
    parameter from the reference's and from the start, are of all ranks. `memory_bytes`, after each phase, is of step 1,
    which makes the state; `peak_bytes`, within each, of step 2, which finds one there; `held_bytes`, by kind, is what
    lives on after that.
    """
    # On CUDA some sums are made in any order, which is faster: not here, where two runs must agree to the bit.
    torch.use_deterministic_algorithms(rank.device.type == "cuda", warn_only=True)
    way, batches = catalogue.find(base, bucket_mb), make_batches(settings, rank)
    before, reference = reference_params(settings, rank, way.reference, way.dtype)
    gc.collect()
    with Memory(rank.device) as memory:
        model = make_model(settings, rank, way.dtype, way.starts_apart)
        phases = {"model": memory.live}
        training = way.build(model, adamw(settings))
        phases["optimizer"] = memory.settled()
        build_peak = memory.peak
        first_peaks, after, _ = memory_of_step(memory, training, batches[0])
        phases.update({phase: after[phase] for phase in ("backward", "step")})
        training.zero_grad()
        peaks, _, activations = memory_of_step(memory, training, batches[1])
        kinds = {kind: memory.by_kind().get(kind, 0) for kind in KINDS}
        training.zero_grad()
        phases["peak"] = max(build_peak, *first_peaks.values(), *peaks.values())
        peaks = {"build": build_peak, **{phase: peaks[phase] for phase in ("forward", "backward", "step")}}
        if rank.device.type == "cuda":  # what tensors don't use of it belongs to torch's allocator, and to nobody else
            phases["reserved"] = memory.reserved
    dist.barrier()
    before_step = bytes_on_the_line()
    with Ledger() as ledger:
        training.step(batches[2])
        training.finish()
    dist.barrier()
    line_bytes = None if before_step is None else bytes_on_the_line() - before_step
    params = training.full_params()
    torch.use_deterministic_algorithms(False)
    largest = torch.stack([_largest_difference(params, reference), _largest_difference(params, before)])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    difference, movement = largest.tolist()
    numel = sum(param.numel() for param in model.parameters())
    return Row(
        base, bucket_mb, way.kind, way.dtype, max_abs_diff=difference, collectives=ledger.collectives,
        message_bytes=ledger.message_bytes, wire_bytes=ledger.wire_bytes, line_bytes=line_bytes,
        wire_bytes_theory=round(way.wire_bytes(numel, rank.world_size)),
        memory_bytes=phases, peak_bytes=peaks, activation_bytes=activations, held_bytes=kinds,
        bytes_per_param=sum(kinds.values()) / numel,
        bytes_per_param_theory=way.bytes_per_param(numel, rank.world_size, training.optimizer)), movement


def memory_of_step(memory, training, batch):
    """One step, without the zeroing -> (peak within each phase, bytes after each phase, bytes of activations).

    Activations: what is alive when the forward pass ends and was not before, but no parameters: FSDP2 gathers those.
    Afterwards `memory.by_kind()` tells parameters, gradients and state from the rest.
    """
    def without_params():
        memory.mark("parameters", training.model.parameters())
        return memory.live - memory.by_kind().get("parameters", 0)

    def end(phase):
        after[phase], peaks[phase] = memory.settled(), memory.peak
        memory.reset_peak()
    after, peaks = {}, {}
    end("before")
    before = without_params()
    loss = training.forward(*batch)
    end("forward")
    activations = without_params() - before
    loss.backward()
    del loss
    end("backward")
    mark_grads(memory, training.model.parameters())
    training.update()
    training.finish()
    end("step")
    mark_state(memory, training.optimizer)
    return peaks, after, activations


def bytes_on_the_line():
    """All that the interface which gloo was told to use has sent, with headers; None: it was told none."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    counter = Path("/sys/class/net", interface or "none", "statistics", "tx_bytes")
    return int(counter.read_text()) if interface and counter.exists() else None


def _largest_difference(ones, others):
    """As a tensor (); what is not a number counts as the largest float."""
    differences = torch.stack([(one - other).abs().max().float() for one, other in zip(ones, others, strict=True)])
    return differences.max().nan_to_num(nan=torch.finfo(torch.float32).max)
