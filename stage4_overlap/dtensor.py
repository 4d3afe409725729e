"""Tensor-parallel models on a 2-D mesh: the local part of each DTensor is sharded over the data-parallel ranks.

Shown by tests/stages/test_dtensor.py.
"""

import torch.distributed as dist

from guard.groups import mesh_groups_of


def local(tensor):
    """Return the part of a DTensor that is on this rank, or any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)  # to_local() returns a view, and replacing its data has no effect


def local_parts(named, process_group):
    """Return [(name, local part of the parameter), …]. Raises ValueError: one is spread over that group already."""
    group_ranks = set(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    for name, param in named:
        for group in mesh_groups_of(param):
            if len(group_ranks.intersection(dist.get_process_group_ranks(group))) > 1:
                raise ValueError(f"parameter {name} is spread over ranks of process_group already: pass the "
                                 'data-parallel dimension of the mesh, as process_group=mesh["dp"].get_group()')
    return [(name, local(param)) for name, param in named]
