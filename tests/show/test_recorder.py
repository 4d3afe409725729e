"""The recorder: its numbers are those of a replicated step, by hand, and bad input is one line."""

import json
import sys

import pytest

from harness import STAGE_3, STAGE_4, STAGES
from show import __main__ as command
from show import frames, page, record, replicated
from show.frames import Memory
from show.trace import Event, Place
from show.wires import Operation
from tests.ranks import ROOT, run_module
from tests.show.test_page import DATA

RUNGS = [replicated.__name__, *STAGES]
RECORDINGS = {}  # by program: two are equal byte for byte, as a test here shows, so that each is made once


def recorded(run, world_size, package, **settings):
    """Return what the page gets, from ranks that are there already."""
    program = record.Program(**{"package": package, "ranks": world_size, "optimizer": "momentum"} | settings)
    if program not in RECORDINGS:
        RECORDINGS[program] = frames.recording(run(record.record_rank, program), program)
    return RECORDINGS[program]


def cells_of(recording, row, last):
    """-> for each rank the cells of a row after frame `last`."""
    memory = Memory(recording, last)
    ranks = memory.rows()[row]
    return [[cell for number in ranks[rank] for cell in memory.cells.get(number) or ()] for rank in sorted(ranks)]


def parameters(recording):
    """-> for each rank the model's parameters in the last frame, by element."""
    has_buffer = any(one["row"] == "ParameterBuffer.flat" for one in recording["storages"])
    row = "ParameterBuffer.flat" if has_buffer else "parameters"
    ranks = cells_of(recording, row, len(recording["frames"]) - 1)
    kinds = ("old", "new", "stale")
    return [[value for _, value in sorted((one[2], one[0]) for one in cells if one[1] in kinds)] for cells in ranks]


def last_frame_of(recording, phase):
    return max(index for index, frame in enumerate(recording["frames"]) if frame["phase"] == phase)


@pytest.mark.parametrize("world_size, dtype", [(1, "float32"), (3, "float32"), (3, "bfloat16")])
@pytest.mark.parametrize("rung", RUNGS)
def test_the_last_frame_holds_the_numbers_of_a_replicated_step(run, rung, world_size, dtype):
    """500 + 2 e less the average of 100 r + e, whose momentum is itself in the first step.

    In bfloat16 a gradient is rounded when it is sent, to 1 in 256 of some hundreds.
    """
    wanted = [500 + 2 * e - sum(100 * rank + e for rank in range(world_size)) / world_size for e in range(1, 17)]
    for values in parameters(recorded(run, world_size, rung, dtype=dtype)):
        assert values == pytest.approx(wanted, abs=4 if dtype == "bfloat16" else 1e-3)


@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("id", ["0", "2", "4"])
def test_the_page_holds_what_the_core_does(run, id, world_size):
    """Recorded anew, and equal: two recordings never differ."""
    program = next(one.program for one in page.SHOWN if one.id == id)
    fresh = recorded(run, world_size, **vars(program))
    on_page = next(one for one in DATA["programs"] if one["id"] == id)
    for part in ("frames", "cells", "operations", "stacks", "sent_bytes"):
        assert json.loads(json.dumps(fresh[part])) == on_page[part], f"{part}: make show HTML=1"


@pytest.mark.parametrize("world_size", [4])
def test_after_sync_grads_what_a_rank_doesnt_step_is_garbage(run, world_size):
    recording = recorded(run, world_size, STAGE_3)
    for rank, cells in enumerate(cells_of(recording, "GradBuffer.flat", last_frame_of(recording, "sync_grads"))):
        own = range(4 * rank, 4 * rank + 4)
        assert [(value, kind) for value, kind, *_ in cells if kind != "garbage"] == [(151 + e, "average") for e in own]
    recording = recorded(run, world_size, STAGES[0])
    assert set(recording["owners"]) == {0, 1, 2}  # three parameters, four ranks
    ranks = cells_of(recording, "gradients", last_frame_of(recording, "sync_grads"))
    assert [sum(kind == "average" for _, kind, *_ in cells) for cells in ranks] == [9, 5, 2, 0]


@pytest.mark.parametrize("world_size", [4])
def test_stage_4_sends_two_buckets_during_backward_and_receives_parameters_during_forward(run, world_size):
    recording = recorded(run, world_size, STAGE_4)
    in_flight = {"backward": [], "forward": []}
    for index, frame in enumerate(recording["frames"]):
        in_flight.setdefault(frame["phase"], []).append([
            one["what"] for one in recording["operations"]
            if any(start <= index < end for *_, start, end in one["arrows"])])
    assert max(map(len, in_flight["backward"])) == 2
    assert ["gradients"] * 2 in in_flight["backward"] and ["parameters"] * 3 in in_flight["forward"]
    assert [one["params"] for one in recording["operations"]] == [[2], [1], [0], [0], [1], [2]]
    first = next(index for index, frame in enumerate(recording["frames"]) if frame["step"] == 1)
    assert any(cell[1] == "stale" for cells in cells_of(recording, "ParameterBuffer.flat", first) for cell in cells)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("settings", [{"params": (3, 13)}, {"optimizer": "sgd", "steps": 2}], ids=str)
def test_a_run_can_be_varied(run, world_size, settings):
    recording = recorded(run, world_size, STAGE_3, **settings)
    n_steps = settings.get("steps", 1)
    assert len(parameters(recording)[0]) == sum(recording["params"])
    assert parameters(recording)[0] == parameters(recording)[1]
    assert max(frame["step"] for frame in recording["frames"]) == n_steps
    assert sum(one["what"] == "gradients" for one in recording["operations"]) == n_steps


def moment(starts=(), ends=()):
    operations = [Operation(key, "broadcast", "broadcast", ()) for key in starts]
    return Event((Place("loop.py", 1, "train", 1),), starts=operations, ends=list(ends))


def test_a_collective_ends_a_frame_after_the_last_rank_has_begun_it_and_who_comes_first_waits():
    early = [moment(), moment(starts=["sum"]), moment(ends=["sum"]), moment()]
    late = [moment(), moment(), moment(), moment(starts=["sum"]), moment(ends=["sum"]), moment()]
    assert [sorted(frame) for frame in frames.in_frames([early, late])] == [[0, 1], [0, 1], [1], [1], [0, 1], [0, 1]]
    assert [one.frame for one in early] == [0, 1, 4, 5] and [one.frame for one in late] == [0, 1, 2, 3, 4, 5]


# ---------------------------------------------------------------------------------------------------- the command


@pytest.mark.waits
def test_the_terminal_shows_frames_and_writes_no_file():
    def written():
        return {path: path.stat().st_mtime_ns for name in ("docs", "results", "show")
                for path in (ROOT / name).iterdir() if path.is_file()}

    before = written()
    run = run_module("show", 3, COLUMNS=80)
    assert run.code == 0, run.stderr
    assert written() == before and max(map(len, run.stdout.splitlines())) <= 80
    unbroken = run.stdout.replace("\n" + " " * len("  rank 0 "), "")
    lines = [line.replace("│", " ").split() for line in unbroken.splitlines()]
    for rank in range(4):
        own = [str(151 + e) for e in range(4 * rank, 4 * rank + 4)]
        assert any(line[:2] == ["rank", str(rank)] and line[2 + 4 * rank : 6 + 4 * rank] == own for line in lines)
        assert ["rank", str(rank), *(str(501 + 2 * e) for e in range(16))] in lines
    assert "reduce-scatter of gradients: 12 messages of 16 B" in run.stdout
    assert "ShardedOptimizer.step_own, optimizer.py" in run.stdout


@pytest.mark.parametrize("args, message", [
    ("7", f"STAGE=7: there are stages 0 to {max(command.STAGES)}"),
    ("nothing_here", "no package nothing_here here"),
    ("3 --params 0,x", "--params 0,x: it must be like 5,2,9"),
    ("3 --params 100", "at most 48"),
    ("3 --ranks 99", "--ranks: must be a whole number from 1 to 8, not 99"),
    ("3 --steps 0", "--steps: must be a whole number from 1 to 4, not 0"),
    ("3 --optimizer lion", "lion")])
def test_bad_input_is_one_line(args, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["show", *args.split()])
    with pytest.raises(SystemExit) as exit:
        command.main()
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
