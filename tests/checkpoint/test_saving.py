"""What a cluster does to a save: a second run in the folder, a slow rank, a full disk, a failure nobody asks for."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import wait
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import checkpoint
from checkpoint import folder as folders
from checkpoint import rank_files, ranks, reading, reshard, states, writing
from checkpoint.folder import LOCK
from checkpoint.optimizers import Piece
from tests.common import STAGES, optimizer_of
from tests.ranks import ROOT

REFUSED = "can't be written: another run saves in .*: end it, or save in another folder"


def made(rank, stage, group=None):
    model = torch.nn.Linear(64, 64).to(rank.device)
    optimizer = optimizer_of(stage)(model.parameters(), torch.optim.AdamW, process_group=group)
    model(torch.ones(1, 64, device=rank.device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class OtherRun:
    """A process that saves `path`, then lives on until the `with` ends."""

    def __init__(self, path, then=""):
        script = f"""
            import sys, torch, checkpoint
            model = torch.nn.Linear(3, 3)
            checkpoint.save({str(path)!r}, model, torch.optim.AdamW(model.parameters()), "other run")
            {then}
            print("saved", flush=True)
            sys.stdin.read()
        """
        self.process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self):
        assert self.process.stdout.readline() == "saved\n"
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.communicate()


def save_beside(rank, stage, folder, is_refused):
    model, optimizer = made(rank, stage)
    if is_refused:
        for asynchronous in (False, True):
            with pytest.raises(checkpoint.CheckpointError, match=REFUSED) as refusal:
                checkpoint.save(folder / "step-2", model, optimizer, asynchronous=asynchronous)
            assert len(str(refusal.value).splitlines()) == 1
        checkpoint.save(folder / "best-2", model, optimizer)  # which is no step of the other run
        return str(refusal.value)
    checkpoint.save(folder / "step-2", model, optimizer)


@pytest.mark.waits
@pytest.mark.parametrize("stage", STAGES[3:])
@pytest.mark.parametrize("world_size", [2])
def test_a_second_run_in_a_folder_is_refused_while_the_first_lives(run, stage, tmp_path):
    """Also between two saves of the first. What a dead one has left is removed, and what a living one writes is not."""
    left = tmp_path / "step-1.0-0123456789ab-0.partial"
    with OtherRun(tmp_path / "step-1"):
        left.mkdir()
        assert len(set(run(save_beside, stage, tmp_path, True))) == 1
        assert left.exists() and checkpoint.latest(tmp_path).name == "best-2"
    run(save_beside, stage, tmp_path, False)
    assert not left.exists() and checkpoint.latest(tmp_path).name == "step-2"


def test_what_nobody_here_has_left_is_not_removed(tmp_path):
    """A folder of the user's, another process group's, another series', and one that this process writes now."""
    model = torch.nn.Linear(3, 3)
    names = ["mine.partial", "step-1.partial", "step-1.1-0123456789ab-0.partial", "best-1.0-0123456789ab-0.partial"]
    for name in [*names, f"step-2.0-{folders.token(os.getpid())}-77.partial", "step-3.0-0123456789ab-0.partial"]:
        (tmp_path / name).mkdir()
    checkpoint.save(tmp_path / "step-9", model, torch.optim.AdamW(model.parameters()))
    assert {path.name for path in tmp_path.iterdir()} == {
        *names, f"step-2.0-{folders.token(os.getpid())}-77.partial", "step-9", LOCK}


@pytest.mark.parametrize("why", ["no locks", "of another user"])
def test_without_locks_it_saves_all_the_same(why, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(13, "Permission denied") if why == "of another user" else OSError(37, "No locks available")
    monkeypatch.setattr(folders, "opened_lock" if why == "of another user" else "lock_byte", refuse)
    (tmp_path / "step-3.0-0123456789ab-0.partial").mkdir()
    model = torch.nn.Linear(3, 3)
    checkpoint.save(tmp_path / "step-9", model, torch.optim.AdamW(model.parameters()))
    assert checkpoint.latest(tmp_path).name == "step-9" and len(list(tmp_path.glob("*.partial"))) == 1




@pytest.mark.parametrize("what", ["a fifo", "a dangling link", "a link to a file", "a folder"])
def test_what_lies_in_the_place_of_the_lock_is_not_waited_for_and_not_followed(what, tmp_path):
    (tmp_path / "run").mkdir()
    lock, elsewhere = tmp_path / "run" / LOCK, tmp_path / "elsewhere"
    if what == "a fifo":
        os.mkfifo(lock)
    elif what == "a folder":
        lock.mkdir()
    else:
        lock.symlink_to(elsewhere)
        if what == "a link to a file":
            elsewhere.write_text("mine")
    model = torch.nn.Linear(3, 3)
    with pytest.raises(checkpoint.CheckpointError, match=f"{LOCK} is no regular file: remove it"):
        checkpoint.save(tmp_path / "run" / "step-9", model, torch.optim.AdamW(model.parameters()))
    assert elsewhere.exists() == (what == "a link to a file")
    assert [path.name for path in lock.parent.iterdir()] == [LOCK]


@pytest.mark.waits
def test_the_lock_stays_when_its_holder_copies_the_folder(tmp_path):
    """One of the process would be lost with any descriptor of the file that it closes."""
    copies = f"import shutil; shutil.copytree({str(tmp_path / 'run')!r}, {str(tmp_path / 'copy')!r})"
    model = torch.nn.Linear(3, 3)
    with OtherRun(tmp_path / "run" / "step-1", then=copies):
        assert (tmp_path / "copy" / LOCK).exists()
        with pytest.raises(checkpoint.FolderInUse, match=REFUSED):
            checkpoint.save(tmp_path / "run" / "step-2", model, torch.optim.AdamW(model.parameters()))


@pytest.mark.waits
def test_the_lock_ends_with_its_holder_and_not_with_a_child(tmp_path):
    """A worker that was forked and lives on has no part in it."""
    forks = ("import os, time; child = os.fork(); child or (os.closerange(0, 3), time.sleep(60), os._exit(0)); "
             "print('forked', child, flush=True)")
    model = torch.nn.Linear(3, 3)
    other = OtherRun(tmp_path / "step-1", then=forks)
    child = int(other.process.stdout.readline().split()[1])
    with other:
        pass
    try:
        checkpoint.save(tmp_path / "step-2", model, torch.optim.AdamW(model.parameters()))
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_that_was_removed_is_taken_anew(tmp_path):
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.save(tmp_path / "step-1", model, optimizer)
    (tmp_path / LOCK).unlink()
    checkpoint.save(tmp_path / "step-2", model, optimizer)
    assert (tmp_path / LOCK).exists()


@pytest.mark.waits
def test_without_locks_two_runs_at_once_never_mix(tmp_path, monkeypatch):
    """The second saves the same step as a whole while the first is in the middle of it."""
    def refuse(*args):
        raise OSError(37, "No locks available")

    def save(fill):
        model = torch.nn.Linear(3, 3)
        torch.nn.init.constant_(model.weight, fill)
        checkpoint.save(tmp_path / "step-1", model, torch.optim.AdamW(model.parameters()), fill)

    def second_in_between(*args):
        monkeypatch.setattr(writing, "write_rank_file", write)
        future = write(*args)
        save(2)
        return future

    monkeypatch.setattr(folders, "lock_byte", refuse)
    write = writing.write_rank_file
    monkeypatch.setattr(writing, "write_rank_file", second_in_between)
    with pytest.raises(checkpoint.CheckpointError, match="can't be written: it exists already"):
        save(1)
    model = torch.nn.Linear(3, 3)
    assert checkpoint.load(tmp_path / "step-1", model, torch.optim.AdamW(model.parameters())) == 2
    assert model.weight.eq(2).all() and {path.name for path in tmp_path.iterdir()} == {"step-1", LOCK}


def not_enough(*args):
    raise OSError(28, "No space left on device")


def fails_behind(rank, stage, folder):
    """On rank 1 the disk is full. Rank 0 alone asks how the second save went. -> what the third says"""
    model, optimizer = made(rank, stage)
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            patch.setattr(writing, "write_rank_file", not_enough)
        for name in ("one", "two"):
            saving = checkpoint.save(folder / name, model, optimizer, asynchronous=True)
            if name == "two":
                wait([saving])
                if rank.rank == 0:
                    with pytest.raises(checkpoint.CheckpointError, match="two can't be written: rank 1: No space left"):
                        saving.result()
            else:
                with pytest.raises(checkpoint.CheckpointError, match="one can't be written: rank 1: No space") as told:
                    checkpoint.save(folder / "none", model, optimizer)
    with pytest.raises(checkpoint.CheckpointError) as told_again:
        checkpoint.save(folder / "none", model, optimizer)
    checkpoint.save(folder / "three", model, optimizer, asynchronous=True).result()
    checkpoint.save(folder / "four", model, optimizer)
    return str(told.value), str(told_again.value)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2])
def test_a_failed_asynchronous_save_is_told_by_the_next(run, stage, tmp_path):
    (lines,) = set(run(fails_behind, stage, tmp_path))
    assert [line.split(": ", 1)[1] for line in lines] == ["rank 1: No space left on device"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"three", "four", LOCK}


@pytest.mark.waits
@pytest.mark.parametrize("asks", [False, True])
def test_a_failed_asynchronous_save_is_told_at_the_end(asks, tmp_path):
    """One that the program has heard of is not told again."""
    script = f"""
        import resource, signal, torch, checkpoint
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
        model = torch.nn.Linear(99, 99)
        saving = checkpoint.save({str(tmp_path / "one")!r}, model, torch.optim.AdamW(model.parameters()),
                                 asynchronous=True)
        if {asks}:
            try:
                saving.result()
            except checkpoint.CheckpointError:
                pass
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    line = f"error: checkpoint {tmp_path}/one can't be written: File too large\n"
    assert (ended.returncode, ended.stderr) == (0, "" if asks else line)


def resources():
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def moves_and_saves(rank, stage, folder):
    """-> descriptors and threads after each move to a new process group of the same ranks."""
    model, optimizer = made(rank, stage)
    found = []
    for number in range(5):
        group = dist.new_group([0, 1])
        reshard(optimizer, group)
        checkpoint.save(folder / f"step-{number}", model, optimizer, asynchronous=True).result()
        reshard(optimizer, None)
        dist.destroy_process_group(group)
        found.append(resources())
    return found[1:]


@pytest.mark.parametrize("stage", STAGES[2:])
@pytest.mark.parametrize("world_size", [2])
def test_new_process_groups_leave_nothing_behind(run, stage, tmp_path):
    for found in run(moves_and_saves, stage, tmp_path):
        assert all(last <= first for first, last in zip(found[0], found[-1])), found


def late(function, seconds):
    def after(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)
    return after


def slow(rank, stage, folder):
    """On rank 1 each disk is slower than any collective of this group would wait."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    model, optimizer = made(rank, stage, group)
    with pytest.MonkeyPatch.context() as patch:
        if rank.rank == 1:
            for module, name in ((writing, "collect"), (states, "refuse_unclaimed"), (writing, "write_rank_file"),
                                 (rank_files, "checksum"), (reading, "install")):
                patch.setattr(module, name, late(getattr(module, name), 2.2))
        else:
            patch.setattr(writing, "finish", late(writing.finish, 2.2))
        checkpoint.save(folder / "one", model, optimizer)
        checkpoint.load(folder / "one", model, optimizer)


@pytest.mark.waits
@pytest.mark.parametrize("stage", STAGES[3:])
@pytest.mark.parametrize("world_size", [2])
def test_a_slow_rank_is_waited_for(run, stage, tmp_path):
    run(slow, stage, tmp_path)


def stop(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)


def missing(rank, stage, folder, where):
    """Rank 1 doesn't come, or stops in the middle of its work, until rank 0 has noticed. -> what rank 0 says"""
    everyone = [None, None]
    dist.all_gather_object(everyone, os.getpid())
    group = dist.new_group([0, 1], timeout=timedelta(seconds=3))
    model, optimizer = made(rank, stage, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "SILENT_S", 2)
        if rank.rank == 0:
            with pytest.raises(dist.DistError) as error:
                checkpoint.save(folder / "one", model, optimizer)
            os.kill(everyone[1], signal.SIGCONT)
            dist.barrier()
            return str(error.value)
        if where == "not there":
            stop()
        else:
            patch.setattr(writing, "write_rank_file" if where == "writes" else "collect", stop)
            with pytest.raises((RuntimeError, checkpoint.CheckpointError)):  # rank 0 has gone on
                checkpoint.save(folder / "one", model, optimizer)
        dist.barrier()


@pytest.mark.waits
@pytest.mark.parametrize("where, seconds", [("not there", 3), ("writes", 2), ("collects", 2)])
@pytest.mark.parametrize("stage", STAGES[3:])
@pytest.mark.parametrize("world_size", [2])
def test_a_missing_rank_is_named(run, stage, where, seconds, tmp_path):
    line, _ = run(missing, stage, tmp_path, where)
    assert line == (f"checkpoint {tmp_path}/one can't be written: rank 1 is missing: nothing was heard of it for "
                    f"{seconds} s")
    assert not (tmp_path / "one").exists()


def test_a_full_disk_says_so_each_time(tmp_path):
    """In the middle of a tensor. The limit stands for the disk."""
    model, line = torch.nn.Linear(300, 300), f"checkpoint {tmp_path}/one can't be written: File too large"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        for asynchronous in (False, True, False):
            with pytest.raises(checkpoint.CheckpointError) as refusal:
                checkpoint.save(tmp_path / "one", model, torch.optim.AdamW(model.parameters()),
                                asynchronous=asynchronous).result()
            assert str(refusal.value) == line and not list(tmp_path.glob("one*"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_leads_that_differ_are_no_stack():
    """Of two ranks that keep stacks of 2 and of 3: one of them would be read as the other."""
    parts = [(rank, states.describe({"last": torch.zeros(2 + rank, 5)}, Piece(0, 5, torch.zeros(5)))[0])
             for rank in (0, 1)]
    with pytest.raises(states.NotKept, match="last in the state of weight has shape .2, 5. on rank 0 and .3, 5. on"):
        states.layout_of(parts, set(), "weight")


def damaged(rank, stage, path):
    """-> what a rank says of a checkpoint of which one file is damaged. Only one rank reads that file."""
    model, optimizer = made(rank, stage)
    checkpoint.save(path, model, optimizer)
    if rank.rank == 0:
        content = bytearray((path / "rank-00001.bin").read_bytes())
        content[len(content) // 2] ^= 1
        (path / "rank-00001.bin").write_bytes(content)
    dist.barrier()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(checkpoint.CheckpointError) as refusal:
        checkpoint.load(path, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    return str(refusal.value)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_say_the_same_of_a_damaged_checkpoint(run, stage, world_size, tmp_path):
    (line,) = set(run(damaged, stage, tmp_path / "one"))
    assert "rank-00001.bin is damaged: " in line and len(line.splitlines()) == 1
