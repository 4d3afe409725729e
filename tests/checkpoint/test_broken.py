"""Checkpoints that are damaged, of something else, or forged by somebody who made the checksums right again.

Every rank refuses them, in one line, before anything changes. No code of them runs, and no rank waits for another.
"""

import errno
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
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict

import checkpoint
from checkpoint.storage import METADATA, SUMS, Reader
from harness import STAGE_4
from tests.checkpoint import ONE_PROCESS, flip_a_bit, make_optimizer, make_run
from tests.checkpoint.compare import equal, nothing_changes, said_by_all
from tests.common import error_of, on_ranks, situation

FIRST, LAST = "__0_0.distcp", "__1_0.distcp"  # the files of ranks 0 and 1
MOMENT = "optimizer.state.embed.weight.exp_avg"

# ------------------------------------------------------------------------------------------------------- ways to forge


def forge(folder, change):
    """Change the content of a checkpoint, and make all checksums right again.

    change: function (metadata, folder), which may change both, and may return an object in place of the metadata.
    """
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata = change(metadata, folder) or metadata
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    sums = {}
    for file in folder.iterdir():
        if file.name != SUMS:
            content = file.read_bytes()
            sums[file.name] = len(content), zlib.crc32(content)
    (folder / SUMS).write_text(json.dumps(sums))


class EndsTheProcess:
    """An object whose pickle is code: it ends the process that loads it."""

    def __reduce__(self):
        return os._exit, (1,)


def store_code(folder):
    """Write a file that ends the process that loads it. Return where the file is, as DCP's metadata says it."""
    file = folder / "forged"
    torch.save(EndsTheProcess(), file)
    return _StorageInfo(file.name, 0, file.stat().st_size)


def code_as_metadata(metadata, folder):
    return EndsTheProcess()


def code_as_value(metadata, folder):
    metadata.storage_data[MetadataIndex("extra.0")] = store_code(folder)


def code_as_tensor(metadata, folder):
    place = store_code(folder)
    for index in metadata.storage_data:
        if index.fqn == MOMENT:
            metadata.storage_data[index] = place


def value_for_a_tensor(metadata, folder):
    metadata.state_dict_metadata[MOMENT] = BytesStorageMetadata()


def gap_in_a_tensor(metadata, folder):
    metadata.state_dict_metadata[MOMENT].chunks.pop()


BROKEN = {  # name -> (function of a folder, words of the error). Only `forge` makes the checksums right.
    "a bit": (lambda folder: flip_a_bit(folder / LAST), f"{LAST} is damaged: its checksum was"),
    "short": (lambda folder: os.truncate(folder / FIRST, 1000), f"{FIRST} is damaged: .* now it is 1000 bytes"),
    "missing": (lambda folder: (folder / LAST).unlink(), f"{LAST} is damaged: it is missing, or no regular file"),
    "no metadata": (lambda folder: (folder / METADATA).unlink(), "it is not complete: [.]metadata is missing"),
    "nothing": (shutil.rmtree, "there is no such folder"),
    "code": (lambda folder: forge(folder, code_as_metadata), r"metadata is damaged: it names \w+\._exit"),
    "code in a value": (lambda folder: forge(folder, code_as_value), "extra.0 is damaged: it is no plain value"),
    "code in a tensor": (lambda folder: forge(folder, code_as_tensor), "a tensor is damaged: it is no plain value"),
    "a value for a tensor": (lambda folder: forge(folder, value_for_a_tensor), f"it has no {MOMENT}"),
    "a gap": (lambda folder: forge(folder, gap_in_a_tensor), "tensors aren't complete"),
}


@on_ranks(2)
def test_a_checkpoint_that_was_damaged_or_forged_is_refused(rank, tmp_path):
    """Break copies of a checkpoint, each in its way. The same content with checksums written anew is loaded."""
    model, optimizer = make_run(rank, STAGE_4, steps=2)
    whole = tmp_path / "whole"
    extra = torch.arange(100.0)
    checkpoint.save(whole, model, optimizer, extra)
    if rank.number == 0:
        forge(whole, lambda metadata, folder: None)
    other_run = make_run(rank, STAGE_4, seed=7, steps=1)
    for name, (break_folder, words) in BROKEN.items():
        folder = tmp_path / name
        with situation(name), nothing_changes(*other_run):
            if rank.number == 0:
                shutil.copytree(whole, folder)
                break_folder(folder)
            dist.barrier()
            line = error_of(lambda: checkpoint.load(folder, *other_run), checkpoint.CheckpointError)
            said_by_all(line)
            assert line.startswith(f"checkpoint {folder} can't be loaded: ") and re.search(words, line), line
    assert equal(checkpoint.load(whole, *other_run), extra)


# ------------------------------------------------------------------------------------------------- of something else


FOREIGN = {  # words of the error -> function that returns the layers of a model
    "it has no model.1.weight": lambda: [nn.Linear(7, 7), nn.Linear(7, 7)],
    "Size mismatch between saved .*7, 7.* for model.0.weight": lambda: [nn.Linear(7, 8)],
    "it has .*0.bias.*, which this model": lambda: [nn.Linear(7, 7, bias=False)],
}


def make_layers(*layers):
    """Return a model of these layers, and stage 4's optimizer."""
    model = nn.Sequential(*layers)
    return model, make_optimizer(STAGE_4, model.parameters())


@on_ranks(2)
def test_a_checkpoint_of_something_else_is_refused_and_nothing_is_changed(rank, tmp_path):
    """Load into other models, other groups and an expanded buffer, and load another checkpoint on each rank.

    torch's recipes call the optimizer optim. A load that didn't refuse this would lose its state.
    """
    model, optimizer = make_layers(nn.Linear(7, 7))

    def refusal(folder_name, model, optimizer, kind=checkpoint.ForeignCheckpoint):
        with nothing_changes(model, optimizer):
            return error_of(lambda: checkpoint.load(tmp_path / folder_name, model, optimizer), kind)

    for number in range(2):
        checkpoint.save(tmp_path / f"{number}", model, optimizer, number)
    line = refusal(f"{rank.number}", model, optimizer, checkpoint.CheckpointError)
    assert line.endswith("the ranks read different checkpoints")
    for words, layers in FOREIGN.items():
        line = said_by_all(refusal("0", *make_layers(*layers())))
        assert re.search(words, line), line

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optimizer_state}, checkpoint_id=tmp_path / "recipe")
    assert said_by_all(refusal("recipe", model, optimizer)).endswith("its keys begin with model, optim")

    weight, bias = model[0].weight, model[0].bias
    weight_first = make_optimizer(STAGE_4, [{"params": [weight]}, {"params": [bias]}])
    checkpoint.save(tmp_path / "weight first", model, weight_first)
    bias_first = make_optimizer(STAGE_4, [{"params": [bias]}, {"params": [weight]}])
    line = refusal("weight first", model, bias_first)
    assert "0.bias was in parameter group 1, and is in 0 here" in line

    model.register_buffer("spread", torch.zeros(1).expand(3))
    checkpoint.save(tmp_path / "spread", model, bias_first)
    line = refusal("spread", model, bias_first, checkpoint.UnfitModel)
    assert "spread is expanded, so nothing can be copied into it" in line


def test_what_a_disk_cannot_read_is_damaged(tmp_path, monkeypatch):
    """A program goes on from the checkpoint before a damaged one."""
    run = make_run(ONE_PROCESS, None)
    checkpoint.save(tmp_path / "one", *run)
    monkeypatch.setattr(Reader, "read_data", mock.Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(checkpoint.DamagedCheckpoint, match="Input/output error"):
        checkpoint.load(tmp_path / "one", *run)
