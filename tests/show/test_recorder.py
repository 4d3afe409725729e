"""The recorder: its numbers are those of a replicated step, by hand, and bad input is one line."""

import json
import subprocess
import sys

import pytest
import torch

from show import __main__ as command
from show import clock, frames, programs, record, replicated
from show.memory import Memory
from show.trace import Event, Place
from show.wires import Operation
from tests.common import STAGES
from tests.ranks import ROOT, run_module

RUNGS = [replicated.__name__, *STAGES]
THREE, FOUR = STAGES[2:]


RECORDINGS = {}  # by program: two are equal byte for byte, as a test here shows, so that each is made once


def recorded(run, world_size, package, **settings):
    """What the page gets, on ranks that are there already."""
    program = record.Program(package, world_size, **settings)
    if program not in RECORDINGS:
        sources = frames.sources_of(record.core_files(package))
        RECORDINGS[program] = frames.recording(run(record.record_rank, program), program, sources)
    return RECORDINGS[program]


def memory_at(recording, last=None):
    """-> Memory after frame `last`, by default the last one."""
    memory = Memory(recording)
    for frame in recording["frames"][: None if last is None else last + 1]:
        memory.take(frame)
    return memory


def parameters(recording, rank):
    """-> the model's parameters on a rank in the last frame, by element; each as it is there."""
    memory = memory_at(recording)
    rows = memory.rows()
    values = {}
    for number in rows.get("ParameterBuffer.flat", rows.get("parameters"))[rank]:
        for value, label in memory.cells[number]:
            kind, element, _ = recording["labels"][label]
            if kind in ("old", "new", "stale"):
                values[element] = value
    return [values[element] for element in sorted(values)]


def by_hand(world_size, dtype, n=16):
    """500 + 2 e less the average of 100 r + e, whose momentum is itself in the first step."""
    means = [sum(100 * rank + e for rank in range(world_size)) / world_size for e in range(1, n + 1)]
    return torch.tensor([500 + 2 * e - mean for e, mean in enumerate(means, 1)], dtype=dtype).tolist()


@pytest.mark.parametrize("world_size, dtype", [
    (1, "float32"), (2, "float32"), (3, "float32"), (3, "bfloat16"), (3, "float16")])
@pytest.mark.parametrize("rung", RUNGS)
def test_the_last_frame_holds_the_numbers_of_a_replicated_step(run, rung, world_size, dtype):
    """16-bit gradients are rounded on their way: to 1 in 256 of some hundreds in bfloat16, to 1 in 2048 in float16.

    A third is rounded in any case. What other numbers of ranks compute in 16 bits, tests/stages/test_dtypes.py shows.
    """
    recording = recorded(run, world_size, rung, dtype=dtype)
    wanted = by_hand(world_size, getattr(torch, dtype))
    near = {"float32": 0, "bfloat16": 4, "float16": 0.5}[dtype]
    for rank in range(world_size):
        assert parameters(recording, rank) == pytest.approx(wanted, abs=near), rank


@pytest.mark.parametrize("world_size", [4])
@pytest.mark.parametrize("rung, wire_bytes", list(zip(RUNGS, (96, 96 + 48, 96 + 108, 48 + 48, 72 + 72))))
def test_bytes_are_those_of_the_formulas(run, rung, wire_bytes, world_size):
    """Of 16 elements of 4 bytes: an all-reduce sends 2 · 64 · 3/4 = 96; stage 2 pads to 36 elements, stage 4 to 24."""
    recording = recorded(run, world_size, rung)
    sent = [arrow[2] for operation in recording["operations"] for arrow in operation["arrows"]]
    assert sum(sent) / world_size == wire_bytes


def rows_of(recording, last, row):
    memory = memory_at(recording, last)
    return [
        [
            (memory.kind(number, cell), memory.cells[number][cell][0])
            for number in numbers
            for cell in range(len(memory.cells[number]))
        ]
        for _, numbers in sorted(memory.rows()[row].items())
    ]


def last_frame_of(recording, phase):
    return max(index for index, frame in enumerate(recording["frames"]) if frame["phase"] == phase)


@pytest.mark.parametrize("world_size", [4])
def test_after_sync_grads_a_rank_of_stage_3_holds_its_averages_and_garbage(run, world_size):
    recording = recorded(run, world_size, THREE)
    for rank, cells in enumerate(rows_of(recording, last_frame_of(recording, "sync_grads"), "GradBuffer.flat")):
        own = range(4 * rank, 4 * rank + 4)
        assert [cell for cell, (kind, _) in enumerate(cells) if kind == "average"] == list(own)
        assert {kind for cell, (kind, _) in enumerate(cells) if cell not in own} == {"garbage"}
        assert [cells[cell][1] for cell in own] == [151 + cell for cell in own]


@pytest.mark.parametrize("world_size", [4])
def test_what_a_rank_of_stage_1_doesnt_step_was_averaged_for_nothing(run, world_size):
    recording = recorded(run, world_size, STAGES[0])
    assert set(recording["owners"]) == {0, 1, 2}  # three parameters, four ranks
    for rank, cells in enumerate(rows_of(recording, last_frame_of(recording, "sync_grads"), "gradients")):
        assert sum(kind == "average" for kind, _ in cells) == (9, 5, 2, 0)[rank]


def under_way(recording, index):
    return [
        one["what"] for one in recording["operations"] if any(start <= index < end for *_, start, end in one["arrows"])
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_stage_4_sends_two_buckets_during_backward_and_receives_parameters_during_forward(run, world_size):
    recording = recorded(run, world_size, FOUR)
    at = {
        phase: [
            under_way(recording, index) for index, frame in enumerate(recording["frames"]) if frame["phase"] == phase
        ]
        for phase in ("backward", "forward")
    }
    assert max(map(len, at["backward"])) == 2
    assert ["gradients"] * 2 in at["backward"]
    assert ["parameters"] * 3 in at["forward"]
    assert [one["params"] for one in recording["operations"]] == [[2], [1], [0], [0], [1], [2]]
    stale = {
        kind
        for cells in rows_of(recording, first_forward_after(recording), "ParameterBuffer.flat")
        for kind, _ in cells
    }
    assert "stale" in stale


def first_forward_after(recording):
    return next(index for index, frame in enumerate(recording["frames"]) if frame["step"] == 1)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize(
    "settings",
    [
        {"params": (3, 13)},
        {"optimizer": "adamw"},
        {"optimizer": "sgd", "steps": 2},
        {"params": (1,)},
        {"dtype": "bfloat16", "grad_dtype": "float32"},
    ],
    ids=str,
)
def test_a_run_can_be_varied(run, world_size, settings):
    recording = recorded(run, world_size, THREE, **settings)
    assert parameters(recording, 0) == parameters(recording, 1)
    assert max(frame["step"] for frame in recording["frames"]) == settings.get("steps", 1)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize("buckets", [1, 2, 3])
def test_buckets_are_as_many_as_asked_for(run, world_size, buckets):
    recording = recorded(run, world_size, FOUR, buckets=buckets)
    assert sum(one["what"] == "gradients" for one in recording["operations"]) == buckets


def moment(line, starts=(), ends=()):
    operations = [Operation(key, "all-reduce", (), ()) for key in starts]
    return Event((Place("loop.py", line, "train", 1),), True, "", starts=operations, ends=list(ends))


def test_a_collective_ends_a_tick_after_the_last_rank_has_begun_it_and_who_comes_first_waits():
    early = [moment(1), moment(2, starts=["sum"]), moment(2, ends=["sum"]), moment(3)]
    late = [moment(1), moment(1), moment(1), moment(2, starts=["sum"]), moment(2, ends=["sum"]), moment(3)]
    clock.set_ticks([early, late], [0, 0])
    assert [one.tick for one in early] == [0, 1, 4, 5]
    assert [one.tick for one in late] == [0, 1, 2, 3, 4, 5]


def test_ranks_begin_the_loop_in_the_same_tick():
    short, long = [moment(1), moment(2)], [moment(1), moment(1), moment(1), moment(2)]
    clock.set_ticks([short, long], [1, 3])
    assert short[1].tick == long[3].tick == 3


def test_ranks_that_wait_for_each_other_for_ever_are_an_error():
    waits = [[moment(1, ends=[key]), moment(2, starts=[other])] for key, other in (("a", "b"), ("b", "a"))]
    with pytest.raises(RuntimeError, match="for ever"):
        clock.set_ticks(waits, [0, 0])


# ---------------------------------------------------------------------------------------------------- the command


@pytest.mark.waits
def test_a_step_comes_without_warnings_of_torch():
    """reduce_scatter_tensor and all_gather_into_tensor have other names in torch 2.13, and not in older ones."""
    run = subprocess.run([sys.executable, "-m", "show", "3"], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.waits
def test_two_recordings_are_equal_byte_for_byte(tmp_path):
    """One of them is by a Python of its own: forked processes have one seed for the order of a set."""
    command = [sys.executable, "-m", "show", "4", "--ranks", "2", "--json", tmp_path / "one"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    run = run_module("show", 4, "--ranks", 2, "--json", tmp_path / "two")
    assert run.code == 0, run.stderr
    texts = [(tmp_path / name).read_bytes() for name in ("one", "two")]
    assert texts[0] == texts[1] and json.loads(texts[0])["format"] == frames.FORMAT


@pytest.mark.waits
def test_the_terminal_shows_frames_and_writes_no_file(tmp_path):
    def changed():
        return subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout

    before = changed()
    run = run_module("show", 3)
    assert run.code == 0, run.stderr
    assert changed() == before
    lines = [line.replace("│", " ").split() for line in run.stdout.splitlines()]
    for rank in range(4):
        own = [str(151 + e) for e in range(4 * rank, 4 * rank + 4)]
        assert any(line[:2] == ["rank", str(rank)] and line[2 + 4 * rank : 6 + 4 * rank] == own for line in lines)
        assert ["rank", str(rank), *(str(351 + e) for e in range(16))] in lines
    assert "reduce-scatter of gradients: 12 messages of 16 B" in run.stdout


@pytest.mark.waits
def test_a_package_of_ones_own_is_recorded_as_a_stage_is(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "__init__.py").write_text("from .optimizer import ShardedOptimizer\n")
    (mine / "optimizer.py").write_text((ROOT / STAGES[0] / "optimizer.py").read_text())
    run = run_module("show", "mine", "--ranks", 2, PYTHONPATH=tmp_path)
    assert run.code == 0, run.stderr
    assert "ShardedOptimizer.sync_params, optimizer.py" in run.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (["7"], "STAGE=7: there are stages 0 to 4"),
        (["nothing_here"], "no package nothing_here here"),
        (["3", "--params", "0,x"], "--params 0,x: it must be like 5,2,9"),
        (["3", "--params", "100"], "at most 48"),
        (["3", "--ranks", "99"], "--ranks 99: it must be from 1 to 8"),
        (["3", "--steps", "0"], "--steps 0"),
        (["3", "--dtype", "int8"], "int8"),
        (["2", "--grad-dtype", "float32"], "only stage 3"),
        (["3", "--json", "docs"], "folder"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(args, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["show", *args])
    with pytest.raises(SystemExit) as exit:
        command.main()
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_each_bug_of_a_chapter_is_a_program_of_the_page():
    from tests.pages.test_chapters import BUGS

    edits = {(one.program.package, edit[1:]) for one in programs.SHOWN for edit in one.program.edits}
    assert {(chapter, (before, after)) for (_, chapter), (before, after, _) in BUGS.items()} <= edits
