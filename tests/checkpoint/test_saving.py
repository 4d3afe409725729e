"""What a cluster does to a save: a killed rank, a full disk, an error on one rank, one that nobody asks for."""

import contextlib
import copy
import errno
import gc
import os
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import wait
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import checkpoint
from checkpoint import files, full_state, full_state_dict, load_full_state_dict, ranks, reshard, storage
from tests.checkpoint import ONE, SHARDED, a_run, full_disk, small, train
from tests.checkpoint.compare import equal, full, nothing_changes, said_by_all, weights
from tests.common import STAGES, error_of, on_ranks, situation
from tests.ranks import ROOT


def left_in(folder):
    return {path.name for path in folder.iterdir()}


# ----------------------------------------------------------------------------------------------------- behind training


@on_ranks(2, stage=[None, *STAGES])
def test_an_asynchronous_save_keeps_what_was_there(rank, stage, tmp_path):
    """Model, state, groups, `extra`, and where it was begun. The next save waits for it."""
    model, optimizer = a_run(rank, stage, lr=torch.tensor(0.5), steps=2)
    folder, let_go, write = tmp_path / f"{stage}", threading.Event(), files.write
    folder.mkdir(exist_ok=True)
    extra, before = {"step": 1, "average": torch.zeros(20)}, copy.deepcopy([weights(model), full(optimizer)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", lambda *args: (let_go.wait(30), write(*args))[1])
        patch.chdir(folder)
        saving = checkpoint.save("one", model, optimizer, extra, asynchronous=True)
        patch.chdir(tmp_path)
        extra["step"], _ = 2, extra["average"].fill_(7)
        optimizer.param_groups[0]["lr"].fill_(9)
        train(rank, model, optimizer, (2, 3))
        patch.setattr(ranks.Saving, "unread_error", lambda its: (let_go.set(), wait([its]), "")[2])
        line = error_of(lambda: checkpoint.save(folder / "one", model, optimizer))
    assert line.endswith("exists already") and saving.result() is None
    again = a_run(rank, stage, seed=1, lr=torch.tensor(0.1))
    assert equal(checkpoint.load(folder / "one", *again), {"step": 1, "average": torch.zeros(20)})
    assert equal([weights(again[0]), full(again[1])], before)


@on_ranks(2, stage=STAGES)
def test_a_failed_asynchronous_save_is_told_by_the_next(rank, stage, tmp_path):
    """On rank 1 the disk is full. Rank 0 alone asks how the second save went, and the third save tells the others."""
    model, optimizer = small(rank, stage)
    folder = tmp_path / stage
    full_there = mock.patch.object(storage.SummedFile, "write", side_effect=OSError(28, "No space left on device"))
    for name in ("one", "two"):
        with full_there if rank.rank == 1 else contextlib.nullcontext():
            saving = checkpoint.save(folder / name, model, optimizer, asynchronous=True)
            wait([saving])
        words = f"{name} can't be written: rank 1: No space left on device"
        if name == "two" and rank.rank == 0:
            assert error_of(saving.result).endswith(words)
        assert said_by_all(error_of(lambda: checkpoint.save(folder / "none", model, optimizer))).endswith(words)
    checkpoint.save(folder / "three", model, optimizer, asynchronous=True).result()
    checkpoint.save(folder / "four", model, optimizer)
    assert left_in(folder) == {"three", "four"}


@pytest.mark.waits
@pytest.mark.parametrize("asks", [False, True])
def test_a_failed_asynchronous_save_is_told_at_the_end(asks, tmp_path):
    """One that the program has heard of is not told again."""
    script = f"""
        import torch, checkpoint
        from tests.checkpoint import alone, full_disk
        with full_disk(10_000):
            saving = checkpoint.save({str(tmp_path / "one")!r}, *alone(torch.nn.Linear(99, 99)), asynchronous=True)
            try:
                {"saving.result()" if asks else "saving.exception()"}
            except checkpoint.CheckpointError:
                pass
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    line = f"error: checkpoint {tmp_path}/one can't be written: File too large\n"
    assert (ended.returncode, ended.stderr) == (0, "" if asks else line)


@on_ranks(2, stage=SHARDED)
def test_new_process_groups_and_optimizers_leave_nothing_behind(rank, stage, tmp_path):
    """Neither groups and threads nor tensors: one Saver serves the same ranks, whichever group they come in."""
    n_groups, n_threads = [], []
    for number in range(4):
        model, optimizer = small(rank, stage)
        group = dist.new_group([0, 1])
        reshard(optimizer, group)
        future = checkpoint.save(tmp_path / f"{stage}{number}", model, optimizer, asynchronous=True)
        future.result()
        kept = weakref.ref(model[0].weight)
        reshard(optimizer, None)
        dist.destroy_process_group(group)
        del model, optimizer, future
        gc.collect()
        assert kept() is None
        n_groups.append(len(dist.distributed_c10d._world.pg_names))
        n_threads.append(threading.active_count())
    assert len(set(n_groups)) == len(set(n_threads)) == 1


@on_ranks(3)
def test_ranks_in_unlike_numbers_of_groups_save_together(rank, tmp_path):
    """torch names the group of some ranks after the number of groups that each is in, and would wait forever."""
    dist.new_group([1])
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    if rank.rank < 2:
        run = small(rank, STAGES[3], process_group=group)
        checkpoint.save(tmp_path / "one", *run, rank.rank)
        assert checkpoint.load(tmp_path / "one", *run) == rank.rank
    dist.barrier()


@pytest.mark.parametrize("stage", SHARDED)
def test_asynchronous_saves_go_on_in_a_new_process_group(stage, tmp_path):
    its = None
    for name in ("one", "other"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            its = its or small(ONE, stage)
            checkpoint.save(tmp_path / name, *its, asynchronous=True).result()
        finally:
            dist.destroy_process_group()
        assert (tmp_path / name / files.SUMS).exists()


# -------------------------------------------------------------------------- an error on one rank is an error on all
# What save and load call, one after the other; what only rank 0 does is named so.

OF_SAVE = [(files, "packed"), (files, "refuse_different"), (storage.SavePlanner, "create_local_plan"),
           (storage.Writer, "write_data"), (storage.SummedFile, "write")]
OF_RANK_0 = [(files.shutil, "rmtree"), (storage.Writer, "finish"), (files, "finish"), (files, "sync_folder")][1:]
OF_LOAD = [(storage, "checked_files"), (storage, "check_metadata"), (files, "room_for"),
           (storage.LoadPlanner, "create_local_plan"), (storage.Reader, "read_data"), (storage, "unpacked"),
           (files, "fit_groups")]
OF_FULL_STATE = [(full_state, "loaded_value")]
ERRORS = [MemoryError("too little memory"), ValueError("embedded null byte"), KeyError("nobody thought of it"),
          RuntimeError("several\nlines")]


@on_ranks(2, case=[(None, 1), (STAGES[3], 0), (STAGES[3], 1)])
def test_whatever_goes_wrong_on_one_rank_in_any_phase_is_one_line_on_all(rank, case, tmp_path):
    """Nobody waits for a time-out, whose line would be another."""
    stage, bad_rank = case
    model, optimizer = a_run(rank, stage, steps=1)
    path = tmp_path / f"{stage}{bad_rank}" / "one"

    def line_of(call, module, name, error):
        fails = mock.patch.object(module, name, side_effect=error)
        with situation(name), fails if rank.rank == bad_rank else contextlib.nullcontext():
            return said_by_all(error_of(call, checkpoint.CheckpointError))

    of_rank = [] if stage is None else OF_SAVE  # of a plain optimizer, rank 0 writes everything
    for number, (module, name) in enumerate(of_rank + OF_RANK_0 * (bad_rank == 0)):
        line = line_of(lambda: checkpoint.save(path, model, optimizer, asynchronous=number % 2 == 1).result(),
                       module, name, ERRORS[number % len(ERRORS)])
        assert line.startswith(f"checkpoint {path} can't be written: "), name
        dist.barrier()
        if name == "sync_folder":
            continue
        assert not path.parent.exists() or not left_in(path.parent), name
    if not path.exists():
        checkpoint.save(path, model, optimizer)
    train(rank, model, optimizer, range(1, 2))
    for number, (module, name) in enumerate(OF_LOAD):
        with nothing_changes(model, optimizer):
            line = line_of(lambda: checkpoint.load(path, model, optimizer), module, name, ERRORS[number % len(ERRORS)])
        assert line.startswith(f"checkpoint {path} can't be loaded: rank {bad_rank}: "), line
    checkpoint.load(path, model, optimizer)
    if stage:
        found = full(optimizer)
        with nothing_changes(model, optimizer):
            for call in (lambda: full(optimizer), lambda: full_state_dict(optimizer)):
                line = line_of(call, full_state, "own_state_dict", ERRORS[0])
                assert line == f"the state can't be put together: rank {bad_rank}: too little memory"
            for module, name in OF_FULL_STATE:
                line = line_of(lambda: load_full_state_dict(optimizer, found), module, name, ERRORS[0])
                assert line == f"the state can't be loaded: rank {bad_rank}: too little memory"


@on_ranks(2, moment=[(storage.Writer, "write_data"), (files, "finish")])
def test_an_interrupt_in_a_save_stays_one(rank, moment, tmp_path):
    """Ctrl-C comes to rank 0; the others say so; nothing is left; the next save works."""
    its, interrupts = small(rank, STAGES[3]), contextlib.nullcontext()
    kind, words = checkpoint.CheckpointError, "rank 0: KeyboardInterrupt"
    if rank.rank == 0:
        interrupts = mock.patch.object(*moment, side_effect=KeyboardInterrupt)
        kind, words = KeyboardInterrupt, None
    with interrupts, pytest.raises(kind, match=words):
        checkpoint.save(tmp_path / "one", *its)
    dist.barrier()
    assert not left_in(tmp_path)
    dist.barrier()
    checkpoint.save(tmp_path / moment[1], *its)
    dist.barrier()
    shutil.rmtree(tmp_path / moment[1], ignore_errors=True)
    dist.barrier()


@on_ranks(2, stage=SHARDED)
def test_a_place_that_cannot_be_written_is_one_line_and_nothing_is_left(rank, stage, tmp_path):
    """A full disk on the last rank; a file for a folder; a folder for each rank; a path for each rank."""
    model, optimizer = a_run(rank, stage, steps=2)
    folder, own = tmp_path / stage, tmp_path / stage / str(rank.rank)
    own.mkdir(parents=True)
    (folder / "file").touch()
    for path, words in ((folder / "full" / "one", ": rank 1: File too large"), ("/proc/checkpoint", ": "),
                        (folder / "file" / "one", ": .*file is no folder"), (own.parent, "it exists already"),
                        (f"{folder}/a\0b", "embedded null byte"), ("one", "isn't here: all need the same folder"),
                        (folder / f"at-{rank.rank}", "rank 1 saves to .*at-1, rank 0 to .*at-0: a path with the time")):
        with situation(path), nothing_changes(model, optimizer), pytest.MonkeyPatch.context() as patch:
            patch.chdir(own)
            with full_disk(1000) if rank.rank and "large" in words else contextlib.nullcontext():
                line = error_of(lambda: checkpoint.save(path, model, optimizer))
            assert re.search(f"can't be written.*{words}", line), line
    assert not left_in(own) and not left_in(folder / "full")
    assert "there is no such folder" in error_of(lambda: checkpoint.load(f"{folder}/a\0b", model, optimizer))
    train(rank, model, optimizer, (2,))


@on_ranks(2, stage=SHARDED)
def test_what_would_not_be_loaded_again_is_not_saved(rank, stage, tmp_path):
    """A model that can't be, is another on each rank, or whose extra no load would read; nor is it loaded into."""
    path = tmp_path / stage / "one"
    checkpoint.save(path, *small(rank, stage))
    model = torch.nn.Linear(3 + rank.rank, 3)
    line = error_of(lambda: checkpoint.save(path.with_name("two"), model, torch.optim.AdamW(model.parameters())))
    assert "weight is another parameter on rank 1, with shape (3, 4): give each expert a name" in said_by_all(line)
    extra = np.zeros(2) if rank.rank else {"step": 1}
    line = error_of(lambda: checkpoint.save(path.with_name("two"), *small(rank, stage), extra))
    assert "rank 1: load() can't read `extra` again: it holds numpy" in line
    its = small(rank, stage)
    its[1].param_groups[0]["mine"] = tmp_path
    line = error_of(lambda: checkpoint.save(path.with_name("two"), *its))
    assert "can't read mine of parameter group 0 again: it holds pathlib" in said_by_all(line)
    assert left_in(path.parent) == {"one"}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_synced_is_no_error_where_file_systems_do_not_know_that(number, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(OSError, match="Input/output error") if number == errno.EIO else contextlib.nullcontext():
        files.sync_folder(tmp_path)


def test_a_line_of_an_error_can_be_printed():
    line = ranks.first_line(ValueError("name \x1b[31mred\x07\x00 " + "x" * 10_000_000))
    assert line.isprintable() and line.startswith(r"name \x1b[31mred\x07\x00 xxx") and len(line) <= 502
