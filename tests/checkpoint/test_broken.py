"""Checkpoints that are damaged, of something else, or forged by somebody who made the checksums right again.

Refused on every rank, in one line. Nothing runs, nothing hangs, nothing is written elsewhere or changed, and no memory
is taken without bound.
"""

import errno
import io
import json
import os
import pickle
import re
import resource
import shutil
import zipfile
import zlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

import checkpoint
from checkpoint.files import DISK_ERRORS, SUMS
from checkpoint.storage import METADATA, Reader
from tests.checkpoint import ADAMW, SHARDED, a_run, alone, flip_a_bit, small, wrapped
from tests.checkpoint.compare import equal, nothing_changes, said_by_all
from tests.common import STAGES, error_of, on_ranks, situation

FIRST, LAST = "__0_0.distcp", "__1_0.distcp"
MOMENT = "optimizer.state.embed.weight.exp_avg"

# ------------------------------------------------------------------------------------------------------ ways to damage
# name -> (function(folder); what is said). Nobody makes the checksums right.


def a_fifo(path):
    path.unlink()
    os.mkfifo(path)


def exchanged(folder):
    (folder / FIRST).rename(folder / "x")
    (folder / LAST).rename(folder / FIRST)
    (folder / "x").rename(folder / LAST)


def of_another_step(folder):
    shutil.copy(folder.with_name("before") / LAST, folder / LAST)


DAMAGE = {
    "a bit": (lambda folder: flip_a_bit(folder / LAST), f"{LAST} is damaged: its checksum was"),
    "a bit of the metadata": (lambda folder: flip_a_bit(folder / METADATA), "[.]metadata is damaged: its checksum was"),
    "a bit of the sums": (lambda folder: flip_a_bit(folder / SUMS), "is damaged"),
    "short": (lambda folder: os.truncate(folder / FIRST, 1000), f"{FIRST} is damaged: .* now it is 1000 bytes"),
    "many bytes": (lambda folder: os.truncate(folder / FIRST, 2**40), "now it is 1099511627776 bytes"),
    "missing": (lambda folder: (folder / LAST).unlink(), f"{LAST} is damaged: it is missing"),
    "swapped": (exchanged, "is damaged"), "of another step": (of_another_step, f"{LAST} is damaged"),
    "a fifo": (lambda folder: a_fifo(folder / LAST), "it is no regular file"),
    "no metadata": (lambda folder: (folder / METADATA).unlink(), "it is not complete: [.]metadata is missing"),
    "no sums": (lambda folder: (folder / SUMS).unlink(), "it is not complete: checksums.json is missing"),
    "sums cut": (lambda folder: os.truncate(folder / SUMS, 20), "checksums.json is damaged: "),
    "nothing": (shutil.rmtree, "there is no such folder"),
}

# ------------------------------------------------------------------------------------------------------- ways to forge
# name -> (function(metadata, folder), which may return a pickle; what is said). All checksums are right.


class Runs:
    """A pickle that runs a command."""

    def __reduce__(self):
        return os.system, ("touch /tmp/forged",)


def named(module, name) -> bytes:
    """Return the beginning of a pickle, which asks for a name in a module."""
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)) + b"\x93"


def dotted_names(*_):
    """Return a pickle that walks on from torch.float32 by a name with dots, as far as os.system in the end."""
    return named("torch", "float32.__class__.__base__.__subclasses__") + b")R."


def a_changed_class(*_):
    return named("torch.distributed.checkpoint.metadata", "Metadata") + b"N}\x8c\x01xK\x01s\x86b."


def in_place_of(key, content, as_value=True):
    """Store `content` as what `key` is, in files of its own; the metadata calls it a value that is no tensor, or not.
    """
    def forge(metadata, folder):
        indices = [index for index in metadata.storage_data if index.fqn == key]
        if as_value:
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
            for index in indices:
                del metadata.storage_data[index]
            indices = [MetadataIndex(key)]
        for number, index in enumerate(indices):
            (folder / f"forged{number}").write_bytes(content)
            metadata.storage_data[index] = _StorageInfo(f"forged{number}", 0, len(content))
    return forge


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def another_place(**changes):
    """Change where the first tensor lies."""
    def forge(metadata, _):
        for name, value in changes.items():
            setattr(next(info for index, info in metadata.storage_data.items() if index.fqn == MOMENT), name, value)
    return forge


def a_size(*size):
    return lambda metadata, _: setattr(metadata.state_dict_metadata[MOMENT], "size", torch.Size(size))


def a_hole(metadata, _):
    metadata.state_dict_metadata[MOMENT].chunks.pop()


def a_bomb() -> bytes:
    """Return a tensor whose file is deflated: 64 MB of zeros in some 100 kB."""
    content, source = io.BytesIO(), zipfile.ZipFile(io.BytesIO(saved(torch.zeros(2**24))))
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name))
    return content.getvalue()


def rank_metadata(metadata, folder):
    """Leave `.metadata` unreadable, and torch's fallback beside it."""
    (folder / "__0.metadata").write_bytes(pickle.dumps(metadata))
    (folder / "__1.metadata").write_bytes(pickle.dumps(Runs()))
    return b"nothing"


FORGED = {
    "code": (lambda *_: pickle.dumps(Runs()), r"\.metadata is damaged: it names \w+.system, which isn't DCP's"),
    "code by dotted names": (dotted_names, "it names torch.float32.__class__.* which isn't DCP's"),
    "a changed class": (a_changed_class, "it changes a class"),
    "code in a value": (in_place_of("extra.0", saved(Runs())), "Weights only load failed|Unsupported"),
    "code for a tensor": (in_place_of(MOMENT, saved(Runs())), "Weights only load failed|Unsupported"),
    "code in a tensor": (in_place_of(MOMENT, saved(Runs()), as_value=False), "Weights only load failed|Unsupported"),
    "code for a parameter": (in_place_of("model.embed.weight", saved(Runs())), "embed.weight: the checkpoint doesn't"),
    "code in the groups": (in_place_of("optimizer.param_groups.0.lr", saved(Runs())), "Weights only load|Unsupported"),
    "a file elsewhere": (another_place(relative_path="/etc/passwd"), "a tensor lies in '/etc/passwd'"),
    "a file above": (another_place(relative_path="../before/__0_0.distcp"), "a tensor lies in '../before"),
    "behind the end": (another_place(offset=2**40), "lies behind the end"),
    "below zero": (another_place(offset=-1), "a place"),
    "a tensor of many bytes": (a_size(2**40, 5, 7), "a box of|is too large"),
    "no size": (a_size(-5, -7), "the shape of"), "a hole": (a_hole, "too large|are missing"),
    "a bomb": (lambda *its: in_place_of(MOMENT, a_bomb(), as_value=False)(*its), "it has compressed tensors"),
    "the fallback of torch's": (rank_metadata, r"\.metadata is damaged"),
    "a list for metadata": (lambda *_: pickle.dumps([1, 2]), r"\.metadata is damaged"),
    "a text for a learning rate": (in_place_of("optimizer.param_groups.0.lr", saved("fast")),
                                   "can't step with the hyperparameters that were saved"),
    "a text for a moment": (in_place_of(MOMENT, saved("none")), "is of another optimizer"),
    "a list for what it is about": (in_place_of("about", saved([1])), "can't be loaded"),
    "another state": (lambda metadata, _: metadata.state_dict_metadata.pop(MOMENT), "is of another optimizer"),
}


def forge(folder, change):
    """Change the metadata and files of a checkpoint by `change(metadata, folder)`; make all checksums right again."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    content = change(metadata, folder)
    (folder / METADATA).write_bytes(content if isinstance(content, bytes) else pickle.dumps(metadata))
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.name != SUMS}
    sums = {name: (len(content), zlib.crc32(content)) for name, content in files.items()}
    (folder / SUMS).write_text(json.dumps(sums))


@on_ranks(2)
def test_a_checkpoint_that_was_damaged_or_forged_is_refused(rank, tmp_path):
    """And one that was only written anew, with the same content, is loaded."""
    model, optimizer = a_run(rank, STAGES[3], **ADAMW, steps=2)
    whole, extra = tmp_path / "whole", {"step": 2, "average": torch.arange(100.0)}
    checkpoint.save(whole, model, optimizer, extra)
    a_step_before = a_run(rank, STAGES[3], **ADAMW, steps=1)
    if rank.rank == 0:
        forge(whole, lambda *_: None)
    model, optimizer = a_run(rank, STAGES[3], seed=7, steps=1)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, (what, (change, words)) in enumerate({**DAMAGE, **FORGED}.items()):
        folder = tmp_path / str(number) / "one"
        checkpoint.save(folder.with_name("before"), *a_step_before)
        with situation(what), nothing_changes(model, optimizer):
            if rank.rank == 0:
                shutil.copytree(whole, folder)
                change(folder) if what in DAMAGE else forge(folder, change)
            dist.barrier()
            line = said_by_all(error_of(lambda: checkpoint.load(folder, model, optimizer), checkpoint.CheckpointError))
            assert line.startswith(f"checkpoint {folder} can't be loaded: ") and len(line) < 700, line
            assert re.search(words, line), line
            assert not os.path.exists("/tmp/forged")
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 600_000  # KiB
    assert equal(checkpoint.load(whole, model, optimizer), extra)


def in_two_groups(rank):
    model = nn.Sequential(nn.Linear(7, 7)).to(rank.device)
    return model, wrapped(SHARDED[1], [{"params": [param]} for param in model.parameters()])


FOREIGN = [
    (lambda rank: small(rank, SHARDED[1], nn.Linear(7, 7), nn.Linear(7, 7)),
     "it is of another model: 1.weight: the checkpoint doesn't have it"),
    (lambda rank: small(rank, SHARDED[0], nn.Linear(7, 8)),
     r"of another model: 0.weight: the checkpoint has it with shape \(7, 7\), the model .*\(8, 7\)"),
    (lambda rank: small(rank, SHARDED[0], cls=torch.optim.SGD, lr=0.1), "it is of AdamW, this optimizer is SGD"),
    (lambda rank: small(rank, SHARDED[1], cls=type("AdamW", (torch.optim.Adagrad,), {})),
     "the state of .* is of another optimizer: .*exp_avg_sq.*, this one keeps step, sum"),
    (in_two_groups, "its parameter groups are 2 from .* to .*, this optimizer's 1 from .* and 1 from"),
]


@on_ranks(2)
def test_a_checkpoint_of_something_else_is_refused_and_nothing_is_changed(rank, tmp_path):
    its = small(rank, STAGES[3])
    for turn in range(2):
        checkpoint.save(tmp_path / str(turn), *its, turn)
    for make, words in FOREIGN:
        others = make(rank)
        with situation(words), nothing_changes(*others):
            line = error_of(lambda: checkpoint.load(tmp_path / "0", *others), checkpoint.ForeignCheckpoint)
            assert re.search(words, said_by_all(line)), line
    with nothing_changes(*its):
        line = error_of(lambda: checkpoint.load(tmp_path / str(rank.rank), *its))
        assert line.endswith("the ranks read different checkpoints")


def test_a_folder_of_version_02_says_which_version_reads_it(tmp_path):
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "manifest.json").write_text("{}")
    assert checkpoint.latest(tmp_path) == tmp_path / "step-7"  # a run would begin anew otherwise
    line = error_of(lambda: checkpoint.load(tmp_path / "step-7", *alone()), checkpoint.ForeignCheckpoint)
    assert line.endswith("version 0.2 or an earlier one has written it: load it with that version")


@pytest.mark.parametrize("number", [*DISK_ERRORS, errno.EMFILE])
def test_what_a_disk_cannot_read_is_damaged_and_with_too_many_open_files_it_is_not(number, tmp_path, monkeypatch):
    """For what is damaged a run takes the checkpoint before."""
    checkpoint.save(tmp_path / "one", *alone())
    monkeypatch.setattr(Reader, "read_data", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(checkpoint.CheckpointError, match=os.strerror(number)) as refusal:
        checkpoint.load(tmp_path / "one", *alone())
    assert isinstance(refusal.value, checkpoint.DamagedCheckpoint) == (number != errno.EMFILE)
