"""Cuts text that is on every machine into batches.

It is the source of Python's own standard library, byte by byte: nothing to download, no tokenizer, 256 symbols.
"""

import math
import os
import sysconfig
import zlib
from pathlib import Path

import numpy as np
import torch

from harness.ranks.meeting import on_all_ranks
from harness.training.options import DATA_BYTES, STDLIB_BYTES

VALIDATION_PART = 0.1  # the end of the text
VALIDATION_SEQUENCES = 128  # the same ones every time, evenly spread over the validation part

# Not read: tests (they repeat themselves), installed packages, tables of numbers, and files made on this machine.
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "encodings", "pydoc_data"}


def load_bytes(path=None):
    """Read the text at `path`, a file or a folder of text files, or Python's standard library: (n,) uint8.

    Folders are read in alphabetical order, without hidden files and files that hold a zero byte. At most DATA_BYTES.
    Raises ValueError when there is nothing to read, naming the path.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [file for file in _files(root, STDLIB_SKIPPED) if file.suffix == ".py"]
        limit = STDLIB_BYTES
        advice = "this Python comes without its source: give a text file or folder with --data"
    else:
        place = os.path.expanduser(path)
        limit = DATA_BYTES
        advice = "give a text file, or a folder with text files"
        if not (os.path.isdir(place) or os.path.isfile(place)):  # both are False if it is a FIFO, or its name too long
            raise ValueError(f"--data {path}: there is no such file or folder; {advice}")
        root = Path(place)
        files = _files(root) if root.is_dir() else [root]
    data = _read(files, limit, skip_binary=root.is_dir())
    if not data:
        raise ValueError(f"{root}: no text in it; {advice}")
    return np.frombuffer(data, dtype=np.uint8)


def _files(root, skipped=()):
    """List the files below `root` by relative path, without hidden ones and those in folders named in `skipped`."""
    files = []
    for folder, subfolders, names in os.walk(root):
        # Assigned in place: os.walk then enters no other folder (site-packages alone may hold 100 000 files).
        subfolders[:] = [name for name in subfolders if name not in skipped and _is_wanted(name)]
        files += [path for name in names if _is_wanted(name) and (path := Path(folder, name)).is_file()]  # no pipes
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _is_wanted(name):
    return not name.startswith((".", "__pycache__", "_sysconfigdata"))


def _read(files, limit, skip_binary):
    """Read `files` one after the other, at most `limit` bytes."""
    text = bytearray()
    for file in files:
        try:
            with file.open("rb") as opened:
                content = opened.read(limit - len(text))
        except OSError as error:
            raise ValueError(f"cannot read {file}: {error.strerror}") from None
        if not (skip_binary and b"\0" in content):
            text += content
        if len(text) == limit:
            break
    return bytes(text)


def split(data):
    """Return (train, validation): the first 90 % and the last 10 % of `data`."""
    n_train = len(data) - round(len(data) * VALIDATION_PART)
    return data[:n_train], data[n_train:]


class Batches:
    """Makes training batches by number, each time the same ones.

    The whole batch of a step, `world_size * batch_size` sequences, is drawn from (seed, step), and this rank takes its
    part of it: 2 ranks with 8 sequences each see the same text as 4 ranks with 4.
    """

    def __init__(self, data, batch_size, sequence_length, rank, world_size, seed=0, device="cpu"):
        if len(data) <= sequence_length:
            raise ValueError(f"{len(data)} bytes to train on are too few for one sequence of {sequence_length} + 1")
        self.data, self.batch_size, self.sequence_length = data, batch_size, sequence_length
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.device = torch.device(device)

    def batch(self, step):
        """Return (tokens, targets), each (B, T) int64 on the device. The target of a byte is the byte after it."""
        generator = np.random.default_rng((self.seed, step))
        n_starts = len(self.data) - self.sequence_length
        starts = generator.integers(n_starts, size=(self.world_size, self.batch_size))[self.rank]
        return _sequences(self.data, starts, self.sequence_length, self.device)


def validation_batches(data, batch_size, sequence_length, rank, world_size, device="cpu"):
    """Return this rank's part of VALIDATION_SEQUENCES fixed sequences: [(tokens, targets)], each (B or fewer, T)."""
    starts = np.linspace(0, len(data) - sequence_length - 1, VALIDATION_SEQUENCES).astype(np.int64)[rank::world_size]
    pieces = [starts[i:i + batch_size] for i in range(0, len(starts), batch_size)]
    return [_sequences(data, piece, sequence_length, torch.device(device)) for piece in pieces]


def _sequences(data, starts, sequence_length, device):
    rows = starts[:, None] + np.arange(sequence_length + 1)  # (B, T + 1)
    text = torch.from_numpy(data[rows].astype(np.int64))  # (B, T + 1)
    if device.type == "cuda":  # from pinned memory the copy doesn't make the CPU wait for the GPU
        text = text.pin_memory().to(device, non_blocking=True)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()  # (B, T), (B, T)


def load_data(args, me):
    """Return (Batches to train on, list of validation batches) of this rank. Bad data ends all ranks with one line.

    Sets `args.text`, by which a checkpoint knows the text.
    """
    def load():
        data = load_bytes(args.data)
        train, validation = split(data)
        if len(validation) <= args.sequence_length:
            needed = math.ceil((args.sequence_length + 1) / VALIDATION_PART)
            raise ValueError(f"--data {args.data or 'stdlib'}: {len(data)} bytes are too few: the last 10 % "
                             f"must hold one sequence: give at least {needed} bytes, or a shorter --sequence-length")
        args.text = f"{len(data)} bytes with checksum {zlib.crc32(data):08x}"  # the same wherever the text lies
        sizes = args.batch_size, args.sequence_length, me.number // args.tp, me.world_size // args.tp
        return Batches(train, *sizes, args.seed, me.device), validation_batches(validation, *sizes, me.device)
    return on_all_ranks(load)
