"""Reads the earlier formats 1 and 2, which nothing writes any more. Only this file knows them.

Their manifest says where the bytes of each tensor lie, and has one checksum per file. Format 1 had the files of
torch.distributed.checkpoint: zip archives with uncompressed tensors, and a pickled `.metadata`, which is never read.
Its manifest had no checksum of itself. Format 2 had raw files.
"""

import collections
import zlib

from .errors import DamagedCheckpoint
from .json_values import DTYPES, checked_shape, is_count, need
from .rank_files import CHUNK, Range, Stored, checked, opened

FORMATS = 1, 2


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
