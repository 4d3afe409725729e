"""One raw file a rank: its parts of tensors, byte for byte, each at a multiple of 64 bytes, and nothing else.

What lies where is in the manifest. The checksum of a file is made while it is written, and compared when it is loaded.
"""

import os
import stat
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

from .boxes import boxes
from .errors import DamagedCheckpoint
from .json_values import bytes_of, tensor_of

ALIGNMENT = 64  # bytes; with it a program that maps a file has tensors in place
CHUNK = 2**20  # bytes that are written at once, while the processor still has them from the checksum
BEHIND = 2**24  # bytes after which the disk is told to begin with them, not only at fsync


class Part(NamedTuple):
    """What a rank writes of a tensor. `lead`: dimensions that are whole in each part, such as those of a stack."""

    data: torch.Tensor  # (*lead, elements that are here)
    shape: tuple  # (*lead, *shape of the whole)
    start: int  # which of the whole's elements is the first one here: flat, or box after box, see boxes.py
    cuts: list | None = None  # of a DTensor, by dimension


def whole(tensor) -> Part:
    return Part(tensor.reshape(-1), tuple(tensor.shape), 0)


def name_of(rank) -> str:
    return f"rank-{rank:05}.bin"


def write_rank_file(path, parts) -> tuple[dict, dict]:
    """Write `parts`, key -> Part, to a new file. -> key -> the manifest's entry of that tensor; size and checksum.

    Raises OSError: the disk says no.
    """
    entries, crc, place, told = {}, 0, 0, 0
    with open(path, "xb") as file:
        for key, (data, shape, start, cuts) in parts.items():
            content = bytes_of(data.cpu().contiguous())
            for chunk in (bytes(-place % ALIGNMENT), *(content[i : i + CHUNK] for i in range(0, len(content), CHUNK))):
                crc = zlib.crc32(chunk, crc)
                place += file.write(chunk)
                if place - told >= BEHIND and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), told, place - told, os.POSIX_FADV_DONTNEED)
                    told = place
            ranges = [[start, start + data.shape[-1], path.name, place - len(content)]] if len(content) else []
            entries[key] = {"dtype": str(data.dtype).removeprefix("torch."), "shape": list(shape),
                            "n_lead": data.dim() - 1, "ranges": ranges, **({"cuts": cuts} if cuts else {})}
        file.flush()
        os.fsync(file.fileno())
    return entries, {"bytes": place, "crc32": crc}


def opened(folder, name):
    """-> a file in `folder`, to be read: a regular one, and not where a link leads. Its name has been checked.

    Raises:
        DamagedCheckpoint: it is something else.
        OSError: it is not there.
    """
    path = Path(folder) / name
    if path.is_symlink():
        raise DamagedCheckpoint(f"{name} is damaged: it is a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)  # a FIFO would wait
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedCheckpoint(f"{name} is damaged: it is no regular file")
    return os.fdopen(descriptor, "rb")


def checksum(file) -> dict:
    """Size and CRC-32 of an open file."""
    crc, n_bytes, chunk = 0, 0, memoryview(bytearray(CHUNK))
    while n_read := file.readinto(chunk):
        crc, n_bytes = zlib.crc32(chunk[:n_read], crc), n_bytes + n_read
    return {"bytes": n_bytes, "crc32": crc}


def verify(folder, manifest, rank=0, world_size=1):
    """Raise OSError or DamagedCheckpoint unless the files are those that were written. Each rank reads some of them."""
    verify_sizes(folder, manifest)
    for name, written in sorted(manifest.files.items())[rank::world_size]:
        with opened(folder, name) as file:
            found = checksum(file)
        if found != written:
            now = described(found)
            raise DamagedCheckpoint(f"{name} is damaged: {described(written)} were written, now it is {now}")


def verify_sizes(folder, manifest):
    """And that all files are there, before anything is read."""
    for name, written in sorted(manifest.files.items()):
        size = size_of(folder, name)
        if size != written["bytes"]:
            now = "missing" if size is None else f"{size} bytes"
            raise DamagedCheckpoint(f"{name} is damaged: {described(written)} were written, now it is {now}")


def size_of(folder, name):
    try:
        with opened(folder, name) as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return None


def described(file):
    return f"{file['bytes']} bytes with checksum {file['crc32']:08x}"


def read_box(folder, stored, box) -> torch.Tensor:
    """-> a part of a tensor in the files: (*lead, *sizes of the box), on the CPU."""
    return read_part(folder, stored, box, 0, box.numel).reshape((*stored.lead, *box.sizes))


def read_part(folder, stored, box, start, stop) -> torch.Tensor:
    """-> flat elements start to stop of a box: (*lead, stop - start). Of one that was saved so, no more is read."""
    for saved in boxes(stored.cuts):
        if saved[:2] == box[:2]:
            return read(folder, stored, saved.base + start, saved.base + stop)
    found = torch.empty((*stored.lead, *box.sizes), dtype=stored.dtype, device="cpu")
    for saved in boxes(stored.cuts):
        if both := saved.overlap(box):
            there, here = both
            part = read(folder, stored, saved.base, saved.base + saved.numel).reshape((*stored.lead, *saved.sizes))
            found[(..., *here)] = part[(..., *there)]
    return found.reshape((*stored.lead, box.numel))[..., start:stop]


def read(folder, stored, start, stop) -> torch.Tensor:
    """-> elements start to stop of a manifest's Stored, as they are in files: (*lead, stop - start), on the CPU."""
    found = torch.empty(*stored.lead, stop - start, dtype=stored.dtype, device="cpu")
    for one in stored.ranges:
        first, last = max(start, one.start), min(stop, one.stop)
        if first < last:
            own = (first, last) if not stored.n_lead else (one.start, one.stop)  # of a stack all, in one go
            n_bytes = stored.nbytes(own[1] - own[0])
            content = bytes_at(folder, one.file, one.offset + (own[0] - one.start) * stored.dtype.itemsize, n_bytes)
            part = tensor_of(content, stored.dtype, (*stored.lead, own[1] - own[0]))
            found[..., first - start : last - start] = part[..., first - own[0] : last - own[0]]
    return found


def bytes_at(folder, name, offset, n_bytes) -> bytearray:
    content = bytearray(n_bytes)
    with opened(folder, name) as file:
        file.seek(offset)
        if file.readinto(content) != n_bytes:
            raise DamagedCheckpoint(f"{name} is damaged: it ends too early")
    return content
