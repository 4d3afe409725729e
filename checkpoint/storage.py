"""What torch.distributed.checkpoint (DCP) is told: which boxes of a tensor a rank has, sums of files, what to trust.

DCP's `.metadata` is a pickle, and so is each value that is no tensor. Here nothing but DCP's own classes comes out of
the first, and torch.load(weights_only=True) reads the others.
"""

import collections
import contextlib
import dataclasses
import io
import math
import pickle
import re
import zipfile
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.utils._pytree import tree_map

from .errors import DamagedCheckpoint
from .optimizers import as_python, local, offsets_of

METADATA = ".metadata"
MOST_DIMENSIONS = 64  # of a tensor in torch
DCP = "torch.distributed.checkpoint"
DTYPES = {name for name in dir(torch) if type(getattr(torch, name)) is torch.dtype}
ALLOWED = {
    *((f"{DCP}.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (f"{DCP}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), *(("torch", name) for name in DTYPES)}


class Boxes(NamedTuple):
    """A tensor in a checkpoint, of which this rank writes or reads some boxes."""

    shape: tuple  # of the whole tensor
    dtype: torch.dtype
    views: dict[torch.Size, torch.Tensor]  # where a box begins in the whole -> its elements, in the shape of the box

    def chunks(self):
        return [ChunkStorageMetadata(offsets, view.shape) for offsets, view in self.views.items()]


def boxes_of(shape, start, stop) -> list[tuple[tuple, tuple]]:
    """Return (offsets, sizes) of the boxes that flat elements `start` to `stop` of a tensor of this shape consist of.

    They come in the order of the elements: a part of a row, whole rows, a part of a row, for each dimension.
    """
    if start >= stop:
        return []
    if len(shape) <= 1:
        return [((start,), (stop - start,))] if shape else [((), ())]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows

    def part_of_row(number, begin, end):
        return [((number, *offsets), (1, *sizes)) for offsets, sizes in boxes_of(shape[1:], begin, end)]

    if first > last:  # all of it lies in one row
        return part_of_row(last, start - last * row, stop - last * row)
    row_start = (0,) * len(shape[1:])
    whole_rows = [((first, *row_start), (last - first, *shape[1:]))] if last > first else []
    head = part_of_row(first - 1, start - (first - 1) * row, row) if start % row else []
    return [*head, *whole_rows, *part_of_row(last, 0, stop - last * row)]


def range_boxes(flat, param, start=0) -> Boxes:
    """Return the Boxes of `flat`, (*lead, elements): flat elements of the local part of `param`, from `start` on.

    `flat` may also be of a state of the same shape, or of a stack of such states with leading dimensions `lead`.
    """
    lead = flat.shape[:-1]
    views = {}
    place = 0
    for begin, sizes in boxes_of(tuple(local(param).shape), start, start + flat.shape[-1]):
        offsets = map(sum, zip(begin, offsets_of(param)))
        stop = place + math.prod(sizes)
        views[torch.Size((*(0,) * len(lead), *offsets))] = flat[..., place:stop].view((*lead, *sizes))
        place = stop
    return Boxes((*lead, *param.shape), flat.dtype, views)


def tensor_boxes(value, tensor=None) -> Boxes:
    """Return the Boxes of all elements of `value`, which lie in the whole where those of `tensor` do.

    tensor: a DTensor has a part of the whole, any other tensor is the whole. None: `value` itself.
    """
    if tensor is None:
        tensor = value
    if not tensor.numel():
        return Boxes(tensor.shape, value.dtype, {torch.Size(offsets_of(tensor)): local(value)})
    return range_boxes(local(value).reshape(-1), tensor)


# ------------------------------------------------------------------------------------------------------------ writing


class SavePlanner(dcp.DefaultSavePlanner):
    """Plans to write `content`: Boxes or bytes by path, which is where DCP's converters put these in nested dicts.

    DCP writes one time what several ranks have at one path, in a box of one place: as the lowest of them has it.
    """

    def __init__(self, content):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self.items = {joined(path): value for path, value in content.items()}
        self.paths = {joined(path): path for path in content}

    def create_local_plan(self):
        items = []
        for key, value in self.items.items():
            if isinstance(value, bytes):
                items.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            properties, size = TensorProperties(dtype=value.dtype), torch.Size(value.shape)
            items += [WriteItem(MetadataIndex(key, chunk.offsets), WriteItemType.SHARD,
                                tensor_data=TensorWriteData(chunk, properties, size)) for chunk in value.chunks()]
        return SavePlan(items, planner_data=self.paths)

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        paths = dict(collections.ChainMap(*(plan.planner_data for plan in all_plans)))
        return plans, dataclasses.replace(metadata, planner_data=paths)

    def resolve_data(self, write_item):
        value = self.items[write_item.index.fqn]
        return io.BytesIO(value) if isinstance(value, bytes) else value.views[write_item.index.offset]


class SummedFile(io.BufferedWriter):
    """A file that knows the number of bytes that were written, and their CRC-32."""

    n_bytes = crc = 0

    def write(self, content):
        self.crc = zlib.crc32(content, self.crc)
        self.n_bytes += memoryview(content).nbytes
        return super().write(content)


class SummingFileSystem(FileSystem):
    """Sums up the files that it writes. `sums`: name -> its size in bytes, its CRC-32."""

    def __init__(self):
        self.sums = {}

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        with SummedFile(io.FileIO(path, mode)) as stream:
            yield stream
            self.sums[Path(path).name] = stream.n_bytes, stream.crc

    def rename(self, path, new_path):
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class Writer(dcp.FileSystemWriter):
    """Writes one file per rank, flushed to the disk. With several threads DCP would take a full disk for success."""

    def __init__(self, path):
        super().__init__(path, sync_files=True, thread_count=1, overwrite=False)
        self.fs = SummingFileSystem()

    def storage_meta(self):
        return StorageMeta()  # without the path, which is another when the folder is complete


# ------------------------------------------------------------------------------------------------------------ reading


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans to read `items`: key -> Boxes, which it fills, or None, for what torch.load(weights_only=True) returns."""

    def __init__(self, items):
        super().__init__()
        self.items = items

    def create_local_plan(self):
        items, no_offsets = [], torch.Size((0,))
        for key, value in self.items.items():
            if not isinstance(value, Boxes):
                index = MetadataIndex(key)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, no_offsets, index, no_offsets, no_offsets))
                continue
            parts = create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], value.chunks())
            n_elements = sum(view.numel() for view in value.views.values())
            if missing := n_elements - sum(math.prod(part.lengths) for part in parts):
                raise DamagedCheckpoint(f"{key} is not complete: {missing} elements are missing")
            items += parts
        return LoadPlan(items)

    def resolve_tensor(self, read_item):
        view = self.items[read_item.dest_index.fqn].views[read_item.dest_index.offset]
        return view[tuple(slice(start, start + n) for start, n in zip(read_item.dest_offsets, read_item.lengths))]

    def load_bytes(self, read_item, value):
        self.items[read_item.dest_index.fqn] = unpacked(value)


class Reader(dcp.FileSystemReader):
    """Reads files of which `metadata` has been checked. DCP's own fallback, a metadata of each rank, is never read."""

    def __init__(self, path, metadata):
        super().__init__(path)
        self.metadata = metadata

    def read_metadata(self):
        return self.metadata

    def read_data(self, plan, planner):
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            with open(self.path / info.relative_path, "rb") as file:
                refuse_compressed(file, info)
        return super().read_data(plan, planner)


def refuse_compressed(file, info):
    """Raise DamagedCheckpoint if what torch.load would read there becomes larger than the file."""
    n_bytes = min(info.length, 2**16)  # the directory of a zip is at its end, and that of torch.save is small
    file.seek(info.offset + info.length - n_bytes)
    directory = zipfile.ZipFile(io.BytesIO(file.read(n_bytes))).infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in directory) or \
            sum(entry.file_size for entry in directory) > info.length:
        raise DamagedCheckpoint(f"{info.relative_path} is damaged: it has compressed tensors")


class MetadataUnpickler(pickle._Unpickler):  # the one in Python, of which an instruction can be replaced
    """Makes DCP's own objects, and nothing else. No name in ALLOWED has a dot, so none leads to an attribute."""

    def find_class(self, module, name):
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which isn't DCP's")
        return super().find_class(module, name)

    def load_build(self):
        if isinstance(self.stack[-2], type):  # the object whose attributes would be set
            raise pickle.UnpicklingError("it changes a class")
        super().load_build()

    dispatch = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


def read_metadata(folder, sizes):
    """Return the metadata of a checkpoint. `sizes`: file -> its number of bytes, of all that may be read.

    Raises DamagedCheckpoint, before memory is taken: tensors would be larger than their files, or lie elsewhere.
    """
    with opened(Path(folder) / METADATA) as file:
        metadata = MetadataUnpickler(file).load()
        check_metadata(metadata, sizes)
        return metadata


@contextlib.contextmanager
def opened(path):
    """Open a file of a checkpoint. Whatever is wrong with what is in it is a DamagedCheckpoint, which names it."""
    try:
        need(path.exists(), "it is missing")
        need(path.is_file(), "it is no regular file")  # opening a FIFO would wait
        with open(path, "rb") as file:
            yield file
    except OSError:
        raise
    except Exception as error:
        words = str(error) if isinstance(error, (ValueError, pickle.UnpicklingError)) else type(error).__name__
        raise DamagedCheckpoint(f"{path.name} is damaged: {words}") from None


def check_metadata(metadata, sizes):
    n_bytes = collections.Counter()  # file -> bytes of all tensors in it
    for index, info in metadata.storage_data.items():
        need(type(index) is MetadataIndex and type(info) is _StorageInfo, "a place of another class")
        need(info.relative_path in sizes, f"a tensor lies in {info.relative_path!r:.60}")
        need(is_count(info.offset) and is_count(info.length) and info.transform_descriptors is None, "a place")
        need(info.offset + info.length <= sizes[info.relative_path], f"{index.fqn!r:.60} lies behind the end")
        n_bytes[info.relative_path] += info.length
    need(all(n <= sizes[name] for name, n in n_bytes.items()), "tensors lie over each other")
    for key, stored in metadata.state_dict_metadata.items():
        need(type(key) is str, "a key that is no text")
        if type(stored) is BytesStorageMetadata:
            need(MetadataIndex(key) in metadata.storage_data, f"{key!r:.60} is nowhere")
            continue
        need(type(stored) is TensorStorageMetadata and type(stored.properties.dtype) is torch.dtype, "a tensor")
        need(all(map(is_count, stored.size)) and len(stored.size) < MOST_DIMENSIONS, f"the shape of {key!r:.60}")
        n_stored = 0
        for chunk in stored.chunks:
            need(len(chunk.offsets) == len(chunk.sizes) == len(stored.size), f"a box of {key!r:.60}")
            need(all(is_count(start) and is_count(n) and start + n <= size for start, n, size in
                     zip(chunk.offsets, chunk.sizes, stored.size)), f"a box of {key!r:.60}")
            n_stored += metadata.storage_data[MetadataIndex(key, chunk.offsets)].length
        need(math.prod(stored.size) * stored.properties.dtype.itemsize <= n_stored, f"{key!r:.60} is too large")


def need(condition, message):
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def is_count(value):
    return type(value) is int and value >= 0


# ------------------------------------------------------------------------------------------------------------- values


def joined(path) -> str:
    """Return the key of a value at a path."""
    return ".".join(map(str, path))


def packed(value, name) -> bytes:
    """Return `value` as torch.save writes it. Raises ValueError: `unpacked` couldn't read it again."""
    buffer = io.BytesIO()
    try:
        torch.save(tree_map(as_saved, value), buffer)
        unpacked(io.BytesIO(buffer.getvalue()))
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]+)|got <class '([\w.]+)'>", str(error))
        words = f"it holds {named[1] or named[2]}" if named else f"{type(error).__name__}: {error}"
        raise ValueError(f"load() can't read {name} again: {words}") from None
    return buffer.getvalue()


def unpacked(stream):
    """Return a value that `packed` or torch's own tools have written. Runs no code from it."""
    with torch.serialization.safe_globals([frozenset]):
        return torch.load(stream, map_location="cpu", weights_only=True)


def as_saved(value):
    """Return a tensor's copy on the CPU, without what lies around it in memory; a number of NumPy's as Python's."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else as_python(value)
