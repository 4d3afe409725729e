"""What a checkpoint consists of: its manifest, of which nothing is believed before all of it has been checked.

A tensor lies in files as ranges of its flat elements, byte for byte. The manifest is JSON that begins with a checksum
of the rest of itself.
"""

import collections
import json
import math
import os
import re
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

from .errors import CheckpointError, DamagedCheckpoint, ForeignCheckpoint
from .format_1 import FORMAT as FORMAT_BEFORE
from .format_1 import LARGEST_GAP, is_format_1, upgraded
from .json_values import DTYPES, checked_shape, unpack, unpack_data
from .rank_files import ALIGNMENT, opened

MANIFEST = "manifest.json"  # what a checkpoint is of, where its tensors lie, and the sizes and checksums of its files
FORMAT = 2
MOST_BYTES, MOST_BYTES_A_TENSOR = 2**23, 2**15  # of a manifest: Python takes some thirty times as much to read it


class Range(NamedTuple):
    """Elements start to stop of a tensor, as bytes from `offset` on in a file."""

    start: int
    stop: int
    file: str
    offset: int


class Stored(NamedTuple):
    """A tensor in the files.

    shape: the first `n_lead` dimensions are whole in each range; the others, flat, are what ranges divide.
    cuts: into which pieces a DTensor was cut along each of these others: its elements then lie box after box, see
        boxes.py, and ranges divide that.
    """

    dtype: torch.dtype
    shape: torch.Size
    n_lead: int
    ranges: list[Range]
    cuts: list[list[int]]

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
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: {what}")


def most_bytes(n_tensors) -> int:
    """That the manifest of a model of so many tensors may have."""
    return MOST_BYTES + n_tensors * MOST_BYTES_A_TENSOR


def manifest_of(folder, limit=2**28) -> tuple[Manifest, int]:
    """-> the manifest of a checkpoint, checked; and a checksum of its text."""
    if not Path(folder).is_dir():
        raise DamagedCheckpoint("there is no such folder")
    if not (Path(folder) / MANIFEST).exists():
        raise DamagedCheckpoint(f"it is not complete: {MANIFEST} is missing")
    with opened(folder, MANIFEST) as file:
        need(os.fstat(file.fileno()).st_size <= limit, f"it has more than {limit} bytes")
        text = file.read(limit)
    return parsed(text), zlib.crc32(text)


def sealed(contents) -> bytes:
    """The text of a manifest: JSON, whose first entry is the checksum of what the text is without that."""
    text = json.dumps(contents).encode()
    return b'{"crc32": %d, %b' % (zlib.crc32(text), text[1:])


def unsealed(text) -> tuple[bytes, bool]:
    """-> the text without its checksum, and whether it had one."""
    seal = re.match(rb'\{"crc32": (\d{1,10}), ', text)
    if not seal:
        return text, False
    text = b"{" + text[seal.end() :]
    need(zlib.crc32(text) == int(seal[1]), "its checksum is that of another")
    return text, True


def parsed(text) -> Manifest:
    """Raises DamagedCheckpoint or ForeignCheckpoint, in one line, if it is not what `save` writes."""
    try:
        text, is_sealed = unsealed(text)
        raw = json.loads(text, object_pairs_hook=_without_doubles)
        need(is_sealed or is_format_1(raw), "it has no checksum of itself")
        return checked(raw, ALIGNMENT) if is_sealed else checked(upgraded(raw), LARGEST_GAP)
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: {type(error).__name__} in it") from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: {str(error)[:200]}") from None


def _without_doubles(pairs):
    found = dict(pairs)
    need(len(found) == len(pairs), "a key comes twice")
    return found


def checked(raw, largest_gap) -> Manifest:
    """`largest_gap`: fewer bytes than that lie between two tensors in a file, or at its end."""
    need(isinstance(raw, dict), "it is no dict")
    if raw.get("format") != FORMAT:
        formats = f"{FORMAT_BEFORE} and {FORMAT}"
        raise ForeignCheckpoint(f"it was written in format {raw.get('format')!r:.20}, this program reads {formats}")
    need(raw.keys() == {"format", "byteorder", *Manifest._fields}, "it has other entries")
    need(raw["byteorder"] == sys.byteorder, f"its numbers are {raw['byteorder']!r:.20}, here they are {sys.byteorder}")
    files = {name: _file(name, what) for name, what in raw["files"].items()}
    tensors = {key: _stored(key, what) for key, what in raw["tensors"].items()}
    manifest = Manifest(**{**{name: raw[name] for name in Manifest._fields}, "files": files, "tensors": tensors})
    _check_regions(manifest, largest_gap)
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
    need(what.keys() | {"cuts"} == set(Stored._fields), f"tensor {key!r:.60}")
    shape, n_lead = checked_shape(what["shape"]), what["n_lead"]
    need(_is_count(n_lead) and n_lead <= len(shape), f"dimensions of {key!r:.60}")
    ranges = [Range(*one) for one in what["ranges"]]
    cuts = what.get("cuts", [[size] for size in shape[n_lead:]])
    _check_cuts(key, cuts, shape[n_lead:], len(ranges))
    stored = Stored(DTYPES[what["dtype"]], shape, n_lead, ranges, cuts)
    in_files = collections.Counter(one.file for one in ranges)
    need(max(in_files.values(), default=0) <= max(1, 2 * len(shape)), f"{key!r:.60} is in too many ranges")
    end = 0
    for start, stop, _, offset in ranges:  # in order, which leaves nothing out and has nothing twice
        need(all(map(_is_count, (start, stop, offset))) and start == end < stop, f"ranges of {key!r:.60}")
        end = stop
    need(end == (stored.numel if math.prod(stored.lead) else 0), f"ranges of {key!r:.60} are not all of it")
    return stored


def _check_cuts(key, cuts, shape, n_ranges):
    """They are all of the shape, and no more boxes than ranges: each has one at least."""
    need(type(cuts) is list and all(type(sizes) is list for sizes in cuts), f"cuts of {key!r:.60}")
    for sizes in cuts:
        need(all(map(_is_count, sizes)) and (all(sizes) or len(sizes) == 1), f"cuts of {key!r:.60}")
    need([sum(sizes) for sizes in cuts] == list(shape), f"the cuts of {key!r:.60} are not all of it")
    need(math.prod(map(len, cuts)) <= max(1, n_ranges), f"{key!r:.60} is cut into too many boxes")


def _check_regions(manifest, largest_gap):
    """Each range lies in a file that is listed, and no two in the same bytes: memory is no more than there are.

    And no file has many bytes more than that.
    """
    regions = []
    for key, stored in manifest.tensors.items():
        for start, stop, file, offset in stored.ranges:
            regions.append((file, offset, offset + stored.nbytes(stop - start), key))
    regions.sort()
    for file, _, end, key in regions:
        need(file in manifest.files and end <= manifest.files[file]["bytes"], f"{key!r:.60} lies outside of its file")
    for (file, _, end, _), (other, start, _, key) in zip(regions, regions[1:]):
        need(file != other or end <= start, f"{key!r:.60} lies where another tensor does")
    used = collections.Counter()
    for file, start, end, _ in regions:
        used[file] += end - start + largest_gap
    for file, written in manifest.files.items():
        need(written["bytes"] <= used[file] + largest_gap, f"{file!r:.60} has bytes of no tensor")


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
