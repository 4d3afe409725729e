"""Checkpoints that are damaged, of something else, or forged by somebody who made the checksums right again.

Refused on every rank, in one line, before anything changes. Nothing runs, nothing hangs.
"""

import errno
import io
import json
import os
import pickle
import re
import shutil
import zlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict

import checkpoint
from checkpoint.files import DISK_ERRORS
from checkpoint.storage import METADATA, SUMS, Reader
from tests.checkpoint import ADAMW, SHARDED, a_run, alone, flip_a_bit, small, wrapped
from tests.checkpoint.compare import equal, nothing_changes, said_by_all
from tests.common import STAGES, error_of, on_ranks, situation

FIRST, LAST = "__0_0.distcp", "__1_0.distcp"
MOMENT = "optimizer.state.embed.weight.exp_avg"

# ------------------------------------------------------------------------------------------------------ ways to damage
# name -> (function(folder); what is said). Nobody makes the checksums right.
# tests/harness/damage.py has more, at random.

DAMAGE = {
    "a bit": (lambda folder: flip_a_bit(folder / LAST), f"{LAST} is damaged: its checksum was"),
    "a bit of the metadata": (lambda folder: flip_a_bit(folder / METADATA), "[.]metadata is damaged: its checksum was"),
    "short": (lambda folder: os.truncate(folder / FIRST, 1000), f"{FIRST} is damaged: .* now it is 1000 bytes"),
    "missing": (lambda folder: (folder / LAST).unlink(), f"{LAST} is damaged: it is missing, or no regular file"),
    "of another step": (lambda folder: shutil.copy(folder.with_name("before") / LAST, folder / LAST),
                        f"{LAST} is damaged"),
    "no metadata": (lambda folder: (folder / METADATA).unlink(), "it is not complete: [.]metadata is missing"),
    "sums cut": (lambda folder: os.truncate(folder / SUMS, 20), "checksums.json is damaged: "),
    "nothing": (shutil.rmtree, "there is no such folder"),
}

# ------------------------------------------------------------------------------------------------------- ways to forge
# name -> (function(metadata, folder), which may return a pickle; what is said). All checksums are right.


class Runs:
    """A pickle that runs a command."""

    def __reduce__(self):
        return os.system, ("touch /tmp/forged",)


def dotted_names(*_):
    """Return a pickle that walks on from torch.float32 by a name with dots, as far as os.system in the end."""
    words = "torch", "float32.__class__.__base__.__subclasses__"
    return b"\x80\x04" + b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in words) + b"\x93)R."


def in_place_of(key, is_tensor):
    """Store a pickle that runs a command as what `key` is; the metadata calls it a tensor, or a value."""
    def forge(metadata, folder):
        buffer = io.BytesIO()
        torch.save(Runs(), buffer)
        (folder / "forged").write_bytes(buffer.getvalue())
        indices = [index for index in metadata.storage_data if index.fqn == key] if is_tensor else [MetadataIndex(key)]
        if not is_tensor:
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
        for index in indices:
            metadata.storage_data[index] = _StorageInfo("forged", 0, len(buffer.getvalue()))
    return forge


def a_gap(metadata, _):
    metadata.state_dict_metadata[MOMENT].chunks.pop()


def a_box_twice(metadata, _):
    """Instead of another one: its elements would be whatever lies in memory."""
    first = ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))
    metadata.state_dict_metadata["model.frozen.bias"].chunks = [first] * 3  # of three elements


FORGED = {
    "code": (lambda *_: pickle.dumps(Runs()), r"\.metadata is damaged: it names \w+.system, which isn't DCP's"),
    "code by dotted names": (dotted_names, "it names torch.float32.__class__.* which isn't DCP's"),
    "code in a value": (in_place_of("extra.0", is_tensor=False), "extra.0 is damaged: it is no plain value"),
    "code in a tensor": (in_place_of(MOMENT, is_tensor=True), "a tensor is damaged: it is no plain value"),
    "a value for a tensor": (in_place_of(MOMENT, is_tensor=False), f"it has no {MOMENT}"),
    "a gap": (a_gap, "tensors aren't complete"), "a box twice": (a_box_twice, "tensors aren't complete"),
    "another state": (lambda metadata, _: metadata.state_dict_metadata.pop(MOMENT), f"it has no {MOMENT}"),
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
    if rank.number == 0 and os.path.exists("/tmp/forged"):  # of a run in which code ran
        os.remove("/tmp/forged")
    model, optimizer = a_run(rank, STAGES[3], **ADAMW, steps=2)
    whole = tmp_path / "whole"
    extra = {"step": 2, "average": torch.arange(100.0)}
    checkpoint.save(whole, model, optimizer, extra)
    a_step_before = a_run(rank, STAGES[3], **ADAMW, steps=1)
    if rank.number == 0:
        forge(whole, lambda *_: None)
    model, optimizer = a_run(rank, STAGES[3], seed=7, steps=1)
    for number, (what, (change, words)) in enumerate({**DAMAGE, **FORGED}.items()):
        folder = tmp_path / str(number) / "one"
        checkpoint.save(folder.with_name("before"), *a_step_before)
        with situation(what), nothing_changes(model, optimizer):
            if rank.number == 0:
                shutil.copytree(whole, folder)
                change(folder) if what in DAMAGE else forge(folder, change)
            dist.barrier()
            line = said_by_all(error_of(lambda: checkpoint.load(folder, model, optimizer), checkpoint.CheckpointError))
            assert line.startswith(f"checkpoint {folder} can't be loaded: ") and len(line) < 700, line
            assert re.search(words, line), line
            assert not os.path.exists("/tmp/forged")
    assert equal(checkpoint.load(whole, model, optimizer), extra)


def in_groups(rank, *names):
    model = nn.Sequential(nn.Linear(7, 7)).to(rank.device)
    return model, wrapped(SHARDED[1], [{"params": [getattr(model[0], name)]} for name in names])


FOREIGN = [
    (lambda rank: small(rank, SHARDED[1], nn.Linear(7, 7), nn.Linear(7, 7)), "it has no model.1.weight"),
    (lambda rank: small(rank, SHARDED[0], nn.Linear(7, 8)), r"Size mismatch between saved .*7, 7.* for model.0.weight"),
    (lambda rank: small(rank, SHARDED[0], nn.Linear(7, 7, bias=False)), "it has .*0.bias.*, which this model"),
    (lambda rank: small(rank, SHARDED[0], cls=torch.optim.SGD, lr=0.1), "it has .*step|exp_avg.*, which this model"),
    (lambda rank: small(rank, SHARDED[1], cls=torch.optim.AdamW, amsgrad=True), "it has no .*max_exp_avg_sq"),
    (lambda rank: in_groups(rank, "weight", "bias"), "it has 1 parameter groups under optimizer, and more are here"),
]


@on_ranks(2)
def test_a_checkpoint_of_something_else_is_refused_and_nothing_is_changed(rank, tmp_path):
    """Whatever a load would not use is named too: torch's recipes call the optimizer optim, and it would be lost."""
    its = small(rank, STAGES[3])
    checkpoint.save(tmp_path / "0", *its)
    for make, words in FOREIGN:
        others = make(rank)
        with situation(words), nothing_changes(*others):
            line = error_of(lambda: checkpoint.load(tmp_path / "0", *others), checkpoint.ForeignCheckpoint)
            assert re.search(words, said_by_all(line)), line
    checkpoint.save(tmp_path / "1", *its, 1)
    with nothing_changes(*its):
        line = error_of(lambda: checkpoint.load(tmp_path / str(rank.number), *its))
        assert line.endswith("the ranks read different checkpoints")
    checkpoint.save(tmp_path / "two groups", *in_groups(rank, "weight", "bias"))
    line = error_of(lambda: checkpoint.load(tmp_path / "two groups", *in_groups(rank, "bias", "weight")))
    assert "0.bias was in parameter group 1, and is in 0 here" in line
    of_model, of_optimizer = get_state_dict(*its)
    for name in ("optim", None):
        state = {"model": of_model, **({name: of_optimizer} if name else {})}
        dcp.save(state, checkpoint_id=tmp_path / str(name))
        line = error_of(lambda: checkpoint.load(tmp_path / str(name), *its), checkpoint.ForeignCheckpoint)
        assert said_by_all(line).endswith("its keys begin with model" + (f", {name}" if name else ""))
    its[0].register_buffer("spread", torch.zeros(1).expand(3))
    checkpoint.save(tmp_path / "spread", *its)
    with nothing_changes(*its):
        line = error_of(lambda: checkpoint.load(tmp_path / "spread", *its), checkpoint.UnfitModel)
    assert "spread is expanded, so nothing can be copied into it" in line


@pytest.mark.parametrize("number", [DISK_ERRORS[0], errno.EMFILE])
def test_what_a_disk_cannot_read_is_damaged_and_with_too_many_open_files_it_is_not(number, tmp_path, monkeypatch):
    """For what is damaged a run takes the checkpoint before."""
    checkpoint.save(tmp_path / "one", *alone())
    monkeypatch.setattr(Reader, "read_data", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(checkpoint.CheckpointError, match=os.strerror(number)) as refusal:
        checkpoint.load(tmp_path / "one", *alone())
    assert isinstance(refusal.value, checkpoint.DamagedCheckpoint) == (number != errno.EMFILE)
