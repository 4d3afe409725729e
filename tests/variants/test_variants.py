"""The variants: each equals replicated training on 1 to 4 ranks, sends and holds what its formula says, and takes the
guard.

The contract of stages runs over each of them: `pytest tests/stages/test_contract.py --stage variants.finite`.
"""

import contextlib
import math

import pytest
import torch
from torch import nn

from checkpoint import full_state_dict
from harness.measure.ledger import Ledger
from harness.measure.memory import Memory
from harness.report.reading_time import code_lines
from tests.checkpoint import test_checkpoint
from tests.common import Net, Replicated, assert_same, batch, loss_of, one_rank_of, optimizer_of, trainable
from tests.ranks import ROOT
from tests.stages import test_contract, test_cores
from tests.stages.test_cores import core_of

FILES = sorted(path for path in (ROOT / "variants").glob("[a-z]*.py"))
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "foreach": False}
# With fp32 parameters and AdamW each of these is replicated training, to the bit where sums allow it.
AS_REPLICATED = [*(f"variants.{name}" for name in ("per_parameter", "whole_matrices", "finite", "blocks", "offload")),
                 "tests.variants.on_pairs"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_variant_has_thirty_lines(path):
    assert len(code_lines(path)) <= 30


# ------------------------------------------------------------------------------------------------------------ equality


@pytest.mark.parametrize("variant", AS_REPLICATED)
def test_a_variant_equals_replicated_training(run, variant):
    run(test_cores.equals_replicated, variant, "AdamW", test_cores.by_dimension, False, 1)


@pytest.mark.parametrize("variant", AS_REPLICATED)
def test_a_variant_adds_up_micro_batches(run, variant):
    run(test_cores.equals_replicated, variant, "AdamW", nn.Module.parameters, False, 3)


class Matrices(nn.Module):
    """Matrices of several shapes: 700 elements."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        shapes = [(7, 20), (20, 10), (10, 20), (20, 8)]
        self.weights = nn.ParameterList(torch.randn(shape) / math.sqrt(shape[0]) for shape in shapes)

    def forward(self, x):  # (batch, 7) -> (batch, 8)
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x


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


def own_optimizer(rank, of, variant, cap_mb, optimizer_cls, shapes, kwargs):
    """Gradients are drawn for each step and rank. -> largest difference from one process with all of them"""
    drawn = torch.Generator().manual_seed(0)
    whole = [nn.Parameter(torch.randn(shape, generator=drawn)) for shape in shapes]
    params = [nn.Parameter(torch.randn_like(param)) for param in whole]  # others: the constructor broadcasts
    for param, first in zip(params, whole):
        if rank.rank == 0:
            param.data.copy_(first.data)
    plain = optimizer_cls(whole, **kwargs)
    optimizer = of(variant)(params, optimizer_cls, bucket_cap_mb=cap_mb, **kwargs)
    for _ in range(4):
        grads = [[torch.randn(shape, generator=drawn) for shape in shapes] for _ in range(rank.world_size)]
        for param, grad in zip(params, grads[rank.rank]):
            (param * grad).sum().backward()
        optimizer.step()
        for param, *its in zip(whole, *grads):
            param.grad = sum(grad / rank.world_size for grad in its)
        plain.step()
    return max((a - b).abs().max().item() for a, b in zip(params, whole))


@pytest.mark.parametrize("of", [core_of, optimizer_of], ids=["core", "guard"])
@pytest.mark.parametrize("cap_mb", [1e-6, 2e-3, 1])
def test_muon_steps_whole_matrices(run, of, cap_mb, world_size):
    """At d = 2 to the bit. Beyond, the order of a sum: Newton–Schulz works in bf16, and shows its last bit."""
    shapes = [(24, 16), (16, 24), (8, 8), (40, 16), (16, 3)]
    (worst, *_) = run(own_optimizer, of, "variants.whole_matrices", cap_mb, torch.optim.Muon, shapes, {"lr": 0.02})
    assert worst <= (0 if world_size <= 2 else 2e-3)


@pytest.mark.parametrize("of", [core_of, optimizer_of], ids=["core", "guard"])
def test_blocks_are_stepped_as_in_the_whole_tensor(run, of, world_size):
    shapes = [(40, 40), (10,), (513,), (300,)]
    (worst, *_) = run(own_optimizer, of, "variants.blocks", 2e-3, BlockSGD, shapes, {"lr": 0.1})
    assert worst <= (0 if world_size <= 2 else 1e-6)


def refused(rank, variant, optimizer_cls, shape, kwargs):
    with pytest.raises(ValueError, match="is not element-wise"):
        optimizer_of(variant)([nn.Parameter(torch.zeros(shape))], optimizer_cls, **kwargs)


@pytest.mark.parametrize("world_size", [1])
def test_other_stages_refuse_what_these_variants_are_for(run):
    run(refused, "stage4_overlap", torch.optim.Muon, (8, 8), {"lr": 0.1})
    run(refused, "stage4_overlap", BlockSGD, (40, 40), {"lr": 0.1})
    run(refused, "variants.blocks", torch.optim.Muon, (8, 8), {"lr": 0.1})


# -------------------------------------------------------------------------------------------------------- with a guard


@pytest.mark.parametrize("variant", AS_REPLICATED)
@pytest.mark.parametrize("with_no_sync", [True, False], ids=["no_sync", "every backward"])
def test_a_guarded_variant_accumulates(run, variant, with_no_sync):
    run(test_contract.accumulate, variant, with_no_sync)


@pytest.mark.parametrize("variant", AS_REPLICATED)
def test_a_guarded_variant_clips(run, variant):
    run(test_contract.clip, variant, 2.0, 0.05)


@pytest.mark.parametrize("variant", AS_REPLICATED[:-1])
def test_a_guarded_variant_goes_on_in_plain_torch_and_back(run, variant):
    run(test_checkpoint.to_plain_and_back, variant)
