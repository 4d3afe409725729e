"""Where the local part of a DTensor lies in the whole tensor: a box, which follows from mesh and placements.

Each dimension of the whole is cut into pieces, and a box is one piece per dimension. In files and messages a tensor is
stored box after box, each flat, so the local part of a rank is contiguous. A tensor that isn't cut is one box.
"""

import itertools
import math
from typing import NamedTuple

from .errors import UnfitModel


class Box(NamedTuple):
    """`offsets`, `sizes`: place in the whole, by dimension. `base`: number of elements in the boxes before it."""

    offsets: tuple
    sizes: tuple
    base: int = 0

    @property
    def numel(self):
        return math.prod(self.sizes)

    def overlap(self, other):
        """-> slices of the common part in this box and in the other box; None if they have nothing in common."""
        starts = [*map(max, self.offsets, other.offsets)]
        stops = [min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes)]
        if any(start >= stop for start, stop in zip(starts, stops)):
            return None
        return tuple(tuple(slice(start - offset, stop - offset) for start, stop, offset in zip(starts, stops, offsets))
                     for offsets in (self.offsets, other.offsets))


def cuts_of(tensor, name="a tensor") -> list[list[int]]:
    """-> sizes of the pieces of each dimension, none empty. Raises UnfitModel: FSDP2 has cut a tensor-parallel one."""
    cuts = [[size] for size in tensor.shape]
    for n, placement, _ in meshed(tensor):
        if placement.is_shard() and type(placement).__name__ == "Shard":
            cuts[placement.dim] = [size for whole in cuts[placement.dim] for size in chunks(whole, n)]
        elif not placement.is_replicate():
            raise UnfitModel(f"{name} is a DTensor with placement {placement}: only Shard and Replicate are kept")
    return [[size for size in sizes if size] or [0] for sizes in cuts]


def box_of(tensor) -> Box:
    """-> the box that this rank has; the whole if the tensor isn't cut."""
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for n, placement, place in meshed(tensor):
        if placement.is_shard():
            parts = chunks(sizes[placement.dim], n)
            offsets[placement.dim] += sum(parts[:place])
            sizes[placement.dim] = parts[place]
    found = Box(tuple(offsets), tuple(sizes))
    return next((box for box in boxes(cuts_of(tensor)) if box[:2] == found[:2]), found)  # else it is empty


def local(tensor):
    """-> the part of a DTensor that is on this rank; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def is_meshed(tensor):
    return hasattr(tensor, "device_mesh")


def meshed(tensor):
    """-> [(ranks along a dimension of the mesh, placement, this rank's place), …]; of any other tensor, nothing."""
    mesh = getattr(tensor, "device_mesh", None)
    return list(zip(mesh.shape, tensor.placements, mesh.get_coordinate())) if mesh is not None else []


def chunks(size, n):
    """-> n sizes, as of torch.chunk; where that returns fewer chunks, the last sizes are 0."""
    most = -(-size // n)
    return [max(0, min(most, size - most * place)) for place in range(n)]


def boxes(cuts):
    """-> iterator over the boxes of a whole, in the order in which they are kept."""
    base, offsets = 0, [[*itertools.accumulate(sizes, initial=0)] for sizes in cuts]
    for place in itertools.product(*(range(len(sizes)) for sizes in cuts)):
        box = Box(*(tuple(of[at] for of, at in zip(values, place)) for values in (offsets, cuts)), base)
        yield box
        base += box.numel
