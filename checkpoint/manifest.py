"""The manifest of a checkpoint, which says what it consists of, and is checked completely before use.

The manifest is JSON that begins with a checksum of the rest. The headers of the files say where tensors lie.

In the earlier formats 1 and 2 the manifest says where tensors lie, and has one checksum per file. Format 1 had zip
archives, with a pickled `.metadata` that is never read, and no checksum of its manifest. Format 2 had raw files.
"""

import collections
import json
import os
import re
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

from .errors import DamagedCheckpoint, ForeignCheckpoint
from .json_values import DTYPES, checked_shape, is_count, need, unpack, without_doubles
from .rank_files import CHUNK, Range, Stored, checked, damage_of, opened, tensors_in

MANIFEST = "manifest.json"  # what a checkpoint is of, and the sizes and checksums of its files
FORMAT, FORMATS_BEFORE = 3, (1, 2)
MOST_BYTES, MOST_BYTES_A_TENSOR = 2**23, 2**15  # of a manifest: Python takes some thirty times as much to read it

# Key -> what stands there: a class; a list of such; a dict of these keys, or of any (None). `object` is checked later.
ENTRIES = {
    "format": int, "byteorder": str, "ranks": int,
    "optimizer": str,  # its class
    "groups": [{"params": [str], "options": object}],  # names of the parameters; the rest of a group, packed
    "model": [str],  # names of its tensors, whose keys are f"model.{name}"
    "states": {None: object},  # name of a parameter -> its state, packed
    "extra": [object],  # of each rank, packed
    "files": {None: {"bytes": int, "crc32": [int]}},  # name -> what `write_rank_file` returned
}
ENTRIES_BEFORE = {**ENTRIES, "files": {None: {"bytes": int, "crc32": int}}, "tensors": {None: object}}


def most_bytes(n_tensors) -> int:
    """-> the largest size in bytes of a manifest, and of all headers, for a model of `n_tensors` tensors."""
    return MOST_BYTES + n_tensors * MOST_BYTES_A_TENSOR


def manifest_of(folder, limit=2**28) -> tuple[SimpleNamespace, int]:
    """-> the checked manifest of a checkpoint, see ENTRIES, with its tensors by key; a checksum of its text.
    Raises OSError, DamagedCheckpoint or ForeignCheckpoint, in one line, if `save` can't have written it."""
    if not Path(folder).is_dir():
        raise DamagedCheckpoint("there is no such folder")
    if not (Path(folder) / MANIFEST).exists():
        raise DamagedCheckpoint(f"it is not complete: {MANIFEST} is missing")
    with damage_of(MANIFEST):
        with opened(folder, MANIFEST) as file:
            need(os.fstat(file.fileno()).st_size <= limit, f"it has more than {limit} bytes")
            text = file.read(limit)
        raw = unsealed(text)
        before = raw["format"] in FORMATS_BEFORE
        tensors = tensors_before(folder, raw) if before else tensors_in(folder, raw["files"], limit)
        manifest = SimpleNamespace(**{**raw, "tensors": tensors})
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
    need(raw["byteorder"] == sys.byteorder, f"its numbers are {raw['byteorder']!r:.20}, here they are {sys.byteorder}")
    check_kinds(raw, ENTRIES_BEFORE if raw["format"] in FORMATS_BEFORE else ENTRIES, "it")
    for name in raw["files"]:
        need(name not in ("", ".", "..", MANIFEST) and "/" not in name and "\0" not in name, f"file {name!r:.60}")
    return raw


def check_kinds(value, kind, where):
    """Raise ValueError unless a value of JSON is of `kind`, see ENTRIES; integers are sizes, 0 or more."""
    if isinstance(kind, list):
        need(type(value) is list, f"{where} is {value!r:.40}")
        for item in value:
            check_kinds(item, kind[0], where)
    elif isinstance(kind, dict):
        need(type(value) is dict and (None in kind or value.keys() == kind.keys()), f"{where} has other entries")
        for key, item in value.items():
            check_kinds(item, kind.get(key, kind.get(None)), f"{key!r:.60} of {where}"[:200])
    else:
        need(is_count(value) if kind is int else isinstance(value, kind), f"{where} is {value!r:.40}")


def check_entries(manifest):
    """Check the entries of the manifest, and that each tensor in the files belongs to exactly one entry."""
    need(len(manifest.extra) == manifest.ranks > 0, "as many `extra` as ranks")
    need(len(set(manifest.model)) == len(manifest.model), "a name of the model twice")
    claimed = collections.Counter()

    def claim(word, key, words=("tensor",), shape=None):
        need(word in words, f"a tensor as {word!r:.20}")
        stored = manifest.tensors[key]
        need(word == "tensor" or stored.rest == shape, f"the shape of {key!r:.60}")
        need(word == "piece" or stored.n_lead == 0, f"the dimensions of {key!r:.60}")
        claimed[key] += 1

    for group in manifest.groups:
        options = unpack(group["options"], lambda word, key: claim(word, key, ()))
        need(isinstance(options, dict) and all(isinstance(key, str) and key != "params" for key in options), "groups")
    names = [name for group in manifest.groups for name in group["params"]]
    need(len(set(names)) == len(names) and set(names) <= set(manifest.model), "parameters of the groups")
    need(manifest.states.keys() <= set(names), "a state of no parameter")
    for name in manifest.model:
        claim("tensor", f"model.{name}")
    for name, state in manifest.states.items():
        shape = manifest.tensors[f"model.{name}"].shape
        found = unpack(state, lambda word, key: claim(word, key, ("tensor", "piece"), shape))
        need(isinstance(found, dict) and found, f"the state of {name!r:.60}")
    for extra in manifest.extra:
        unpack(extra, claim)
    need(set(claimed.values()) <= {1}, "a tensor is claimed twice")
    left = manifest.tensors.keys() - claimed.keys()
    need(not left, f"nobody claims {min(left, default='')!r:.60}")


def tensors_before(folder, raw) -> dict[str, Stored]:
    """-> where each tensor lies, from the manifest, after comparing all files with their checksums."""
    for name, written in sorted(raw["files"].items()):
        with opened(folder, name, written["bytes"]) as file:
            crc = 0
            while content := file.read(CHUNK):
                crc = zlib.crc32(content, crc)
        if crc != written["crc32"]:
            raise DamagedCheckpoint(f"{name} is damaged: its checksum was {written['crc32']:08x}, now it is {crc:08x}")
    tensors, n_bytes = {}, collections.Counter()
    for key, what in raw["tensors"].items():
        shape, n_lead = checked_shape(what["shape"]), what["n_lead"]
        need(is_count(n_lead) and n_lead <= len(shape), f"dimensions of {key!r:.60}")
        cuts = what.get("cuts", [[size] for size in shape[n_lead:]])
        ranges = [Range(*one) for one in what["ranges"]]
        tensors[key] = checked(key, Stored(DTYPES[what["dtype"]], shape, n_lead, cuts, ranges))
        for one in ranges:
            n_bytes[one.file] += tensors[key].nbytes(one)
            need(is_count(one.offset) and one.file in raw["files"], f"{key!r:.60} lies in no file")
    for name, n in n_bytes.items():
        need(n <= raw["files"][name]["bytes"], f"{name!r:.60} has fewer bytes than its tensors")
    return tensors
