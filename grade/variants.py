"""Grades a variant that a reader has written: it trains, sends and holds what ours of the same name does.

    make grade STAGE=mine.wire16

`make exercise STAGE=variants TO=mine` writes ours with bodies taken out; docs/exercise.md has what is asked for.
"""

import importlib
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from grade.grader import NotRun
from harness.memory import Memory
from harness.tables import code_lines

ROOT = Path(__file__).resolve().parents[1]
MOST_LINES = 30
ADAMW = torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": False}
SHAPES = (40, 40), (64, 64), (10,), (513,)
IN_BUCKETS = {"bucket_cap_mb": 0.01}


class BlockSGD(torch.optim.Optimizer):
    """Divides each gradient by the largest in its block of 256 elements: element-wise it is not."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    for part, grad in zip(param.view(-1).split(256), param.grad.view(-1).split(256)):
                        part -= group["lr"] * grad / grad.abs().max().clamp(min=1e-6)


class Case(NamedTuple):
    """How a variant is tried, and what a wrong one is told."""

    hint: str
    optimizer: tuple = ADAMW
    settings: dict = IN_BUCKETS
    shapes: tuple = SHAPES
    dtype: torch.dtype = torch.float32
    n_ranks: int = 2


CASES = {
    "per_parameter": Case("a buffer for each parameter: call the core's shard with one at a time", settings={}),
    "muon": Case("a rank owns whole matrices, shaped as in the model: starts, ranges, main_params",
                           (torch.optim.Muon, {"lr": 0.02}), shapes=((64, 64), (24, 16), (16, 24), (40, 16))),
    "hybrid": Case("average the shard across the groups as well, when a bucket has arrived", n_ranks=4),
    "wire16": Case("a buffer's wire_dtype is what travels; reduce_dtype says that parts are added in fp32"),
    "remainder16": Case("the lower 16 bits stay, as a signed number; what is put together is let go of again",
                        dtype=torch.bfloat16),
    "moments16": Case("fp32 from unpack to pack, bf16 between steps"),
    "offload": Case("main_shard is a copy in the host's memory; the sum of a bucket goes there"),
    "finite": Case("each gradient is looked at before it leaves, and all ranks agree in sync_grads"),
    "blocks": Case("parameters begin, and shards end, at multiples of 256 elements", (BlockSGD, {"lr": 0.1})),
    "chained": Case("one norm over the averaged gradients of all, then each is scaled by the same factor"),
}


class Seen(NamedTuple):
    """Of three steps on a rank. `norms`: what clip_grad_norm_ said; bytes are of a parameter."""

    params: torch.Tensor
    norms: torch.Tensor
    sent: float
    messages: int
    held: float


def build(module, case, params, mesh):
    optimizer_cls, kwargs = case.optimizer
    if hasattr(module, "Chained"):
        stages = [importlib.import_module(name).DistributedOptimizer for name in ("stage2_allgather", "stage4_overlap")]
        return module.Chained(*(stage(some, optimizer_cls, **kwargs) for stage, some in
                                zip(stages, (params[:2], params[2:]))))
    return module.ShardedOptimizer(params, optimizer_cls, **case.settings, **kwargs, **({"mesh": mesh} if mesh else {}))


def train(candidate, module, case, mesh):
    """-> Seen. Gradients are drawn for each step and rank."""
    generator, rank, norms = torch.Generator().manual_seed(0), candidate.rank.rank, []
    with Memory("cpu") as memory:
        params = [nn.Parameter(torch.randn(shape, generator=generator).to(case.dtype)) for shape in case.shapes]
        optimizer = build(module, case, params, mesh)
        for step in range(3):
            before = len(candidate.ledger.entries)
            factors = [torch.randn(shape, generator=generator.manual_seed(100 * step + rank)).to(case.dtype)
                       for shape in case.shapes]
            sum((param * factor).sum() for param, factor in zip(params, factors)).backward()
            if hasattr(module, "Chained"):
                norms.append(float(optimizer.clip_grad_norm_(0.05)))
            optimizer.step()
            optimizer.zero_grad()
        del factors
        buffers = {one for buffer in getattr(optimizer, "idle", ()) for one in (buffer.sent, buffer.received)}
        held = memory.settled() - sum(buffer.nbytes for buffer in buffers)
    entries, numel = candidate.ledger.entries[before:], sum(param.numel() for param in params)
    sent = sum(entry.wire_bytes for entry in entries)
    flat = torch.cat([param.detach().float().view(-1) for param in params])
    return Seen(flat, torch.tensor(norms), sent / numel, len(entries), held / numel)


def both(candidate, name):
    """-> (Seen of the candidate, Seen of ours)."""
    case, d = CASES[name], candidate.rank.world_size
    mesh = torch.distributed.init_device_mesh("cpu", (2, d // 2)) if name == "hybrid" else None
    ours = importlib.import_module(f"guard.{name}" if name == "chained" else f"variants.{name}")
    return train(candidate, sys.modules[candidate.package], case, mesh), train(candidate, ours, case, mesh)


def meets_nan(candidate):
    """The last rank has it, in the second parameter. -> what step() says, on this rank"""
    weights = [(name, nn.Parameter(torch.ones(40))) for name in ("first", "second", "third")]
    optimizer = sys.modules[candidate.package].ShardedOptimizer(weights, torch.optim.SGD, lr=1.0, bucket_cap_mb=1e-6)
    factor = torch.nan if candidate.rank.rank == candidate.rank.world_size - 1 else 1.0
    sum((param * (factor if name == "second" else 1.0)).sum() for name, param in weights).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def code_of(candidate):
    return sys.modules[candidate.package].__file__


def level(name):
    """-> (title, checks) of the variant of that name, as in LEVELS."""
    case, found = CASES[name], []

    def seen(grader):
        if not found:
            found.extend(grader.run(case.n_ranks, both, name, hint=case.hint))
        return found

    def trains(grader):
        for rank, (mine, ours) in enumerate(seen(grader)):
            if not torch.allclose(mine.norms, ours.norms, rtol=1e-4):
                raise NotRun(f"clip_grad_norm_ returns the norm of all gradients: {ours.norms[0]:.5f}",
                            f"{mine.norms[0]:.5f} on rank {rank}", case.hint)
            difference = (mine.params - ours.params).abs().max().item()
            if not difference < 1e-5:
                raise NotRun(f"after three steps parameters are what {name} makes of them",
                            f"they differ by {difference:.1e} on rank {rank}", case.hint)

    def sends(grader):
        mine, ours = seen(grader)[0]
        if abs(mine.sent - ours.sent) > 0.01 * ours.sent or mine.messages != ours.messages:
            raise NotRun(f"{ours.sent:.2f} bytes a parameter sent by a rank in a step, in {ours.messages} messages",
                         f"{mine.sent:.2f} in {mine.messages}", case.hint)
        return [f"sent       {mine.sent:.2f} bytes a parameter, in {mine.messages} messages"]

    def holds(grader):
        mine, ours = seen(grader)[0]
        if abs(mine.held - ours.held) > 0.01 * ours.held:
            raise NotRun(f"{ours.held:.2f} bytes a parameter held after a step, without bucket buffers",
                         f"{mine.held:.2f}", case.hint)
        return [f"held       {mine.held:.2f} bytes a parameter"]

    def tells(grader):
        answers = grader.run(2, meets_nan)
        if not all("second" in answer and "rank 1" in answer for answer in answers):
            raise NotRun("a nan is a RuntimeError of step() on every rank, and names its parameter and rank",
                         [f"rank {rank}: {answer or 'no error'}" for rank, answer in enumerate(answers)], case.hint)

    def is_short(grader):
        n_lines = len(code_lines(Path(grader.run(2, code_of)[0])))
        if name != "chained" and n_lines > MOST_LINES:
            raise NotRun(f"at most {MOST_LINES} code lines", str(n_lines), "see what the core's methods do already")
        return [f"lines      {n_lines}"]

    checks = [("it trains as ours does", trains), ("what it sends", sends), ("what it holds", holds),
              *[("who has the nan", tells)] * (name == "finite"), ("its code lines", is_short)]
    return f"It is {name}", [(title, check, lambda facts: True) for title, check in checks]
