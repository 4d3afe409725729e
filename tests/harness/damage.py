"""Checkpoints that are damaged in hundreds of ways: all ranks refuse them in one line, or load what was saved."""

import collections
import copy
import json
import os
import random
import shutil
import zlib

import torch
import torch.distributed as dist

import checkpoint
from harness import STAGE_3, STAGE_4
from tests.checkpoint import small, step
from tests.checkpoint.compare import equal, full, weights

SUMS = "checksums.json"
FORGED = "bits flipped, sums right"


def flip_bits(path, chance, **_):
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 10, 1000])):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def flip_bits_and_forge_sums(path, **options):
    flip_bits(path, **options)
    contents = {file.name: file.read_bytes() for file in path.parent.iterdir() if file.name != SUMS}
    sums = {name: [len(content), zlib.crc32(content)] for name, content in contents.items()}
    (path.parent / SUMS).write_text(json.dumps(sums))


def swap_files(path, chance, **_):
    other_path = chance.choice([file for file in path.parent.iterdir() if file != path])
    content = path.read_bytes()
    other_path.replace(path)
    other_path.write_bytes(content)


def replace_by_no_file(path, chance, **_):
    path.unlink()
    chance.choice([path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")])()


KINDS = {  # a function(path of a file, chance: random.Random, other: checkpoint of another step)
    "bits flipped": flip_bits, FORGED: flip_bits_and_forge_sums, "two files swapped": swap_files,
    "no file in its place": replace_by_no_file, "a file missing": lambda path, **_: path.unlink(),
    "a file cut short": lambda path, chance, **_: os.truncate(path, chance.randrange(path.stat().st_size)),
    "a file longer": lambda path, chance, **_: path.write_bytes(path.read_bytes() + bytes(chance.choice([1, 512]))),
    "a file of another step": lambda path, other, **_: shutil.copy(other / path.name, path),
}


def damage_copies(rank, folder, number):
    """Load `number` damaged copies on all ranks; return kind -> Counter of "refused", "equal" and what is wrong."""
    outcomes, saved = collections.defaultdict(collections.Counter), []
    for stage, dtype in ((STAGE_4, torch.float32), (STAGE_3, torch.bfloat16)):
        trained = small(rank, stage, torch.nn.Linear(11, 21), torch.nn.Linear(21, 11), dtype=dtype)
        for name in ("before", "newest"):
            step(*trained)
            checkpoint.save(folder / stage / name, *trained, {"step": name})
        saved.append((folder / stage, trained, contents(*trained)))
    for turn in range(number):
        kind = list(KINDS)[turn % len(KINDS)]
        place, trained, expected = saved[turn // len(KINDS) % 2]
        step(*trained)  # into what was trained otherwise, after whatever was loaded before
        if rank.rank == 0:
            shutil.rmtree(place / "copy", ignore_errors=True)
            shutil.copytree(place / "newest", place / "copy")
            chance = random.Random(turn)
            KINDS[kind](chance.choice(sorted((place / "copy").iterdir())), chance=chance, other=place / "before")
        dist.barrier()
        outcomes[kind][outcome_of(place / "copy", trained, expected)] += 1
    return outcomes


def contents(model, optimizer):
    return copy.deepcopy((weights(model), full(optimizer)))


def outcome_of(path, trained, expected):
    before = contents(*trained)
    try:
        extra = checkpoint.load(path, *trained)
    except checkpoint.CheckpointError as error:
        is_one_line = str(error).startswith(f"checkpoint {path} can't be loaded: ") and str(error).isprintable()
        return "refused" if is_one_line and equal(contents(*trained), before) else f"changed or in other words: {error}"
    return "equal" if equal((extra, contents(*trained)), ({"step": "newest"}, expected)) else "loaded"
