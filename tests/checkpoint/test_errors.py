"""Whatever goes wrong on one rank, in any phase of a save or a load, ends all of them, with one line.

Nobody waits for a time-out, whose line would be another.
"""

import errno
import os

import pytest
import torch
import torch.distributed as dist

import checkpoint
from checkpoint import full_state, latest, reading, states, writing
from checkpoint.folder import LOCK
from checkpoint.ranks import LONGEST, first_line
from tests.checkpoint.test_checkpoint import a_run, equal, step_alike
from tests.common import STAGES

# What save and load call, one after the other; what only rank 0 does is named so.
OF_SAVE = [(writing, "names_of"), (writing, "packed"), (writing, "local_states"), (states, "refuse_unclaimed"),
           (states, "describe"), (writing, "check_states"), (writing, "collect"), (writing, "packed_states"),
           (writing, "write_rank_file")]
OF_RANK_0 = [(writing, "claim"), (writing, "complete_manifest"), (writing, "sealed"), (writing, "sync_folder")]
OF_LOAD = [(reading, "names_of"), (reading, "pieces_of"), (reading, "manifest_of"), (reading, "verify_sizes"),
           (reading, "check"), (reading, "check_manifest_states"), (reading, "verify"), (reading, "read_box"),
           (reading, "check_piece"), (reading, "install")]
ERRORS = [MemoryError("too little memory"), ValueError("embedded null byte"), KeyError("what nobody thought of"),
          RuntimeError("several\nlines")]


def raising(error):
    def function(*_, **__):
        raise error
    return function


def saved_with_errors(rank, stage, folder, bad_rank):
    """-> for each place the line."""
    places = OF_SAVE + OF_RANK_0 * (bad_rank == 0)
    model, optimizer = a_run(rank, stage, None)
    step_alike(rank, model, optimizer, range(1))
    told = []
    for number, (module, name) in enumerate(places):
        with pytest.MonkeyPatch.context() as patch:
            if rank.rank == bad_rank:
                patch.setattr(module, name, raising(ERRORS[number % len(ERRORS)]))
            with pytest.raises(checkpoint.CheckpointError) as refusal:
                checkpoint.save(folder / "one", model, optimizer, asynchronous=number % 2 == 1).result()
        told.append((name, str(refusal.value)))
        dist.barrier()
        assert {path.name for path in folder.iterdir()} <= {LOCK}, name
    checkpoint.save(folder / "one", model, optimizer)
    return told


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("stage", [None, STAGES[3]])
@pytest.mark.parametrize("world_size", [2])
def test_an_error_in_a_save_is_one_of_all_ranks(run, stage, bad_rank, tmp_path):
    one, other = run(saved_with_errors, stage, tmp_path, bad_rank)
    for (name, line), (_, other_line) in zip(one, other):
        assert line == other_line and line.startswith(f"checkpoint {tmp_path}/one can't be written: "), name
        assert len(line.splitlines()) == 1, name


def loaded_with_errors(rank, stage, folder, bad_rank):
    model, optimizer = a_run(rank, stage, None)
    step_alike(rank, model, optimizer, range(1))
    checkpoint.save(folder / "one", model, optimizer)
    step_alike(rank, model, optimizer, range(1, 2))
    before, told = checkpoint.full_state_dict(optimizer, to_all=True), []
    for number, (module, name) in enumerate(OF_LOAD):
        with pytest.MonkeyPatch.context() as patch:
            if rank.rank == bad_rank:
                patch.setattr(module, name, raising(ERRORS[number % len(ERRORS)]))
            with pytest.raises(checkpoint.CheckpointError) as refusal:
                checkpoint.load(folder / "one", model, optimizer)
        told.append((name, str(refusal.value)))
        if name != "install":
            assert equal(checkpoint.full_state_dict(optimizer, to_all=True), before), name
    checkpoint.load(folder / "one", model, optimizer)
    return told


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("stage", [None, STAGES[3]])
@pytest.mark.parametrize("world_size", [2])
def test_an_error_in_a_load_is_one_of_all_ranks(run, stage, bad_rank, tmp_path):
    one, other = run(loaded_with_errors, stage, tmp_path, bad_rank)
    for (name, line), (_, other_line) in zip(one, other):
        assert line == other_line and line.startswith(f"checkpoint {tmp_path}/one can't be loaded: "), name
        assert f"rank {bad_rank}: " in line and len(line.splitlines()) == 1, name


def full_state_with_errors(rank, stage, bad_rank):
    """-> lines of full_state_dict, and of load_full_state_dict"""
    model, optimizer = a_run(rank, stage, None)
    step_alike(rank, model, optimizer, range(1))
    full, lines = checkpoint.full_state_dict(optimizer, to_all=True), []
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == bad_rank:
            patch.setattr(states, "describe", raising(MemoryError("too little")))
        with pytest.raises(RuntimeError) as refusal:
            checkpoint.full_state_dict(optimizer)
    lines.append(str(refusal.value))
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == bad_rank:
            patch.setattr(full_state, "pieces_of", raising(MemoryError("too little")))
        with pytest.raises(Exception) as refusal:
            checkpoint.load_full_state_dict(optimizer, full)
    lines.append(str(refusal.value))
    assert equal(checkpoint.full_state_dict(optimizer, to_all=True), full)
    return lines


@pytest.mark.parametrize("bad_rank", [0, 1])
@pytest.mark.parametrize("stage", [STAGES[3]])
@pytest.mark.parametrize("world_size", [2])
def test_an_error_in_a_full_state_is_one_of_all_ranks(run, stage, bad_rank):
    lines = run(full_state_with_errors, stage, bad_rank)
    assert lines[0] == lines[1] and all("too little" in line for line in lines[0])


def different_models(rank, stage, folder):
    model = torch.nn.Linear(3 + rank.rank, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(checkpoint.UnfitModel) as refusal:
        checkpoint.save(folder / "one", model, optimizer)
    return str(refusal.value)


@pytest.mark.parametrize("world_size", [2])
def test_ranks_with_different_models_are_told_so(run, tmp_path):
    (line,) = set(run(different_models, None, tmp_path))
    assert line.endswith("can't be written: the ranks have different models: weight isn't the same on ranks 0 and 1")
    assert not list(tmp_path.iterdir())


def a_path_with_a_null_byte(rank, stage, folder):
    model, optimizer = a_run(rank, stage, None)
    lines = []
    for call in (checkpoint.save, checkpoint.load):
        with pytest.raises(checkpoint.CheckpointError) as refusal:
            call(f"{folder}/a\0b", model, optimizer)
        lines.append(str(refusal.value))
    return lines


@pytest.mark.parametrize("world_size", [2])
def test_a_null_byte_in_a_path_is_one_line_on_all_ranks(run, tmp_path):
    one, other = run(a_path_with_a_null_byte, STAGES[2], tmp_path)
    assert one == other and one[0].endswith("embedded null byte") and "there is no such folder" in one[1]


# ---------------------------------------------------------------------------------------------------------- disks


def alone(seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Linear(9, 9)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 9)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("number", [errno.EIO, errno.EUCLEAN, errno.EBADMSG], ids=errno.errorcode.get)
def test_what_the_disk_cannot_read_is_damage(number, tmp_path, monkeypatch):
    """So that a run takes the checkpoint before."""
    checkpoint.save(tmp_path / "one", *alone())
    monkeypatch.setattr(reading, "verify", raising(OSError(number, os.strerror(number))))
    with pytest.raises(checkpoint.DamagedCheckpoint, match=os.strerror(number)):
        checkpoint.load(tmp_path / "one", *alone())


def test_too_many_open_files_are_no_damage(tmp_path, monkeypatch):
    checkpoint.save(tmp_path / "one", *alone())
    monkeypatch.setattr(reading, "verify", raising(OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(checkpoint.CheckpointError, match="Too many open files") as refusal:
        checkpoint.load(tmp_path / "one", *alone())
    assert not isinstance(refusal.value, checkpoint.DamagedCheckpoint)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_synced_is_no_error_where_file_systems_do_not_know_that(number, tmp_path, monkeypatch):
    fsync = os.fsync

    def refuse(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        return fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    if number == errno.EIO:
        with pytest.raises(checkpoint.CheckpointError, match="Input/output error"):
            checkpoint.save(tmp_path / "one", *alone())
    else:
        checkpoint.save(tmp_path / "one", *alone())
        assert latest(tmp_path) is None and (tmp_path / "one" / "manifest.json").exists()


# ------------------------------------------------------------------------------------------------------- what is said


def test_a_line_of_an_error_can_be_printed():
    line = first_line(ValueError("name \x1b[31mred\x07\x00 " + "x" * 10_000_000))
    assert line.isprintable() and line.startswith(r"name \x1b[31mred\x07\x00 xxx") and len(line) <= LONGEST + 2


def test_what_was_set_aside_or_is_no_file_is_not_the_newest(tmp_path):
    for name in ("step-2", "step-00000009.aside-7", "step-9.aside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    (tmp_path / "step-3" / "manifest.json").mkdir(parents=True)
    assert latest(tmp_path) == tmp_path / "step-2"


def nested(depth):
    value = 1
    for _ in range(depth):
        value = [value]
    return value


def test_what_load_would_not_read_is_not_saved(tmp_path):
    """As deep, and as large, as load takes it, and no more."""
    for extra, message in ((nested(52), "it is nested deeper than 50"),
                           ([0] * 4_000_000, "its manifest has 12.* bytes, load.. reads 8.*: put large values")):
        with pytest.raises(checkpoint.CheckpointError, match=message):
            checkpoint.save(tmp_path / "one", *alone(), extra)
    assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    for number, extra in enumerate((nested(51), [0] * 1_000_000)):
        checkpoint.save(tmp_path / str(number), *alone(), extra)
        assert checkpoint.load(tmp_path / str(number), *alone()) == extra
