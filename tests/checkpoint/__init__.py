"""What the tests of checkpoints share: models, steps, how states are compared, how a checkpoint is changed by hand."""

import collections
import contextlib
import copy
import json
import resource
import sys
import zlib
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from checkpoint import full_state_dict
from checkpoint.manifest import MANIFEST, sealed
from harness.meeting import Rank
from tests.common import STAGES, Net, batch, loss_of, optimizer_of

SHARDED = STAGES[2:]
ADAMW = {"lr": 0.01, "weight_decay": 0.1}
FORMAT_1 = Path(__file__).parent / "format_1"  # stage 3 saved these on 2 ranks, when that was in use
ONE = Rank(0, 1, torch.device("cpu"), "gloo")


def wrapped(stage, params, cls=torch.optim.AdamW, **kwargs):
    """A stage's optimizer; without stage a plain torch optimizer."""
    if stage is None:
        return cls(params, **{key: value for key, value in kwargs.items() if key != "process_group"})
    sizes = {"bucket_cap_mb": 0.0003} if stage == STAGES[3] else {}
    return optimizer_of(stage)(params, cls, **{**sizes, **kwargs})


def a_run(rank, stage, group=None, seed=0, dtype=torch.float32, cls=torch.optim.AdamW, steps=0, **kwargs):
    """A model of odd sizes, and its optimizer on the ranks of `group`; after some steps."""
    model = Net(seed=seed, frozen_seed=seed).to(rank.device, dtype)
    optimizer = wrapped(stage, model.parameters(), cls, process_group=group, **kwargs)
    train(rank, model, optimizer, range(steps))
    return model, optimizer


def small(rank, stage, *layers, dtype=torch.float32, **kwargs):
    """A model, and its optimizer after a step."""
    model = torch.nn.Sequential(*(layers or [torch.nn.Linear(7, 7)])).to(rank.device, dtype)
    optimizer = wrapped(stage, model.parameters(), **kwargs)
    step(model, optimizer)
    return model, optimizer


def alone(*layers):
    """The same without ranks, and in plain torch."""
    return small(ONE, None, *layers)


def step(model, optimizer):
    weight = next(model.parameters())
    model(weight.new_ones(2, model[0].in_features)).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(rank, model, optimizer, steps, alike=True):
    """`alike`: every rank has the same batch, so that what comes out doesn't depend on how many there are."""
    dtype = next(model.parameters()).dtype
    for step in steps:
        x, y = (part.to(dtype) for part in batch(step, 0 if alike else rank.rank, device=rank.device))
        loss_of(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def alike(one, other, same):
    """Whether two values have the same keys, lengths and classes, and `same` tensors; on whichever device."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key], same) for key in one)
    if isinstance(one, (list, tuple, collections.deque)):
        is_same = type(one) is type(other) and getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return is_same and len(one) == len(other) and all(alike(a, b, same) for a, b in zip(one, other))
    if isinstance(one, torch.Tensor):
        one, other = (getattr(value, "_local_tensor", value).detach().cpu() for value in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and same(one, other)
    return type(one) is type(other) and one == other


def equal(one, other):
    """To the bit."""
    return alike(one, other, torch.equal)


def close(one, other):
    """Up to the order of a sum."""
    return alike(one, other, lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-6))


def full(optimizer):
    return full_state_dict(optimizer, to_all=True)


def weights(model):
    return {name: value.detach() for name, value in model.state_dict().items()}


@contextlib.contextmanager
def nothing_changes(model, optimizer):
    """In model, state and groups, on any rank."""
    before = copy.deepcopy((weights(model), full(optimizer)))
    yield
    assert equal((weights(model), full(optimizer)), before)


def said_by_all(line):
    """-> `line`, which every rank must have."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, line)
    assert set(everyone) == {line}, everyone
    return line


def on_rank_0(rank, function, *args):
    """What one does with files; the others wait."""
    dist.barrier()
    if rank.rank == 0:
        function(*args)
    dist.barrier()


def in_group(rank, ranks, function):
    """function(process_group) on the ranks of a new group; None on the others, which wait for them."""
    group = dist.new_group(ranks)
    result = function(group) if rank.rank in ranks else None
    dist.barrier()
    return result


def raising(error):
    def function(*_, **__):
        raise error
    return function


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-1 - len(content) // 8] ^= 1  # behind a header
    file.write_bytes(content)


def tamper(folder, change):
    """Change a checkpoint by `change(manifest, folder)`, and make all checksums right again.

    The manifest has the headers of the files in it, by name: the parts of tensors by key, and `places`. `change` may
    return the text of the manifest, or replace that file.
    """
    file = folder / MANIFEST
    before, manifest = file.read_bytes(), json.loads(file.read_bytes())
    del manifest["crc32"]
    manifest["headers"] = {name: header_of((folder / name).read_bytes()) for name in manifest["files"]}
    texts = {id(header): json.dumps(header) for header in manifest["headers"].values()}
    text = change(manifest, folder)
    with contextlib.suppress(ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError):
        for name, header in manifest.pop("headers").items():
            make_right(folder / name, header, texts.get(id(header)) != json.dumps(header), manifest["files"])
    if is_regular(file) and file.read_bytes() == before:
        file.write_bytes(sealed_text(text) if text else sealed(manifest))


def make_right(path, header, is_new, files):
    """Write a new header into a file; say in the manifest's `files` what the file is now, whatever it is."""
    if not is_regular(path):
        return
    if is_new:
        content, its = data_of(path.read_bytes()), dict(header)
        path.write_bytes(header_bytes(its.pop("places"), its) + content)
        files[path.name]["bytes"] = path.stat().st_size
    if all(type(crc) is int for crc in files[path.name]["crc32"]):
        content = path.read_bytes()
        data, offsets = data_of(content), [what["data_offsets"] for key, what in header.items() if key != "places"]
        files[path.name]["crc32"] = [zlib.crc32(content[: len(content) - len(data)]),
                                     *(zlib.crc32(data[slice(*of)]) for of in offsets)]


def is_regular(path):
    return path.is_file() and not path.is_symlink()


def text_of(manifest):
    return json.dumps({key: what for key, what in manifest.items() if key != "headers"}).encode()


def header_of(content):
    """Of the bytes of a rank's file, with its `places`."""
    header = json.loads(content[8 : len(content) - len(data_of(content))])
    return {"places": json.loads(header.pop("__metadata__")["places"]), **header}


def header_bytes(places, entries):
    text = json.dumps({"__metadata__": {"places": json.dumps(places)}, **entries}).encode()
    return len(text).to_bytes(8, "little") + text


def data_of(content):
    return content[8 + int.from_bytes(content[:8], "little") :]


def sealed_text(text):
    """JSON with its checksum, whatever it says."""
    return b'{"crc32": %d, %b' % (zlib.crc32(text), text[1:]) if text[:1] == b"{" else text


@contextlib.contextmanager
def full_disk(n_bytes):
    """The limit that a file of this process may have stands for the disk: Python would write broken bytecode, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        with mock.patch.object(sys, "dont_write_bytecode", True):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
