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
    """A tensor of (*lead, *shape) of which only a part is here: of `shape` the flat elements from `start` on.

    __create_chunk_list__, __create_write_items__ and __get_tensor_shard__ are the protocol of
    torch.distributed.checkpoint, which DTensor follows too.

    Args:
        part: (*lead, elements that are here).
    """

    def __new__(cls, part, shape, start):
        shape = (*part.shape[:-1], *shape)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=part.dtype, device=part.device)

    def __init__(self, part, shape, start):
        lead, done = part.shape[:-1], 0
        self.n_lead = len(lead)
        self.parts, self.ranges = {}, {}  # offsets of a box -> view of part; -> (start, stop)
        for offsets, sizes in boxes(shape, start, start + part.shape[-1]):
            n, place = math.prod(sizes), torch.Size([0] * self.n_lead + list(offsets))
            self.parts[place] = part[..., done : done + n].reshape((*lead, *sizes)).contiguous()  # as bytes it is read
            self.ranges[place] = start + done, start + done + n
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
