"""Cuts text into batches, byte by byte: no tokenizer, 256 symbols.

By default the text is the source of Python's own standard library, which is on every machine.
"""

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch

STDLIB_BYTES = 8_000_000  # how much of the standard library is read; it takes less than a second
LEAST_BYTES = 10_000  # a shorter text is refused; a sequence of any model is shorter
VALIDATION_PART = 0.1  # how much of a text, at the end, is for validation
VALIDATION_SEQUENCES = 128  # evenly spread over the validation part, the same every time

# Skipped are tests, which repeat themselves, installed packages, tables of numbers, and files made on this machine.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "encodings", "pydoc_data"}
SKIPPED_BEGINNINGS = ".", "__pycache__", "_sysconfigdata"  # of names of files and folders


def load_bytes(path=None):
    """Read the text file at `path`, or the standard library: (n,) uint8.

    Raises OSError if the file can't be read, and ValueError if the text is shorter than a model's sequences: a Python
    may come without its source.
    """
    content = path.read_bytes() if path else stdlib_source()
    if len(content) < LEAST_BYTES:
        raise ValueError(f"{path or 'standard library'}: {len(content)} bytes are too few, there must be {LEAST_BYTES}")
    return np.frombuffer(content, dtype=np.uint8)


def stdlib_source():
    """Return the first STDLIB_BYTES of the standard library's source files, one file behind the other."""
    content = bytearray()
    for file in source_files(Path(sysconfig.get_paths()["stdlib"])):
        content += file.read_bytes()
        if len(content) >= STDLIB_BYTES:
            break
    return bytes(content[:STDLIB_BYTES])


def source_files(root):
    """List the .py files below `root` in order of their relative paths, without what is skipped."""
    files = []
    for folder, subfolders, names in os.walk(root):
        # Assigned in place: os.walk then enters no other folder (site-packages alone may hold 100 000 files).
        subfolders[:] = [name for name in subfolders
                         if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_BEGINNINGS)]
        files += [Path(folder, name) for name in names
                  if name.endswith(".py") and not name.startswith(SKIPPED_BEGINNINGS)]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def load_parts(path, sequence_length):
    """Return (train, validation) of a text. Raises what `load_bytes` raises, and ValueError if a part is too short."""
    text = load_bytes(path)
    train, validation = split(text)
    if len(validation) <= sequence_length:
        raise ValueError(f"--data {path}: of {len(text)} bytes the last 10 % can't hold a sequence of "
                         f"{sequence_length} bytes")
    return train, validation


def split(data):
    """Return (train, validation): `data` but for its end, and the end, VALIDATION_PART of it."""
    n_train = len(data) - round(len(data) * VALIDATION_PART)
    return data[:n_train], data[n_train:]


class Batches:
    """Makes training batches by number, each time the same ones.

    The whole batch of a step, `world_size * batch_size` sequences, is drawn from (seed, step), and this rank takes its
    part of the batch: 2 ranks with 8 sequences each see the same text as 4 ranks with 4.
    """

    def __init__(self, data, batch_size, sequence_length, rank, world_size, seed=0, device="cpu"):
        self.data = data
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.device = torch.device(device)

    def batch(self, step):
        """Return (tokens, targets), each (B, T) int64 on the device. The target of a byte is the byte after it."""
        generator = np.random.default_rng((self.seed, step))
        n_starts = len(self.data) - self.sequence_length
        starts = generator.integers(n_starts, size=(self.world_size, self.batch_size))
        return _sequences(self.data, starts[self.rank], self.sequence_length, self.device)


def validation_batches(data, batch_size, sequence_length, rank, world_size, device="cpu"):
    """Return this rank's part of VALIDATION_SEQUENCES fixed sequences: [(tokens, targets)], each (B or fewer, T)."""
    last_start = len(data) - sequence_length - 1
    starts = np.linspace(0, last_start, VALIDATION_SEQUENCES).astype(np.int64)[rank::world_size]
    return [_sequences(data, starts[first:first + batch_size], sequence_length, torch.device(device))
            for first in range(0, len(starts), batch_size)]


def _sequences(data, starts, sequence_length, device):
    """Return (tokens, targets) of the sequences that begin at `starts`, (B, T) int64 each on the device."""
    positions = starts[:, None] + np.arange(sequence_length + 1)  # (B, T + 1)
    text = torch.from_numpy(data[positions].astype(np.int64))  # (B, T + 1)
    if device.type == "cuda":  # from pinned memory the copy doesn't make the CPU wait for the GPU
        text = text.pin_memory().to(device, non_blocking=True)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()  # (B, T), (B, T)
