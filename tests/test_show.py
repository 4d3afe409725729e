"""make show: the numbers that it prints are those that one gets by hand, and the picture is an SVG."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]


def show(svg, *args):
    command = [sys.executable, "-m", "stage3_gradbuffer.show", "--svg", str(svg), *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)


def rows_of(output, method):
    """The numbers of each rank below the heading that names the method."""
    lines = output[output.index(f"{method}() →") :].splitlines()[1:]
    end = next(i for i, line in enumerate(lines) if not line.strip())
    lines = [line for line in lines[:end] if line.startswith("rank")]
    return [[float(x) for x in re.findall(r"-?\d+\.?\d*", line.split(maxsplit=2)[2])] for line in lines]


def test_sixteen_gradients_on_four_ranks(tmp_path):
    """Element e of rank r has the gradient e + 10 r: the mean is e + 15, and 10 - 0.1 (e + 15) is the parameter."""
    run = show(tmp_path / "show.svg")
    assert run.returncode == 0, run.stderr
    assert rows_of(run.stdout, "collect_grads") == [[e + 10 * r for e in range(1, 17)] for r in range(4)]
    reduced = rows_of(run.stdout, "reduce_scatter_grads")
    assert [row[4 * r : 4 * r + 4] for r, row in enumerate(reduced)] == [
        [e + 15 for e in range(4 * r + 1, 4 * r + 5)] for r in range(4)
    ]
    expected = pytest.approx([10 - 0.1 * (e + 15) for e in range(1, 17)])
    assert all(row == expected for row in rows_of(run.stdout, "all_gather_params"))
    assert rows_of(run.stdout, "zero") == [[0.0] * 16] * 4
    texts = [element.text for element in ElementTree.parse(tmp_path / "show.svg").iter() if element.text]
    assert sum("rank 3" in text for text in texts) == 7  # once in each key step


def test_two_ranks_in_16_bits(tmp_path):
    run = show(tmp_path / "show.svg", "--ranks", "2", "--dtype", "bfloat16", "--grad-dtype", "float32")
    assert run.returncode == 0, run.stderr
    assert "bfloat16" in run.stdout and len(rows_of(run.stdout, "all_gather_params")) == 2


@pytest.mark.parametrize("args", [["--ranks", "0"], ["--params", ""], ["--dtype", "int8"]], ids=str)
def test_bad_input_is_one_line(args, tmp_path):
    run = show(tmp_path / "show.svg", *args)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr and "error" in run.stderr
