"""train.py: all stages print the losses of DDP, and bad input is one line. Stage 4 is run by torchrun."""

import functools
import os
import re
import subprocess
import sys

import pytest

from harness import corpus
from tests.common import STAGES
from tests.ranks import ROOT, run_alone, run_ranks

pytestmark = pytest.mark.waits

NANO = ["--model", "nano", "--sequence-length", "32", "--batch-size", "4"]


def printed_by(script, *args):
    """-> what 2 ranks print."""
    if STAGES[3] in script:  # in the others torchrun would do the same once more
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
        return subprocess.run([*command, *args], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True,
                              timeout=300).stdout
    ended = run_ranks(2, script, *args)
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    return ended[0].stdout + ended[1].stdout


@functools.cache
def losses(script):
    """-> what it prints about losses, after 12 steps of 2 micro-batches, clipped."""
    printed = printed_by(script, *NANO, "--steps", "12", "--accumulate", "2", "--clip", "0.5")
    return [float(loss) for loss in re.findall(r"loss(?: before:| after:)? +(\d+\.\d{4,})", printed)]


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_prints_the_losses_of_ddp(stage):
    reference = losses("harness/train_ddp.py")
    assert len(reference) >= 4 and reference[-1] < reference[0]
    assert losses(f"{stage}/train.py") == pytest.approx(reference, abs=1.5e-4)  # four decimals are printed


def test_bad_input_is_one_line(tmp_path):
    """Of a rank without torchrun, which adds lines of its own, and once of two. More options: test_command_lines.py."""
    (tmp_path / "empty.txt").touch()
    for args, message in ((["--timeout"], "--timeout: expected one argument"),
                          (["--data", "empty.txt"], "empty.txt"),
                          ([*NANO, "--checkpoint", "empty.txt/a"], "--checkpoint empty.txt/a/step: Not a directory")):
        run = run_alone(ROOT / STAGES[0] / "train.py", *args, cwd=tmp_path)
        assert run.code == 2 and message in run.stderr and "Traceback" not in run.stderr, run.stderr
        assert len([line for line in run.stderr.splitlines() if "error" in line]) == 1
    ended = run_ranks(2, "stage2_allgather/train.py", "--data", "/nowhere")
    assert [(rank.code, rank.stderr.count("there is no such file")) for rank in ended] == [(2, 1), (2, 0)]
    assert not any("Traceback" in rank.stderr for rank in ended)


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
