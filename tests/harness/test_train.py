"""train.py: all stages print the losses of DDP, on a mesh and after a stop too, and bad input is one line."""

import os
import re
import shutil

import pytest

from harness import STAGE_1, STAGE_2, STAGE_3, STAGE_4
from harness.training import corpus
from tests.common import STAGES
from tests.ranks import ROOT, run_alone, run_ranks

pytestmark = pytest.mark.waits

TRAIN_4 = f"{STAGE_4}/train.py"
OPTIONS = ["--model", "nano", "--sequence-length", "32", "--steps", "18", "--accumulate", "2", "--clip", "0.5"]


def losses(ended):
    """Of ranks that have ended -> [(number of a step, its loss), …]; those of the validation have number 0.

    A slow machine prints more steps, a line every 10 seconds: only those that every machine prints are compared.
    """
    found = re.findall(r"(?:step +(\d+)/18 +)?loss(?: before:| after:)? +(\d+\.\d{4,})", ended[0].stdout)
    return [(int(step or 0), float(loss)) for step, loss in found if int(step or 0) in (0, 1, 10, 18)]


@pytest.fixture(scope="module")
def of_ddp():
    """Its losses: of validation, of steps 1, 10 and 18, and of validation."""
    found = losses(run_ranks(2, "harness/training/train_ddp.py", *OPTIONS, "--batch-size", "4"))
    assert [step for step, _ in found] == [0, 1, 10, 18, 0] and found[-1] < found[0]
    return [(step, pytest.approx(loss, abs=1.5e-4)) for step, loss in found]  # four decimals are printed


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_prints_the_losses_of_ddp(stage, of_ddp):
    ended = run_ranks(2, f"{stage}/train.py", *OPTIONS, "--batch-size", "4")
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert losses(ended) == of_ddp


def test_a_run_on_a_mesh_stops_and_goes_on_with_the_losses_of_ddp(of_ddp, tmp_path):
    """2 x 2 until a signal in step 8, then 2 x 2 and 4 x 1."""
    mesh = [*OPTIONS, "--batch-size", "4", "--tp", "2", "--checkpoint"]
    ended = run_ranks(4, "tests/harness/killed.py", "1", "backward", "SIGTERM", TRAIN_4, *mesh, tmp_path / "2x2")
    assert [rank.code for rank in ended] == [75] * 4, ended[0].stderr
    assert losses(ended) == of_ddp[:2]
    shutil.copytree(tmp_path / "2x2", tmp_path / "4x1")
    for options in ([*mesh, tmp_path / "2x2"], [*OPTIONS, "--batch-size", "2", "--checkpoint", tmp_path / "4x1"]):
        ended = run_ranks(4, TRAIN_4, *options)
        assert [rank.code for rank in ended] == [0] * 4, ended[0].stderr
        assert losses(ended)[-2:] == of_ddp[-2:]


@pytest.mark.parametrize("script, args, message", [
    (TRAIN_4, ["--tp", "3"], "2 ranks can't be split into 3 equal parts"),
    (f"{STAGE_3}/train.py", ["--tp", "2"], "it is for stage4_overlap/train.py"),
    (f"{STAGE_2}/train.py", ["--data", "/nowhere"], "there is no such file"),
])
def test_what_ranks_cannot_do_one_of_them_says_in_a_line(script, args, message):
    first, second = run_ranks(2, script, *OPTIONS, *args)
    assert (first.code, second.code) == (2, 2) and message in first.stderr
    assert [rank.stderr.count("error") for rank in (first, second)] == [1, 0]


def test_bad_input_is_one_line(tmp_path):
    """Of a rank without torchrun, which adds lines of its own. More options: test_command_lines.py."""
    (tmp_path / "empty.txt").touch()
    for args, message in ((["--timeout"], "--timeout: expected one argument"),
                          (["--data", "empty.txt"], "empty.txt"),
                          (["--checkpoint", "empty.txt/a"], "Not a directory: 'empty.txt/a'")):
        run = run_alone(ROOT / STAGE_1 / "train.py", "--model", "nano", *args, cwd=tmp_path)
        assert run.code == 2 and message in run.stderr and "Traceback" not in run.stderr, run.stderr
        assert len([line for line in run.stderr.splitlines() if "error" in line]) == 1


def test_a_folder_of_text_is_read_but_for_what_is_no_file(tmp_path):
    """Every folder in it, whatever its name; a pipe would be waited for, and a broken link is nothing."""
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.txt").write_bytes(b"text " * 9)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert bytes(corpus.load_bytes(tmp_path)) == b"text " * 9
    for path in (tmp_path / "pipe", "x" * 300, "~nobody-of-that-name/text"):
        with pytest.raises(ValueError, match="--data .*: there is no such file or folder; give a text file"):
            corpus.load_bytes(path)
