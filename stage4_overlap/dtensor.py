"""A tensor-parallel model over a 2-D mesh: each rank shards what it has of a DTensor.

What it has of a parameter lies in a bucket, over the data-parallel ranks. Shown by tests/stages/test_dtensor.py.
"""

import torch.distributed as dist

from guard.groups import spread_over


def local(tensor):
    """Of a DTensor what lies on this rank; of any other tensor, itself."""
    return getattr(tensor, "_local_tensor", tensor)  # to_local() returns a view, whose data can't be replaced


def local_parts(named, process_group):
    """-> [(name, what of the parameter is on this rank), …]. ValueError: it is spread over `process_group` already."""
    ours = set(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    for name, param in named:
        for group in spread_over(param):
            if len(ours.intersection(dist.get_process_group_ranks(group))) > 1:
                raise ValueError(
                    f"parameter {name} is spread over ranks of process_group already: pass the data-parallel dimension "
                    'of the mesh, as process_group=mesh["dp"].get_group()'
                )
    return [(name, local(param)) for name, param in named]
