"""Makes a tensor of which this rank has only a part look like a whole tensor to torch's checkpoint functions.

Situation: a program saves and loads an optimizer with torch's `get_state_dict`, `dcp.save`, `dcp.load` and
`set_state_dict`, as programs with FSDP2 do, on any number of ranks. In stages 3 and 4 of this project a rank has a
range of the flat elements of a tensor, which may begin in the middle of a row. torch's DTensor is cut between rows and
can't describe such a range. So the class FlatShard has the three methods by which torch.distributed.checkpoint (DCP)
saves and loads tensor subclasses.

DCP reads and writes *boxes*: rectangular parts of a tensor, each with offsets and a shape. A range of flat elements
consists of several boxes, which `boxes_of` computes. Shown by tests/checkpoint/test_torch.py. Source of the protocol:
torch.distributed._checkpointable.
"""

import math

import torch
import torch.distributed.checkpoint as dcp


class FlatShard(torch.Tensor):
    """A part of a *whole* tensor: the flat elements `start` to `stop` (excluded) of one box of the whole.

    It has the shape and dtype of the whole tensor. It may have no elements (start == stop).

    Attributes:
        local: (stop - start,): the elements on this rank.
        start, stop: the range of these elements in the flattened box.
        offsets, sizes: where the box begins in the whole, and the shape of the box. If the whole is a DTensor, the box
            is the local part of this rank. Otherwise the box is the whole.
        is_replica: whether another rank has the same box and writes it. Then this rank doesn't write it, because DCP
            refuses boxes that overlap.
        was_broadcast: whether torch has called broadcast() with this FlatShard. The ranks have then received zeros, and
            load_state_dict() refuses the FlatShard.
        gather: collective function: a value of this rank -> list of the values of all ranks that have a part of the
            whole. None if this FlatShard was unpickled, since a function can't be pickled.
    """

    @staticmethod
    def __new__(cls, shape, start, stop, local, offsets=None, sizes=None, is_replica=False, gather=None):
        # A tensor of this shape without memory for its elements.
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
        """Return a tuple. It is equal for two FlatShards if they are the same elements of wholes of the same shape."""
        return tuple(self.shape), self.offsets, self.sizes, self.start, self.stop

    def with_local(self, local):
        """Return a FlatShard of the same elements of the whole, with the values `local`."""
        return FlatShard(self.shape, self.start, self.stop, local, self.offsets, self.sizes, self.is_replica,
                         self.gather)

    def boxes(self):
        """Yield (offsets in the whole, elements) for each of the smaller boxes that make up this range of elements.

        The elements have the shape of the smaller box.
        """
        smaller_boxes = boxes_of(self.sizes, self.start, self.stop)
        parts = self.local.split([math.prod(sizes) for _, sizes in smaller_boxes])
        for (offsets_in_box, sizes), part in zip(smaller_boxes, parts):
            offsets = torch.Size(outer + inner for outer, inner in zip(self.offsets, offsets_in_box))
            yield offsets, part.view(sizes)

    def full_tensor(self):
        """Return the whole tensor, as DTensor.full_tensor() does. Collective over all ranks that have a part of it."""
        if self.gather is None:
            raise RuntimeError("full_tensor() needs the ranks of the optimizer: this FlatShard was read from a file")
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for shard in self.gather(self.with_local(self.local.cpu())):  # on the CPU, because it is sent pickled
            shard.copy_into(whole)
        return whole

    def copy_into(self, whole):
        """Copy the elements of this rank to their places in `whole`."""
        for offsets, part in self.boxes():
            place = tuple(slice(begin, begin + size) for begin, size in zip(offsets, part.shape))
            whole[place] = part

    # DCP calls the next three methods. In DCP's words a box is a "chunk" or a "tensor shard".

    def __create_chunk_list__(self):
        """Tell DCP which boxes to read."""
        return [dcp.metadata.ChunkStorageMetadata(offsets, part.shape) for offsets, part in self.boxes()]

    def __create_write_items__(self, fqn, _):
        """Tell DCP which boxes to write. fqn ("fully qualified name"): key of this tensor in the state_dict.

        The last argument is this tensor, once more.
        """
        chunks = [] if self.is_replica else self.__create_chunk_list__()
        items = []
        for chunk in chunks:
            index = dcp.metadata.MetadataIndex(fqn, chunk.offsets)
            properties = dcp.metadata.TensorProperties(dtype=self.dtype)
            data = dcp.planner.TensorWriteData(chunk, properties, self.size())
            items.append(dcp.planner.WriteItem(index, dcp.planner.WriteItemType.SHARD, tensor_data=data))
        return items

    def __get_tensor_shard__(self, index):
        """Return a view of the elements of the box that begins at `index.offset`. DCP reads it, or writes into it."""
        return next(part for offsets, part in self.boxes() if offsets == index.offset)

    def __reduce_ex__(self, protocol):
        # Pickle the arguments of the constructor, without `gather`, which can't be pickled. `local` is cloned, because
        # pickle would write the whole storage of a view.
        arguments = self.start, self.stop, self.local.clone(), self.offsets, self.sizes, self.is_replica
        return FlatShard, (tuple(self.shape), *arguments)

    def __deepcopy__(self, memo):
        return self.clone()  # by __torch_dispatch__ below: a FlatShard with a clone of `local`

    def __repr__(self):
        return f"FlatShard(elements {self.start} to {self.stop} of {tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        """Run `function` on the elements of this rank, if it copies or converts. Any other function is an error.

        torch calls this method in place of each of its functions that gets a FlatShard as an argument.
        """
        name = function._schema.name
        shard = args[0]
        # With full_state_dict=True torch's get_state_dict() gathers DTensors, and broadcasts tensors of other classes.
        if name == "c10d::broadcast_":
            (shard,) = args[0]  # the first argument of a broadcast is a list of tensors
            # An error here would let the other ranks wait. So zeros are sent, and load_state_dict() refuses them.
            shard.was_broadcast = True
            whole = torch.zeros(shard.shape, dtype=shard.dtype, device=shard.device)
            return function([whole], *args[1:], **(kwargs or {}))
        if name == "aten::copy_" and isinstance(args[1], FlatShard) and shard.place == args[1].place:
            shard.local.copy_(args[1].local)
            return shard
        if name == "aten::new_empty":  # DCP's stager makes an empty tensor, and then copies all attributes into it
            return FlatShard(shard.shape, 0, 0, shard.local.new_empty(0, **(kwargs or {})))
        if name in ("aten::detach", "aten::alias", "aten::clone", "aten::_to_copy", "aten::empty_like"):
            return shard.with_local(function(shard.local, *args[1:], **(kwargs or {})))
        raise RuntimeError(f"{name} of a FlatShard, of which each rank has a part: full_tensor() has the whole")


def boxes_of(shape, start, stop) -> list[tuple[tuple, tuple]]:
    """Return [(offsets, sizes), …]: the boxes that make up flat elements `start` to `stop` (excluded) of a tensor.

    The boxes come in the order of the elements. For example, elements 2 to 9 (excluded) of a tensor of shape (3, 4) are
    three boxes: the end of row 0 (a), row 1 (b), and the beginning of row 2 (c). In a tensor of more dimensions a "row"
    is a tensor itself, and its end consists of several boxes, too.

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
        row, begin = divmod(start, row_numel)  # `begin` counts the elements of this row before `start`
        n_rows = (stop - start) // row_numel  # how many whole rows the elements that are left can fill
        if begin == 0 and n_rows:  # a box of whole rows, which begins at 0 in all other dimensions
            boxes.append(((row, *[0] * len(row_shape)), (n_rows, *row_shape)))
            start += n_rows * row_numel
        else:
            end = min(begin + stop - start, row_numel)  # where the range ends in this row
            boxes += [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes_of(row_shape, begin, end)]
            start += end - begin
    return boxes


torch.serialization.add_safe_globals([FlatShard])  # so that torch.load(weights_only=True) may unpickle a FlatShard
