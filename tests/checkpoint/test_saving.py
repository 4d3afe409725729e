"""What a cluster does to a save: a full disk, an error on one rank, an error that nobody asks for."""

import contextlib
import copy
import gc
import re
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
from checkpoint import files, full_state, ranks, reshard, storage
from tests.checkpoint import SHARDED, a_run, full_disk, small, train
from tests.checkpoint.compare import equal, full, nothing_changes, said_by_all, weights
from tests.common import STAGES, error_of, on_ranks, situation


def left_in(folder):
    return {path.name for path in folder.iterdir()}


# ----------------------------------------------------------------------------------------------------- behind training


@on_ranks(2, stage=[None, *STAGES])
def test_an_asynchronous_save_keeps_what_was_there(rank, stage, tmp_path):
    """Model, state, groups and `extra`. Meanwhile ranks may send each other their states. The next save waits."""
    model, optimizer = a_run(rank, stage, lr=torch.tensor(0.5), steps=2)
    path = tmp_path / f"{stage}"
    let_go = threading.Event()
    write = files.write
    extra = {"step": 1, "average": torch.zeros(20)}
    before = copy.deepcopy([weights(model), full(optimizer)])
    if rank.number == 0:  # its thread waits for that of rank 1, in the group of the save
        let_go.set()
    with mock.patch.object(files, "write", lambda *args: (let_go.wait(30), write(*args))[1]):
        saving = checkpoint.save(path, model, optimizer, extra, asynchronous=True)
        extra["average"].fill_(7)
        optimizer.param_groups[0]["lr"].fill_(9)
        train(rank, model, optimizer, (2, 3))
        full(optimizer)
        assert not path.exists()
        threading.Timer(0.1, let_go.set).start()
        line = error_of(lambda: checkpoint.save(path, model, optimizer))
    assert line.endswith("exists already") and saving.result() is None
    again = a_run(rank, stage, seed=1, lr=torch.tensor(0.1))
    assert equal(checkpoint.load(path, *again), {"step": 1, "average": torch.zeros(20)})
    assert equal([weights(again[0]), full(again[1])], before)


@on_ranks(2, stage=STAGES)
def test_a_failed_asynchronous_save_is_printed_and_told_by_the_next(rank, stage, tmp_path):
    """On rank 1 the disk is full. Rank 0 alone asks how the second save went, and the third save tells the others."""
    model, optimizer = small(rank, stage)
    folder = tmp_path / stage
    full_there = mock.patch.object(storage.SummedFile, "write", side_effect=OSError(28, "No space left on device"))
    for name in ("one", "two"):
        with full_there if rank.number == 1 else contextlib.nullcontext(), mock.patch("sys.stderr.write") as printed:
            saving = checkpoint.save(folder / name, model, optimizer, asynchronous=True)
            wait([saving])
        words = f"{name} can't be written: rank 1: No space left on device"
        assert printed.call_args_list[0][0][0].endswith(words)
        if name == "two" and rank.number == 0:
            assert error_of(saving.result).endswith(words)
        assert said_by_all(error_of(lambda: checkpoint.save(folder / "none", model, optimizer))).endswith(words)
    checkpoint.save(folder / "three", model, optimizer, asynchronous=True).result()
    checkpoint.save(folder / "four", model, optimizer)
    assert left_in(folder) == {"three", "four"}


@on_ranks(2, stage=SHARDED)
def test_new_process_groups_and_optimizers_leave_nothing_behind(rank, stage, tmp_path):
    """Neither groups and threads nor tensors: one Saver serves the same ranks, whichever group they come in."""
    numbers = set()
    for turn in range(3):
        model, optimizer = small(rank, stage)
        group = dist.new_group([0, 1])
        reshard(optimizer, group)
        future = checkpoint.save(tmp_path / f"{stage}{turn}", model, optimizer, asynchronous=True)
        future.result()
        kept = weakref.ref(model[0].weight)
        reshard(optimizer, None)
        dist.destroy_process_group(group)
        del model, optimizer, future
        gc.collect()
        assert kept() is None
        numbers.add((len(dist.distributed_c10d._world.pg_names), threading.active_count()))
    assert len(numbers) == 1


@on_ranks(3)
def test_ranks_in_unlike_numbers_of_groups_save_together(rank, tmp_path):
    """torch names the group of some ranks after the number of groups that each is in, and would wait forever."""
    dist.new_group([1])
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    if rank.number < 2:
        run = small(rank, STAGES[3], process_group=group)
        checkpoint.save(tmp_path / "one", *run, rank.number)
        assert checkpoint.load(tmp_path / "one", *run) == rank.number
    dist.barrier()


# -------------------------------------------------------------------------- an error on one rank is an error on all
# What save and load call, one after the other; what only rank 0 does stands apart.

OF_SAVE = [(files, "packed"), (files, "refuse_different"), (storage.SavePlanner, "create_local_plan"),
           (storage.Writer, "write_data"), (storage.SummedFile, "write")]
OF_RANK_0 = [(storage.Writer, "finish"), (files, "finish")]
OF_LOAD = [(storage, "checksum_of_folder"), (storage, "check_boxes"), (files, "memory_for"),
           (storage.LoadPlanner, "create_local_plan"), (storage.Reader, "read_data"), (storage, "unpickled"),
           (files, "groups_to_load")]
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
        with situation(name), fails if rank.number == bad_rank else contextlib.nullcontext():
            return said_by_all(error_of(call, checkpoint.CheckpointError))

    of_rank = [] if stage is None else OF_SAVE  # of a plain optimizer, rank 0 writes everything
    for number, (module, name) in enumerate(of_rank + OF_RANK_0 * (bad_rank == 0)):
        line = line_of(lambda: checkpoint.save(path, model, optimizer, asynchronous=number % 2 == 1).result(),
                       module, name, ERRORS[number % len(ERRORS)])
        assert line.startswith(f"checkpoint {path} can't be written: "), name
        dist.barrier()
        assert not path.parent.exists() or not left_in(path.parent), name
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
            line = line_of(lambda: full(optimizer), full_state, "own_state_dict", ERRORS[0])
            assert line == f"the state can't be put together: rank {bad_rank}: too little memory"
            line = line_of(lambda: checkpoint.load_full_state_dict(optimizer, found), full_state, "loaded_value",
                           ERRORS[0])
            assert line == f"the state can't be loaded: rank {bad_rank}: too little memory"


@on_ranks(2)
def test_an_interrupt_in_a_save_stays_one(rank, tmp_path):
    """Ctrl-C comes to rank 0; the others say so; nothing is left; the next save works."""
    run = small(rank, STAGES[3])
    interrupt = mock.patch.object(storage.Writer, "write_data", side_effect=KeyboardInterrupt)
    kind = checkpoint.CheckpointError if rank.number else KeyboardInterrupt
    with contextlib.nullcontext() if rank.number else interrupt, pytest.raises(kind):
        checkpoint.save(tmp_path / "one", *run)
    dist.barrier()
    assert not left_in(tmp_path)
    dist.barrier()
    checkpoint.save(tmp_path / "one", *run)


@on_ranks(2, stage=SHARDED)
def test_a_place_that_cannot_be_written_is_one_line_and_nothing_is_left(rank, stage, tmp_path):
    """A full disk on the last rank; a file for a folder; a folder for each rank; a path for each rank."""
    model, optimizer = a_run(rank, stage, steps=2)
    folder = tmp_path / stage
    own = folder / str(rank.number)
    own.mkdir(parents=True)
    (folder / "file").touch()
    there = mock.patch.object(files.Path, "is_file", return_value=False)  # of another host
    for path, words, situation_of_rank in (
            (folder / "full" / "one", "rank 1: File too large", full_disk(1000) if rank.number else None),
            (folder / "elsewhere", "of another rank isn't here: all need the same folder", there),
            (folder / "file" / "one", "Not a directory", None), (own.parent, "it exists already", None),
            (folder / f"at-{rank.number}", "the path is .*at-1 on rank 1, and .*at-0 on rank 0: all ranks must", None)):
        with situation(path), nothing_changes(model, optimizer), situation_of_rank or contextlib.nullcontext():
            line = error_of(lambda: checkpoint.save(path, model, optimizer))
            assert re.search(f"can't be written.*{words}", line), line
    dist.barrier()
    assert left_in(folder) == {"0", "1", "file", "full"} and not left_in(folder / "full")
    train(rank, model, optimizer, (2,))


@on_ranks(2, stage=SHARDED)
def test_what_would_not_be_loaded_again_is_not_saved(rank, stage, tmp_path):
    """Another model on each rank, or of another optimizer; `extra` or a group that no load would read."""
    folder = tmp_path / stage
    model, optimizer = small(rank, stage)

    def refusal(*run_and_extra):
        return said_by_all(error_of(lambda: checkpoint.save(folder / "one", *run_and_extra)))

    other = torch.nn.Linear(3 + rank.number, 3)
    line = refusal(other, torch.optim.AdamW(other.parameters()))
    assert "weight is a tensor of shape (3, 4) on rank 1, and a tensor of shape (3, 3) on rank 0: all ranks" in line
    assert "has a parameter or state of shape (7, 7), which isn't the model's" in refusal(other, optimizer)
    extra = np.zeros(2) if rank.number else {"step": 1}
    assert "rank 1: load() can't read extra.1 again: it holds numpy" in refusal(model, optimizer, extra)
    optimizer.param_groups[0]["mine"] = tmp_path
    assert "can't read optimizer.param_groups.0.mine again: it holds pathlib" in refusal(model, optimizer)
    dist.barrier()
    assert not left_in(folder)


def test_a_line_of_an_error_can_be_printed():
    line = ranks.first_line(ValueError("name \x1b[31mred\x07\x00 " + "x" * 10_000_000))
    assert line.isprintable() and line.startswith(r"name \x1b[31mred\x07\x00 xxx") and len(line) <= 502
