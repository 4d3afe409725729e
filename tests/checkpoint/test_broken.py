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

import pytest
import torch

import checkpoint
from checkpoint import files
from checkpoint.folder import LOCK
from checkpoint.rank_files import Reader
from tests.checkpoint import (
    ADAMW,
    SHARDED,
    Exploit,
    a_run,
    alone,
    equal,
    flip_a_bit,
    full,
    nothing_changes,
    on_rank_0,
    raising,
    said_by_all,
    small,
    tamper,
    text_of,
    train,
    weights,
    wrapped,
)
from tests.checkpoint.mutations import KINDS
from tests.common import STAGES, Net, error_of, on_ranks, situation
from tests.ranks import run_module

WEIGHT, MOMENT = "model.embed.weight", "optimizer.state.embed.weight.exp_avg"

# ------------------------------------------------------------------------------------------------------- ways to tamper
# name -> (function(manifest, folder): changes the one, or files in the other, or returns the manifest's text; the line)


def a_file(manifest):
    return max(name for name in manifest["files"])


def renamed(name):
    """Whatever refers to a file refers to `name` now, where it is, if it can be."""
    def change(m, folder):
        old = a_file(m)
        to = str(folder.parent / "outside" / "x") if name == "absolute" else name
        m["files"][to] = m["files"].pop(old)
        if "/" in to:
            (folder / to).parent.mkdir(exist_ok=True)
            (folder / old).rename(folder / to)
    return change


def replaced(make, name=None):
    """`make(path, outside)` puts something in the place of a file, which lies outside then."""
    def change(m, folder):
        path = folder / (name or a_file(m))
        outside = folder.parent / "outside" / path.name
        path.rename(outside)
        make(path, outside)
    return change


def rewrite(path, start):
    path.write_bytes(start + path.read_bytes()[len(start) :])


def instead(text, old="ranks"):
    """The manifest's JSON with `text` in the place of an entry."""
    def change(m, _):
        m[old] = "here"
        return text_of(m).replace('"here"', text)
    return change


def written(text):
    return lambda m, folder: (folder / "manifest.json").write_bytes(text(m, folder))


def header(change, key=MOMENT):
    """change(entries, places) of the first file that has `key`."""
    return lambda m, _: next(change(its, its["places"]) for its in m["headers"].values() if key in its)


def tensor(key=MOMENT, **changes):
    return header(lambda its, _: its[key].update(changes), key)


def part(rank, **changes):
    """What `places` say of the part that a rank has written of a moment: each has one."""
    def of(m, _):
        both = [its["places"] for its in m["headers"].values()]
        key = next(name for name in both[0] if name in both[1] and name.endswith("exp_avg"))
        both[rank][key].update(changes)
    return of


def without_last(m, _):
    """The last tensor of a file, and its bytes say nothing."""
    its = m["headers"][a_file(m)]
    its.pop(list(its)[-1])


def of_a_file(**changes):
    return lambda m, _: m["files"][a_file(m)].update(changes)


def option(key, value):
    def change(m, _):
        options = m["groups"][0]["options"]["dict"]
        options[:] = [pair for pair in options if pair[0] != key] + [[key, value]]
    return change


def entry(key, value):
    def change(m, _):
        next(pair for pair in m["states"]["embed.weight"]["dict"] if pair[0] == key)[1] = value
    return change


def extra(value):
    return lambda m, _: m["extra"].__setitem__(0, value)


def tuples(m, _):
    for _ in range(60):
        m["extra"][0] = {"tuple": [m["extra"][0]]}


def a_large_file(m, folder):
    """Of nothing, whose checksum would be right."""
    os.truncate(folder / a_file(m), 2**33)
    m["files"][a_file(m)]["bytes"] = 2**33


def a_number_for_a_moment(m, folder):
    entry("exp_avg", 0.0)(m, folder)
    rename(m, MOMENT, "extra.0.more")
    m["extra"][0]["dict"].append(["more", {"tensor": "extra.0.more"}])


def rename(m, key, to):
    for name, its in m["headers"].items():
        m["headers"][name] = {to if key == other else other: what for other, what in its.items()}


FILES = [f"rank-{rank:05}.safetensors" for rank in range(2)]
DAMAGE = {  # where nobody makes the checksums right; function(folder)
    "a bit": (lambda folder: flip_a_bit(folder / FILES[1]), "is damaged: a tensor with checksum"),
    "a bit of a header": (lambda folder: rewrite(folder / FILES[1], b"\1"), "the checksum of its header is another"),
    "a file cut": (lambda folder: os.truncate(folder / FILES[0], 1000), "now it is 1000 bytes"),
    "many bytes": (lambda folder: os.truncate(folder / FILES[0], 2**40), "now it is 1099511627776 bytes"),
    "no file": (lambda folder: (folder / FILES[1]).unlink(), "now it is missing"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "it is not complete: manifest.json is missing"),
    "a manifest cut": (lambda folder: os.truncate(folder / "manifest.json", 100), "its checksum is that of another"),
    "a large manifest": (lambda folder: os.truncate(folder / "manifest.json", 2**40), "it has more than 8749056 bytes"),
    "nothing": (shutil.rmtree, "there is no such folder"),
}
WAYS = {
    "a file above": (renamed("../outside/x"), "file '../outside/x'"),
    "a file by its absolute path": (renamed("absolute"), "file '/"),
    "a file without a name": (renamed(""), "file ''"),
    "a file called dot": (renamed("."), "file '.'"),
    "a file with a zero byte in its name": (renamed("x\0"), "file 'x\\x00'"),
    "the manifest as a file": (renamed("manifest.json"), "file 'manifest.json'"),
    "a link to outside": (replaced(lambda path, outside: path.symlink_to(outside)), "it is a link"),
    "a fifo": (replaced(lambda path, _: os.mkfifo(path)), "it is no regular file"),
    "the manifest as a fifo": (replaced(lambda path, _: os.mkfifo(path), "manifest.json"), "it is no regular file"),
    "a pickle for a manifest": (written(lambda _, folder: pickle.dumps(Exploit(folder.parent / "outside" / "ran"))),
        "codec can't decode byte 0x80"),
    "a list for a manifest": (written(lambda *_: b"[]"), "it is no dict"),
    "a manifest without its checksum": (written(lambda m, _: text_of(m).encode()), "it has no checksum of itself"),
    "10,000 lists in each other": (instead("[" * 10_000 + "]" * 10_000), "RecursionError in it"),
    "60 MB of lists": (instead("[" + "[]," * 20_000_000 + "0]"), "it has more than 8749056 bytes"),
    "a number of a million digits": (instead("9" * 1_000_000), "Exceeds the limit (4300 digits)"),
    "a key twice": (lambda m, _: text_of(m)[:-1] + ', "ranks": 2}', "a key comes twice"),
    "tuples in each other": (tuples, "values nested deeper than 50"),
    "8 GB of nothing": (a_large_file, "has bytes of no tensor"),
    "another format": (lambda m, _: m.update(format=99), "this program reads 1, 2, 3"),
    "the other byte order": (lambda m, _: m.update(byteorder="big"), "its numbers are 'big', here they are little"),
    "more ranks than extras": (lambda m, _: m.update(ranks=10**9), "extra"),
    "an entry more": (lambda m, _: m.update(code="print(1)"), "it has other entries"),
    "an entry less": (lambda m, _: m.pop("extra") and None, "it has other entries"),
    "less than no bytes": (of_a_file(bytes=-1), "'bytes' of 'rank-00001.safetensors'"),
    "a part less": (without_last, "it has bytes of no tensor"),
    "a part twice": (part(1, start=0), "ranges of '"),
    "not a number for a start": (part(0, start=float("nan")), "ranges of '"),
    "parts of other tensors": (part(1, shape=[10**6]), "its parts are of several tensors"),
    "a part of no place": (part(0, wide=3, start=None), "TypeError in it"),
    "a place of no part": (header(lambda _, places: places.update(nowhere={"shape": [3], "start": 0})),
        "it has other entries"),
    "two tensors in the same bytes": (tensor(data_offsets=[0, 140]), "doesn't lie behind the one before"),
    "a shape of too many": (tensor(shape=[2**40, 2**40]), "a shape of too many elements"),
    "a shape below zero": (tensor(shape=[-5, -7]), "a shape of [-5, -7]"),
    "a moment of another shape": (tensor(shape=[7, 5]), "the shape of '"),
    "a dtype that is none": (tensor(dtype="load"), "KeyError in it"),
    "a dtype of another kind": (tensor(dtype="I32"), "is of another optimizer: int32"),
    "a parameter of another kind": (tensor(WEIGHT, dtype="I32"), "embed.weight is torch.int32 there"),
    "a part without dimensions": (header(lambda its, places: places.update({WEIGHT: {"shape": [], "start": 0}}) or
        its[WEIGHT].update(shape=[]), WEIGHT), "IndexError in it"),
    "dimensions before that others have not": (header(lambda _, places: places.update(
        {WEIGHT: {"shape": [7, 35], "start": 0}}), WEIGHT), "dimensions of '"),
    "a header of many bytes": (lambda m, folder: rewrite(folder / a_file(m), (2**62).to_bytes(8, "little")),
        "its header is too long"),
    "a header cut": (lambda m, folder: rewrite(folder / a_file(m), (64).to_bytes(8, "little")),
        "Unterminated string"),
    "a tensor that nobody claims": (lambda m, _: rename(m, MOMENT, "more"), "KeyError in it"),
    "an extra that is gone": (extra(3), "nobody claims 'extra.0.average'"),
    "a name less": (lambda m, _: m["model"].remove("embed.weight"), "parameters of the groups"),
    "a name twice": (lambda m, _: m["model"].append("embed.weight"), "model"),
    "a text for a learning rate": (option("lr", "fast"), "lr of group 0 is 'fast', here it is 0.001"),
    "a number for betas": (option("betas", 0.9), "betas of group 0 is '0.9', here it is (0.9, 0.999)"),
    "parameters in the options": (option("params", []), "groups"),
    "a tensor of the files in the options": (option("mine", {"tensor": MOMENT}), "a tensor as 'tensor'"),
    "a state of no parameter": (lambda m, _: m["states"].update(nothing=m["states"].pop("embed.weight")),
        "a state of no parameter"),
    "a state of nothing": (lambda m, _: m["states"].update({"embed.weight": {"dict": []}}),
        "the state of 'embed.weight'"),
    "a moment that is another one's": (entry("exp_avg", {"piece": MOMENT + "_sq"}), "a tensor is claimed twice"),
    "a moment that is whole on each rank": (entry("exp_avg", {"tensor": MOMENT}), "is of another optimizer: float32"),
    "a number for a moment": (a_number_for_a_moment, "is of another optimizer: 0.0, not"),
    "a count of another shape": (entry("step", {"data": ["float32", [2], "AAAAAAAAAAA="]}),
        "is of another optimizer: float32"),
    "a pickle in a state": (entry("step", {"pickle": "gASVAAAA"}), "a tensor as 'pickle'"),
    "a text for a count": (entry("step", {"data": ["float32", [], "?"]}), "Only base64 data is allowed"),
    "a large tensor of few bytes": (entry("step", {"data": ["float32", [2**40], "AAAAAA=="]}),
        "4 bytes for a tensor"),
    "a deque below zero": (extra({"deque": [-1, [1]]}), "maxlen must be non-negative"),
    "a list for a key": (extra({"dict": [[[1], 2]]}), "TypeError in it"),
    "two kinds at once": (extra({"dict": [], "list": []}), "a value of no known kind"),
    "an extra that is a piece": (extra({"piece": "extra.0.average"}), "a tensor as 'piece'"),
}


@on_ranks(2)
def test_a_checkpoint_that_was_damaged_or_tampered_with_is_refused(rank, tmp_path):
    """And one that was only written anew, with the same content, is loaded."""
    model, optimizer = a_run(rank, STAGES[3], **ADAMW, steps=2)
    whole = tmp_path / "whole"
    saved = {"step": 2, "average": torch.arange(100.0)}
    checkpoint.save(whole, model, optimizer, saved)
    on_rank_0(rank, tamper, whole, lambda *_: None)
    model, optimizer = a_run(rank, STAGES[3], seed=7, steps=1)

    def begin(folder, what):
        shutil.copytree(whole, folder)
        (folder.parent / "outside").mkdir()
        DAMAGE[what][0](folder) if what in DAMAGE else tamper(folder, WAYS[what][0])

    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, what in enumerate([*DAMAGE, *WAYS]):
        folder = tmp_path / str(number) / "one"
        with situation(what), nothing_changes(model, optimizer):
            on_rank_0(rank, begin, folder, what)
            outside, began = outside_of(folder), time.process_time()
            line = said_by_all(error_of(lambda: checkpoint.load(folder, model, optimizer), checkpoint.CheckpointError))
            assert line.startswith(f"checkpoint {folder} can't be loaded: ") and len(line) < 700
            assert {**DAMAGE, **WAYS}[what][1] in line, line
            assert time.process_time() - began < 10 and outside_of(folder) == outside
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 600_000  # KiB
    assert equal(checkpoint.load(whole, model, optimizer), saved)


def outside_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.parent.rglob("*") if folder not in path.parents}


# -------------------------------------------------------------------------------------------------------- thousands


def test_whatever_is_changed_is_refused_or_loaded_stepped_and_saved(tmp_path):
    """A share of `python -m tests.checkpoint.mutations`: the seed is one that make faults doesn't have."""
    ended = run_module("tests.checkpoint.mutations", "--number", 5 * len(KINDS), "--seed", 1, "--json", tmp_path / "it")
    assert ended.code == 0, ended
    rows = json.loads((tmp_path / "it").read_text())["rows"]
    assert {row["kind"] for row in rows} == KINDS.keys() and sum(row["loaded"] for row in rows) > 5


# ------------------------------------------------------------------------------------------------- of something else


def other_shape(rank):
    model = Net(seed=0).to(rank.device)
    model.up = torch.nn.Linear(5, 12).to(rank.device)
    return model, wrapped(SHARDED[0], model.parameters())


def other_groups(rank):
    model = Net(seed=0).to(rank.device)
    params = list(model.parameters())
    return model, wrapped(SHARDED[1], [{"params": params[:4]}, {"params": params[4:]}])


FOREIGN = [
    (lambda rank: small(rank, SHARDED[1]), "it is of another model: 0.weight: the checkpoint doesn't have it"),
    (other_shape, r"of another model: up.weight: the checkpoint has it with shape \(11, 5\), the model .*\(12, 5\)"),
    (lambda rank: a_run(rank, SHARDED[0], cls=torch.optim.SGD, lr=0.1), "it is of AdamW, this optimizer is SGD"),
    (lambda rank: a_run(rank, SHARDED[1], cls=type("AdamW", (torch.optim.Adagrad,), {})),
     "the state of .* is of another optimizer: .*exp_avg_sq.*, this one keeps step, sum"),
    (other_groups, "its parameter groups are 10 from .* to .*, this optimizer's 4 from .* and 6 from"),
]


@on_ranks(2)
def test_a_checkpoint_of_something_else_is_refused_and_nothing_is_changed(rank, tmp_path):
    model, optimizer = a_run(rank, STAGES[3])
    for turn in range(2):
        train(rank, model, optimizer, range(1))
        checkpoint.save(tmp_path / str(turn), model, optimizer)
    for make, words in FOREIGN:
        its = make(rank)
        with situation(words), nothing_changes(*its):
            line = error_of(lambda: checkpoint.load(tmp_path / "0", *its), checkpoint.ForeignCheckpoint)
            assert re.search(words, said_by_all(line)), line
    with nothing_changes(model, optimizer):
        line = error_of(lambda: checkpoint.load(tmp_path / str(rank.rank), model, optimizer))
        assert line.endswith("the ranks read different checkpoints")


def test_load_unpickles_nothing(tmp_path, monkeypatch):
    """In one process: ranks send each other pickles, which are no files."""
    its, others = alone(), alone()
    checkpoint.save(tmp_path / "one", *its, {"average": torch.arange(100.0), "text": "three"})
    for module, name in ((torch, "load"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, raising(AssertionError("something was unpickled")))
    assert checkpoint.load(tmp_path / "one", *others)["text"] == "three"
    assert equal(weights(others[0]), weights(its[0])) and equal(full(others[1]), full(its[1]))


# --------------------------------------------------------------------------------------- neither half read, nor saved


@on_ranks(2, stage=STAGES[1::2], number=[*files.DISK_ERRORS, errno.EMFILE])
def test_what_cannot_be_read_to_its_end_changes_nothing(rank, stage, number, tmp_path):
    """On rank 1 the disk breaks at the last tensor, after everything has been checked. Too many open files are no
    damage, for which a run would take the checkpoint before."""
    read, jobs_of = Reader.read, lambda reader: reader.jobs

    def read_until(self, job):
        if rank.rank == 1 and job is jobs_of(self)[-1]:
            raise OSError(number, os.strerror(number))
        return read(self, job)

    model, optimizer = a_run(rank, stage, steps=1)
    path = tmp_path / f"{stage}{number}"
    checkpoint.save(path, model, optimizer, torch.arange(100.0))
    train(rank, model, optimizer, range(1))
    with pytest.MonkeyPatch.context() as patch, nothing_changes(model, optimizer):
        patch.setattr(Reader, "read", read_until)
        with pytest.raises(checkpoint.CheckpointError) as refusal:
            checkpoint.load(path, model, optimizer)
    assert said_by_all(str(refusal.value)).endswith(f"rank 1: {os.strerror(number)}")
    assert isinstance(refusal.value, checkpoint.DamagedCheckpoint) == (number != errno.EMFILE)


LOST = {  # function(path, written): after the last rank has written its file
    "a checksum": lambda _, written: written["crc32"].pop(), "a file": lambda path, _: path.unlink(),
    "bytes": lambda path, _: os.truncate(path, path.stat().st_size - 1),
}


@on_ranks(2, stage=STAGES[1::2], what=LOST)
def test_what_could_not_be_loaded_is_not_saved(rank, stage, what, tmp_path):
    write = files.write_rank_file

    def changed(path, parts):
        answer = write(path, parts)
        LOST[what](path, answer)
        return answer

    model, optimizer = a_run(rank, stage, steps=1)
    path = tmp_path / f"{stage}{what}" / "one"
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setattr(files, "write_rank_file", changed)
        line = said_by_all(error_of(lambda: checkpoint.save(path, model, optimizer)))
    assert "one can't be written: " in line and [left.name for left in path.parent.iterdir()] == [LOCK]
