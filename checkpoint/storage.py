"""Adds to torch.distributed.checkpoint (DCP) checksums, checks of a checkpoint's content, and safe unpickling.

DCP saves a checkpoint as a folder. A file `.metadata` in it describes the checkpoint, and the other files have the
values. Each value has a *key*, such as "model.layer.weight". A tensor is stored as one or more *boxes*, rectangular
parts. A *planner* of DCP decides which rank writes or reads what.

`.metadata` is a pickle, and so is each value that is no tensor. A pickle may run any code when it is read. So here
`.metadata` can only make objects of DCP's own classes, and torch.load(weights_only=True) reads the values.
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
SUMS = "checksums.json"  # name of the file that has, for each other file: name -> [size in bytes, CRC-32]
CHUNK = 2**20  # a file is read in pieces of this number of bytes
DTYPES = {name for name, value in vars(torch).items() if type(value) is torch.dtype}
# The classes and functions that a `.metadata` may name: module -> names. No name has a dot, because pickle would follow
# it to an attribute of an object, and so to other functions.
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
    """The bytes into which torch.save has turned a value.

    DCP would save a dict or a list item by item. It writes a Packed as a single value.
    """


class SavePlanner(dcp.DefaultSavePlanner):
    """DCP's own planner, which also refuses values that `load` of files.py couldn't read again.

    If several ranks have a value under the same key, the lowest of these ranks writes it.
    """

    def __init__(self):
        super().__init__(dedup_save_to_lowest_rank=True)

    def transform_object(self, write_item, value):
        """Return what DCP writes for `value`: a BytesIO, or a tensor as it is. DCP calls this method for each value."""
        if isinstance(value, Packed):
            written = io.BytesIO(value)
        else:
            written = super().transform_object(write_item, value)
        if isinstance(written, io.BytesIO):
            try:
                unpickled(io.BytesIO(written.getvalue()))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                # If torch's unpickler refuses a class, its message has one of these two forms. Then one of the two
                # groups of the pattern is the name of the class, and the other is None.
                refused = re.search(r"GLOBAL ([\w.]+)|got <class '([\w.]+)'>", str(error))
                if refused:
                    reason = f"it holds {refused[1] or refused[2]}"
                raise ValueError(f"load() can't read {write_item.index.fqn} again: {reason}") from None
        return written


class SummedFile(io.BufferedWriter):
    """A file that computes the size and the checksum of what is written into it."""

    n_bytes = 0  # number of bytes that were written so far
    crc = 0  # CRC-32 of these bytes
    error = None  # the error of the disk, if there was one

    def write(self, content):
        self.crc = zlib.crc32(content, self.crc)
        self.n_bytes += memoryview(content).nbytes
        try:
            return super().write(content)
        except OSError as error:
            self.error = error  # noted here, because torch.save replaces this error by an error of its own
            raise


class SummingFileSystem(FileSystem):
    """Writes files, and computes a checksum of each. DCP calls these methods."""

    def __init__(self):
        self.sums = {}  # name of a file that was written -> (size in bytes, CRC-32)

    @contextlib.contextmanager
    def create_stream(self, path, mode):
        """Open a file to write. When it is complete, note its size and checksum in `sums`.

        If the disk has an error, that error is raised, and not the error that torch.save makes of it.
        """
        with SummedFile(io.FileIO(path, mode)) as stream:
            try:
                yield stream
            except Exception as error:
                first_error = stream.error or error
                raise first_error from None
            self.sums[Path(path).name] = stream.n_bytes, stream.crc

    def rename(self, path, new_path):
        """Rename a file, also in `sums`. DCP calls this, because it first writes `.metadata` under another name."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class Writer(dcp.FileSystemWriter):
    """Writes one file per rank, and flushes it to the disk.

    It writes in one thread, because otherwise DCP doesn't report a full disk.
    """

    def __init__(self, folder):
        super().__init__(folder, sync_files=True, thread_count=1, overwrite=False)
        self.fs = SummingFileSystem()  # DCP writes files by this attribute; files.py reads its `sums`

    def storage_meta(self):
        """Return what DCP writes into `.metadata` about the folder: not its name, because that will change."""
        return StorageMeta()


# ------------------------------------------------------------------------------------------------------------ reading


class Reader(dcp.FileSystemReader):
    """Reads a folder. The constructor checks that the files are unchanged, and reads `.metadata` safely.

    Raises DamagedCheckpoint if a file is missing, has changed, or can't be read.
    """

    def __init__(self, folder, rank, n_ranks):
        super().__init__(folder)
        self.checksum = checksum_of_folder(folder, rank, n_ranks)  # the ranks compare it
        with opened(folder / METADATA) as file:
            self.metadata = MetadataUnpickler(file).load()
            check_boxes(self.metadata)

    def read_metadata(self, *args, **kwargs):
        """Return the metadata that the constructor has read. DCP's own method would unpickle any object."""
        return self.metadata


class LoadPlanner(dcp.DefaultLoadPlanner):
    """DCP's own planner, which also refuses missing keys and unused keys, and runs no code of a pickle.

    DCP calls create_local_plan() on every rank, then create_global_plan() on one rank with the plans of all ranks, and
    then, on every rank, load_bytes() for each value that is no tensor. DCP has set these attributes before:
        metadata: the content of `.metadata`
        state_dict, original_state_dict: the values to replace, as a flat dict and as nested dicts
        mappings: key of the flat dict -> its keys in the nested dicts
    """

    def __init__(self, may_be_unused):
        super().__init__()
        # Beginnings of keys. An unused key that begins so is no error.
        self.may_be_unused = tuple(may_be_unused)

    def create_local_plan(self):
        """Return the plan of what this rank reads. Raise ForeignCheckpoint if the checkpoint doesn't have all of it."""
        stored = self.metadata.state_dict_metadata  # key -> description of the value
        for key, value in self.state_dict.items():
            is_tensor = isinstance(value, torch.Tensor)
            # Refuse if the key is missing, or if only one of the checkpoint and the state_dict has a tensor.
            if key not in stored or isinstance(stored[key], TensorStorageMetadata) != is_tensor:
                raise ForeignCheckpoint(f"it is of another model or optimizer: it has no {key}")
        keys_used_here = list(self.state_dict)  # create_global_plan() reads them from the plan, which has room for data
        return dataclasses.replace(super().create_local_plan(), planner_data=keys_used_here)

    def create_global_plan(self, plans):
        """Return the plans of all ranks. Raise ForeignCheckpoint if no rank uses some key of the checkpoint."""
        used = {key for plan in plans for key in plan.planner_data}
        for key in self.metadata.state_dict_metadata.keys() - used:
            if not key.startswith(self.may_be_unused):
                raise ForeignCheckpoint(f"it has {key}, which this model and optimizer don't have")
            # There is no warning about a key of version 0.3, "about", or about what other ranks have saved for
            # themselves, "extra".
            if not re.fullmatch(r"about|extra\.\d+", key):
                warnings.warn(f"{key} of the checkpoint isn't loaded", stacklevel=2)
        return super().create_global_plan(plans)

    def load_bytes(self, read_item, stream):
        """Put a value that is no tensor into the state_dict, as DCP's planner does, but by a safe unpickler."""
        key = read_item.dest_index.fqn  # DCP's "fully qualified name"
        place = self.mappings[key]  # the keys in the nested dicts
        try:
            set_element(self.original_state_dict, place, unpickled(stream))
        except pickle.UnpicklingError:  # without torch's text, which says how to run code in the pickle
            raise DamagedCheckpoint(f"{key} is damaged: it is no plain value") from None


class MetadataUnpickler(pickle.Unpickler):
    """Reads a pickle of DCP's own objects, and refuses anything else."""

    def find_class(self, module, name):
        """Return the class or function `name` if it is ALLOWED. pickle calls this for each name in the pickle."""
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which isn't DCP's")
        return super().find_class(module, name)


def check_boxes(metadata):
    """Raise ValueError unless the stored boxes of each tensor cover each element of the tensor exactly once."""
    for key, stored in metadata.state_dict_metadata.items():
        is_scalar = isinstance(stored, TensorStorageMetadata) and not stored.size
        if is_scalar:  # DCP's check, below, doesn't look at scalars. In DCP's words a box is a "chunk"
            require(len(stored.chunks) == 1, f"{key!r:.60} has no value")
    # DCP's check only counts the plans, its first argument, and accepts gaps if there is one plan. So give it two. It
    # returns a list of texts; torch 2.11 returns True if there are no problems.
    problems = _validate_global_plan([None, None], metadata)
    require(problems in ([], True), f"tensors aren't complete ({str(problems):.100})")


def renamed(metadata, stored_keys) -> dcp.Metadata:
    """Return a copy of `metadata` with other keys, so that DCP finds a value of the checkpoint under a new key.

    stored_keys: new key -> key in the checkpoint. Several new keys may have the same value. All other keys stay.
    """
    new_keys = defaultdict(list)  # key in the checkpoint -> the new keys under which it is read
    for key, stored_key in stored_keys.items():
        new_keys[stored_key].append(key)
    # All other keys stay: those that get no new key, and that are not themselves the new key of another value.
    for key in metadata.state_dict_metadata.keys() - new_keys.keys() - stored_keys.keys():
        new_keys[key].append(key)
    descriptions = {}  # new key -> description of the value
    for stored_key, description in metadata.state_dict_metadata.items():
        for key in new_keys[stored_key]:
            descriptions[key] = description
    # Index of a box, which is a key (`fqn`) and the offsets of the box -> the file, and the position in the file.
    places = {}
    for index, place in metadata.storage_data.items():
        for key in new_keys[index.fqn]:
            places[dataclasses.replace(index, fqn=key)] = place
    return dataclasses.replace(metadata, state_dict_metadata=descriptions, storage_data=places)


@contextlib.contextmanager
def opened(path):
    """Open a file of a checkpoint, to read. An error in the `with` block becomes a DamagedCheckpoint of this file.

    But an OSError stays, because it says nothing about the content.
    """
    try:
        require(path.is_file(), "it is missing, or no regular file")  # to open a FIFO, for example, would wait
        with open(path, "rb") as file:
            yield file
    except OSError:
        raise
    except Exception as error:
        # The texts of these two errors say what is wrong with the file. Other texts are about the program.
        has_text = isinstance(error, (ValueError, pickle.UnpicklingError))
        reason = str(error) if has_text else type(error).__name__
        raise DamagedCheckpoint(f"{path.name} is damaged: {reason}") from None


def require(condition, message):
    """Raise ValueError with `message` unless `condition`."""
    if not condition:
        raise ValueError(message)


def checksum_of_folder(folder, rank, n_ranks) -> int:
    """Check the files of a checkpoint. Return a checksum that is equal on two ranks if they read the same folder.

    The file SUMS has the sizes and checksums that the other files had when they were written. Each of the `n_ranks`
    ranks checks the sizes of all files, and the checksums of every n_ranks-th file.

    Raises DamagedCheckpoint: a file is missing, or has changed since it was written.
    """
    if not folder.is_dir():
        raise DamagedCheckpoint("there is no such folder")
    if not (folder / METADATA).exists():
        raise DamagedCheckpoint(f"it is not complete: {METADATA} is missing")
    if not (folder / SUMS).exists():  # another program has written the checkpoint, without checksums
        with opened(folder / METADATA) as file:
            return checksum_of(file)
    with opened(folder / SUMS) as file:
        checksum = checksum_of(file)
        file.seek(0)  # read the file once more, from its start
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
    """Return the CRC-32 of the rest of an open file."""
    crc = 0
    while content := file.read(CHUNK):
        crc = zlib.crc32(content, crc)
    return crc


# ------------------------------------------------------------------------------------------------------------- values


def packed(value) -> Packed:
    """Return the bytes into which torch.save turns `value`, with copies on the CPU of all tensors in `value`."""
    buffer = io.BytesIO()
    torch.save(tree_map(as_saved, value), buffer)
    return Packed(buffer.getvalue())


def as_saved(value):
    """Return a copy of a tensor on the CPU, a NumPy number as a Python number, and any other value unchanged."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else as_python(value)


def unpickled(stream):
    """Return the value that torch.save has written into `stream`. Run no code of the pickle, whatever it says."""
    with torch.serialization.safe_globals([frozenset]):
        return torch.load(stream, map_location="cpu", weights_only=True)
