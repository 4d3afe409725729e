"""The manifest of a checkpoint, which says what it consists of, and is checked completely before use.

The manifest is JSON that begins with a checksum of the rest. The headers of the files say where tensors lie.
"""

import json
import os
import re
import sys
import zlib
from pathlib import Path
from typing import NamedTuple

from .errors import DamagedCheckpoint, ForeignCheckpoint
from .formats_before import FORMATS as FORMATS_BEFORE
from .formats_before import tensors_before
from .json_values import is_count, need, unpack, unpack_data, without_doubles
from .rank_files import Stored, damage_of, opened, tensors_in

MANIFEST = "manifest.json"  # what a checkpoint is of, and the sizes and checksums of its files
FORMAT = 3
MOST_BYTES, MOST_BYTES_A_TENSOR = 2**23, 2**15  # of a manifest: Python takes some thirty times as much to read it


class Manifest(NamedTuple):
    optimizer: str  # class
    ranks: int
    groups: list[dict]  # with the names of the parameters
    model: list[str]  # names of its tensors, whose keys are f"model.{name}"
    states: dict  # name of a parameter -> its state, packed
    extra: list  # of each rank, packed
    files: dict[str, dict]  # name -> bytes, crc32: what `write_rank_file` returned
    tensors: dict[str, Stored]  # by key: from the headers of the files


ENTRIES = {"format", "byteorder", *Manifest._fields} - {"tensors"}


def most_bytes(n_tensors) -> int:
    """-> the largest size in bytes of a manifest, and of all headers, for a model of `n_tensors` tensors."""
    return MOST_BYTES + n_tensors * MOST_BYTES_A_TENSOR


def manifest_of(folder, limit=2**28) -> tuple[Manifest, int]:
    """-> the checked manifest of a checkpoint; a checksum of its text.

    Raises OSError, DamagedCheckpoint or ForeignCheckpoint, in one line, if `save` can't have written it.
    """
    if not Path(folder).is_dir():
        raise DamagedCheckpoint("there is no such folder")
    if not (Path(folder) / MANIFEST).exists():
        raise DamagedCheckpoint(f"it is not complete: {MANIFEST} is missing")
    with damage_of(MANIFEST):
        with opened(folder, MANIFEST) as file:
            need(os.fstat(file.fileno()).st_size <= limit, f"it has more than {limit} bytes")
            text = file.read(limit)
        raw = unsealed(text)
        files = {name: checked_file(name, what, raw["format"]) for name, what in raw["files"].items()}
        before = raw["format"] in FORMATS_BEFORE
        tensors = tensors_before(folder, raw) if before else tensors_in(folder, files, limit)
        manifest = Manifest(**{**{name: raw[name] for name in Manifest._fields[:-1]}, "tensors": tensors})
        check_entries(manifest)
        return manifest, zlib.crc32(text)


def sealed(contents) -> bytes:
    """-> the text of a manifest: JSON whose first entry is the checksum of the text without this entry."""
    text = json.dumps(contents).encode()
    return b'{"crc32": %d, %b' % (zlib.crc32(text), text[1:])


def unsealed(text) -> dict:
    """-> the JSON without its checksum, in a format that this program reads."""
    seal = re.match(rb'\{"crc32": (\d{1,10}), ', text)
    if seal:
        text = b"{" + text[seal.end() :]
        need(zlib.crc32(text) == int(seal[1]), "its checksum is that of another")
    raw = json.loads(text, object_pairs_hook=without_doubles)
    need(isinstance(raw, dict), "it is no dict")
    need(seal or raw.get("format") == 1, "it has no checksum of itself")
    formats = *FORMATS_BEFORE, FORMAT
    if type(raw.get("format")) is not int or raw["format"] not in formats:
        raise ForeignCheckpoint(f"it was written in format {raw.get('format')!r:.20}, this program reads "
                                f"{', '.join(map(str, formats))}")
    need(raw.keys() - {"tensors"} == ENTRIES and ("tensors" in raw) == (raw["format"] in FORMATS_BEFORE),
         "it has other entries")
    need(raw["byteorder"] == sys.byteorder, f"its numbers are {raw['byteorder']!r:.20}, here they are {sys.byteorder}")
    return raw


def checked_file(name, what, format_):
    need(name not in ("", ".", "..", MANIFEST) and "/" not in name and "\0" not in name, f"file {name!r:.60}")
    crcs = [what["crc32"]] if format_ in FORMATS_BEFORE else what["crc32"]
    need(what.keys() == {"bytes", "crc32"} and type(crcs) is list and crcs, f"file {name!r:.60}")
    need(all(map(is_count, [what["bytes"], *crcs])), f"file {name!r:.60}")
    return what


def check_entries(manifest):
    """Check the entries of the manifest, and that each tensor in the files belongs to exactly one entry."""
    need(isinstance(manifest.optimizer, str), "optimizer")
    need(is_count(manifest.ranks) and manifest.ranks > 0, "ranks")
    need(isinstance(manifest.extra, list) and len(manifest.extra) == manifest.ranks, "extra")
    need(isinstance(manifest.model, list) and all(isinstance(name, str) for name in manifest.model)
         and len(set(manifest.model)) == len(manifest.model), "model")
    need(isinstance(manifest.groups, list) and isinstance(manifest.states, dict), "groups and states")
    for group in manifest.groups:
        need(group.keys() == {"params", "options"} and isinstance(group["params"], list), "groups")
        options = unpack(group["options"], data_only)
        need(isinstance(options, dict) and all(isinstance(key, str) and key != "params" for key in options), "groups")
    names = [name for group in manifest.groups for name in group["params"]]
    need(len(set(names)) == len(names) and set(names) <= set(manifest.model), "parameters of the groups")
    need(manifest.states.keys() <= set(names), "a state of no parameter")
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


def data_only(name, what):
    need(name == "data", f"a tensor as {name!r:.20}")
    return unpack_data(what)
