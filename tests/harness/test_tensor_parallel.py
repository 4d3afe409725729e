"""train.py --tp: a GPT whose layers are shared prints the losses of one process, and goes on with other ranks."""

import re
import shutil

import pytest

from harness import every_row
from harness.every_row import PACKAGES, examine_shared, time_shared
from harness.examine import Settings, make_model
from harness.gpt import share_layers
from harness.reference import local
from harness.results import Result
from harness.tables import shared_sheet, sheet_text
from tests.common import STAGES
from tests.ranks import run_alone, run_ranks

pytestmark = pytest.mark.waits

TRAIN = f"{STAGES[3]}/train.py"
OPTIONS = ["--model", "nano", "--sequence-length", "32", "--steps", "18", "--clip", "0.5"]


def losses(ended):
    assert [rank.code for rank in ended] == [0] * len(ended), ended[0].stderr
    return re.findall(r"(?:step +(\d+)/18 +)?loss(?: before:| after:)? +(\d+\.\d{4,})", ended[0].stdout)


@pytest.fixture(scope="module")
def one_process():
    return losses([run_alone(TRAIN, *OPTIONS, "--batch-size", "8")])


def test_a_run_on_a_mesh_stops_and_goes_on_with_the_losses_of_one_process(one_process, tmp_path):
    """2 x 2 until a signal in step 15, then 2 x 2 and 4 x 1; to all four decimals."""
    assert [step for step, _ in one_process] == ["", "1", "10", "18", ""]
    mesh = [*OPTIONS, "--batch-size", "4", "--tp", "2", "--checkpoint"]
    ended = run_ranks(4, "tests/checkpoint/killed.py", "backward:SIGTERM", TRAIN, *mesh, tmp_path / "2x2")
    assert [rank.code for rank in ended] == [75] * 4, ended[0].stderr
    shutil.copytree(tmp_path / "2x2", tmp_path / "4x1")
    before = re.findall(r"step +(\d+)/18 +loss +(\d+\.\d{4,})", ended[0].stdout)
    assert before == one_process[1:3]
    for options in (["2x2", "--tp", "2", "--batch-size", "4"], ["4x1", "--batch-size", "2"]):
        found = losses(run_ranks(4, TRAIN, *OPTIONS, "--checkpoint", tmp_path / options[0], *options[1:]))
        assert found[-1] == one_process[-1], options


@pytest.mark.parametrize("script, n, message", [
    (TRAIN, 3, "2 ranks aren't divided by that"), (f"{STAGES[2]}/train.py", 2, "it is for stage4_overlap/train.py"),
])
def test_what_can_not_be_shared_is_one_line(script, n, message):
    ended = run_ranks(2, script, *OPTIONS, "--tp", n)
    assert [rank.code for rank in ended] == [2, 2] and message in ended[0].stderr, ended[0].stderr
    assert len(ended[0].stderr.splitlines()) == 1


def both(rank):
    settings = Settings("nano", batch_size=2, sequence_length=16, rounds=1, steps=1)
    rows = [examine_shared(rank, settings, 2, name) for name in PACKAGES]
    timed = time_shared(rank, settings, 2, "stage 4")
    model = make_model(settings, rank, "float32")
    share_layers(model, 2, rank)
    return rows, timed, sum(local(param).numel() for param in model.parameters())


@pytest.mark.parametrize("world_size", [4])
def test_the_bench_counts_what_data_and_tensor_parallel_ranks_send_apart(run, world_size):
    """In fp32 on 2 x 2: a gradient of each parameter that is here goes to the other replica, and its value comes back.
    """
    ((rung_0, stage_4), (step_ms, _), numel), *_ = run(both)
    assert 0 < rung_0.max_abs_diff < 1e-5 and 0 < stage_4.max_abs_diff < 1e-5
    assert step_ms > 0 and rung_0.tp_bytes == stage_4.tp_bytes > rung_0.dp_bytes
    assert rung_0.dp_bytes == pytest.approx(4 * numel, rel=0.001)
    assert stage_4.dp_bytes == pytest.approx(4 * numel, rel=0.05)  # and padding
    assert stage_4.held_bytes["state"] == pytest.approx(rung_0.held_bytes["state"] / 2, rel=0.05)
    rung_0.rounds_ms = rung_0.ddp_ms = [step_ms]
    stage_4.error = "wrong: for once"
    shown = sheet_text(shared_sheet([rung_0, stage_4]))
    assert "1.00" in shown and "stage 4: wrong: for once" in shown
    assert every_row.is_wrong(Result(None, [], shared=[stage_4]))
