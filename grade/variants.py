"""Grades a variant that a reader has written: it trains, sends and holds what ours of the same name does."""

import importlib
import math
import sys
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from grade.grader import require
from grade.levels import Check, is_short
from grade.runs import OPTIMIZERS, Run, play
from harness.publishing.stages import ROOT, code_lines


class BlockSGD(torch.optim.SGD):
    """Divides each gradient by the largest in its block of 256 elements: element-wise it is not."""

    @torch.no_grad()
    def step(self):
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            for grad in param.grad.view(-1).split(256):
                grad /= grad.abs().max().clamp(min=1e-6)
        super().step()


OPTIMIZERS = {**OPTIMIZERS, "Muon": (torch.optim.Muon, {"lr": 0.02}), "BlockSGD": (BlockSGD, {"lr": 0.1})}


@dataclass(frozen=True)
class Case(Run):
    """How a variant is tried, and the hint for a wrong one. Gradients are drawn for each step and rank."""
    name: str = ""
    hint: str = ""
    optimizer: str = "AdamW"
    bucket_cap_mb: float = 0.01
    shapes: tuple = ((40, 40), (64, 64), (10,), (513,))
    n_ranks: int = 2
    home: str = "variants"
    module: str = ""  # that is tried; without one the reader's
    counts_memory: bool = True

    def drawn(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in self.shapes]

    def model(self, seed):
        return nn.ParameterList(map(nn.Parameter, self.drawn(0)))

    def loss(self, model, number, rank):
        return sum((param * factor).sum() for param, factor in zip(model, self.drawn(100 * number + rank)))

    def make(self, candidate, model):
        module = importlib.import_module(self.module or candidate.package)
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
        return sum(tensor.nbytes for tensor in {tensor for buffer in getattr(optimizer, "idle", ())
                                                for tensor in (buffer.sent, buffer.received)})

    def pairs(self, grader):
        """Return for each rank (Seen of the reader's, Seen of the repository's)."""
        return list(zip(*(grader.run(self.n_ranks, play, replace(self, module=module), hint=self.hint)
                          for module in ("", f"{self.home}.{self.name}"))))

    def per_param(self, n_bytes):
        return n_bytes / sum(torch.Size(shape).numel() for shape in self.shapes)

    def trains(self, grader):
        for rank, (seen, target) in enumerate(self.pairs(grader)):
            for norm, due in zip(seen.norms, target.norms):
                require(math.isclose(norm, due, rel_tol=1e-4), "clip_grad_norm_ returns the norm of all gradients: "
                        f"{due:.5f}", f"{norm:.5f} on rank {rank}", self.hint)
            difference = (seen.snapshots[-1] - target.snapshots[-1]).abs().max().item()
            require(difference < 1e-5, f"after three steps parameters are what {self.name} makes of them",
                    f"they differ by {difference:.1e} on rank {rank}", self.hint)

    def sends(self, grader):
        (came, n), (due, n_due) = [(self.per_param(sum(entry.wire_bytes for entry in seen.entries)), len(seen.entries))
                                   for seen in self.pairs(grader)[0]]
        require(abs(came - due) <= 0.01 * due and n == n_due, f"{due:.2f} bytes a parameter sent by a rank in a step, "
                f"in {n_due} messages", f"{came:.2f} in {n}", self.hint)
        return [f"sent       {came:.2f} bytes a parameter, in {n} messages"]

    def holds(self, grader):
        came, due = [self.per_param(seen.held) for seen in self.pairs(grader)[0]]
        require(abs(came - due) <= 0.01 * due, f"{due:.2f} bytes a parameter held after a step, without bucket buffers",
                f"{came:.2f}", self.hint)
        return [f"held       {came:.2f} bytes a parameter"]

    def adds(self, grader):
        dtype = grader.run(2, adds_in)[0]
        require(dtype == "torch.float32", "parts are added in fp32, on NCCL as well: reduce_dtype is torch.float32",
                f"it is {dtype}", self.hint)

    def tells(self, grader):
        answers = grader.run(2, meets_nan)
        require(all("second" in answer and "rank 1" in answer for answer in answers),
                "a nan is a RuntimeError of step() on every rank, and names its parameter and rank",
                [f"rank {rank}: {answer}" for rank, answer in enumerate(answers)], self.hint)


CASES = {case.name: case for case in (
    Case(name="per_parameter", hint="a buffer for each parameter: call the core's shard with one at a time",
         bucket_cap_mb=0),
    Case(name="muon", hint="a rank owns whole matrices, shaped as in the model: starts, ranges, main_params",
         optimizer="Muon", shapes=((64, 64), (24, 16), (16, 24), (40, 16))),
    Case(name="hybrid", hint="average the shard across the groups as well, when a bucket has arrived", n_ranks=4),
    Case(name="wire16", hint="a buffer's wire_dtype is what travels; reduce_dtype says that parts are added in fp32"),
    Case(name="remainder16", hint="the lower 16 bits stay, as a signed number; what is put together is let go of again",
         dtype=torch.bfloat16),
    Case(name="moments16", hint="fp32 from unpack to pack, bf16 between steps"),
    Case(name="offload", hint="main_shard is a copy in the host's memory; the sum of a bucket goes there"),
    Case(name="finite", hint="each gradient is looked at before it leaves, and all ranks agree in sync_grads"),
    Case(name="blocks", hint="parameters begin, and shards end, at multiples of 256 elements", optimizer="BlockSGD"),
    Case(name="chained", hint="one norm over the averaged gradients of all, then each is scaled by the same factor",
         max_norms=(0.05, 0.05, 0.05), home="guard"))}


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
    """Return the dtype in which parts are added on NCCL, too."""
    params = [nn.Parameter(torch.ones(40))]
    return str(sys.modules[candidate.package].ShardedOptimizer(params, torch.optim.SGD, lr=1.0).reduce_dtype)


def level(name):
    """Return (title, checks) of the variant of that name, as in LEVELS."""
    case = CASES[name]
    special = {"wire16": [Check("in which dtype parts are added", case.adds)],
               "finite": [Check("who has the nan", case.tells)]}
    most = max(30, len(code_lines(ROOT / "variants" / f"{name}.py"))) if case.home == "variants" else math.inf
    return f"It is {name}", [Check("it trains as ours does", case.trains), Check("what it sends", case.sends),
                            Check("what it holds", case.holds), *special.get(name, []),
                            Check("its code lines", is_short, most=most, hint="see what the core's methods do already")]
