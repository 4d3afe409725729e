"""Gives torch's checkpoint functions a tensor of which this rank has only a range of flat elements.

Situation: a program saves and loads with `get_state_dict`, `dcp.save`, `dcp.load` and `set_state_dict`, as for FSDP2,
on any number of ranks. torch's DTensor is cut by rows; the shards of stages 3 and 4 ignore rows. So FlatShard has the
three methods by which torch.distributed.checkpoint (DCP) saves and loads tensor subclasses. Shown by
tests/checkpoint/test_torch.py. Source of the protocol: torch.distributed._checkpointable.
"""

import math

import torch
import torch.distributed.checkpoint as dcp


class FlatShard(torch.Tensor):
    """The flat elements `start` to `stop` of a box of a larger tensor. It has the shape and dtype of that whole tensor.

    Attributes:
        local: (stop - start,): the elements on this rank.
        start, stop: the range of these elements in the flattened box.
        offsets, sizes: where the box begins in the whole, and the shape of the box. The box is the local part of a
            DTensor; of any other tensor it is the whole.
        is_replica: whether another rank has the same box and writes it, so that this rank doesn't: DCP refuses boxes
            that overlap.
        was_broadcast: whether torch has broadcast this FlatShard. It has sent zeros then, and load_state_dict() refuses
            it.
        gather: collective function: a value of this rank -> the values of all ranks that have a part of the whole. None
            after unpickling.
    """

    @staticmethod
    def __new__(cls, shape, start, stop, local, offsets=None, sizes=None, is_replica=False, gather=None):
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        self.local = local
        self.start = start
        self.stop = stop
        self.offsets = tuple(offsets or (0,) * len(shape))
        self.sizes = tuple(shape if sizes is None else sizes)
        self.is_replica = is_replica
        self.was_broadcast = False
        self.gather = gather
        return self

    @property
    def place(self):
        """Return a key that is equal for FlatShards of the same elements of a whole of the same shape."""
        return tuple(self.shape), self.offsets, self.sizes, self.start, self.stop

    def with_local(self, local):
        """Return a FlatShard of the same place with other values."""
        return FlatShard(self.shape, self.start, self.stop, local, self.offsets, self.sizes, self.is_replica,
                         self.gather)

    def boxes(self):
        """Yield each smaller box of which the range consists: (offsets in the whole, elements in the box's shape)."""
        smaller_boxes = boxes_of(self.sizes, self.start, self.stop)
        parts = self.local.split([math.prod(sizes) for _, sizes in smaller_boxes])
        for (offsets_in_box, sizes), part in zip(smaller_boxes, parts):
            offsets = torch.Size(outer + inner for outer, inner in zip(self.offsets, offsets_in_box))
            yield offsets, part.view(sizes)

    def full_tensor(self):
        """Return the whole tensor, as DTensor.full_tensor() does. Collective over the ranks that have parts."""
        if self.gather is None:
            raise RuntimeError("full_tensor() needs the ranks of the optimizer: this FlatShard was read from a file")
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for shard in self.gather(self.with_local(self.local.cpu())):
            shard.copy_into(whole)
        return whole

    def copy_into(self, whole):
        """Copy the elements of this rank to their places in `whole`."""
        for offsets, part in self.boxes():
            place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape))
            whole[place] = part

    # DCP calls the next three methods.

    def __create_chunk_list__(self):
        """Tell DCP which boxes to read."""
        return [dcp.metadata.ChunkStorageMetadata(offsets, part.shape) for offsets, part in self.boxes()]

    def __create_write_items__(self, fqn, _):
        """Tell DCP which boxes to write. fqn: key of this tensor in the state_dict."""
        chunks = [] if self.is_replica else self.__create_chunk_list__()
        items = []
        for chunk in chunks:
            index = dcp.metadata.MetadataIndex(fqn, chunk.offsets)
            properties = dcp.metadata.TensorProperties(dtype=self.dtype)
            data = dcp.planner.TensorWriteData(chunk, properties, self.size())
            items.append(dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index):
        """Return the elements of the box `index`, a view: DCP reads from it, or writes into it."""
        return next(part for offsets, part in self.boxes() if offsets == index.offset)

    def __reduce_ex__(self, protocol):
        # A clone, because pickle would write the whole storage of a view. `gather` is left out: it can't be pickled.
        arguments = self.start, self.stop, self.local.clone(), self.offsets, self.sizes, self.is_replica
        return FlatShard, (tuple(self.shape), *arguments)

    def __deepcopy__(self, memo):
        return self.clone()

    def __repr__(self):
        return f"FlatShard(elements {self.start} to {self.stop} of {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Copy or convert the elements of this rank, or make an empty FlatShard. Any other function is an error.

        torch calls this method in place of each function of which an argument is a FlatShard.
        """
        name = function._schema.name
        shard = args[0]
        # With full_state_dict=True torch's get_state_dict() gathers DTensors, and broadcasts all other tensors.
        if name == "c10d::broadcast_":
            (shard,) = args[0]  # a list of tensors
            shard.was_broadcast = True  # load_state_dict() refuses it; an error here would let other ranks wait
            whole = torch.zeros(shard.shape, dtype=shard.dtype, device=shard.device)
            return function([whole], *args[1:], **(kwargs or {}))
        if name == "aten::copy_" and isinstance(args[1], FlatShard) and shard.place == args[1].place:
            shard.local.copy_(args[1].local)
            return shard
        if name == "aten::new_empty":  # DCP's stager makes an empty tensor, and then copies the attributes
            return FlatShard(shard.shape, 0, 0, shard.local.new_empty(0, **(kwargs or {})))
        if name in ("aten::detach", "aten::alias", "aten::clone", "aten::_to_copy", "aten::empty_like"):
            return shard.with_local(function(shard.local, *args[1:], **(kwargs or {})))
        raise RuntimeError(f"{name} of a FlatShard, of which each rank has a part: full_tensor() has the whole")


def boxes_of(shape, start, stop) -> list[tuple[tuple, tuple]]:
    """Return (offsets, sizes) of the boxes that flat elements `start` to `stop` of a tensor of this shape consist of.

    The boxes come in the order of the elements. Elements 2 to 9 of a (3, 4) tensor are three boxes: the end of row 0,
    row 1, and the begin of row 2. In more dimensions the end of a row consists of several boxes, too.

        . . a a
        b b b b
        c . . .
    """
    if not shape:  # a scalar
        return [((), ())] if start < stop else []
    row_shape = shape[1:]
    row_numel = math.prod(row_shape)
    boxes: list[tuple[tuple, tuple]] = []
    while start < stop:
        row, begin = divmod(start, row_numel)
        n_rows = (stop - start) // row_numel
        if begin == 0 and n_rows:  # whole rows
            boxes.append(((row, *[0] * len(row_shape)), (n_rows, *row_shape)))
            start += n_rows * row_numel
        else:
            end = min(begin + stop - start, row_numel)
            boxes += [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes_of(row_shape, begin, end)]
            start += end - begin
    return boxes


torch.serialization.add_safe_globals([FlatShard])  # torch.load(weights_only=True) reads it
