"""Builds two rows of the bench that train with Muon: torch.optim.Muon updates the matrices, AdamW all other parameters.

A row of the bench is a way to train, which is measured. In the replicated row each rank updates everything. In the
sharded row each of d ranks updates 1/d of the matrices, by variants/muon.py, and its share of the rest, by stage 4.
`make bench ARGS="--rows muon"` measures both rows on one host, and `make bench WHAT=network ARGS="--rows muon"` on two.
"""

import functools

import torch

import stage4_overlap
import variants.muon
from guard.chained import Chained
from harness.training import baselines

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


def split(model):
    """Return (matrices, rest): the matrices that are no embeddings, for Muon, and all other parameters."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    matrices = []
    rest = []
    for param in model.parameters():
        if param.dim() == 2 and param not in embeddings:  # the output layer shares its weight with an embedding
            matrices.append(param)
        else:
            rest.append(param)
    return matrices, rest


def pair_of(matrix_class, rest_class, prefetches=False):
    """Return `build`, which the bench calls: build(model, adamw) returns a Training, the bench's training loop.

    matrix_class, rest_class: the distributed optimizers that run Muon, and AdamW.
    prefetches: whether `step` may return before the updated parameters have arrived.
    adamw: the arguments of AdamW.
    """
    def build(model, adamw):
        matrices, rest = split(model)
        # A Chained acts as one optimizer, and steps the rest first: the next forward pass reads embeddings first.
        pair = Chained(rest_class(rest, torch.optim.AdamW, **adamw), matrix_class(matrices, torch.optim.Muon, **MUON))
        if prefetches:
            for optimizer in pair.optimizers:
                optimizer.prefetch_params(model)  # adds hooks: each module waits for its parameters
        # Arguments: the model; what the loop calls, here the model itself; the optimizer.
        return baselines.Training(model, model, pair)
    return build


def ddp_and_muon(model, adamw):
    """Build the replicated row: DDP averages the gradients, and every rank updates every matrix."""
    # baselines.DistributedOptimizer updates all parameters on every rank. DDP has averaged the gradients already.
    replicated = functools.partial(baselines.DistributedOptimizer, average_gradients=False)
    training = pair_of(replicated, replicated)(model, adamw)
    training.forward = baselines.in_ddp(model)  # the loop calls DDP, which calls the model
    return training


# Builds the sharded row, in which each rank has whole matrices.
whole_matrices = pair_of(variants.muon.DistributedOptimizer, stage4_overlap.DistributedOptimizer, prefetches=True)
