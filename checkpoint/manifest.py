"""What a checkpoint consists of: its manifest, of which nothing is believed before all of it has been checked.

A tensor lies in files as ranges of its flat elements, byte for byte: `load` reads them past pickle and past zip.
"""

import json
import math
import os
import stat
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

from .json_values import DTYPES, checked_shape, tensor_of, unpack, unpack_data

MANIFEST = "manifest.json"  # what a checkpoint is of, where its tensors lie, and the sizes and checksums of its files
FORMAT = 1
MOST_BYTES = 2**28  # of a manifest: Python takes some ten times as much memory to read it


class Range(NamedTuple):
    """Elements start to stop of a tensor, as bytes from `offset` on in a file."""

    start: int
    stop: int
    file: str
    offset: int


class Stored(NamedTuple):
    """A tensor in the files.

    shape: the first `n_lead` dimensions are whole in each range; the others, flat, are what ranges divide.
    """

    dtype: torch.dtype
    shape: torch.Size
    n_lead: int
    ranges: list[Range]

    @property
    def lead(self):
        return self.shape[: self.n_lead]

    @property
    def numel(self):
        return math.prod(self.shape[self.n_lead :])

    def nbytes(self, n_elements):
        return math.prod(self.lead) * n_elements * self.dtype.itemsize


class Manifest(NamedTuple):
    optimizer: str  # class
    ranks: int
    groups: list[dict]  # with the names of the parameters
    model: list[str]  # names of its tensors, whose keys are f"model.{name}"
    states: dict  # name of a parameter -> its state, packed
    extra: list  # of each rank, packed
    tensors: dict[str, Stored]  # by key
    files: dict[str, dict]  # name -> bytes, crc32


def need(condition, what):
    if not condition:
        raise ValueError(f"{MANIFEST} is damaged: {what}")


def opened(folder, name):
    """-> a file in `folder` itself, to be read: a regular one, and not where a link leads.

    Raises:
        OSError, ValueError: it is not there, or something else.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name or os.sep in name:
        raise ValueError(f"{name!r} is no name of a file in the folder")
    path = Path(folder) / name
    if path.is_symlink():
        raise ValueError(f"{name} is damaged: it is a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)  # a FIFO would wait
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{name} is damaged: it is no regular file")
    return os.fdopen(descriptor, "rb")


def checksum(file) -> dict:
    """Size and CRC-32 of an open file, or of one at a path."""
    if not hasattr(file, "read"):
        with open(file, "rb") as opened_file:
            return checksum(opened_file)
    crc, n_bytes = 0, 0
    while chunk := file.read(1 << 20):
        crc, n_bytes = zlib.crc32(chunk, crc), n_bytes + len(chunk)
    return {"bytes": n_bytes, "crc32": crc}


def manifest_of(folder) -> tuple[Manifest, int]:
    """-> the manifest of a checkpoint, checked; and a checksum of its text."""
    if not Path(folder).is_dir():
        raise ValueError("there is no such folder")
    if not (Path(folder) / MANIFEST).exists():
        raise ValueError(f"it is not complete: {MANIFEST} is missing")
    with opened(folder, MANIFEST) as file:
        need(os.fstat(file.fileno()).st_size <= MOST_BYTES, "it is too large")
        text = file.read(MOST_BYTES)
    return parsed(text), zlib.crc32(text)


def parsed(text) -> Manifest:
    """Raises ValueError, in one line, if it is not what `save` writes."""
    try:
        return checked(json.loads(text, object_pairs_hook=_without_doubles))
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {type(error).__name__} in it") from None
    except ValueError as error:
        known = str(error).startswith((MANIFEST, "it was written"))
        raise ValueError(str(error) if known else f"{MANIFEST} is damaged: {str(error)[:200]}") from None


def _without_doubles(pairs):
    found = dict(pairs)
    need(len(found) == len(pairs), "a key comes twice")
    return found


def checked(raw) -> Manifest:
    need(isinstance(raw, dict), "it is no dict")
    if raw.get("format") != FORMAT:
        raise ValueError(f"it was written in format {str(raw.get('format'))[:20]}, this program reads {FORMAT}")
    need(raw.keys() == {"format", "byteorder", *Manifest._fields}, "it has other entries")
    need(raw["byteorder"] == sys.byteorder, f"its numbers are {raw['byteorder']!r:.20}, here they are {sys.byteorder}")
    files = {name: _file(name, what) for name, what in raw["files"].items()}
    tensors = {key: _stored(key, what) for key, what in raw["tensors"].items()}
    manifest = Manifest(**{**{name: raw[name] for name in Manifest._fields}, "files": files, "tensors": tensors})
    _check_regions(manifest)
    _check_entries(manifest)
    _check_references(manifest)
    return manifest


def _is_count(value):
    return type(value) is int and value >= 0


def _file(name, what):
    need(name not in ("", ".", "..", MANIFEST) and "/" not in name and "\0" not in name, f"file {name!r:.60}")
    need(what.keys() == {"bytes", "crc32"} and all(map(_is_count, what.values())), f"file {name!r:.60}")
    return what


def _stored(key, what) -> Stored:
    need(what.keys() == set(Stored._fields), f"tensor {key!r:.60}")
    shape, n_lead = checked_shape(what["shape"]), what["n_lead"]
    need(_is_count(n_lead) and n_lead <= len(shape), f"dimensions of {key!r:.60}")
    ranges = [Range(*one) for one in what["ranges"]]
    stored = Stored(DTYPES[what["dtype"]], shape, n_lead, ranges)
    end = 0
    for start, stop, _, offset in ranges:  # in order, which leaves nothing out and has nothing twice
        need(all(map(_is_count, (start, stop, offset))) and start == end < stop, f"ranges of {key!r:.60}")
        end = stop
    need(end == (stored.numel if math.prod(stored.lead) else 0), f"ranges of {key!r:.60} are not all of it")
    return stored


def _check_regions(manifest):
    """Each range lies in a file that is listed, and no two in the same bytes: memory is no more than there are."""
    regions = []
    for key, stored in manifest.tensors.items():
        for start, stop, file, offset in stored.ranges:
            regions.append((file, offset, offset + stored.nbytes(stop - start), key))
    regions.sort()
    for file, _, end, key in regions:
        need(file in manifest.files and end <= manifest.files[file]["bytes"], f"{key!r:.60} lies outside of its file")
    for (file, _, end, _), (other, start, _, key) in zip(regions, regions[1:]):
        need(file != other or end <= start, f"{key!r:.60} lies where another tensor does")


def _check_entries(manifest):
    need(isinstance(manifest.optimizer, str), "optimizer")
    need(_is_count(manifest.ranks) and manifest.ranks > 0, "ranks")
    need(isinstance(manifest.extra, list) and len(manifest.extra) == manifest.ranks, "extra")
    need(isinstance(manifest.model, list) and len(set(manifest.model)) == len(manifest.model), "model")
    need(all(isinstance(name, str) for name in manifest.model), "model")
    need(isinstance(manifest.groups, list) and isinstance(manifest.states, dict), "groups and states")
    for group in manifest.groups:
        need(group.keys() == {"params", "options"} and isinstance(group["params"], list), "groups")
        options = unpack(group["options"], _data_only)
        need(isinstance(options, dict) and all(isinstance(key, str) for key in options), "groups")
        need("params" not in options, "groups")
    names = [name for group in manifest.groups for name in group["params"]]
    need(len(set(names)) == len(names) and set(names) <= set(manifest.model), "parameters of the groups")
    need(manifest.states.keys() <= set(names), "a state of no parameter")


def _data_only(name, what):
    need(name == "data", f"a tensor as {name!r:.20}")
    return unpack_data(what)


def _check_references(manifest):
    """Each tensor in the files is of exactly one entry: none is left out, or loaded twice."""
    claimed = []

    def claim(name, what, shape=None):
        if name == "data":
            return unpack_data(what)
        need(name == "tensor" or name == "piece" and shape is not None, f"a tensor as {name!r:.20}")
        stored = manifest.tensors[what]
        need(name == "tensor" or stored.shape[stored.n_lead :] == shape, f"the shape of {what!r:.60}")
        need(name == "piece" or stored.n_lead == 0, f"the dimensions of {what!r:.60}")
        claimed.append(what)

    for name in manifest.model:
        claim("piece", f"model.{name}", manifest.tensors[f"model.{name}"].shape)
    for name, state in manifest.states.items():
        shape = manifest.tensors[f"model.{name}"].shape
        found = unpack(state, lambda kind, what, shape=shape: claim(kind, what, shape))
        need(isinstance(found, dict) and found, f"the state of {name!r:.60}")
    for extra in manifest.extra:
        unpack(extra, claim)
    need(len(set(claimed)) == len(claimed), "a tensor is claimed twice")
    left = manifest.tensors.keys() - set(claimed)
    need(not left, f"nobody claims {min(left, default='')!r:.60}")


def verify(folder, manifest, rank=0, world_size=1):
    """Raise OSError or ValueError unless the files are those that were written. Each rank reads some of them."""
    verify_sizes(folder, manifest)
    for name, written in sorted(manifest.files.items())[rank::world_size]:
        with opened(folder, name) as file:
            found = checksum(file)
        if found != written:
            raise ValueError(f"{name} is damaged: {_described(written)} were written, now it is {_described(found)}")


def verify_sizes(folder, manifest):
    """And that all files are there, before anything is read."""
    for name, written in sorted(manifest.files.items()):
        size = _size(folder, name)
        if size != written["bytes"]:
            now = "missing" if size is None else f"{size} bytes"
            raise ValueError(f"{name} is damaged: {_described(written)} were written, now it is {now}")


def _size(folder, name):
    try:
        with opened(folder, name) as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None


def _described(file):
    return f"{file['bytes']} bytes with checksum {file['crc32']:08x}"


def read(folder, stored, start=0, stop=None) -> torch.Tensor:
    """-> elements start to stop of a tensor in the files, (*lead, stop - start), on the CPU."""
    stop = stored.numel if stop is None else stop
    whole = torch.empty(*stored.lead, stop - start, dtype=stored.dtype, device="cpu")
    for one in stored.ranges:
        first, last = max(start, one.start), min(stop, one.stop)
        if first < last:
            own = (first, last) if not stored.n_lead else (one.start, one.stop)  # of a stack all, in one go
            n_bytes = stored.nbytes(own[1] - own[0])
            content = _bytes_at(folder, one.file, one.offset + (own[0] - one.start) * stored.dtype.itemsize, n_bytes)
            part = tensor_of(content, stored.dtype, (*stored.lead, own[1] - own[0]))
            whole[..., first - start : last - start] = part[..., first - own[0] : last - own[0]]
    return whole


def _bytes_at(folder, name, offset, n_bytes) -> bytearray:
    content = bytearray(n_bytes)
    with opened(folder, name) as file:
        file.seek(offset)
        if file.readinto(content) != n_bytes:
            raise ValueError(f"{name} is damaged: it ends too early")
    return content
