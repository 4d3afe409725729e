"""One safetensors file per rank with its parts of tensors, which any safetensors tool can open.

The largest dtypes come first, so that each tensor is aligned to its element size. A part of a tensor has the shape
(*lead, elements). `places`, in the format's free metadata, says where the part lies in its tensor.
"""

import collections
import concurrent.futures
import contextlib
import json
import math
import os
import zlib
from pathlib import Path
from typing import NamedTuple

import torch

from .boxes import Box, boxes
from .errors import CheckpointError, DamagedCheckpoint
from .json_values import DTYPE_OF_CODE, bytes_of, checked_shape, is_count, need, unpack, without_doubles

ALIGNMENT = 64  # bytes; aligns the first tensor for programs that map the file
CHUNK = 2**18  # bytes written or read at once, few enough to stay in the processor's cache for the checksum
BEHIND = 2**24  # bytes after which the disk is told to start writing, so that fsync has less to do
READERS = 2  # threads: one computes a checksum while the other waits for the disk
CODE_OF = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


class Part(NamedTuple):
    """What a rank writes of a tensor. `lead`: dimensions that are whole in each part, such as those of a stack."""

    data: torch.Tensor  # (*lead, elements that are here)
    shape: tuple  # (*lead, *shape of the whole)
    start: int  # which of the whole's elements is the first one here: flat, or box after box, see boxes.py
    cuts: list = []  # see `cuts_of`


class Range(NamedTuple):
    """Elements start to stop of a tensor, as bytes from `offset` on in a file. `crc32` of these; None: of all of it."""

    start: int
    stop: int
    file: str
    offset: int
    crc32: int | None = None


class Stored(NamedTuple):
    """A tensor in the files."""

    dtype: torch.dtype
    shape: torch.Size
    n_lead: int  # the first dimensions, which are whole in each range: the others, flat, are what ranges divide
    cuts: list[list[int]]  # of these others; of a DTensor, its elements lie box after box, and ranges divide that
    ranges: list[Range]

    @property
    def lead(self):
        return self.shape[: self.n_lead]

    @property
    def rest(self):
        return self.shape[self.n_lead :]

    def nbytes(self, one):
        return math.prod(self.lead) * (one.stop - one.start) * self.dtype.itemsize


def whole(tensor) -> Part:
    return Part(tensor.reshape(-1), tuple(tensor.shape), 0)


def write_rank_file(path, parts) -> dict:
    """Write `parts`, key -> Part, to a new file. -> its size; checksums of its header and of each tensor, in order."""
    ordered = sorted(parts.items(), key=lambda item: -item[1].data.dtype.itemsize)
    header = header_of(ordered)
    checksums, place, told = [zlib.crc32(header)], len(header), 0
    with open(path, "xb") as file:
        file.write(header)
        for _, part in ordered:
            content, crc = bytes_of(part.data.cpu().contiguous()), 0
            for start in range(0, len(content), CHUNK):
                chunk = content[start : start + CHUNK]
                crc = zlib.crc32(chunk, crc)
                place += file.write(chunk)
                if place - told >= BEHIND and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), told, place - told, os.POSIX_FADV_DONTNEED)
                    told = place
            checksums.append(crc)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": place, "crc32": checksums}


def header_of(parts) -> bytes:
    entries, places, end = {}, {}, 0
    for key, (data, shape, start, cuts) in parts:
        is_cut = any(len(sizes) > 1 for sizes in cuts)
        is_whole = data.dim() == 1 and len(data) == math.prod(shape) and not is_cut
        if not is_whole:
            places[key] = {"shape": shape, "start": start, **({"cuts": cuts} if is_cut else {})}
        entries[key] = {"dtype": CODE_OF[data.dtype], "shape": shape if is_whole else [*data.shape],
                        "data_offsets": [end, end := end + data.nbytes]}
    text = json.dumps({"__metadata__": {"places": json.dumps(places)}, **entries}).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def tensors_in(folder, files, limit) -> dict[str, Stored]:
    """What the headers of `files` say, which have at most `limit` bytes in all. Raises OSError or DamagedCheckpoint."""
    found = collections.defaultdict(list)
    for name, written in sorted(files.items()):
        with damage_of(name), opened(folder, name, written["bytes"]) as file:
            length = file.read(8)
            limit -= int.from_bytes(length, "little")
            need(limit >= 0, "its header is too long")
            header = file.read(int.from_bytes(length, "little"))
            need(zlib.crc32(length + header) == written["crc32"][0], "the checksum of its header is another")
            for key, one in parsed_header(header, name, written).items():
                found[key].append(one)
    tensors = {}
    for key, parts in found.items():
        with damage_of(key):
            need(all(part[:4] == parts[0][:4] for part in parts), "its parts are of several tensors")
            ranges = sorted(one for part in parts for one in part.ranges)
            tensors[key] = checked(key, parts[0]._replace(ranges=ranges))
    return tensors


def parsed_header(text, name, written) -> dict[str, Stored]:
    """-> the parts of tensors in a file, which are all of its bytes."""
    entries = json.loads(text, object_pairs_hook=without_doubles)
    places = json.loads(entries.pop("__metadata__")["places"], object_pairs_hook=without_doubles)
    need(places.keys() <= entries.keys() and len(written["crc32"]) == 1 + len(entries), "it has other entries")
    found, begin, end = {}, 8 + len(text), 0
    for (key, what), crc in zip(entries.items(), written["crc32"][1:]):
        dtype, shape, place = DTYPE_OF_CODE[what["dtype"]], checked_shape(what["shape"]), places.get(key, {})
        n_lead, here = (len(shape) - 1, shape[-1]) if place else (0, math.prod(shape))
        start, end = end, end + math.prod(shape) * dtype.itemsize
        need(what["data_offsets"] == [start, end], f"{key!r:.60} doesn't lie behind the one before")
        of, first = checked_shape(place.get("shape", list(shape))), place.get("start", 0)
        need(of[:n_lead] == shape[:n_lead], f"dimensions of {key!r:.60}")
        ranges = [Range(first, first + here, name, begin + start, crc)] if here else []
        found[key] = Stored(dtype, of, n_lead, place.get("cuts", [[size] for size in of[n_lead:]]), ranges)
    need(begin + end == written["bytes"], "it has bytes of no tensor")
    return found


def checked(key, stored) -> Stored:
    """-> `stored`. Raises ValueError: ranges have a gap or overlap, or cuts don't add up to the shape."""
    end, cuts = 0, stored.cuts
    for start, stop, *_ in stored.ranges:
        need(is_count(start) and start == end < stop, f"ranges of {key!r:.60}")
        end = stop
    need(end == math.prod(stored.rest) or not math.prod(stored.shape), f"ranges of {key!r:.60} are not all of it")
    need(type(cuts) is list and all(type(sizes) is list for sizes in cuts), f"cuts of {key!r:.60}")
    for sizes in cuts:
        need(all(map(is_count, sizes)) and (all(sizes) or len(sizes) == 1), f"cuts of {key!r:.60}")
    need([*map(sum, cuts)] == [*stored.rest], f"the cuts of {key!r:.60} are not all of it")
    need(math.prod(map(len, cuts)) <= max(1, len(stored.ranges)), f"{key!r:.60} is cut into too many boxes")
    return stored


@contextlib.contextmanager
def damage_of(name):
    """Turn any error in reading what a file says into a DamagedCheckpoint, in one line."""
    try:
        yield
    except CheckpointError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error)[:200] if isinstance(error, ValueError) else f"{type(error).__name__} in it"
        raise DamagedCheckpoint(f"{name} is damaged: {reason}") from None


@contextlib.contextmanager
def opened(folder, name, n_bytes=None):
    """Open a regular file for reading. Raises OSError or DamagedCheckpoint: it is none, or doesn't have `n_bytes`."""
    # It never blocks, as a FIFO would, and follows no link, even if the file is replaced after the check.
    path, flags, now = Path(folder) / name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, "missing"
    if path.is_symlink():
        raise DamagedCheckpoint(f"{name} is damaged: it is a link")
    if path.exists():
        if not path.is_file():
            raise DamagedCheckpoint(f"{name} is damaged: it is no regular file")
        with open(path, "rb", opener=lambda path, _: os.open(path, flags)) as file:
            size = os.fstat(file.fileno()).st_size
            if n_bytes in (None, size):
                yield file
                return
            now = f"{size} bytes"
    raise DamagedCheckpoint(f"{name} is damaged: {n_bytes} bytes were written, now it is {now}")


class Reader:
    """Reads tensors of a checkpoint to the CPU: its methods return uninitialized memory, and `run` fills it all.
    A range that is read completely is compared with its checksum, and so is the rest of a rank's share of the files."""

    def __init__(self, folder, manifest, rank=0, world_size=1):
        self.folder, self.files, self.tensors = folder, manifest.files, manifest.tensors
        self.share = sorted(manifest.files)[rank::world_size]
        self.jobs = []  # (range, bytes of it, memory for them, or None)
        self.copies = []  # (memory, what is copied there when it has been read)

    def unpack(self, packed):
        """-> a value of the manifest, with whole tensors."""
        return unpack(packed, lambda _, key: self.whole(key))

    def whole(self, key) -> torch.Tensor:
        stored = self.tensors[key]
        return self.box(stored, Box((0,) * len(stored.rest), tuple(stored.rest)))

    def box(self, stored, box) -> torch.Tensor:
        """-> a part of a tensor: (*lead, *sizes of the box)."""
        return self.part(stored, box, 0, box.numel).view((*stored.lead, *box.sizes))

    def part(self, stored, box, start, stop) -> torch.Tensor:
        """-> flat elements start to stop of a box, (*lead, stop - start). If the box was saved so, reads only these."""
        for saved in boxes(stored.cuts):
            if saved[:2] == box[:2]:
                return self.flat(stored, saved.base + start, saved.base + stop)
        found = torch.empty((*stored.lead, *box.sizes), dtype=stored.dtype, device="cpu")
        for saved in boxes(stored.cuts):
            if both := saved.overlap(box):
                there, here = both
                part = self.flat(stored, saved.base, saved.base + saved.numel).view((*stored.lead, *saved.sizes))
                self.copies.append((found[(..., *here)], part[(..., *there)]))
        return found.view((*stored.lead, box.numel))[..., start:stop]

    def flat(self, stored, start, stop) -> torch.Tensor:
        """-> elements start to stop, as they are in files: (*lead, stop - start)."""
        found = torch.empty(*stored.lead, stop - start, dtype=stored.dtype, device="cpu")
        for one in stored.ranges:
            first, last = max(start, one.start), min(stop, one.stop)
            if first >= last:
                continue
            room = found[..., first - start : last - start]
            if stored.n_lead:  # of a stack all, in one go
                whole_range = torch.empty(*stored.lead, one.stop - one.start, dtype=stored.dtype, device="cpu")
                self.copies.append((room, whole_range[..., first - one.start : last - one.start]))
                room, first = whole_range, one.start
            place = one._replace(offset=one.offset + (first - one.start) * stored.dtype.itemsize)
            self.jobs.append((place, stored.nbytes(one), room))
        return found

    def run(self):
        """Raises OSError or DamagedCheckpoint."""
        asked = {(one.file, one.offset) for one, n_bytes, room in self.jobs if room.nbytes == n_bytes}
        rest = [(one, stored.nbytes(one), None) for stored in self.tensors.values() for one in stored.ranges
                if one.file in self.share and (one.file, one.offset) not in asked]
        in_order = sorted([*self.jobs, *rest], key=lambda job: (job[0].file not in self.share, *job[0][2:4]))
        with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
            try:
                collections.deque(pool.map(self.read, in_order), 0)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        for there, what in self.copies:
            there.copy_(what)

    def read(self, job):
        one, n_bytes, room = job
        content = memoryview(bytearray(CHUNK)) if room is None else bytes_of(room)
        wanted = n_bytes if room is None else len(content)
        with opened(self.folder, one.file, self.files[one.file]["bytes"]) as file:
            os.posix_fadvise(file.fileno(), one.offset, wanted, os.POSIX_FADV_WILLNEED)
            crc = 0
            for place in range(0, wanted, CHUNK):
                chunk = content[: wanted - place][:CHUNK] if room is None else content[place : place + CHUNK]
                if os.preadv(file.fileno(), [chunk], one.offset + place) != len(chunk):
                    raise DamagedCheckpoint(f"{one.file} is damaged: it ends too early")
                crc = zlib.crc32(chunk, crc) if wanted == n_bytes else None  # of a part there is none to compare
        if wanted == n_bytes and one.crc32 not in (None, crc):
            raise DamagedCheckpoint(f"{one.file} is damaged: a tensor with checksum {one.crc32:08x} was written, now "
                                    f"it has {crc:08x}")
