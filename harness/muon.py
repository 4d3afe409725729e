"""Rows that train with Muon: matrices by torch.optim.Muon, the rest by AdamW, in four ways to share the work.

`make bench ARGS="--rows muon"` and `make bench WHAT=network ARGS="--rows muon"` measure them. What Muon adds to a step
is computing, Newton–Schulz of each matrix: replicated it takes all of it on every rank, sharded 1/d.
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
    """-> matrices that Muon is for; embeddings, and what isn't a matrix."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    matrices = [param for param in model.parameters() if param.dim() == 2 and param not in embeddings]
    others = set(model.parameters()).difference(matrices)  # the head is an embedding too
    return matrices, [param for param in model.parameters() if param in others]


def sharded(of_matrices, of_rest, prefetches=False):
    def build(model, adamw):
        matrices, rest = split(model)
        # The rest first: embeddings are what the next forward pass reads first.
        pair = Chained(of_rest(rest, torch.optim.AdamW, **adamw), of_matrices(matrices, torch.optim.Muon, **MUON))
        for optimizer in pair.optimizers if prefetches else ():
            optimizer.prefetch_params(model)
        return Training(model, model, pair)
    return build


def ddp_and_muon(model, adamw):
    """Every rank orthogonalises every matrix."""
    own = functools.partial(reference.DistributedOptimizer, average_gradients=False)
    training = sharded(own, own)(model, adamw)
    training.forward = reference.in_ddp(model)
    return training


class StackedByShape:
    """As nanochat's DistMuon, from its description: matrices of one shape are a stack, padded to a multiple of d, of
    which each rank steps 1/d, in whole matrices. In `step`: a reduce-scatter of each stack of gradients, Muon on this
    rank's matrices, an all-gather of each stack of parameters, a copy out of it."""

    param_groups, state, process_group = (), {}, None

    def __init__(self, matrices, muon, **settings):
        self.d, self.rank, self.stacks = dist.get_world_size(), dist.get_rank(), []
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
        """`step` does it."""

    @torch.no_grad()
    def step(self):
        for params, own, (n, *shape) in self.stacks:
            grads, mine = params[0].new_zeros(self.d * n, *shape), params[0].new_empty(n, *shape)
            torch._foreach_copy_(list(grads[: len(params)]), [param.grad / self.d for param in params])
            dist.reduce_scatter_tensor(mine, grads)
            for param, grad in zip(own, mine):
                param.grad = grad
        self.optimizer.step()
        for params, own, (n, *shape) in self.stacks:
            gathered, mine = params[0].new_empty(self.d * n, *shape), params[0].new_zeros(n, *shape)
            torch._foreach_copy_(list(mine[: len(own)]), own)
            dist.all_gather_into_tensor(gathered, mine)
            torch._foreach_copy_(params, list(gathered[: len(params)]))

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad()
        for params, _, _ in self.stacks:
            for param in params:
                param.grad = None


stacked = sharded(StackedByShape, stage2_allgather.DistributedOptimizer)
in_stage_2 = sharded(stage2_allgather.DistributedOptimizer, stage2_allgather.DistributedOptimizer)
whole = sharded(variants.muon.DistributedOptimizer, stage4_overlap.DistributedOptimizer, prefetches=True)

# name -> how it is built, what it holds of matrices and of the rest: (whole, shared) bytes a parameter
ROWS = {
    "ddp + muon": (ddp_and_muon, (12, 0), (16, 0)),
    "stage 2 muon": (in_stage_2, (8, 4), (8, 8)),
    "muon stacked by shape": (stacked, (8, 12), (8, 8)),
    "variants muon": (whole, (4, 8), (4, 12)),
}
