"""A range of a tensor's flat elements as torch.distributed.checkpoint stores tensors: in boxes."""

import math

import torch
import torch.distributed.checkpoint as dcp


def boxes(shape, start, stop):
    """Flat elements `start` to `stop` of a tensor of `shape`, as few boxes -> [(offsets, sizes), …], in order.

    Of a matrix: the end of a row, whole rows, the start of one. torch.distributed.checkpoint stores nothing but boxes.
    """
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])  # elements of one step along the first dimension
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        return [((last, *o), (1, *s)) for o, s in boxes(shape[1:], start - last * row, stop - last * row)]
    zeros = (0,) * (len(shape) - 1)
    return [
        *(((first - 1, *o), (1, *s)) for o, s in boxes(shape[1:], start % row, row) if start % row),
        *([((first, *zeros), (last - first, *shape[1:]))] if first < last else []),
        *(((last, *o), (1, *s)) for o, s in boxes(shape[1:], 0, stop % row)),
    ]


class Shard(torch.Tensor):
    """A tensor of `shape` of which only the flat elements from `start` on, as many as `piece` has, are here.

    __create_chunk_list__, __create_write_items__ and __get_tensor_shard__ are the protocol of
    torch.distributed.checkpoint, which DTensor follows too.
    """

    def __new__(cls, piece, shape, start):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=piece.dtype, device=piece.device)

    def __init__(self, piece, shape, start):
        self.parts, done = {}, 0  # offsets -> view of piece
        for offsets, sizes in boxes(shape, start, start + piece.numel()):
            n = math.prod(sizes)
            self.parts[torch.Size(offsets)] = piece.reshape(-1)[done : done + n].view(sizes)
            done += n

    def __create_chunk_list__(self):
        return [dcp.metadata.ChunkStorageMetadata(offsets, part.shape) for offsets, part in self.parts.items()]

    def __create_write_items__(self, fqn, _):
        items, properties = [], dcp.metadata.TensorProperties(dtype=self.dtype)
        for chunk in self.__create_chunk_list__():
            data = dcp.planner.TensorWriteData(chunk=chunk, properties=properties, size=self.shape)
            index, kind = dcp.metadata.MetadataIndex(fqn, chunk.offsets), dcp.planner.WriteItemType.SHARD
            items.append(dcp.planner.WriteItem(index, kind, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index):
        return self.parts[index.offset]

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise TypeError(f"a Shard holds a part of a tensor, {function} can't be called on it")
