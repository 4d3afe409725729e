"""Shards the local part of each DTensor over the data-parallel ranks: for tensor-parallel models on a 2-D mesh.

A DTensor is torch's tensor whose elements are spread over the ranks of a mesh; each rank has its local part.
Shown by tests/stages/test_dtensor.py.
"""

import torch.distributed as dist

from guard.groups import mesh_groups_of


def local(tensor):
    """Return the part of a DTensor that is on this rank. Any other tensor is returned as it is."""
    # to_local() would return a view, and replacing the data of the view has no effect on the DTensor.
    return getattr(tensor, "_local_tensor", tensor)


def local_parts(named, process_group):
    """Return [(name, local part of the parameter), …] for `named`, [(name, parameter), …].

    Raises ValueError: a parameter is spread over ranks of `process_group` already.
    """
    own_ranks = set(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    for name, param in named:
        for mesh_group in mesh_groups_of(param):  # the process groups over which a DTensor is spread
            common_ranks = own_ranks.intersection(dist.get_process_group_ranks(mesh_group))
            if len(common_ranks) > 1:  # this rank is in both groups anyway
                raise ValueError(f"parameter {name} is spread over ranks of process_group already: pass the "
                                 'data-parallel dimension of the mesh, as process_group=mesh["dp"].get_group()')
    return [(name, local(param)) for name, param in named]
