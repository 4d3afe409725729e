"""What a cluster does to a save: a second run, a slow rank, a full disk, an error on one rank, one nobody asks for."""

import contextlib
import copy
import errno
import fcntl
import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import wait
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import checkpoint
from checkpoint import files, full_state, load_full_state_dict, manifest, rank_files, ranks, reshard, states
from checkpoint import folder as folders
from checkpoint.folder import LOCK
from tests.checkpoint import ONE, SHARDED, a_run, alone, full_disk, small, train
from tests.checkpoint.compare import equal, full, nothing_changes, said_by_all, weights
from tests.common import STAGES, error_of, on_ranks, situation
from tests.ranks import ROOT


def left_in(folder):
    return {path.name for path in folder.iterdir()}


# ----------------------------------------------------------------------------------------------------------- two runs


@pytest.mark.waits
def test_a_second_run_in_a_folder_is_refused_while_the_first_lives(tmp_path):
    """Also between two saves of the first, and when it copies the folder: a lock of the process would be lost then.

    What a dead one has left is removed, and what a living one writes is not. A worker that was forked from it and lives
    on has no part in the lock.
    """
    folder, left = tmp_path / "run", tmp_path / "run" / "step-1.0-0123456789ab-0.partial"
    script = f"""
        import os, shutil, sys, time, checkpoint
        from tests.checkpoint import alone
        checkpoint.save({str(folder / "step-1")!r}, *alone())
        shutil.copytree({str(folder)!r}, {str(tmp_path / "copy")!r})
        child = os.fork()
        if child == 0:
            os.closerange(0, 3)
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        sys.stdin.read()
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as first:
        child = int(first.stdout.readline())
        try:
            left.mkdir()
            for asynchronous in (False, True):
                with pytest.raises(checkpoint.FolderInUse, match="can't be written: another run saves in .*: end it"):
                    checkpoint.save(folder / "step-2", *alone(), asynchronous=asynchronous)
            checkpoint.save(folder / "best-2", *alone())  # which is no step of the other run
            assert left.exists() and (tmp_path / "copy" / LOCK).exists()
            first.kill()
            first.wait()
            checkpoint.save(folder / "step-2", *alone())
            assert not left.exists()
        finally:
            first.kill()
            os.kill(child, signal.SIGKILL)


def test_only_what_a_dead_run_has_left_is_removed_and_a_lock_that_is_gone_is_made_anew(tmp_path):
    """Not a folder of the user's, another process group's, another series', or one that this process writes now."""
    names = ["mine.partial", "step-1.partial", "step-1.1-0123456789ab-0.partial", "best-1.0-0123456789ab-0.partial",
             f"step-2.0-{folders.token(os.getpid())}-77.partial"]
    for name in [*names, "step-3.0-0123456789ab-0.partial"]:
        (tmp_path / name).mkdir()
    checkpoint.save(tmp_path / "step-9", *alone())
    assert left_in(tmp_path) == {*names, "step-9", LOCK}
    (tmp_path / LOCK).unlink()
    checkpoint.save(tmp_path / "step-10", *alone())
    assert (tmp_path / LOCK).exists()


@pytest.mark.parametrize("module, name, number", [(folders, "opened", errno.EACCES), (fcntl, "fcntl", errno.ENOLCK)])
def test_without_locks_two_runs_at_once_save_all_the_same_and_never_mix(module, name, number, tmp_path, monkeypatch):
    """The second saves the same step as a whole while the first is in the middle of it."""
    def second_in_between(*args):
        monkeypatch.setattr(files, "write_rank_file", write)
        answer = write(*args)
        checkpoint.save(tmp_path / "step-1", *alone(), 2)
        return answer

    monkeypatch.setattr(module, name, mock.Mock(side_effect=OSError(number, os.strerror(number))))
    (tmp_path / "step-3.0-0123456789ab-0.partial").mkdir()
    write = files.write_rank_file
    monkeypatch.setattr(files, "write_rank_file", second_in_between)
    assert error_of(lambda: checkpoint.save(tmp_path / "step-1", *alone(), 1)).endswith("it exists already")
    assert checkpoint.load(tmp_path / "step-1", *alone()) == 2
    assert left_in(tmp_path) - {LOCK} == {"step-1", "step-3.0-0123456789ab-0.partial"}


@pytest.mark.parametrize("what", ["a fifo", "a dangling link", "a link to a file", "a folder"])
def test_what_lies_in_the_place_of_the_lock_is_not_waited_for_and_not_followed(what, tmp_path):
    lock, elsewhere = tmp_path / "run" / LOCK, tmp_path / "elsewhere"
    lock.parent.mkdir()
    if what == "a link to a file":
        elsewhere.write_text("mine")
    os.mkfifo(lock) if what == "a fifo" else lock.mkdir() if what == "a folder" else lock.symlink_to(elsewhere)
    assert f"{LOCK} is no regular file: remove it" in error_of(lambda: checkpoint.save(lock.parent / "1", *alone()))
    assert elsewhere.exists() == (what == "a link to a file") and left_in(lock.parent) == {LOCK}


# ----------------------------------------------------------------------------------------------------- behind training


@on_ranks(2, stage=[None, *STAGES])
def test_an_asynchronous_save_keeps_what_was_there(rank, stage, tmp_path):
    """Model, state, groups, `extra`, and where it was begun. The next save waits for it."""
    model, optimizer = a_run(rank, stage, lr=torch.tensor(0.5), steps=2)
    folder, let_go, write = tmp_path / f"{stage}", threading.Event(), files.write_rank_file
    folder.mkdir(exist_ok=True)
    extra, before = {"step": 1, "average": torch.zeros(20)}, copy.deepcopy([weights(model), full(optimizer)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write_rank_file", lambda *args: (let_go.wait(30), write(*args))[1])
        patch.setattr(files, "wait", lambda savings: (let_go.set(), wait(savings)))  # for the one before
        patch.chdir(folder)
        saving = checkpoint.save("one", model, optimizer, extra, asynchronous=True)
        patch.chdir(tmp_path)
        extra["step"], _ = 2, extra["average"].fill_(7)
        optimizer.param_groups[0]["lr"].fill_(9)
        train(rank, model, optimizer, (2, 3))
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
    full_there = mock.patch.object(files, "write_rank_file", side_effect=OSError(28, "No space left on device"))
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
    assert left_in(folder) == {"three", "four", LOCK}


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


def resources():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@on_ranks(2, stage=SHARDED)
def test_new_process_groups_and_optimizers_leave_nothing_behind(rank, stage, tmp_path):
    """Neither groups, descriptors and threads nor tensors. Who writes behind waits no longer than the group."""
    found, n_groups = [], []
    for number in range(6):
        if number in (0, 5):
            model, optimizer = small(rank, stage, torch.nn.Linear(7, 7, bias=False))  # of one parameter
        group = dist.new_group([0, 1])
        reshard(optimizer, group)
        future = checkpoint.save(tmp_path / f"{stage}{number}", model, optimizer, asynchronous=True)
        future.result()
        kept = weakref.ref(future)
        del future
        reshard(optimizer, None)
        dist.destroy_process_group(group)
        n_groups.append(len(dist.distributed_c10d._world.pg_names))
        most, deadline = found[1] if 1 < number < 5 else (math.inf, math.inf), time.monotonic() + 120
        while time.monotonic() < deadline and (  # threads have yet to turn to something else, or to end
                kept() is not None or any(now > then for now, then in zip(resources(), most))):
            gc.collect()
        found.append(resources())
        assert kept() is None  # nor what it may have of the tensors, if it has failed
    assert len(set(n_groups)) == 1 and all(last <= first for first, last in zip(found[1], found[4])), found
    checkpoint.save(tmp_path / f"{stage}last", model, optimizer, asynchronous=True).result()
    _, group = files.writer_of(optimizer, None)  # the one that has written it
    ours, writers = (one._get_backend(torch.device("cpu")).options._timeout for one in (dist.group.WORLD, group))
    assert ours == writers != dist.distributed_c10d.default_pg_timeout


@on_ranks(2)
def test_a_group_of_the_same_ranks_after_another_is_gone(rank):
    """Both are made by ranks that are in as many groups, so torch would give them one name, and refuse that."""
    users, made = dist.new_group([0, 1]), []
    for seconds in (1001, 1002):
        made.append(ranks.group_among([0, 1], timeout=timedelta(seconds=seconds), backend="gloo"))
        if not made[1:]:
            dist.destroy_process_group(users)
    assert [said for group in made for said in ranks.all_gather(rank.rank, group)] == [0, 1, 0, 1]


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
        assert (tmp_path / name / "manifest.json").exists()


def test_a_checkpoint_whose_group_is_gone_is_none(tmp_path):
    """As the thread of an asynchronous save finds it: here there is no group, and there were two ranks."""
    (tmp_path / "one.partial").mkdir()
    parts = {"a": rank_files.whole(torch.ones(2))}
    line = error_of(lambda: files.write(tmp_path / "one", tmp_path / "one.partial", parts, {"ranks": 2}, None))
    assert "the process group was destroyed meanwhile" in line and not (tmp_path / "one").exists()


# --------------------------------------------------------------------------------------------- slow and missing ranks


@on_ranks(2)
def test_ranks_wait_for_each_other_at_the_end_of_their_work(rank, tmp_path):
    """Rank 0 is done when it begins: it goes on no earlier than rank 1, who writes a file once rank 0 waits."""
    store = dist.PrefixStore("checkpoint", dist.distributed_c10d._get_process_group_store(dist.group.WORLD))
    with ranks.at_own_pace("it", None):
        if rank.rank == 1:
            while store.get("0") != b"%d waits" % ranks.MEETINGS[dist.group.WORLD]:
                pass
            (tmp_path / "file").touch()
    assert (tmp_path / "file").exists()


@on_ranks(2)
def test_a_rank_that_never_comes_is_named(rank):
    """By a clock on which a minute passes whenever somebody looks."""
    group = dist.new_group()
    if rank.rank == 0:
        clock = SimpleNamespace(monotonic=iter(range(0, 36_000, 60)).__next__, sleep=lambda _: None)
        with mock.patch.object(ranks, "time", clock), pytest.raises(dist.DistError, match="^it: rank 1 is missing"):
            with ranks.at_own_pace("it", group):
                pass
    dist.barrier()
    dist.destroy_process_group(group)


def slow(rank, folder):
    """On each rank each disk is slower than any collective of this group would wait."""
    def late(function):
        return lambda *args, **kwargs: (time.sleep(4.4), function(*args, **kwargs))[1]

    small(rank, STAGES[3])  # tries AdamW out, which a rank does once: it takes a while
    model, optimizer = small(rank, STAGES[3], process_group=dist.new_group([0, 1], timeout=timedelta(seconds=4)))
    of_rank_1 = ((files, "collect"), (states, "refuse_unclaimed"), (files, "write_rank_file"),
                 (rank_files.Reader, "run"), (files, "install"))
    with pytest.MonkeyPatch.context() as patch:
        for module, name in of_rank_1 if rank.rank else [(files, "finish")]:
            patch.setattr(module, name, late(getattr(module, name)))
        checkpoint.save(folder / "one", model, optimizer)
        checkpoint.load(folder / "one", model, optimizer)


def missing(rank, folder, where):
    """Rank 1 stops at the beginning or in the middle of its work, until rank 0 has noticed. -> what rank 0 says"""
    def stop(*args, **_):
        os.kill(os.getpid(), signal.SIGSTOP)
        return args[0]

    small(rank, STAGES[3])  # as in `slow`
    _, other = ranks.all_gather(os.getpid(), None)
    model, optimizer = small(rank, STAGES[3], process_group=dist.new_group([0, 1], timeout=timedelta(seconds=3)))
    kind = dist.DistError if rank.rank == 0 else RuntimeError
    with pytest.MonkeyPatch.context() as patch, pytest.raises(kind) as told:
        patch.setattr(ranks, "SILENT_S", 2)
        if rank.rank:
            patch.setattr(files, where, stop)
        checkpoint.save(folder / "one", model, optimizer)
    if rank.rank == 0:
        os.kill(other, signal.SIGCONT)
    dist.barrier()
    return str(told.value)


@pytest.mark.waits
@pytest.mark.parametrize("where, seconds", [("itself", 3), ("write_rank_file", 2), ("collect", 2)])
@pytest.mark.parametrize("world_size", [2])
def test_a_slow_rank_is_waited_for_and_a_missing_one_is_named(run, where, seconds, tmp_path):
    if where == "itself":  # what `save` begins with
        run(slow, tmp_path / "slow")
    line, _ = run(missing, tmp_path, where)
    assert line == (f"checkpoint {tmp_path}/one can't be written: rank 1 is missing: nothing was heard of it for "
                    f"{seconds} s")
    assert not (tmp_path / "one").exists()


# -------------------------------------------------------------------------- an error on one rank is an error on all
# What save and load call, one after the other; what only rank 0 does is named so.

OF_SAVE = [(files, "names_of"), (files, "packed"), (files, "local_states"), (states, "refuse_unclaimed"),
           (states, "describe"), (files, "check_states"), (files, "collect"), (files, "write_rank_file")]
OF_RANK_0 = [(files, "claim"), (files, "sealed"), (files, "manifest_of"), (files, "sync_folder")]
OF_LOAD = [(files, "names_of"), (files, "pieces_of"), (files, "manifest_of"), (manifest, "opened"),
           (manifest, "tensors_in"), (files, "check"), (files, "room_for"), (rank_files.Reader, "run"),
           (rank_files.Reader, "read"), (files, "check_states"), (files, "prepared"), (files, "install")]
OF_FULL_STATE = [(full_state, "pieces_of"), (full_state, "room_for"), (full_state, "prepared")]  # before tensors travel
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

    for number, (module, name) in enumerate(OF_SAVE + OF_RANK_0 * (bad_rank == 0)):
        line = line_of(lambda: checkpoint.save(path, model, optimizer, asynchronous=number % 2 == 1).result(),
                       module, name, ERRORS[number % len(ERRORS)])
        assert line.startswith(f"checkpoint {path} can't be written: ")
        dist.barrier()
        assert not path.parent.exists() or left_in(path.parent) <= {LOCK}, name
    checkpoint.save(path, model, optimizer)
    train(rank, model, optimizer, range(1, 2))
    for number, (module, name) in enumerate(OF_LOAD):
        with nothing_changes(model, optimizer) if name != "install" else contextlib.nullcontext():
            line = line_of(lambda: checkpoint.load(path, model, optimizer), module, name, ERRORS[number % len(ERRORS)])
        assert line.startswith(f"checkpoint {path} can't be loaded: rank {bad_rank}: ")
    checkpoint.load(path, model, optimizer)
    if stage:
        found = full(optimizer)
        with nothing_changes(model, optimizer):
            line = line_of(lambda: full(optimizer), states, "describe", ERRORS[0])
            assert line == f"the state can't be put together: rank {bad_rank}: too little memory"
            for module, name in OF_FULL_STATE:
                line = line_of(lambda: load_full_state_dict(optimizer, found), module, name, ERRORS[0])
                assert line == f"the state can't be loaded: rank {bad_rank}: too little memory"


@on_ranks(2)
def test_an_interrupt_in_a_save_stays_one(rank, tmp_path):
    """Ctrl-C comes to rank 0; the others say so; nothing is left; the next save works."""
    its, interrupts = small(rank, STAGES[3]), contextlib.nullcontext()
    kind, words = checkpoint.CheckpointError, "rank 0: KeyboardInterrupt"
    if rank.rank == 0:
        interrupts = mock.patch.object(files, "write_rank_file", side_effect=KeyboardInterrupt)
        kind, words = KeyboardInterrupt, None
    with interrupts, pytest.raises(kind, match=words):
        checkpoint.save(tmp_path / "one", *its)
    dist.barrier()
    assert left_in(tmp_path) == {LOCK}
    dist.barrier()
    checkpoint.save(tmp_path / "one", *its)


@on_ranks(2, stage=SHARDED)
def test_a_place_that_cannot_be_written_is_one_line_and_nothing_is_left(rank, stage, tmp_path):
    """A full disk on the last rank; a file for a folder; a folder for each rank, where a path is relative."""
    model, optimizer = a_run(rank, stage, steps=2)
    folder, own = tmp_path / stage, tmp_path / stage / str(rank.rank)
    own.mkdir(parents=True)
    (folder / "file").touch()
    for path, words in ((folder / "full" / "one", ": rank 1: File too large"), ("/proc/checkpoint", ": "),
                        (folder / "file" / "one", ": .*file is no folder"), (own.parent, "it exists already"),
                        (f"{folder}/a\0b", "embedded null byte"), ("one", "isn't here: all need the same folder")):
        with situation(path), nothing_changes(model, optimizer), pytest.MonkeyPatch.context() as patch:
            patch.chdir(own)
            with full_disk(1000) if rank.rank and "large" in words else contextlib.nullcontext():
                line = said_by_all(error_of(lambda: checkpoint.save(path, model, optimizer)))
            assert re.search(f"can't be written.*{words}", line), line
    assert not left_in(own) - {LOCK} and left_in(folder / "full") == {LOCK}
    assert "there is no such folder" in error_of(lambda: checkpoint.load(f"{folder}/a\0b", model, optimizer))
    train(rank, model, optimizer, (2,))


class Scaled(torch.nn.Linear):
    def get_extra_state(self):
        return {"scale": 2.0}


class Cloned(torch.nn.Linear):
    """What frameworks do so that a `state_dict()` doesn't change while it is written."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "bias"] = destination[prefix + "bias"].clone()


@on_ranks(2, stage=SHARDED)
def test_what_would_not_be_loaded_again_is_not_saved(rank, stage, tmp_path):
    """A model that can't be, is another on each rank, or whose extra no load would read; nor is it loaded into."""
    path = tmp_path / stage / "one"
    checkpoint.save(path, *small(rank, stage))
    for kind, words in ((Scaled, "0._extra_state, .*pass it as `extra`"),
                        (Cloned, "a copy of 0.bias, .*could not be loaded")):
        its = small(rank, stage, kind(7, 7))
        for call in (checkpoint.save, checkpoint.load):
            line = error_of(lambda: call(path if call is checkpoint.load else path.with_name("two"), *its),
                            checkpoint.UnfitModel)
            assert re.search(words, line), line
    model = torch.nn.Linear(3 + rank.rank, 3)
    line = error_of(lambda: checkpoint.save(path.with_name("two"), model, torch.optim.AdamW(model.parameters())))
    assert said_by_all(line).endswith("the ranks have different models: weight isn't the same on ranks 0 and 1")
    extra = np.zeros(2) if rank.rank else {"step": 1}
    line = error_of(lambda: checkpoint.save(path.with_name("two"), *small(rank, stage), extra))
    assert "rank 1: load() can't read `extra` or a parameter group again: it holds numpy" in line
    its = small(rank, stage)
    its[1].param_groups[0]["mine"] = tmp_path
    line = error_of(lambda: checkpoint.save(path.with_name("two"), *its))
    assert "or a parameter group again: it holds pathlib" in said_by_all(line)
    assert left_in(path.parent) == {"one", LOCK}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_synced_is_no_error_where_file_systems_do_not_know_that(number, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(OSError, match="Input/output error") if number == errno.EIO else contextlib.nullcontext():
        files.sync_folder(tmp_path)


def test_a_line_of_an_error_can_be_printed():
    line = ranks.first_line(ValueError("name \x1b[31mred\x07\x00 " + "x" * 10_000_000))
    assert line.isprintable() and line.startswith(r"name \x1b[31mred\x07\x00 xxx") and len(line) <= ranks.LONGEST + 2


def test_what_load_would_not_read_is_not_saved(tmp_path):
    """As deep, and as large, as load takes it, and no more."""
    for extra, words in ((json.loads("[" * 52 + "]" * 52), "it is nested deeper than 50"),
                         ({1: torch.ones(99), "1": torch.ones(99)}, "two of its keys read alike"),
                         ([0] * 4_000_000, "its manifest has 12.* bytes, load.. reads 8.*: put large values")):
        assert re.search(words, error_of(lambda: checkpoint.save(tmp_path / "one", *alone(), extra)))
    assert left_in(tmp_path) == {LOCK}
    for number, extra in enumerate((json.loads("[" * 51 + "]" * 51), [0] * 100_000)):
        checkpoint.save(tmp_path / str(number), *alone(), extra)
        assert checkpoint.load(tmp_path / str(number), *alone()) == extra
