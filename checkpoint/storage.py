"""Adds to torch.distributed.checkpoint (DCP) checksums, checks of a checkpoint's content, and safe unpickling.

DCP's `.metadata` is a pickle, and so is each value that is no tensor. Here `.metadata` can only make objects of DCP's
own classes, and torch.load(weights_only=True) reads the values.
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
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata
from torch.utils._pytree import tree_map

from guard.groups import as_python

from .ranks import DamagedCheckpoint, ForeignCheckpoint

METADATA = ".metadata"
SUMS = "checksums.json"  # name of a file -> [size in bytes, CRC-32]
CHUNK = 2**20  # a file is read in pieces of so many bytes
DTYPES = {name for name, value in vars(torch).items() if type(value) is torch.dtype}
# What a `.metadata` may name: module -> names in it. No name has a dot, so none leads to an attribute of an object.
ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex",
        "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *DTYPES},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


# ------------------------------------------------------------------------------------------------------------ writing


class Packed(bytes):
    """A value that torch.save has turned into bytes: DCP writes these bytes, and doesn't take the value apart."""


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's own planner, which also refuses values that `load` couldn't read again.

    If several ranks have a value, the lowest rank writes it.
    """

    def __init__(self):
        super().__init__(dedup_save_to_lowest_rank=True)

    def transform_object(self, write_item, value):
        """Return what is written: a BytesIO, or a tensor as it is. DCP calls this method for each value."""
        if isinstance(value, Packed):
            written = io.BytesIO(value)
        else:
            written = super().transform_object(write_item, value)
        if isinstance(written, io.BytesIO):
            try:
                unpickled(io.BytesIO(written.getvalue()))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                # Two messages of torch's unpickler name the class that it refuses.
                refused = re.search(r"GLOBAL ([\w.]+)|got <class '([\w.]+)'>", str(error))
                if refused:
                    reason = f"it holds {refused[1] or refused[2]}"
                raise ValueError(f"load() can't read {write_item.index.fqn} again: {reason}") from None
        return written


class SummedFile(io.BufferedWriter):
    """A file that adds up what is written into it."""

    n_bytes = 0  # size of what was written
    crc = 0  # CRC-32 of what was written
    error = None  # the error of the disk, if there was one

    def write(self, content):
        self.crc = zlib.crc32(content, self.crc)
        self.n_bytes += memoryview(content).nbytes
        try:
            return super().write(content)
        except OSError as error:  # torch.save would replace this error by its own
            self.error = error
            raise


class SummingFileSystem(FileSystem):
    """Computes a checksum of each file that it writes. DCP calls these methods."""

    def __init__(self):
        self.sums = {}  # name of a file that was written -> (size in bytes, CRC-32)

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        """Open a file. Note its size and checksum when it is complete, or raise the error of the disk."""
        with SummedFile(io.FileIO(path, mode)) as stream:
            try:
                yield stream
            except Exception as error:
                first_error = stream.error or error
                raise first_error from None
            self.sums[Path(path).name] = stream.n_bytes, stream.crc

    def rename(self, path, new_path):
        """Rename a file, also in `sums`: DCP writes `.metadata` under another name first."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class Writer(dcp.FileSystemWriter):
    """Writes one file per rank, flushed to the disk. With several threads, DCP wouldn't report that a disk is full."""

    def __init__(self, folder):
        super().__init__(folder, sync_files=True, thread_count=1, overwrite=False)
        self.fs = SummingFileSystem()

    def storage_meta(self):
        return StorageMeta()  # without the name of the folder, which changes when the checkpoint is complete


# ------------------------------------------------------------------------------------------------------------ reading


class Reader(dcp.FileSystemReader):
    """Reads a folder after checking that its files are unchanged, and that its metadata has only DCP's objects."""

    def __init__(self, folder, rank, n_ranks):
        super().__init__(folder)
        self.checksum = checksum_of_folder(folder, rank, n_ranks)  # for the ranks to compare
        with opened(folder / METADATA) as file:
            self.metadata = MetadataUnpickler(file).load()
            check_boxes(self.metadata)

    def read_metadata(self, *args, **kwargs):
        """Return the metadata that the constructor has read. DCP would unpickle the file without a check."""
        return self.metadata


class LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's own planner, which also refuses missing keys and unused keys, and runs no code of a pickle.

    DCP calls create_local_plan() on every rank, and create_global_plan() with the plans of all ranks on one rank.
    """

    def __init__(self, may_be_unused):
        super().__init__()
        self.may_be_unused = tuple(may_be_unused)  # beginnings of keys: an unused key of these is a warning, no error

    def create_local_plan(self):
        stored = self.metadata.state_dict_metadata  # key -> description of the value
        for key, value in self.state_dict.items():
            is_tensor = isinstance(value, torch.Tensor)
            if key not in stored or isinstance(stored[key], TensorStorageMetadata) != is_tensor:
                raise ForeignCheckpoint(f"it is of another model or optimizer: it has no {key}")
        keys_used_here = list(self.state_dict)  # a plan has room for data of its planner
        return dataclasses.replace(super().create_local_plan(), planner_data=keys_used_here)

    def create_global_plan(self, plans):
        used = {key for plan in plans for key in plan.planner_data}
        for key in self.metadata.state_dict_metadata.keys() - used:
            if not key.startswith(self.may_be_unused):
                raise ForeignCheckpoint(f"it has {key}, which this model and optimizer don't have")
            if not re.fullmatch(r"about|extra\.\d+", key):  # a key of version 0.3, and the `extra` of other ranks
                warnings.warn(f"{key} of the checkpoint isn't loaded", stacklevel=2)
        return super().create_global_plan(plans)

    def load_bytes(self, read_item, stream):
        """Put a value that is no tensor into the state_dict, as DCP's planner does, but by a safe unpickler."""
        key = read_item.dest_index.fqn
        place = self.mappings[key]  # its keys in the nested dicts
        try:
            set_element(self.original_state_dict, place, unpickled(stream))
        except pickle.UnpicklingError:  # torch's text would say how to run the code
            raise DamagedCheckpoint(f"{key} is damaged: it is no plain value") from None


class MetadataUnpickler(pickle.Unpickler):
    """Makes DCP's own objects, and nothing else."""

    def find_class(self, module, name):
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which isn't DCP's")
        return super().find_class(module, name)


def check_boxes(metadata):
    """Raise ValueError unless the stored boxes of each tensor cover each element of the tensor once."""
    for key, stored in metadata.state_dict_metadata.items():
        is_scalar = isinstance(stored, TensorStorageMetadata) and not stored.size
        if is_scalar:  # DCP's check below leaves out scalars
            require(len(stored.chunks) == 1, f"{key!r:.60} has no value")
    several_plans = [None, None]  # DCP counts the plans without reading them: with a single plan it accepts gaps
    problems = _validate_global_plan(several_plans, metadata)  # a list of texts; in torch 2.11 True if all is right
    require(problems in ([], True), f"tensors aren't complete ({str(problems):.100})")


def renamed(metadata, stored_keys) -> dcp.Metadata:
    """Return metadata with other keys. `stored_keys`: new key -> key in the checkpoint. All other keys stay."""
    new_keys = defaultdict(list)  # key in the checkpoint -> the new keys under which it is read
    for key, stored_key in stored_keys.items():
        new_keys[stored_key].append(key)
    # Keys that are neither renamed nor replaced by a key of the same name stay.
    for key in metadata.state_dict_metadata.keys() - new_keys.keys() - stored_keys.keys():
        new_keys[key].append(key)
    descriptions = {}  # new key -> description of the value
    for stored_key, description in metadata.state_dict_metadata.items():
        for key in new_keys[stored_key]:
            descriptions[key] = description
    places = {}  # index, which is a key and the offsets of a box -> file, and position in it
    for index, place in metadata.storage_data.items():
        for key in new_keys[index.fqn]:
            places[dataclasses.replace(index, fqn=key)] = place
    return dataclasses.replace(metadata, state_dict_metadata=descriptions, storage_data=places)


@contextlib.contextmanager
def opened(path):
    """Open a file of a checkpoint. An error in its content becomes a DamagedCheckpoint, which names the file."""
    try:
        require(path.is_file(), "it is missing, or no regular file")  # opening a FIFO would wait
        with open(path, "rb") as file:
            yield file
    except OSError:  # of the disk, which says nothing about the content
        raise
    except Exception as error:
        has_text = isinstance(error, (ValueError, pickle.UnpicklingError))  # a text that says what is wrong
        reason = str(error) if has_text else type(error).__name__
        raise DamagedCheckpoint(f"{path.name} is damaged: {reason}") from None


def require(condition, message):
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def checksum_of_folder(folder, rank, n_ranks) -> int:
    """Return a checksum by which ranks know whether they read the same folder.

    Each rank compares the sizes of all files, and the checksums of its share of the files, with those in the folder.

    Raises DamagedCheckpoint: a file is missing, or has changed since it was written.
    """
    if not folder.is_dir():
        raise DamagedCheckpoint("there is no such folder")
    if not (folder / METADATA).exists():
        raise DamagedCheckpoint(f"it is not complete: {METADATA} is missing")
    if not (folder / SUMS).exists():  # another program has written it
        with opened(folder / METADATA) as file:
            return checksum_of(file)
    with opened(folder / SUMS) as file:
        checksum = checksum_of(file)
        file.seek(0)
        sums = {name: (int(n_bytes), int(crc)) for name, (n_bytes, crc) in json.load(file).items()}
    for number, name in enumerate(sorted(sums)):
        n_bytes, crc = sums[name]
        with opened(folder / name) as file:
            size = os.fstat(file.fileno()).st_size
            require(size == n_bytes, f"{n_bytes} bytes were written, now it is {size} bytes")
            is_share_of_rank = number % n_ranks == rank
            if is_share_of_rank:
                crc_now = checksum_of(file)
                require(crc_now == crc, f"its checksum was {crc:08x}, now it is {crc_now:08x}")
    return checksum


def checksum_of(file):
    """Return the CRC-32 of the rest of a file."""
    crc = 0
    while content := file.read(CHUNK):
        crc = zlib.crc32(content, crc)
    return crc


# ------------------------------------------------------------------------------------------------------------- values


def packed(value) -> Packed:
    """Return `value` as torch.save writes it, with copies of its tensors on the CPU."""
    buffer = io.BytesIO()
    torch.save(tree_map(as_saved, value), buffer)
    return Packed(buffer.getvalue())


def as_saved(value):
    """Return a copy of a tensor on the CPU, or a NumPy number as a Python number; any other value unchanged."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else as_python(value)


def unpickled(stream):
    """Return a value that torch.save has written, without running code in it."""
    with torch.serialization.safe_globals([frozenset]):
        return torch.load(stream, map_location="cpu", weights_only=True)
