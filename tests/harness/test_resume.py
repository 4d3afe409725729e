"""train.py stops and goes on: signals, how many checkpoints stay, which one is taken, and what must not change."""

import re
import shutil
import signal

import pytest
import torch

from checkpoint import load, save
from harness import STAGE_1, STAGE_4
from harness.training import train
from harness.training.models import GPT, MODELS
from tests.checkpoint import flip_a_bit
from tests.common import on_ranks
from tests.harness.faults import end_equally
from tests.ranks import ROOT, run_alone, run_ranks

pytestmark = pytest.mark.waits

OPTIONS = ["--model", "nano", "--sequence-length", "32", "--batch-size", "4"]
TRAIN = f"{STAGE_4}/train.py"


def names_in(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def names(*steps):
    return [f"step-{step:08}" for step in steps]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the folder of 30 steps on 2 ranks, with all checkpoints: every 10 steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = on_two_ranks(folder, "--keep", "0")
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr
    return folder


@pytest.fixture
def copied(undisturbed, tmp_path):
    return shutil.copytree(undisturbed, tmp_path / "run")


def on_two_ranks(folder, *args):
    """Train for 30 steps; return the Ended of each rank."""
    return run_ranks(2, TRAIN, *OPTIONS, "--steps", "30", "--save-every", "10", "--checkpoint", folder, *args)


def alone(folder, *args, steps=1):
    """Train on one rank, started as `python train.py`; return its Ended."""
    command = "--model", "nano", "--batch-size", "2", "--steps", steps, "--checkpoint", folder
    return run_alone(ROOT / STAGE_1 / "train.py", *command, *args)


def error_of(ended):
    """Return the one line of a rank that has refused."""
    assert ended.code == 2 and "Traceback" not in ended.stderr, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    return line


@on_ranks(1)
def test_under_nohup_a_run_goes_on_when_the_terminal_goes(rank):
    """nohup has SIGHUP ignored, and so it stays."""
    numbers = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop_signal = train.StopSignal(30)
        signal.raise_signal(signal.SIGHUP)
        assert stop_signal.agreed_name() is None
        signal.raise_signal(signal.SIGUSR1)
        assert stop_signal.agreed_name() == "SIGUSR1"
    finally:  # this process runs other tests too
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


def test_without_a_folder_sigterm_ends_a_rank_as_ever():
    ended = run_ranks(2, "tests/harness/killed.py", "1", "backward", "SIGTERM", TRAIN, *OPTIONS, "--steps", "30")
    assert [rank.code for rank in ended] == [1, -15]


def test_as_many_checkpoints_stay_as_asked_and_nothing_else_is_removed(tmp_path):
    for args, kept in (([], (3, 4, 5)), (["--keep", "1"], (5,)), (["--keep", "0"], range(1, 6))):
        folder = tmp_path / f"run{''.join(args)}"
        other_names = ["best", "step-1", "step-00000001.old", "step-000000001", "zzz-best"]
        for name in other_names:
            (folder / name).mkdir(parents=True)
        assert alone(folder, "--save-every", "1", *args, steps=5).code == 0
        assert names_in(folder) == sorted([*other_names, *names(*kept)])


def damage(folder, *steps):
    for step in steps:
        flip_a_bit(max(folder.glob(f"step-{step:08}/*"), key=lambda path: path.stat().st_size))


def test_a_run_goes_on_from_the_one_before_a_damaged_one_which_stays_until_it_is_saved_again(copied, undisturbed):
    damage(copied, 30)
    ended = on_two_ranks(copied, "--keep", "0")
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr
    said = "".join(rank.stdout for rank in ended)
    assert re.search(rf"checkpoint {copied}/step-00000030 can't be loaded: .*: the one before is tried\n"
                     rf"resumed from {copied}/step-00000020\n", said) and said.count("resumed") == 1
    assert names_in(copied) == names(10, 20, 30) and end_equally(copied, undisturbed)


def test_a_damaged_checkpoint_does_not_count_among_those_that_stay(copied):
    """Or --keep 1 would keep it and remove step 25, which the run has just saved."""
    damage(copied, 30)
    for steps, kept in ((25, (25, 30)), (30, (30,))):
        ended = on_two_ranks(copied, "--keep", "1", "--save-every", "5", "--steps", steps)
        assert [rank.code for rank in ended] == [0, 0], ended[0].stderr
        assert names_in(copied) == names(*kept)
    assert f"resumed from {copied}/step-00000030\n" in on_two_ranks(copied)[0].stdout


def save_of_another_model(folder):
    model = torch.nn.Linear(2, 2)
    save(folder / "step-00000040", model, torch.optim.AdamW(model.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("prepare, args, says", [
    (lambda folder: None, ["--model", "tiny"], "step-00000030 can't be loaded: it is of another model"),
    (save_of_another_model, [], "step-00000040 can't be loaded: it is of another model"),
    (lambda folder: damage(folder, 10, 20, 30), [], "train.py: error: checkpoint {0}/step-00000010 can't be loaded: "),
    (lambda folder: None, ["--seed", "8", "--clip", "1", "--batch-size", "5"],
     "{0}/step-00000030 is of another run: seed is 8, the run's is 0; clip is 1.0, the run's is 0.0; "
     "ranks x batch_size is 10, the run's is 8: --force goes on nevertheless")])
def test_what_a_run_cannot_go_on_from_is_one_line_and_nothing_is_removed(prepare, args, says, copied):
    prepare(copied)
    before = names_in(copied)
    ended = on_two_ranks(copied, *args)
    assert says.format(copied) in error_of(ended[0])
    assert (ended[1].code, "Traceback" in ended[1].stderr) == (2, False)
    assert names_in(copied) == before


def test_with_force_the_settings_of_the_command_are_taken(tmp_path):
    """Data of the same bytes elsewhere are the same data; of other bytes they are other data."""
    for name, text in (("text", "text"), ("same", "text"), ("alike", "tent")):
        (tmp_path / f"{name}.txt").write_text(text * 300)

    def run(steps, text, *args):
        data = tmp_path / f"{text}.txt"
        return alone(tmp_path / "run", "--sequence-length", "32", "--data", data, *args, steps=steps)

    def groups_of_last():
        model = GPT(MODELS["nano"])
        optimizer = torch.optim.AdamW(model.parameters())
        load(train.checkpoints_in(tmp_path / "run")[0], model, optimizer)
        return [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert run(1, "text").code == run(2, "same").code == 0
    assert re.search(r"text is 1200 bytes with checksum \w{8}, the run's is 1200 bytes with checksum \w{8}: --force",
                     error_of(run(3, "alike")))
    ended = run(3, "alike", "--force", "--lr", "0.5", "--weight-decay", "0")
    assert ended.code == 0 and "lr 0.5, weight decay 0," in ended.stdout
    assert groups_of_last() == [(0.5 * train.warmup_then_cosine(3)(3), 0)]
    assert names_in(tmp_path / "run") == names(1, 2, 3)


def test_pages_say_how_long_a_rank_waits():
    for page in ("README.md", "docs/guide.md", "docs/reference.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert re.search(rf"--timeout.{{0,40}}\b{train.TIMEOUT_S}\b|\b{train.TIMEOUT_S} s \(`--timeout`", text)
