"""Where what a rank has of a DTensor lies in the whole: a box, which follows from mesh and placements.

Along each dimension the whole is cut into pieces; each box is one of them in every dimension. In files and on the move
its elements come box after box, each flat: what a rank has is one run of these. A tensor that isn't cut is one box.
"""

import itertools
import math
from typing import NamedTuple

from .errors import UnfitModel


class Box(NamedTuple):
    """`offsets`, `sizes`: by dimension, where in the whole. `base`: how many elements lie in the boxes before it."""

    offsets: tuple
    sizes: tuple
    base: int = 0

    @property
    def numel(self):
        return math.prod(self.sizes)

    def overlap(self, other):
        """-> the slices of what both have, in this box and in the other one; None: they have nothing in common."""
        starts = [*map(max, self.offsets, other.offsets)]
        stops = [min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes)]
        if any(start >= stop for start, stop in zip(starts, stops)):
            return None
        return tuple(tuple(slice(start - offset, stop - offset) for start, stop, offset in zip(starts, stops, offsets))
                     for offsets in (self.offsets, other.offsets))


def cuts_of(tensor, name="a tensor") -> list[list[int]]:
    """-> by dimension the sizes of the pieces, in order, none of them empty; of a tensor that isn't cut one each.

    Raises UnfitModel: it is a DTensor with elements between those of others, as FSDP2 makes of tensor-parallel ones.
    """
    cuts = [[size] for size in tensor.shape]
    for n, placement, _ in meshed(tensor):
        if placement.is_shard() and type(placement).__name__ == "Shard":
            cuts[placement.dim] = [size for whole in cuts[placement.dim] for size in chunks(whole, n)]
        elif not placement.is_replicate():
            raise UnfitModel(f"{name} is a DTensor with placement {placement}: only Shard and Replicate are kept")
    return [[size for size in sizes if size] or [0] for sizes in cuts]


def box_of(tensor) -> Box:
    """What this rank has of the whole; of a tensor that isn't cut, all."""
    offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
    for n, placement, place in meshed(tensor):
        if placement.is_shard():
            parts = chunks(sizes[placement.dim], n)
            offsets[placement.dim] += sum(parts[:place])
            sizes[placement.dim] = parts[place]
    found = Box(tuple(offsets), tuple(sizes))
    return next((box for box in boxes(cuts_of(tensor)) if box[:2] == found[:2]), found)  # else it is empty


def meshed(tensor):
    """-> [(ranks along a dimension of the mesh, placement, this rank's place), …]; of any other tensor, nothing."""
    mesh = getattr(tensor, "device_mesh", None)
    return list(zip(mesh.shape, tensor.placements, mesh.get_coordinate())) if mesh is not None else []


def chunks(size, n):
    """As torch.chunk, and empty ones at the end where it returns fewer."""
    most = -(-size // n)
    return [max(0, min(most, size - most * place)) for place in range(n)]


def boxes(cuts):
    """-> iterator over the boxes of a whole, in the order in which they are kept."""
    base, offsets = 0, [[*itertools.accumulate(sizes, initial=0)] for sizes in cuts]
    for place in itertools.product(*(range(len(sizes)) for sizes in cuts)):
        box = Box(*(tuple(of[at] for of, at in zip(values, place)) for values in (offsets, cuts)), base)
        yield box
        base += box.numel


def whole_box(shape) -> Box:
    return Box((0,) * len(shape), tuple(shape))
