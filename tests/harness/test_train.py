"""train.py: all stages print the losses of one rank, checkpoints stay as asked, and bad input is one line."""

import re
import signal

import pytest

from harness import STAGE_1, STAGE_4
from harness.training import train
from tests.checkpoint import flip_a_bit
from tests.common import STAGES, on_ranks
from tests.harness.faults import end_of
from tests.ranks import ROOT, run_alone, run_ranks

pytestmark = pytest.mark.waits

NANO = ["--model", "nano", "--sequence-length", "32"]
OPTIONS = [*NANO, "--steps", "18", "--accumulate", "2", "--clip", "0.5"]


def losses(ended):
    """Return [(number of a step, its loss), …] that ranks have printed."""
    assert [rank.code for rank in ended] == [0] * len(ended), "\n".join(rank.stderr for rank in ended)
    printed = re.findall(r"step +(\d+)/18 +loss +(\d+\.\d{4})", ended[0].stdout)
    return [(int(step), float(loss)) for step, loss in printed]


@pytest.fixture(scope="module")
def losses_of_one_rank():
    """Return the losses of one rank with the batch of two: there stage 1 is plain AdamW."""
    of_rank = losses(run_ranks(1, f"{STAGE_1}/train.py", *OPTIONS, "--batch-size", "8"))
    assert [step for step, _ in of_rank] == [1, 10, 18] and of_rank[-1][1] < of_rank[0][1]
    return [(step, pytest.approx(loss, abs=1.5e-4)) for step, loss in of_rank]  # four decimals are printed


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_of_every_stage_print_the_losses_of_one(stage, losses_of_one_rank):
    assert losses(run_ranks(2, f"{stage}/train.py", *OPTIONS, "--batch-size", "4")) == losses_of_one_rank


# ------------------------------------------------------------------------------------------------------ Checkpoints


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def names(*steps):
    return [f"step-{step:08}" for step in steps]


def train_alone(folder, *args, steps):
    """Train on one rank, started as `python train.py`; return its Ended."""
    return run_alone(ROOT / STAGE_1 / "train.py", *NANO, "--batch-size", "2", "--steps", steps, "--checkpoint", folder,
                     *args)


def test_the_three_newest_checkpoints_stay_and_nothing_else_is_removed(tmp_path):
    other_names = ["best", "step-1", "step-00000001.old", "zzz-best"]
    for name in other_names:
        (tmp_path / name).mkdir()
    assert train_alone(tmp_path, "--save-every", "1", steps=5).code == 0
    assert names_in(tmp_path) == sorted([*other_names, *names(3, 4, 5)])


def test_a_run_goes_on_with_the_lr_of_the_command(tmp_path):
    assert train_alone(tmp_path, steps=1).code == 0
    ended = train_alone(tmp_path, "--lr", "0.5", steps=3)
    assert ended.code == 0 and f"resumed from {tmp_path}/step-00000001\n" in ended.stdout
    _, optimizer_state = end_of(tmp_path)
    assert optimizer_state["param_groups"][0]["lr"] == 0.5 * train.warmup_then_cosine(3)(3)


def damage(folder):
    flip_a_bit(max(folder.glob("step-00000001/*"), key=lambda path: path.stat().st_size))


@pytest.mark.parametrize("change, args, says", [
    (lambda folder: None, ["--model", "tiny"], "step-00000001 can't be loaded: it is of another model"),
    (damage, [], "train.py: error: checkpoint {0}/step-00000001 can't be loaded: ")])
def test_what_a_run_cannot_go_on_from_is_one_line_and_nothing_is_removed(change, args, says, tmp_path):
    assert train_alone(tmp_path, steps=1).code == 0
    change(tmp_path)
    ended = train_alone(tmp_path, *args, steps=2)
    assert ended.code == 2 and says.format(tmp_path) in ended.stderr and "Traceback" not in ended.stderr
    assert names_in(tmp_path) == names(1)


@on_ranks(1)
def test_under_nohup_a_run_goes_on_when_the_terminal_goes(rank):
    """nohup ignores SIGHUP, and a run must not hear SIGHUP then. It hears SIGUSR1."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop_signal = train.StopSignal(30)
        signal.raise_signal(signal.SIGHUP)
        assert stop_signal.agreed_signal() is None
        signal.raise_signal(signal.SIGUSR1)
        assert stop_signal.agreed_signal() == signal.SIGUSR1
    finally:  # this process runs other tests too
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


# -------------------------------------------------------------------------------------------------------- Bad input


@pytest.mark.parametrize("args, message", [
    (["--timeout"], "--timeout: expected one argument"),
    (["--data", "empty.txt"], "empty.txt: 0 bytes are too few, there must be 10000"),
    (["--checkpoint", "empty.txt/a"], "Not a directory: 'empty.txt/a'")])
def test_bad_input_is_one_line(args, message, tmp_path):
    """Start a rank without torchrun, which adds lines of its own. test_command_lines.py has more options."""
    (tmp_path / "empty.txt").touch()
    run = run_alone(ROOT / STAGE_4 / "train.py", "--model", "nano", *args, cwd=tmp_path)
    assert run.code == 2 and message in run.stderr and len(run.stderr.splitlines()) == 1, run.stderr
