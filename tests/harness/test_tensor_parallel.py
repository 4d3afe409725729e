"""train.py --tp: a GPT whose layers are shared prints the losses of one process, and goes on with other ranks."""

import re
import shutil

import pytest

from tests.common import STAGES
from tests.ranks import run_alone, run_ranks

pytestmark = pytest.mark.waits

TRAIN = f"{STAGES[3]}/train.py"
OPTIONS = ["--model", "nano", "--sequence-length", "32", "--steps", "18", "--clip", "0.5"]


def losses(ended):
    assert [rank.code for rank in ended] == [0] * len(ended), ended[0].stderr
    return losses_in(ended[0].stdout)


def losses_in(text):
    """-> number of a step, 0 for none; what it has lost."""
    found = re.findall(r"(?:step +(\d+)(?:/18)? +)?loss(?: before:| after:)? +(\d+\.\d{4,})", text)
    return [(int(step or 0), float(loss)) for step, loss in found]


@pytest.fixture(scope="module")
def one_process():
    return losses([run_alone(TRAIN, *OPTIONS, "--batch-size", "8")])


def test_a_run_on_a_mesh_stops_and_goes_on_with_the_losses_of_one_process(one_process, tmp_path):
    """2 x 2 until a signal in step 15, then 2 x 2 and 4 x 1; to the last of four decimals."""
    assert [step for step, _ in one_process] == [0, 1, 10, 18, 0]
    mesh = [*OPTIONS, "--batch-size", "4", "--tp", "2", "--checkpoint"]
    ended = run_ranks(4, "tests/checkpoint/killed.py", "backward:SIGTERM", TRAIN, *mesh, tmp_path / "2x2")
    assert [rank.code for rank in ended] == [75] * 4, ended[0].stderr
    shutil.copytree(tmp_path / "2x2", tmp_path / "4x1")
    before = [pair for pair in losses_in(ended[0].stdout) if pair[0]]
    assert before == [(step, pytest.approx(loss, abs=1.5e-4)) for step, loss in one_process[1:3]]
    for options in (["2x2", "--tp", "2", "--batch-size", "4"], ["4x1", "--batch-size", "2"]):
        found = losses(run_ranks(4, TRAIN, *OPTIONS, "--checkpoint", tmp_path / options[0], *options[1:]))
        assert found[-1] == (0, pytest.approx(one_process[-1][1], abs=1.5e-4)), options


@pytest.mark.parametrize("script, n, message", [
    (TRAIN, 3, "2 ranks aren't divided by that"), (f"{STAGES[2]}/train.py", 2, "it is for stage4_overlap/train.py"),
])
def test_what_can_not_be_shared_is_one_line(script, n, message):
    ended = run_ranks(2, script, *OPTIONS, "--tp", n)
    assert [rank.code for rank in ended] == [2, 2] and message in ended[0].stderr, ended[0].stderr
    assert len(ended[0].stderr.splitlines()) == 1
