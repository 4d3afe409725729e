"""What a cluster does to a save: a full disk, an error on one rank, an error that nobody asks for."""

import contextlib
import copy
import itertools
import re
import threading
from concurrent.futures import wait
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import checkpoint
from checkpoint import files, full_state, ranks, storage
from harness import STAGE_4
from tests.checkpoint import SHARDED, full_disk, make_run, train
from tests.checkpoint.compare import equal, nothing_changes, said_by_all
from tests.checkpoint.compare import full_state as full_state_of
from tests.common import STAGES, error_of, on_ranks, situation


def names_in(folder):
    return {path.name for path in folder.iterdir()}


def on_rank(rank, number, context):
    """Return `context` on the rank of this number, and a context that does nothing on the others."""
    return context if rank.number == number else contextlib.nullcontext()


# ----------------------------------------------------------------------------------------------------- behind training


@on_ranks(2, stage=[None, *STAGES])
def test_an_asynchronous_save_keeps_what_was_there(rank, stage, tmp_path):
    """Change model, state, groups and `extra` before rank 1 writes, and put the full state together meanwhile.

    The next save waits for this save.
    """
    model, optimizer = make_run(rank, stage, lr=torch.tensor(0.5), steps=2)
    path = tmp_path / f"{stage}"
    extra = {"average": torch.zeros(20)}
    before = copy.deepcopy([model.state_dict(), full_state_of(optimizer)])
    may_write = threading.Event()
    write = files.write

    def write_later(*args):
        may_write.wait(30)
        write(*args)

    if rank.number == 0:
        may_write.set()  # its thread waits for the thread of rank 1, in the group of the save
    with mock.patch.object(files, "write", write_later):
        saving = checkpoint.save(path, model, optimizer, extra, asynchronous=True)
        extra["average"].fill_(7)
        optimizer.param_groups[0]["lr"].fill_(9)
        train(rank, model, optimizer, (2, 3))
        full_state_of(optimizer)
        assert not path.exists()
        threading.Timer(0.1, may_write.set).start()
        line = error_of(lambda: checkpoint.save(path, model, optimizer))
    assert line.endswith("exists already") and saving.result() is None
    new_model, new_optimizer = make_run(rank, stage, seed=1, lr=torch.tensor(0.1))
    assert equal(checkpoint.load(path, new_model, new_optimizer), {"average": torch.zeros(20)})
    assert equal([new_model.state_dict(), full_state_of(new_optimizer)], before)


@on_ranks(2, stage=STAGES)
def test_a_failed_asynchronous_save_is_printed_and_told_by_the_next(rank, stage, tmp_path):
    """On rank 1 the disk is full. Rank 0 alone asks how the save went, and the next save tells the others."""
    run = make_run(rank, stage, steps=1)
    folder = tmp_path / stage
    no_space = OSError(28, "No space left on device")
    fails = mock.patch.object(storage.SummedFile, "write", side_effect=no_space)
    with on_rank(rank, 1, fails), mock.patch("sys.stderr.write") as print_error:
        saving = checkpoint.save(folder / "first", *run, asynchronous=True)
        wait([saving])
    words = "first can't be written: rank 1: No space left on device"
    assert print_error.call_args_list[0].args[0].endswith(words)
    if rank.number == 0:
        assert error_of(saving.result).endswith(words)
    line = said_by_all(error_of(lambda: checkpoint.save(folder / "never", *run)))
    assert line.endswith(words)
    checkpoint.save(folder / "third", *run)
    assert names_in(folder) == {"third"}


@on_ranks(3)
def test_ranks_in_unlike_numbers_of_groups_save_together(rank, tmp_path):
    """torch names a group after the number of groups that a rank is in, so these ranks would wait forever.

    On more ranks than have saved, `load` returns what rank 0 has saved as `extra`.
    """
    dist.new_group([1])
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    if rank.number < 2:
        run = make_run(rank, STAGE_4, group)
        checkpoint.save(tmp_path / "one", *run, f"rank {rank.number}")
        assert checkpoint.load(tmp_path / "one", *run) == f"rank {rank.number}"
    dist.barrier()
    assert checkpoint.load(tmp_path / "one", *make_run(rank, STAGE_4)) == "rank 0"


@on_ranks(2)
def test_new_groups_of_the_same_ranks_share_groups_and_a_thread_for_saving(rank):
    savers = {ranks.saver_of(dist.new_group([0, 1])) for _ in range(2)}
    assert len(savers) == 1


# -------------------------------------------------------------------------- an error on one rank is an error on all
# What save and load call, a function of each phase. The functions of OF_RANK_0 run on rank 0 alone.

OF_SAVE = [(files, "packed"), (files, "refuse_different"), (storage.Writer, "write_data")]
OF_RANK_0 = [(storage.Writer, "finish"), (files, "finish")]
OF_LOAD = [(storage, "checksum_of_folder"), (files, "memory_for"), (storage.Reader, "read_data"),
           (files, "groups_to_load")]
ERRORS = [MemoryError("too little memory"), ValueError("embedded null byte"), KeyError("nobody thought of it"),
          RuntimeError("several\nlines")]


@on_ranks(2, bad_rank=[0, 1])
def test_whatever_goes_wrong_on_one_rank_in_any_phase_is_one_line_on_all(rank, bad_rank, tmp_path):
    """No rank waits for a time-out, whose line would be another."""
    model, optimizer = make_run(rank, STAGE_4, steps=1)
    path = tmp_path / f"{bad_rank}" / "one"

    def line_of(call, module, name, error):
        """Call `call` while the function `name` raises `error` on one rank. Return the error of all ranks."""
        fails = mock.patch.object(module, name, side_effect=error)
        with situation(name), on_rank(rank, bad_rank, fails):
            return said_by_all(error_of(call, checkpoint.CheckpointError))

    phases = [*OF_SAVE, *OF_RANK_0] if bad_rank == 0 else OF_SAVE
    for (module, name), error in zip(phases, itertools.cycle(ERRORS)):
        line = line_of(lambda: checkpoint.save(path, model, optimizer), module, name, error)
        assert line.startswith(f"checkpoint {path} can't be written: "), name
        dist.barrier()
        assert not path.parent.exists() or not names_in(path.parent), name
    checkpoint.save(path, model, optimizer)
    train(rank, model, optimizer, [1])
    for (module, name), error in zip(OF_LOAD, ERRORS):
        with nothing_changes(model, optimizer):
            line = line_of(lambda: checkpoint.load(path, model, optimizer), module, name, error)
        assert line.startswith(f"checkpoint {path} can't be loaded: rank {bad_rank}: "), line
    checkpoint.load(path, model, optimizer)

    state_dict = full_state_of(optimizer)
    with nothing_changes(model, optimizer):
        line = line_of(lambda: full_state_of(optimizer), full_state, "own_state_dict", ERRORS[0])
        assert line == f"the state can't be put together: rank {bad_rank}: too little memory"
        line = line_of(lambda: checkpoint.load_full_state_dict(optimizer, state_dict), full_state, "loaded_value",
                       ERRORS[0])
        assert line == f"the state can't be loaded: rank {bad_rank}: too little memory"


@on_ranks(2)
def test_an_interrupt_in_a_save_stays_one(rank, tmp_path):
    """Ctrl-C comes to rank 0, and rank 1 raises an error. Nothing is left, and the next save works."""
    run = make_run(rank, STAGE_4)
    interrupt = mock.patch.object(storage.Writer, "write_data", side_effect=KeyboardInterrupt)
    kind = KeyboardInterrupt if rank.number == 0 else checkpoint.CheckpointError
    with on_rank(rank, 0, interrupt), pytest.raises(kind):
        checkpoint.save(tmp_path / "one", *run)
    dist.barrier()
    assert not names_in(tmp_path)
    dist.barrier()
    checkpoint.save(tmp_path / "one", *run)


@on_ranks(2, stage=SHARDED)
def test_a_place_that_cannot_be_written_is_one_line_and_nothing_is_left(rank, stage, tmp_path):
    """The disk of rank 1 is full; rank 0 doesn't see the files of another host; each rank has a path of its own."""
    model, optimizer = make_run(rank, stage, steps=2)
    folder = tmp_path / stage
    folder.mkdir(exist_ok=True)
    full = on_rank(rank, 1, full_disk(1000))
    elsewhere = mock.patch.object(files.Path, "is_file", return_value=False)
    for name, context, words in (
            ("full", full, "rank 1: File too large"),
            ("elsewhere", elsewhere, "of another rank isn't here: all need the same folder"),
            (f"at-{rank.number}", contextlib.nullcontext(), "the path is .*at-1 on rank 1, and .*at-0 on rank 0")):
        with situation(name), nothing_changes(model, optimizer), context:
            line = error_of(lambda: checkpoint.save(folder / name, model, optimizer))
            assert re.search(f"can't be written.*{words}", line), line
    dist.barrier()
    assert not names_in(folder)


@on_ranks(2, stage=SHARDED)
def test_what_would_not_be_loaded_again_is_not_saved(rank, stage, tmp_path):
    """Save the optimizer of another model; an `extra` or a parameter group that no load would read."""
    folder = tmp_path / stage
    model, optimizer = make_run(rank, stage)

    def refusal(*run_and_extra):
        return said_by_all(error_of(lambda: checkpoint.save(folder / "one", *run_and_extra)))

    line = refusal(torch.nn.Linear(3, 3), optimizer)
    assert "has a parameter or state of shape (), which isn't the model's" in line
    extra = np.zeros(2) if rank.number == 1 else {"step": 1}
    assert "rank 1: load() can't read extra.1 again: it holds numpy" in refusal(model, optimizer, extra)
    optimizer.param_groups[0]["mine"] = tmp_path
    assert "can't read optimizer.param_groups.0.mine again: it holds pathlib" in refusal(model, optimizer)
    dist.barrier()
    assert not names_in(folder)


def test_a_line_of_an_error_can_be_printed():
    line = ranks.first_line(ValueError("name \x1b[31mred\x07\x00 " + "x" * 10_000_000))
    assert line.isprintable() and line.startswith(r"name \x1b[31mred\x07\x00 xxx") and len(line) <= 502
