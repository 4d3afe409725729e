"""One run at a time in a folder, and a name of its own for each save: two runs never mix their files.

A lock of Linux on a file in the folder says that a run saves there. The lock ends with the process that holds it, also
on NFS. Where a file system has no locks, the names alone keep two runs apart.
"""

import fcntl
import functools
import itertools
import os
import re
import shutil
import uuid
import zlib

from .errors import FolderInUse

LOCK = ".checkpoint.lock"
HELD = {}  # folder -> its open lock file; until the process ends
NUMBERS = itertools.count()


def claim(path, owner) -> str:
    """Make the folder in which `path` is written until it is complete, -> its name. On the rank that completes it.

    What runs that are dead have left of this series is removed: step-10 and step-20 are of one series, step-10 and
    best-10 are not. Nor are those of different process groups, which may save side by side.

    Args:
        owner: the global rank of this process.

    Raises:
        OSError: the disk says no, or `path` exists.
        FolderInUse: another run saves here.
    """
    if path.parent.is_file():
        raise NotADirectoryError(20, f"{path.parent} is no folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = f"{owner}-{token(os.getpid())}-"
    if locked(path.parent, f"{series(path.name)} {owner}"):
        for left in path.parent.glob("*.partial"):
            name, _, writer = left.name.removesuffix(".partial").rpartition(".")
            is_of_rank = re.fullmatch(rf"{owner}-[0-9a-f]{{12}}-\d+", writer)
            if is_of_rank and series(name) == series(path.name) and not writer.startswith(mine):
                shutil.rmtree(left, ignore_errors=True)
    refuse_existing(path)
    partial = path.with_name(f"{path.name}.{mine}{next(NUMBERS)}.partial")
    partial.mkdir()
    return partial.name


def refuse_existing(path):
    if path.exists():
        raise FileExistsError(17, "it exists already")


def series(name) -> str:
    return re.sub(r"\d+$", "", name)


@functools.cache
def token(process) -> str:
    return uuid.uuid4().hex[:12]


def locked(folder, key) -> bool:
    """Whether this process has the lock of `key`; False: there are no locks. Raises FolderInUse: another has it."""
    folder, place = folder.resolve(), zlib.crc32(key.encode())
    try:
        if folder not in HELD or not is_still_there(HELD[folder], folder / LOCK):
            HELD[folder] = open(folder / LOCK, "a")
    except OSError:  # it belongs to someone else, say
        return False
    try:
        fcntl.lockf(HELD[folder], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)  # one byte; again is no conflict
    except (BlockingIOError, PermissionError):
        raise FolderInUse(f"another run saves in {folder}: end it, or save in another folder") from None
    except OSError:
        return False
    return True


def is_still_there(file, path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())
