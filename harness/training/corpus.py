"""Cuts a text into batches for training and validation. Each byte is a token, so there are 256 tokens and no tokenizer.

By default the text is the source of Python's own standard library, which is on every machine. In shapes, B is the
number of sequences in a batch, and T the number of bytes in a sequence.
"""

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch

STDLIB_BYTES = 8_000_000  # how much of the standard library is read, which takes less than a second
LEAST_BYTES = 10_000  # a shorter text is refused; every model takes sequences that are much shorter than this
VALIDATION_PART = 0.1  # the last tenth of a text is for validation
VALIDATION_SEQUENCES = 128  # sequences evenly spread over the validation part, the same in every call

# Not read are tests, which repeat themselves, installed packages, tables of numbers, and files made on this machine.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "encodings", "pydoc_data"}
SKIPPED_BEGINNINGS = ".", "__pycache__", "_sysconfigdata"  # files and folders whose names begin so are skipped, too


def load_bytes(path=None):
    """Read the text file at `path`, or by default the standard library. Returns its n bytes as an array, (n,) uint8.

    Raises OSError if the file can't be read, and ValueError if the text has fewer than LEAST_BYTES. The standard
    library may have too few, because some Pythons are installed without their source.
    """
    content = path.read_bytes() if path else stdlib_source()
    if len(content) < LEAST_BYTES:
        raise ValueError(f"{path or 'standard library'}: {len(content)} bytes are too few, there must be {LEAST_BYTES}")
    return np.frombuffer(content, dtype=np.uint8)


def stdlib_source():
    """Return the first STDLIB_BYTES of the standard library's source files, joined in order of their paths."""
    content = bytearray()
    for file in source_files(Path(sysconfig.get_paths()["stdlib"])):
        content += file.read_bytes()
        if len(content) >= STDLIB_BYTES:
            break
    return bytes(content[:STDLIB_BYTES])


def source_files(root):
    """Return the paths of the .py files below `root`, in order, without the files and folders that are skipped."""
    files = []
    for folder, subfolders, names in os.walk(root):
        # os.walk enters the folders that are in this very list. So the list is changed in place, and skipped folders
        # are never entered: site-packages alone may hold 100 000 files.
        subfolders[:] = [name for name in subfolders
                         if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_BEGINNINGS)]
        files += [Path(folder, name) for name in names
                  if name.endswith(".py") and not name.startswith(SKIPPED_BEGINNINGS)]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def load_parts(path, sequence_length):
    """Read a text by `load_bytes`, and return its two parts (train, validation).

    Raises what `load_bytes` raises, and ValueError if the validation part is too short for one sequence.
    """
    text = load_bytes(path)
    train, validation = split(text)
    if len(validation) <= sequence_length:
        raise ValueError(f"--data {path}: of {len(text)} bytes the last 10 % can't hold a sequence of "
                         f"{sequence_length} bytes")
    return train, validation


def split(data):
    """Return (train, validation): the first 90 % of `data`, and the last 10 %."""
    n_train = len(data) - round(len(data) * VALIDATION_PART)
    return data[:n_train], data[n_train:]


class Batches:
    """Makes the training batch of this rank for a step's number. The same number always gives the same batch.

    (seed, step) decide at random which `world_size * batch_size` sequences all ranks train on in a step. This rank
    takes its `batch_size` of them. So 2 ranks with 8 sequences each train on the same text as 4 ranks with 4 each.
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
        """Return (tokens, targets), each (B, T) int64 on the device. The target of a token is the next byte."""
        generator = np.random.default_rng((self.seed, step))
        n_starts = len(self.data) - self.sequence_length  # positions at which T + 1 bytes can begin
        starts = generator.integers(n_starts, size=(self.world_size, self.batch_size))
        return _sequences(self.data, starts[self.rank], self.sequence_length, self.device)


def validation_batches(data, batch_size, sequence_length, rank, world_size, device="cpu"):
    """Return this rank's batches [(tokens, targets), …] of the VALIDATION_SEQUENCES sequences, which ranks share.

    tokens and targets are (B, T) int64 each; the last batch may have fewer sequences.
    """
    last_start = len(data) - sequence_length - 1
    starts = np.linspace(0, last_start, VALIDATION_SEQUENCES).astype(np.int64)[rank::world_size]
    return [_sequences(data, starts[first:first + batch_size], sequence_length, torch.device(device))
            for first in range(0, len(starts), batch_size)]


def _sequences(data, starts, sequence_length, device):
    """Return (tokens, targets), each (B, T) int64 on the device, of the sequences that begin at `starts` in `data`."""
    positions = starts[:, None] + np.arange(sequence_length + 1)  # (B, T + 1)
    text = torch.from_numpy(data[positions].astype(np.int64))  # (B, T + 1)
    if device.type == "cuda":  # only a copy from pinned memory lets the CPU go on while the copy runs
        text = text.pin_memory().to(device, non_blocking=True)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()  # (B, T), (B, T)
