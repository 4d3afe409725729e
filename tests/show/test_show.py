"""show.py: its numbers are those that a reader gets by hand, on paper and in the SVG, and bad input is one line."""

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stage3_gradbuffer import show

ROOT = Path(__file__).resolve().parents[2]
STEPS = ["All gradients", "Reduced shard", "Main gradients", "Main parameters", "Shard of parameters", "All parameters"]
STEPS += ["Zeros"]


def rows_in(text):
    """What was printed -> {title: a row for each rank}; a row is the cells' text, without blanks."""
    blocks = [block.splitlines() for block in text.replace("│", " ").split("\n\n")]
    return {lines[0].split(":")[0].split(". ")[-1]: [line.split()[2:] for line in lines if line.startswith("rank ")]
            for lines in blocks}


def rows_in_svg(path):
    """Text of the cells in the rows of ranks, from top to bottom, without blanks."""
    rows, row = [], None
    for text in ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}text"):
        if text.get("class") in ("words", "title"):
            row = []
            if text.text.startswith("rank "):
                rows.append(row)
        elif text.text:
            row.append(text.text)
    return rows


def strings(values):
    return [f"{value:.3g}" for value in values]


def shards(row, world_size):
    size = len(row) // world_size
    return [row[rank * size : (rank + 1) * size] for rank in range(world_size)]


def test_the_numbers_are_those_of_a_step_by_hand(tmp_path):
    """4 ranks, 16 elements: gradients e + 10 r, their mean e + 15, parameters 10 - 0.1 (e + 15)."""
    path = tmp_path / "new folder" / "show.svg"
    command = [sys.executable, "-m", "stage3_gradbuffer.show", "--svg", path]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    rows = rows_in(run.stdout)
    assert [title for title in rows if rows[title]] == STEPS

    elements = range(1, 17)
    means, params = strings(e + 15 for e in elements), strings(10 - 0.1 * (e + 15) for e in elements)
    assert rows["All gradients"] == [strings(e + 10 * rank for e in elements) for rank in range(4)]
    assert rows["Main gradients"] == shards(means, 4)
    assert rows["Main parameters"] == shards(params, 4)
    for rank in range(4):  # what lies around the shard is nobody's business
        assert shards(rows["Reduced shard"][rank], 4)[rank] == shards(means, 4)[rank]
        assert shards(rows["Shard of parameters"][rank], 4)[rank] == shards(params, 4)[rank]
    assert rows["All parameters"] == [params] * 4
    assert rows["Zeros"] == [["0"] * 16] * 4
    assert rows_in_svg(path) == [row for title in STEPS for row in rows[title]]


def show_here(monkeypatch, capsys, *args):
    """Without the seconds that a Python process needs to import torch."""
    monkeypatch.setattr(sys, "argv", ["show.py", *map(str, args)])
    show.main()
    return rows_in(capsys.readouterr().out)


@pytest.mark.parametrize("grad_dtype", [[], ["--grad-dtype", "float32"]], ids=["grads in 16 bits", "grads in fp32"])
def test_main_parameters_of_16_bit_ones_are_exact_and_the_model_gets_them_rounded(grad_dtype, tmp_path, monkeypatch,
                                                                                 capsys):
    """2 ranks, 5 elements and one of padding: means e + 5, main parameters 9.4 9.3 9.2 9.1 9."""
    path = tmp_path / "show.svg"
    rows = show_here(monkeypatch, capsys, "--ranks", 2, "--params", "1,4", "--dtype", "bfloat16", "--svg", path,
                     *grad_dtype)
    assert rows["All gradients"] == [["1", "2", "3", "4", "5", "·"], ["11", "12", "13", "14", "15", "·"]]
    assert rows["Main gradients"] == [["6", "7", "8"], ["9", "10"]]
    assert rows["Main parameters"] == [["9.4", "9.3", "9.2"], ["9.1", "9"]]
    assert [row[:5] for row in rows["All parameters"]] == [["9.38", "9.31", "9.19", "9.12", "9"]] * 2
    assert rows["Zeros"] == [["0"] * 5 + ["·"]] * 2
    assert rows_in_svg(path) == [row for title in STEPS for row in rows[title]]


@pytest.mark.parametrize(
    "args, message",
    [
        (["--ranks", "0"], "--ranks"),
        (["--params", ""], "--params"),
        (["--params", "3,0"], "'3,0'"),
        (["--params", "100"], "at most 64"),
        (["--dtype", "int8"], "int8"),
        (["--svg", "."], "directory"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(args, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as exit:
        show_here(monkeypatch, capsys, *args)
    assert exit.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_full_disk_is_one_line():
    show = [sys.executable, "-m", "stage3_gradbuffer.show", "--svg", "/dev/full"]
    run = subprocess.run(show, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 1
    assert run.stderr == "show.py: [Errno 28] No space left on device\n"
