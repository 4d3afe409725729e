"""A checkpoint for a program without this package: a file, or a folder for torch.distributed.checkpoint.

Nothing in the checkpoint is unpickled.
"""

import collections
import os
import shutil
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from .boxes import whole_box
from .json_values import unpack
from .manifest import manifest_of
from .rank_files import Reader
from .reading import TensorsOf


def to_torch(found, path):
    """One file, for torch.load(weights_only=True)."""
    with open(path, "xb") as file:
        torch.save(found, file)


def to_dcp(found, path):
    """A folder, for torch.distributed.checkpoint.load and its tools."""
    path.mkdir()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what there is
        dcp.save(found, checkpoint_id=path, no_dist=True)


FORMATS = {"torch": to_torch, "dcp": to_dcp}


def convert(folder, path, to="torch") -> dict:
    """Write what `converted` returns to the new `path`, all of it or nothing. -> what it returns.

    Args:
        to: a key of FORMATS.

    Raises:
        OSError: the disk fails, or `path` exists.
        CheckpointError: `folder` is damaged, or no checkpoint.
    """
    path, found = Path(path), converted(folder)
    if os.path.lexists(path):
        raise FileExistsError(17, "it exists already")
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        FORMATS[to](found, partial)
        partial.rename(path)
    except BaseException as error:
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        raise said_by_the_disk(error) from None
    return found


def said_by_the_disk(error):
    """-> the OSError behind `error`, which torch.save and dcp.save wrap in other errors; or `error`."""
    if isinstance(error, dcp.api.CheckpointException):
        error, _ = next(iter(error.failures.values()))
    found = error
    while found and not isinstance(found, OSError):
        found = found.__context__
    return found or error


def converted(folder) -> dict:
    """-> a checkpoint as one dict, on the CPU. Raises OSError or CheckpointError: it is damaged, or no checkpoint."""
    manifest, _ = manifest_of(folder)
    reader = Reader(folder, manifest)
    tensors = TensorsOf(reader, manifest)
    stored = {name: manifest.tensors[f"model.{name}"] for name in manifest.model}
    groups = [{**unpack(group["options"], tensors), "params": group["params"]} for group in manifest.groups]
    states = {name: without_deques(unpack(state, tensors)) for name, state in manifest.states.items()}
    found = {"model": {name: reader.box(one, whole_box(one.shape)) for name, one in stored.items()},
             "optimizer": {"state": states, "param_groups": groups},
             "extra": [without_deques(unpack(extra, tensors)) for extra in manifest.extra]}
    reader.run()
    return found


def without_deques(value):
    """-> `value` with lists in place of deques, which torch.load(weights_only=True) refuses."""
    if isinstance(value, dict):
        return type(value)((key, without_deques(item)) for key, item in value.items())
    if isinstance(value, (list, collections.deque)):
        return [without_deques(item) for item in value]
    return tuple(map(without_deques, value)) if type(value) is tuple else value
