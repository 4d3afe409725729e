"""The norm of gradients is that of the whole model, though each rank has a part of them.

Shown by tests/stages/test_contract.py, `test_clipping_equals_torch_on_the_whole_model`, and of DTensors by
tests/stages/test_dtensor.py.
"""

import functools

import torch
import torch.distributed as dist

from .groups import all_params, spread_over


def total_norm(optimizer, norm_type):
    """-> the norm of the averaged gradients, a scalar tensor: each element counts once. Collective."""
    params = all_params(optimizer)
    dtype = functools.reduce(torch.promote_types, {param.dtype for param in params}, torch.float32)
    grads = {spread_over(param): [] for param in params}  # by process groups; the same on every rank
    for param, main in optimizer.state.main_param.items():
        if main.grad is not None:
            grads[spread_over(param)].append(main.grad)
    norms = []
    for groups, part in grads.items():
        norm = torch.nn.utils.get_total_norm(part, norm_type).to(params[0].device, dtype)
        for group in (optimizer.process_group, *groups):
            norm = torch.linalg.vector_norm(gather_scalar(norm, group), float(norm_type))
        norms.append(norm)
    norm = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
    for group in dict.fromkeys(group for groups in grads for group in groups):
        norm = gather_scalar(norm, group).max()  # shards of unlike sizes round otherwise: copies would drift apart
    return norm


def gather_scalar(scalar, group):
    """-> that of each rank, (d,). Not reduced on the way: a collective's MAX may lose a nan."""
    everyone = scalar.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(everyone, scalar.view(1), group=group)
    return everyone
