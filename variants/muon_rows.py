"""Trains with Muon, for two rows of the bench: matrices by torch.optim.Muon, and all other parameters by AdamW.

A row of the bench is a way to train, which is measured. In one of the two rows the optimizers are replicated, so that
each rank updates everything. In the other row they are sharded, by variants/muon.py and by stage 4.
`make bench ARGS="--rows muon"` and `make bench WHAT=network ARGS="--rows muon"` measure them. Muon adds computing to a
step: Newton–Schulz of each matrix. Every rank computes it for all matrices in the replicated row, and each of d ranks
for 1/d of the matrices in the sharded row.
"""

import functools

import torch

import stage4_overlap
import variants.muon
from guard.chained import Chained
from harness.training.baselines import DistributedOptimizer, Training, in_ddp

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


def split(model):
    """Return (matrices, rest): the matrices that are no embeddings, for Muon, and all other parameters."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    matrices = []
    rest = []
    for param in model.parameters():
        if param.dim() == 2 and param not in embeddings:  # the output layer has the weight of an embedding
            matrices.append(param)
        else:
            rest.append(param)
    return matrices, rest


def pair_of(matrix_class, rest_class, prefetches=False):
    """Return a function build(model, adamw) -> Training. `matrix_class` runs Muon, `rest_class` runs AdamW.

    The bench calls it. Training is its training loop. `adamw` has the arguments of AdamW.

    prefetches: whether `step` may return before the updated parameters have arrived.
    """
    def build(model, adamw):
        matrices, rest = split(model)
        # A Chained acts as one optimizer, and steps the rest first: the next forward pass reads embeddings first.
        pair = Chained(rest_class(rest, torch.optim.AdamW, **adamw), matrix_class(matrices, torch.optim.Muon, **MUON))
        if prefetches:
            for optimizer in pair.optimizers:
                optimizer.prefetch_params(model)
        return Training(model, model, pair)
    return build


def ddp_and_muon(model, adamw):
    """Build the replicated row: DDP averages the gradients, and every rank updates every matrix."""
    # This class updates all parameters on every rank. DDP has averaged the gradients already.
    replicated = functools.partial(DistributedOptimizer, average_gradients=False)
    training = pair_of(replicated, replicated)(model, adamw)
    training.forward = in_ddp(model)
    return training


# Builds the sharded row.
whole_matrices = pair_of(variants.muon.DistributedOptimizer, stage4_overlap.DistributedOptimizer, prefetches=True)
