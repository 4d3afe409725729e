"""Shards the local part of each DTensor over the data-parallel ranks: for tensor-parallel models on a 2-D mesh.

Shown by tests/stages/test_dtensor.py.
"""

import torch.distributed as dist

from guard.groups import mesh_groups_of


def local(tensor):
    """Return the part of a DTensor that is on this rank. Any other tensor is returned as it is."""
    return getattr(tensor, "_local_tensor", tensor)  # not to_local(): replacing the data of its view has no effect


def local_parts(named, process_group):
    """Return [(name, local part of the parameter), …].

    Raises ValueError: a parameter is spread over ranks of `process_group` already.
    """
    group_ranks = set(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    for name, param in named:
        for group in mesh_groups_of(param):
            if len(group_ranks.intersection(dist.get_process_group_ranks(group))) > 1:
                raise ValueError(f"parameter {name} is spread over ranks of process_group already: pass the "
                                 'data-parallel dimension of the mesh, as process_group=mesh["dp"].get_group()')
    return [(name, local(param)) for name, param in named]
