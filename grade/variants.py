"""Grades a variant that a reader has written: it trains, sends and holds what ours of the same name does.

    make exercise STAGE=variants TO=mine; make grade STAGE=mine.wire16
"""

import importlib
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from grade.grader import first_wrong
from grade.levels import Check
from grade.runs import OPTIMIZERS, Run, play
from harness.take import ROOT, code_lines


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


OPTIMIZERS = {**OPTIMIZERS, "Muon": (torch.optim.Muon, {"lr": 0.02}), "BlockSGD": (BlockSGD, {"lr": 0.1})}


@dataclass(frozen=True)
class Case(Run):
    """How a variant is tried, and what a wrong one is told. Gradients are drawn for each step and rank."""

    hint: str = ""
    optimizer: str = "AdamW"
    bucket_cap_mb: float = 0.01
    shapes: tuple = ((40, 40), (64, 64), (10,), (513,))
    dtype: torch.dtype = torch.float32
    n_ranks: int = 2
    home: str = "variants"
    ours: str = ""  # the module to be tried; without one the reader's
    counts: bool = True

    def drawn(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in self.shapes]

    def model(self, seed):
        return nn.ParameterList(map(nn.Parameter, self.drawn(0)))

    def loss(self, model, number, rank):
        return sum((param * factor).sum() for param, factor in zip(model, self.drawn(100 * number + rank)))

    def make(self, candidate, model):
        module = importlib.import_module(self.ours or candidate.package)
        (optimizer_cls, kwargs), params = OPTIMIZERS[self.optimizer], list(model)
        if self.max_norms:
            halves = {"stage2_allgather": params[:2], "stage4_overlap": params[2:]}
            return module.Chained(*(importlib.import_module(stage).DistributedOptimizer(half, optimizer_cls, **kwargs)
                                    for stage, half in halves.items()))
        mesh = {"mesh": dist.init_device_mesh("cpu", (2, 2))} if self.n_ranks == 4 else {}
        cap = {"bucket_cap_mb": self.bucket_cap_mb} if self.bucket_cap_mb else {}
        return module.ShardedOptimizer(params, optimizer_cls, **kwargs, **cap, **mesh)

    def left_out(self, optimizer):
        """Bucket buffers."""
        return sum(one.nbytes for one in {memory for buffer in getattr(optimizer, "idle", ())
                                          for memory in (buffer.sent, buffer.received)})


CASES = {
    "per_parameter": Case(hint="a buffer for each parameter: call the core's shard with one at a time",
                          bucket_cap_mb=0),
    "muon": Case(hint="a rank owns whole matrices, shaped as in the model: starts, ranges, main_params",
                 optimizer="Muon", shapes=((64, 64), (24, 16), (16, 24), (40, 16))),
    "hybrid": Case(hint="average the shard across the groups as well, when a bucket has arrived", n_ranks=4),
    "wire16": Case(hint="a buffer's wire_dtype is what travels; reduce_dtype says that parts are added in fp32"),
    "remainder16": Case(hint="the lower 16 bits stay, as a signed number; what is put together is let go of again",
                        dtype=torch.bfloat16),
    "moments16": Case(hint="fp32 from unpack to pack, bf16 between steps"),
    "offload": Case(hint="main_shard is a copy in the host's memory; the sum of a bucket goes there"),
    "finite": Case(hint="each gradient is looked at before it leaves, and all ranks agree in sync_grads"),
    "blocks": Case(hint="parameters begin, and shards end, at multiples of 256 elements", optimizer="BlockSGD"),
    "chained": Case(hint="one norm over the averaged gradients of all, then each is scaled by the same factor",
                    max_norms=(0.05, 0.05, 0.05), home="guard"),
}


def meets_nan(candidate):
    """The last rank has it, in the second parameter. -> what step() says, on this rank"""
    weights = [(name, nn.Parameter(torch.ones(40))) for name in ("first", "second", "third")]
    optimizer = sys.modules[candidate.package].ShardedOptimizer(weights, torch.optim.SGD, lr=1.0, bucket_cap_mb=1e-6)
    factor = torch.nan if candidate.rank == dist.get_world_size() - 1 else 1.0
    sum((param * (factor if name == "second" else 1.0)).sum() for name, param in weights).backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def adds_in(candidate):
    """-> the dtype in which parts are added on NCCL, too."""
    params = [nn.Parameter(torch.ones(40))]
    return str(sys.modules[candidate.package].ShardedOptimizer(params, torch.optim.SGD, lr=1.0).reduce_dtype)


def level(name):
    """-> (title, checks) of the variant of that name, as in LEVELS."""
    case = CASES[name]
    numel = sum(torch.Size(shape).numel() for shape in case.shapes)

    def both(grader):
        """-> (Seen of the reader's, Seen of ours) of each rank."""
        return list(zip(*(grader.run(case.n_ranks, play, replace(case, ours=ours), hint=case.hint)
                          for ours in ("", f"{case.home}.{name}"))))

    def trains(grader):
        for rank, (mine, ours) in enumerate(both(grader)):
            difference = (mine.snapshots[-1] - ours.snapshots[-1]).abs().max().item()
            first_wrong([
                *((not math.isclose(norm, due, rel_tol=1e-4), "clip_grad_norm_ returns the norm of all gradients: "
                   f"{due:.5f}", f"{norm:.5f} on rank {rank}", case.hint) for norm, due in zip(mine.norms, ours.norms)),
                (not difference < 1e-5, f"after three steps parameters are what {name} makes of them",
                 f"they differ by {difference:.1e} on rank {rank}", case.hint)])

    def sends(grader):
        (mine, messages), (ours, due) = [(sum(entry.wire_bytes for entry in one.entries) / numel, len(one.entries))
                                         for one in both(grader)[0]]
        first_wrong([(abs(mine - ours) > 0.01 * ours or messages != due,
                      f"{ours:.2f} bytes a parameter sent by a rank in a step, in {due} messages",
                      f"{mine:.2f} in {messages}", case.hint)])
        return [f"sent       {mine:.2f} bytes a parameter, in {messages} messages"]

    def holds(grader):
        mine, ours = [one.held / numel for one in both(grader)[0]]
        first_wrong([(abs(mine - ours) > 0.01 * ours, f"{ours:.2f} bytes a parameter held after a step, without bucket "
                      "buffers", f"{mine:.2f}", case.hint)])
        return [f"held       {mine:.2f} bytes a parameter"]

    def adds(grader):
        came = grader.run(2, adds_in)[0]
        first_wrong([(came != "torch.float32", "parts are added in fp32, on NCCL as well: reduce_dtype is "
                      "torch.float32", f"it is {came}", case.hint)])

    def tells(grader):
        answers = grader.run(2, meets_nan)
        first_wrong([(not all("second" in answer and "rank 1" in answer for answer in answers),
                      "a nan is a RuntimeError of step() on every rank, and names its parameter and rank",
                      [f"rank {rank}: {answer}" for rank, answer in enumerate(answers)], case.hint)])

    def is_short(grader):
        n_lines = len(code_lines(Path(grader.facts.file)))
        most = max(30, len(code_lines(ROOT / case.home / f"{name}.py")))
        first_wrong([(n_lines > most and case.home == "variants", f"at most {most} code lines", str(n_lines),
                      "see what the core's methods do already")])
        return [f"lines      {n_lines}"]

    checks = [Check("it trains as ours does", trains), Check("what it sends", sends), Check("what it holds", holds)]
    if name == "wire16":
        checks.append(Check("in which dtype parts are added", adds))
    if name == "finite":
        checks.append(Check("who has the nan", tells))
    return f"It is {name}", [*checks, Check("its code lines", is_short)]
