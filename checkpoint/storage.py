"""What torch.distributed.checkpoint (DCP) leaves out: sums of files, what may be unpickled, and what a load uses.

DCP's `.metadata` is a pickle, and so is each value that is no tensor. Here nothing but DCP's own classes comes out of
the first, and torch.load(weights_only=True) reads the others.
"""

import contextlib
import dataclasses
import io
import json
import os
import pickle
import re
import warnings
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.utils._pytree import tree_map

from guard.groups import as_python

from .ranks import DamagedCheckpoint, ForeignCheckpoint

METADATA = ".metadata"
SUMS = "checksums.json"  # file -> [bytes, CRC-32]
CHUNK = 2**20  # bytes that are read at once
DCP = "torch.distributed.checkpoint"
DTYPES = {name for name in dir(torch) if type(getattr(torch, name)) is torch.dtype}
ALLOWED = {
    *((f"{DCP}.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    (f"{DCP}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"), *(("torch", name) for name in DTYPES)}


# ------------------------------------------------------------------------------------------------------------ writing


class Packed(bytes):
    """A value as torch.save has written it, so that DCP doesn't take it apart."""


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's own. What all ranks have, such as the model, is written as the lowest of them has it."""

    def __init__(self):
        super().__init__(dedup_save_to_lowest_rank=True)

    def transform_object(self, write_item, object):
        return io.BytesIO(object) if isinstance(object, Packed) else super().transform_object(write_item, object)


class SummedFile(io.BufferedWriter):
    """A file that knows the number of bytes that were written, their CRC-32, and the error of the disk."""

    n_bytes = crc = 0
    error = None

    def write(self, content):
        self.crc = zlib.crc32(content, self.crc)
        self.n_bytes += memoryview(content).nbytes
        try:
            return super().write(content)
        except OSError as error:  # torch.save replaces it by an error of its own
            self.error = error
            raise


class SummingFileSystem(FileSystem):
    """Sums up the files that it writes. `sums`: name -> its size in bytes, its CRC-32."""

    def __init__(self):
        self.sums = {}

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        with SummedFile(io.FileIO(path, mode)) as stream:
            try:
                yield stream
            except Exception as error:
                raise stream.error or error from None
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


class Reader(dcp.FileSystemReader):
    """Reads files whose sums are right, and metadata that is checked before anything is read."""

    def __init__(self, path, rank, world_size):
        super().__init__(path)
        sizes = checked_files(Path(path), rank, world_size)
        has_sums = (Path(path) / SUMS).exists()
        with opened(Path(path) / (SUMS if has_sums else METADATA)) as file:
            self.checksum = checksum_of_file(file)  # to know whether all ranks read the same
        with opened(Path(path) / METADATA) as file:
            self.metadata = MetadataUnpickler(file).load()
            check_metadata(self.metadata, sizes)

    def read_metadata(self, *args, **kwargs):
        return self.metadata


class LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's own. It refuses what isn't there, what a load would not use, and values that could run code.

    may_be_unused: prefixes of keys in the checkpoint of which an unused one is a warning.
    """

    def __init__(self, may_be_unused):
        super().__init__()
        self.may_be_unused = tuple(may_be_unused)

    def create_local_plan(self):
        stored = self.metadata.state_dict_metadata
        for key, value in self.state_dict.items():
            if key not in stored:
                others = [name for name in stored if name not in self.state_dict
                          and not name.startswith(self.may_be_unused)]
                ending = f", but {others[0]}" if others else ""
                raise ForeignCheckpoint(f"it is of another model: it has no {key}{ending}")
            if isinstance(stored[key], TensorStorageMetadata) and isinstance(value, torch.Tensor):
                saved_shape, saved_dtype = tuple(stored[key].size), stored[key].properties.dtype
                if saved_shape != tuple(value.shape):
                    raise ForeignCheckpoint(f"it is of another model: {key} has shape {saved_shape} there, "
                                            f"{tuple(value.shape)} here")
                if saved_dtype != value.dtype and saved_dtype.is_floating_point != value.is_floating_point():
                    raise ForeignCheckpoint(f"{key} is {saved_dtype}, and {value.dtype} here")
        return dataclasses.replace(super().create_local_plan(), planner_data=[*self.state_dict])

    def create_global_plan(self, global_plan):
        used = {key for plan in global_plan for key in plan.planner_data}
        for key in self.metadata.state_dict_metadata:
            if key not in used and not re.fullmatch(r"about|extra\.\d+", key):  # of 0.3, and of other ranks
                if not key.startswith(self.may_be_unused):
                    raise ForeignCheckpoint(f"it has {key}, which this model and optimizer don't have")
                warnings.warn(f"{key} of the checkpoint isn't loaded", stacklevel=2)
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item, value):
        *path, last = self.mappings[read_item.dest_index.fqn]
        container = self.original_state_dict
        for key in path:
            container = container[key]
        try:
            container[last] = unpacked(value)
        except pickle.UnpicklingError:
            raise DamagedCheckpoint(f"{read_item.dest_index.fqn} is damaged: it is no plain value") from None


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


@contextlib.contextmanager
def opened(path):
    """Open a file of a checkpoint. Whatever is wrong with what is in it is a DamagedCheckpoint, which names it."""
    try:
        require(path.is_file(), "it is missing, or no regular file")  # opening a FIFO would wait
        with open(path, "rb") as file:
            yield file
    except OSError:
        raise
    except Exception as error:
        words = str(error) if isinstance(error, (ValueError, pickle.UnpicklingError)) else type(error).__name__
        raise DamagedCheckpoint(f"{path.name} is damaged: {words}") from None


def check_metadata(metadata, sizes):
    """Raise ValueError unless each tensor lies in a file of the folder, and is complete: DCP reads what is listed."""
    for index, info in metadata.storage_data.items():
        require(info.relative_path in sizes, f"{index.fqn!r:.60} lies in {info.relative_path!r:.60}")
    places = {(index.fqn, index.offset) for index in metadata.storage_data}
    for key, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            require(stored.size or len(stored.chunks) == 1, f"{key!r:.60} has no value")
            for chunk in stored.chunks:
                require((key, chunk.offsets) in places, f"a part of {key!r:.60} is missing")
    problems = _validate_global_plan([None, None], metadata)  # boxes that overlap, or leave a gap
    require(problems in ([], True), f"tensors aren't complete ({str(problems):.100})")


def require(condition, message):
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def checked_files(folder, rank, world_size) -> dict[str, int]:
    """Return file -> its number of bytes, of all files of a checkpoint. This rank checks the sums of its share of them.

    Raises DamagedCheckpoint: one is missing or was changed. ForeignCheckpoint: version 0.2 has written it.
    """
    if not folder.is_dir():
        raise DamagedCheckpoint("there is no such folder")
    if not (folder / METADATA).exists():
        if (folder / "manifest.json").exists():
            raise ForeignCheckpoint("version 0.2 or an earlier one has written it: load it with that version")
        raise DamagedCheckpoint(f"it is not complete: {METADATA} is missing")
    if not (folder / SUMS).exists():  # another program has written it
        return {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    with opened(folder / SUMS) as file:
        sums = {name: (int(n_bytes), int(crc)) for name, (n_bytes, crc) in json.load(file).items()}
        require(not any("/" in name for name in sums), "it names files of other folders")
    for number, (name, (n_bytes, crc)) in enumerate(sorted(sums.items())):
        with opened(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            require(size == n_bytes, f"{n_bytes} bytes were written, now it is {size} bytes")
            if number % world_size == rank:
                checksum = checksum_of_file(file)
                require(checksum == crc, f"its checksum was {crc:08x}, now it is {checksum:08x}")
    return {name: n_bytes for name, (n_bytes, _) in sums.items()}


def checksum_of_file(file):
    crc = 0
    while content := file.read(CHUNK):
        crc = zlib.crc32(content, crc)
    return crc


# ------------------------------------------------------------------------------------------------------------- values


def packed(value, name) -> Packed:
    """Return `value` as torch.save writes it. Raises ValueError: `unpacked` couldn't read it again."""
    buffer = io.BytesIO()
    try:
        torch.save(tree_map(as_saved, value), buffer)
        unpacked(io.BytesIO(buffer.getvalue()))
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]+)|got <class '([\w.]+)'>", str(error))
        words = f"it holds {named[1] or named[2]}" if named else f"{type(error).__name__}: {error}"
        raise ValueError(f"load() can't read {name} again: {words}") from None
    return Packed(buffer.getvalue())


def unpacked(stream):
    """Return a value that `packed` or torch's own tools have written. Runs no code from it."""
    with torch.serialization.safe_globals([frozenset]):
        return torch.load(stream, map_location="cpu", weights_only=True)


def as_saved(value):
    """Return a tensor's copy on the CPU, without what lies around it in memory; a number of NumPy's as Python's."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else as_python(value)
