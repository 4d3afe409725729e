"""The page holds what the cores do, and its numbers equal those of a replicated step, computed by hand below."""

import json

import pytest

from show import frames, page, record
from show.frames import memory_after
from show.trace import Event, Place
from show.wires import Call
from tests.show.test_page import NEW, PROGRAMS, each_stage, last_frame_of


@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("id", ["0", "1", "2", "3", "4", "4-queue"])
def test_the_page_holds_what_the_core_does(run, id, world_size):
    """Record a program anew: the recording is equal, because two recordings never differ."""
    program = next(shown.program for shown in page.SHOWN if shown.id == id)
    fresh = frames.recording(run(record.record_rank, program), program)
    for part in fresh.keys() - {"storages"}:  # where the page has places, too
        assert json.loads(json.dumps(fresh[part])) == PROGRAMS[id][part], f"{part}: {NEW}"


def cells_of(program, row, frame):
    """Return for each rank the cells of a row after a frame."""
    cells_by_rank = [[] for _ in range(program["ranks"])]
    for number, cells in memory_after(program, frame).items():
        storage = program["storages"][number]
        if cells and storage["row"] == row:
            cells_by_rank[storage["rank"]] += cells
    return cells_by_rank


@each_stage
def test_the_last_frame_holds_the_numbers_of_a_replicated_step(id):
    """The first step of AdamW with lr 1 takes 1 from 500 + 2 e, for e from 1 on."""
    program = PROGRAMS[id]
    row = "ParameterBuffer.flat" if id == "4" else "parameters"  # stage 4 keeps the parameters in one buffer
    for cells in cells_of(program, row, len(program["frames"]) - 1):
        assert sorted(cell.value for cell in cells) == pytest.approx([499 + 2 * e for e in range(1, 17)], abs=1e-3)


def test_after_sync_grads_what_a_rank_doesnt_step_is_garbage():
    program = PROGRAMS["3"]
    for rank, cells in enumerate(cells_of(program, "GradBuffer.flat", last_frame_of(program, "sync_grads"))):
        own = [151 + e for e in range(4 * rank, 4 * rank + 4)]
        assert [cell.value for cell in cells if cell.kind != "garbage"] == own
    program = PROGRAMS["1"]
    ranks = cells_of(program, "gradients", last_frame_of(program, "sync_grads"))
    assert [sum(cell.kind == "average" for cell in cells) for cells in ranks] == [5, 5, 3, 3]


def event_of(starts=(), ends=()):
    operations = [Call(key, "broadcast", "broadcast", 0, (), ()) for key in starts]
    return Event((Place("loop.py", 1, "train", 1, 1),), starts=operations, ends=list(ends))


def test_a_collective_ends_a_frame_after_the_last_rank_has_begun_it_and_who_comes_first_waits():
    early = [event_of(), event_of(starts=[1]), event_of(ends=[1]), event_of()]
    late = [event_of(), event_of(), event_of(), event_of(starts=[1]), event_of(ends=[1]), event_of()]
    assert [sorted(frame) for frame in frames.in_frames([early, late])] == [[0, 1], [0, 1], [1], [1], [0, 1], [0, 1]]
