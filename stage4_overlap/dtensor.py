"""For whoever trains a tensor-parallel model over a 2-D mesh: each rank shards what it has of a DTensor.

What it has of a parameter lies in a bucket, over the data-parallel ranks. Its gradient may be a partial sum over the
others, and norms count each element once. Shown by tests/stages/test_dtensor.py.
"""

import torch
import torch.distributed as dist

from guard.clip import gather_scalar
from guard.groups import all_params


def local(tensor):
    """Of a DTensor what lies on this rank; of any other tensor, itself."""
    return getattr(tensor, "_local_tensor", tensor)  # to_local() returns a view, whose data can't be replaced


def spread_over(param):
    """The process groups over which the elements of a DTensor are spread; of any other tensor, none."""
    placements = enumerate(getattr(param, "placements", ()))
    return tuple(param.device_mesh.get_group(dim) for dim, placement in placements if not placement.is_replicate())


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


class LocalBucket:
    """Of buckets with DTensors."""

    def tensor_of(self, param):
        return local(param)

    def dense(self, grad, param, tensor):
        if grad is not None and hasattr(param, "placements"):
            grad = local(grad.redistribute(placements=param.placements))
        return super().dense(grad, param, tensor)

    def note_new_params(self):
        torch.autograd.graph.increment_version([local(param) for param in self.stepped])
        super().note_new_params()

    def versions_now(self):
        """A DTensor has a version counter, and so has what this rank has of it: a write moves on one of the two."""
        return [*super().versions_now(), *(tensor._version for tensor in self.tensors)]


class TensorParallel:
    def _groups_of_ranks(self):
        groups = dict.fromkeys(group for param in all_params(self) for group in spread_over(param))
        return [*super()._groups_of_ranks(), *groups]

    def _bounds(self):
        """And this rank in the other dimensions of the mesh: there it has another part, which looks alike."""
        params = all_params(self)
        return {index: (*bound, *map(dist.get_rank, spread_over(params[index])))
                for index, bound in super()._bounds().items()}

    def _total_norm(self, norm_type):
        grads = {spread_over(param): [] for param in all_params(self)}  # by process groups; the same on every rank
        for param, main_param in self._main_param.items():
            if main_param.grad is not None:
                grads[spread_over(param)].append(main_param.grad)
        norms = [self._norm_over_ranks(part, norm_type, (self.process_group, *groups))
                 for groups, part in grads.items()]
        norm = torch.linalg.vector_norm(torch.stack(norms), float(norm_type))
        for group in dict.fromkeys(group for groups in grads for group in groups):
            norm = gather_scalar(norm, group).max()  # shards of unlike sizes round otherwise: copies would drift apart
        return norm
