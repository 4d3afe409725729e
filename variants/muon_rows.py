"""Trains with Muon, for rows of the bench: matrices by torch.optim.Muon, the rest by AdamW, in four ways.

`make bench ARGS="--rows muon"` and `make bench WHAT=network ARGS="--rows muon"` measure them. Muon adds computing to a
step, Newton–Schulz of each matrix: replicated, every rank does all of it; sharded, a rank does 1/d.
"""

import collections
import functools

import torch
import torch.distributed as dist

import stage2_allgather
import stage4_overlap
import variants.muon
from guard.chained import Chained
from harness import reference
from harness.training import Training

MUON = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


def split(model):
    """Return the matrices that Muon is for, and the rest: embeddings, and what isn't a matrix."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    matrices = [param for param in model.parameters() if param.dim() == 2 and param not in embeddings]
    rest = set(model.parameters()).difference(matrices)  # the head is an embedding too
    return matrices, [param for param in model.parameters() if param in rest]


def pair_of(matrix_class, rest_class, prefetches=False):
    """Return build(model, adamw): Muon by `matrix_class`, AdamW by `rest_class`, both distributed optimizers."""
    def build(model, adamw):
        matrices, rest = split(model)
        # The rest first: the next forward pass reads embeddings first.
        pair = Chained(rest_class(rest, torch.optim.AdamW, **adamw), matrix_class(matrices, torch.optim.Muon, **MUON))
        if prefetches:
            for optimizer in pair.optimizers:
                optimizer.prefetch_params(model)
        return Training(model, model, pair)
    return build


def ddp_and_muon(model, adamw):
    """Orthogonalise every matrix on every rank, beneath DDP."""
    replicated = functools.partial(reference.DistributedOptimizer, average_gradients=False)
    training = pair_of(replicated, replicated)(model, adamw)
    training.forward = reference.in_ddp(model)
    return training


class StackedByShape:
    """Shares out Muon as nanochat's DistMuon does, from its description: matrices of one shape are a stack, padded to a
    multiple of d, and each rank steps 1/d of it, in whole matrices. `step` reduce-scatters each stack of gradients,
    steps this rank's matrices, all-gathers each stack of parameters, and copies them out of it."""

    param_groups, state, process_group = (), {}, None

    def __init__(self, matrices, muon, **settings):
        self.d = dist.get_world_size()
        self.rank = dist.get_rank()
        self.stacks = []
        by_shape = collections.defaultdict(list)
        for matrix in matrices:
            dist.broadcast(matrix.detach(), 0)
            by_shape[matrix.shape].append(matrix)
        for shape, params in by_shape.items():
            n = -(-len(params) // self.d)  # matrices of a rank
            own = [torch.nn.Parameter(param.detach().clone()) for param in params[self.rank * n :][:n]]
            self.stacks.append((params, own, (n, *shape)))
        self.optimizer = muon([param for _, own, _ in self.stacks for param in own], **settings)

    def finish_grad_sync(self):
        """Do nothing: `step` averages the gradients."""

    @torch.no_grad()
    def step(self):
        for params, own, (n, *shape) in self.stacks:
            grads = params[0].new_zeros(self.d * n, *shape)
            own_grads = params[0].new_empty(n, *shape)
            torch._foreach_copy_(list(grads[: len(params)]), [param.grad / self.d for param in params])
            dist.reduce_scatter_tensor(own_grads, grads)
            for param, grad in zip(own, own_grads):
                param.grad = grad
        self.optimizer.step()
        for params, own, (n, *shape) in self.stacks:
            gathered = params[0].new_empty(self.d * n, *shape)
            own_stack = params[0].new_zeros(n, *shape)
            torch._foreach_copy_(list(own_stack[: len(own)]), own)
            dist.all_gather_into_tensor(gathered, own_stack)
            torch._foreach_copy_(params, list(gathered[: len(params)]))

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad()
        for params, _, _ in self.stacks:
            for param in params:
                param.grad = None


stacked = pair_of(StackedByShape, stage2_allgather.DistributedOptimizer)
in_stage_2 = pair_of(stage2_allgather.DistributedOptimizer, stage2_allgather.DistributedOptimizer)
whole_matrices = pair_of(variants.muon.DistributedOptimizer, stage4_overlap.DistributedOptimizer, prefetches=True)
