"""Trains with Muon, for rows of the bench: matrices by torch.optim.Muon, the rest by AdamW, replicated and sharded.

`make bench ARGS="--rows muon"` and `make bench WHAT=network ARGS="--rows muon"` measure them. Muon adds computing to a
step, Newton–Schulz of each matrix. Replicated, every rank computes all matrices; sharded, a rank computes 1/d.
"""

import functools

import torch

import stage4_overlap
import variants.muon
from guard.chained import Chained
from harness.training.baselines import DistributedOptimizer, Training, in_ddp

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


def split(model):
    """Return (matrices, rest): Muon is for matrices that are no embeddings."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    matrices = []
    rest = []
    for param in model.parameters():
        if param.dim() == 2 and param not in embeddings:  # the head has the weight of an embedding
            matrices.append(param)
        else:
            rest.append(param)
    return matrices, rest


def pair_of(matrix_class, rest_class, prefetches=False):
    """Return a function build(model, adamw) -> Training: `matrix_class` runs Muon, `rest_class` runs AdamW."""
    def build(model, adamw):
        matrices, rest = split(model)
        # The rest comes first, because the next forward pass reads embeddings first.
        pair = Chained(rest_class(rest, torch.optim.AdamW, **adamw), matrix_class(matrices, torch.optim.Muon, **MUON))
        if prefetches:
            for optimizer in pair.optimizers:
                optimizer.prefetch_params(model)
        return Training(model, model, pair)
    return build


def ddp_and_muon(model, adamw):
    """Orthogonalise every matrix on every rank, beneath DDP."""
    replicated = functools.partial(DistributedOptimizer, average_gradients=False)
    training = pair_of(replicated, replicated)(model, adamw)
    training.forward = in_ddp(model)
    return training


whole_matrices = pair_of(variants.muon.DistributedOptimizer, stage4_overlap.DistributedOptimizer, prefetches=True)
