"""Keeps the files of two runs apart: one run at a time per folder, and a separate name for each save.

A run holds a Linux lock on a file in the folder: of the open file description, so that it survives when this process
copies the folder, say. It ends with the process, also on NFS. Where there are no locks, names keep two runs apart.
"""

import errno
import fcntl
import functools
import itertools
import os
import re
import shutil
import struct
import uuid
import zlib

from .errors import FolderInUse

LOCK = ".checkpoint.lock"
HELD = {}  # folder -> descriptor of its lock file; until the process ends
NUMBERS = itertools.count()


def claim(path, owner) -> str:
    """Make the folder in which `path` is written until it is complete. -> its name. On the rank that completes it.
    Removes what dead runs have left of the same series: step-10 and step-20 are one series, best-10 is another. Process
    groups, of which `owner` is the first global rank, have series of their own. Raises OSError or FolderInUse."""
    if path.parent.is_file():
        raise NotADirectoryError(20, f"{path.parent} is no folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = f"{owner}-{token(os.getpid())}-"
    if hold(path, owner):
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
        raise FileExistsError(errno.EEXIST, "it exists already")


def series(name) -> str:
    return re.sub(r"\d+$", "", name)


@functools.cache
def token(process) -> str:
    return uuid.uuid4().hex[:12]


def hold(path, owner=0) -> bool:
    """Take the lock to save `path` and its series. -> whether this process now holds it; False: there are no locks."""
    folder, place = path.parent.resolve(), zlib.crc32(f"{series(path.name)} {owner}".encode())
    request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)  # struct flock: a byte of the file
    lock = folder / LOCK
    if lock.exists() and not lock.is_file() or lock.is_symlink():
        raise FileExistsError(errno.EEXIST, f"{LOCK} is no regular file: remove it")
    try:
        is_still_there = folder in HELD and lock.exists() and os.path.samestat(os.fstat(HELD[folder]), lock.stat())
        if not is_still_there:
            HELD[folder] = opened(lock)
        fcntl.fcntl(HELD[folder], fcntl.F_OFD_SETLK, request)  # again is no conflict
    except BlockingIOError:
        raise FolderInUse(f"another run saves in {folder}: end it, or save in another folder") from None
    except OSError:  # it belongs to someone else, say
        return False
    return True


def opened(lock) -> int:
    """-> a descriptor. Follows no link, and never blocks."""
    return os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def let_go():
    """After a fork, give up the locks in the child, which may outlive this process."""
    for descriptor in HELD.values():
        os.close(descriptor)
    HELD.clear()


os.register_at_fork(after_in_child=let_go)
