"""Checkpoints that are damaged, of something else, or changed by somebody who made the checksums right again.

Refused on every rank, in one line. Nothing runs, nothing hangs, nothing is written elsewhere or changed, and no memory
is taken without bound.
"""

import errno
import json
import os
import pickle
import re
import resource
import shutil
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import checkpoint
from checkpoint import files
from checkpoint.convert import converted
from checkpoint.manifest import MANIFEST
from checkpoint.rank_files import Reader
from tests.checkpoint import ADAMW, FORMAT_1, SHARDED, a_run, alone, flip_a_bit, small, wrapped
from tests.checkpoint.compare import equal, full, nothing_changes, said_by_all, weights
from tests.checkpoint.mutations import KINDS, tamper, text_of
from tests.common import STAGES, error_of, on_ranks, situation
from tests.ranks import run_module

FIRST, LAST = "rank-00000.safetensors", "rank-00001.safetensors"
HEADER = "headers", LAST
WEIGHT, MOMENT = "model.embed.weight", "optimizer.state.embed.weight.exp_avg"  # in the last file
HALVED = "optimizer.state.up.weight.exp_avg"  # each file has a part of it
OPTIONS, STATE = ("groups", 0, "options", "dict"), ("states", "embed.weight", "dict")  # [[name, value], …]
COUNT, LIKE_MOMENT = (*STATE, 0, 1), (*STATE, 1, 1)  # the values of step and of exp_avg
NO_MOMENT = [["step", {"data": ["float32", [], "AAAAQA=="]}], ["exp_avg", 0.0],
             ["exp_avg_sq", {"piece": f"{MOMENT}_sq"}], ["kept", {"piece": MOMENT}]]

# ------------------------------------------------------------------------------------------------------ ways to damage
# name -> (function(folder); what is said). Nobody makes the checksums right.


def a_fifo(path):
    path.unlink()
    os.mkfifo(path)


def a_link(path, outside):
    path.rename(outside)
    path.symlink_to(outside)


def begin_with(start, path):
    path.write_bytes(start + path.read_bytes()[len(start) :])


def larger_by_nothing(folder, n_bytes=2**33):
    tamper(folder, put(n_bytes, "files", LAST, "bytes"))
    os.truncate(folder / LAST, n_bytes)


DAMAGE = {
    "a bit": (lambda folder: flip_a_bit(folder / LAST), "is damaged: a tensor with checksum"),
    "a bit of a header": (lambda folder: begin_with(b"\1", folder / LAST), "the checksum of its header is another"),
    "a file cut": (lambda folder: os.truncate(folder / FIRST, 1000), "now it is 1000 bytes"),
    "many bytes": (lambda folder: os.truncate(folder / FIRST, 2**40), "now it is 1099511627776 bytes"),
    "8 GB of nothing": (larger_by_nothing, "has bytes of no tensor"),
    "no file": (lambda folder: (folder / LAST).unlink(), "now it is missing"),
    "a link": (lambda folder: a_link(folder / LAST, folder.parent / "outside" / "x"), "it is a link"),
    "a fifo": (lambda folder: a_fifo(folder / LAST), "it is no regular file"),
    "no manifest": (lambda folder: (folder / MANIFEST).unlink(), "it is not complete: manifest.json is missing"),
    "a manifest cut": (lambda folder: os.truncate(folder / MANIFEST, 100), "its checksum is that of another"),
    "a large manifest": (lambda folder: os.truncate(folder / MANIFEST, 2**40), "it has more than 8749056 bytes"),
    "a fifo for a manifest": (lambda folder: a_fifo(folder / MANIFEST), "it is no regular file"),
    "a pickle": (lambda folder: (folder / MANIFEST).write_bytes(pickle.dumps({})), "codec can't decode byte 0x80"),
    "a list": (lambda folder: (folder / MANIFEST).write_bytes(b"[]"), "it is no dict"),
    "no checksum": (lambda folder: (folder / MANIFEST).write_bytes(b'{"format": 2}'), "it has no checksum of itself"),
    "nothing": (shutil.rmtree, "there is no such folder"),
}

# ------------------------------------------------------------------------------------------------------ ways to tamper
# name -> (function(manifest, folder), see `tamper`; what is said). All checksums are right.


def put(value, *path):
    """`value` in the place `path` of the manifest, which has the headers of the files."""
    def change(manifest, _):
        *way, last = path
        for key in way:
            manifest = manifest[key]
        manifest[last] = value
    return change


def named(name):
    return lambda manifest, _: manifest["files"].update({name: manifest["files"].pop(LAST)})


def instead(text):
    """The manifest's JSON with `text` in the place of an entry."""
    return lambda manifest, _: text_of({**manifest, "ranks": "here"}).replace(b'"here"', text)


WAYS = {
    **{f"a file called {name!r}": (named(name), f"file {name!r}")
       for name in ("../outside/x", "", ".", "..", "x\0", MANIFEST)},
    "10,000 lists in each other": (instead(b"[" * 10_000 + b"]" * 10_000), "RecursionError in it"),
    "a number of a million digits": (instead(b"9" * 1_000_000), "Exceeds the limit (4300 digits)"),
    "a key twice": (instead(b'2, "ranks": 2'), "a key comes twice"),
    "tuples in each other": (put(json.loads('{"tuple": [' * 60 + "]}" * 60), "extra", 0), "nested deeper than 50"),
    "another format": (put(99, "format"), "this program reads 1, 2, 3"),
    "the other byte order": (put("big", "byteorder"), "its numbers are 'big', here they are little"),
    "more ranks than extras": (put(10**9, "ranks"), "extra"),
    "an entry more": (put("print(1)", "code"), "it has other entries"),
    "less than no bytes": (put(-1, "files", LAST, "bytes"), "'bytes' of 'rank-00001.safetensors'"),
    "a part twice": (put(0, *HEADER, "places", HALVED, "start"), "ranges of '"),
    "not a number for a start": (put(float("nan"), "headers", FIRST, "places", HALVED, "start"), "ranges of '"),
    "parts of other tensors": (put([10**6], *HEADER, "places", HALVED, "shape"), "its parts are of several tensors"),
    "a part of no place": (put(None, *HEADER, "places", HALVED, "start"), "TypeError in it"),
    "a place of no part": (put({"shape": [3], "start": 0}, *HEADER, "places", "nowhere"), "it has other entries"),
    "two tensors in the same bytes": (put([0, 140], *HEADER, MOMENT, "data_offsets"),
                                      "doesn't lie behind the one before"),
    "a shape of too many": (put([2**40, 2**40], *HEADER, MOMENT, "shape"), "a shape of too many elements"),
    "a shape below zero": (put([-5, -7], *HEADER, MOMENT, "shape"), "a shape of [-5, -7]"),
    "a moment of another shape": (put([7, 5], *HEADER, MOMENT, "shape"), "the shape of '"),
    "a dtype that is none": (put("load", *HEADER, MOMENT, "dtype"), "KeyError in it"),
    "a dtype of another kind": (put("I32", *HEADER, MOMENT, "dtype"), "is of another optimizer: int32"),
    "a parameter of another kind": (put("I32", *HEADER, WEIGHT, "dtype"), "embed.weight is torch.int32 there"),
    "a part without dimensions": (put({"shape": [], "start": 0}, *HEADER, "places", "model.scale"), "IndexError in it"),
    "dimensions before that others have not": (put({"shape": [7, 35], "start": 0}, *HEADER, "places", WEIGHT),
                                               "dimensions of '"),
    "a header of many bytes": (lambda _, folder: begin_with((2**62).to_bytes(8, "little"), folder / LAST),
                               "its header is too long"),
    "a header cut": (lambda _, folder: begin_with((64).to_bytes(8, "little"), folder / LAST),
                     "Unterminated string"),
    "a moment that is nowhere": (put({"piece": "nowhere"}, *LIKE_MOMENT), "KeyError in it"),
    "an extra that is gone": (put(3, "extra", 0), "nobody claims 'extra.0.average'"),
    "another name": (put("nobody's", "model", 3), "parameters of the groups"),
    "a name twice": (put("embed.weight", "model", 0), "a name of the model twice"),
    "a text for a learning rate": (put("fast", *OPTIONS, 0, 1), "lr of group 0 is 'fast', here it is 0.001"),
    "a number for betas": (put(0.9, *OPTIONS, 1, 1), "betas of group 0 is '0.9', here it is (0.9, 0.999)"),
    "parameters in the options": (put(["params", []], *OPTIONS, 0), "groups"),
    "a tensor of the files in the options": (put({"tensor": MOMENT}, *OPTIONS, 0, 1), "a tensor as 'tensor'"),
    "a state of no parameter": (put({"dict": []}, "states", "nothing"), "a state of no parameter"),
    "a state of nothing": (put([], *STATE), "the state of 'embed.weight'"),
    "a moment that is another one's": (put({"piece": MOMENT + "_sq"}, *LIKE_MOMENT), "a tensor is claimed twice"),
    "a moment that is whole on each rank": (put({"tensor": MOMENT}, *LIKE_MOMENT), "is of another optimizer: float32"),
    "a number for a moment": (put(NO_MOMENT, *STATE), "is of another optimizer: 0.0, not"),
    "a pickle in a state": (put({"pickle": "gASVAAAA"}, *COUNT), "a tensor as 'pickle'"),
    "a text for a count": (put({"data": ["float32", [], "?"]}, *COUNT), "Only base64 data is allowed"),
    "a large tensor of few bytes": (put({"data": ["float32", [2**40], "AAAAAA=="]}, *COUNT), "4 bytes for a tensor"),
    "a deque below zero": (put({"deque": [-1, [1]]}, "extra", 0), "maxlen must be non-negative"),
    "a list for a key": (put({"dict": [[[1], 2]]}, "extra", 0), "TypeError in it"),
    "two kinds at once": (put({"dict": [], "list": []}, "extra", 0), "a value of no known kind"),
    "an extra that is a piece": (put({"piece": "extra.0.average"}, "extra", 0), "a tensor as 'piece'"),
}


@on_ranks(2)
def test_a_checkpoint_that_was_damaged_or_tampered_with_is_refused(rank, tmp_path):
    """And one that was only written anew, with the same content, is loaded."""
    model, optimizer = a_run(rank, STAGES[3], **ADAMW, steps=2)
    whole, saved = tmp_path / "whole", {"step": 2, "average": torch.arange(100.0)}
    checkpoint.save(whole, model, optimizer, saved)
    if rank.rank == 0:
        tamper(whole, lambda *_: None)
    model, optimizer = a_run(rank, STAGES[3], seed=7, steps=1)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, (what, (change, words)) in enumerate({**DAMAGE, **WAYS}.items()):
        folder = tmp_path / str(number) / "one"
        with situation(what), nothing_changes(model, optimizer):
            if rank.rank == 0:
                shutil.copytree(whole, folder)
                (folder.parent / "outside").mkdir()
                change(folder) if what in DAMAGE else tamper(folder, change)
            dist.barrier()
            outside, began = outside_of(folder), time.process_time()
            line = said_by_all(error_of(lambda: checkpoint.load(folder, model, optimizer), checkpoint.CheckpointError))
            assert line.startswith(f"checkpoint {folder} can't be loaded: ") and len(line) < 700 and words in line, line
            assert time.process_time() - began < 10 and outside_of(folder) == outside
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 600_000  # KiB
    assert equal(checkpoint.load(whole, model, optimizer), saved)


def outside_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*") if folder not in path.parents}


def test_whatever_is_changed_is_refused_or_loaded_stepped_and_saved(tmp_path):
    """A share of `python -m tests.checkpoint.mutations`: the seed is one that make faults doesn't have."""
    ended = run_module("tests.checkpoint.mutations", "--number", 5 * len(KINDS), "--seed", 1, "--json", tmp_path / "it")
    assert ended.code == 0, ended
    rows = json.loads((tmp_path / "it").read_text())["rows"]
    assert {row["kind"] for row in rows} == KINDS.keys() and sum(row["loaded"] for row in rows) > 5


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


def test_load_unpickles_nothing(tmp_path, monkeypatch):
    """In one process: ranks send each other pickles, which are no files. A file of format 1 is a pickle, never read."""
    its, others = alone(), alone()
    checkpoint.save(tmp_path / "one", *its, {"average": torch.arange(100.0), "text": "three"})
    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, mock.Mock(side_effect=AssertionError("something was unpickled")))
    assert checkpoint.load(tmp_path / "one", *others)["text"] == "three"
    assert equal(weights(others[0]), weights(its[0])) and equal(full(others[1]), full(its[1]))
    assert converted(FORMAT_1 / "adamw")["extra"]


@pytest.mark.parametrize("number", [*files.DISK_ERRORS, errno.EMFILE])
def test_what_a_disk_cannot_read_is_damaged_and_with_too_many_open_files_it_is_not(number, tmp_path, monkeypatch):
    """For what is damaged a run takes the checkpoint before."""
    checkpoint.save(tmp_path / "one", *alone())
    monkeypatch.setattr(Reader, "read", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(checkpoint.CheckpointError, match=os.strerror(number)) as refusal:
        checkpoint.load(tmp_path / "one", *alone())
    assert isinstance(refusal.value, checkpoint.DamagedCheckpoint) == (number != errno.EMFILE)
