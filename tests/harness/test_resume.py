"""train.py stops and goes on: signals, how many checkpoints stay, which one is taken, and what must not change."""

import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from checkpoint import ForeignCheckpoint, latest, save
from harness import checkpoints, options
from stage4_overlap import DistributedOptimizer
from tests.common import STAGES
from tests.harness.faults import converted, same
from tests.ranks import ROOT, run_alone, run_ranks

pytestmark = pytest.mark.waits

OPTIONS = ["--model", "nano", "--sequence-length", "32", "--batch-size", "4"]
TRAIN = f"{STAGES[3]}/train.py"


def steps_in(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".checkpoint.lock")


def names(*steps):
    return [f"step-{step:08}" for step in steps]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of 30 steps on 2 ranks, with all checkpoints: every 10 steps."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run_ranks(2, TRAIN, *OPTIONS, "--steps", "30", "--save-every", "10", "--keep", "0", "--checkpoint", folder)
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr
    return folder


@pytest.fixture
def copied(undisturbed, tmp_path):
    return shutil.copytree(undisturbed, tmp_path / "run")


def alone(folder, *args, steps=1, script=f"{STAGES[0]}/train.py"):
    """One rank, started as `python train.py` -> Ended."""
    command = "--model", "nano", "--batch-size", "2", "--steps", steps, "--checkpoint", folder
    return run_alone(ROOT / script, *command, *args)


def error_of(ended):
    """-> its one line."""
    assert ended.code == 2 and "Traceback" not in ended.stderr, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    return line


# ------------------------------------------------------------------------------------------------------------ signals


def test_a_signal_in_the_last_step_lets_the_run_end(tmp_path):
    command = [TRAIN, *OPTIONS, "--steps", "15", "--checkpoint", tmp_path]
    ended = run_ranks(2, "tests/checkpoint/killed.py", "backward:SIGTERM", *command)
    assert [rank.code for rank in ended] == [0, 0] and "validation loss after" in ended[0].stdout
    assert steps_in(tmp_path) == names(15)


@pytest.mark.parametrize("world_size", [1])
def test_under_nohup_a_run_goes_on_when_the_terminal_goes(run):
    """nohup has SIGHUP ignored, and so it stays."""
    assert run(hangs_up) == [[None, "SIGHUP"]]


def hangs_up(rank):
    before, heard = {number: signal.getsignal(number) for number in checkpoints.SIGNALS}, []
    try:
        for at_first in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, at_first)
            told = checkpoints.StopSignal(30)
            signal.raise_signal(signal.SIGHUP)
            heard.append(told.agreed())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return heard


def test_without_a_folder_sigterm_ends_a_rank_as_ever():
    ended = run_ranks(2, "tests/checkpoint/killed.py", "backward:SIGTERM", TRAIN, *OPTIONS, "--steps", "30")
    assert [rank.code for rank in ended] == [1, -15]


# ------------------------------------------------------------------------------------------------------- which are kept


def test_as_many_checkpoints_stay_as_asked(tmp_path):
    for number, (args, steps) in enumerate((([], (3, 4, 5)), (["--keep", "1"], (5,)), (["--keep", "0"], range(1, 6)))):
        assert alone(tmp_path / str(number), "--save-every", "1", *args, steps=5).code == 0
        assert steps_in(tmp_path / str(number)) == names(*steps)


def make(folder, *steps, is_complete=True):
    for step in steps:
        checkpoints.path_of(folder, step).mkdir()
        (checkpoints.path_of(folder, step) / "data").touch()
        if is_complete:
            (checkpoints.path_of(folder, step) / checkpoints.MANIFEST).touch()


def test_only_old_checkpoints_of_the_run_are_removed(tmp_path):
    """What isn't complete doesn't count, and goes if it is old: the rest of one that was half removed."""
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "run"
    for path in (elsewhere, folder):
        path.mkdir()
    make(folder, 2, 3, 10, 123456789)
    make(folder, 1, 11, is_complete=False)
    make(elsewhere, 4)
    others = ["best", "step-00000001.aside", "step-00000001.partial", "step-1", "zzz-best"]
    for name in others:
        (folder / name).mkdir()
        (folder / name / checkpoints.MANIFEST).touch()
    checkpoints.path_of(folder, 4).symlink_to(checkpoints.path_of(elsewhere, 4))
    assert checkpoints.complete(folder) == [123456789, 10, 4, 3, 2]
    checkpoints.remove_old(folder, 2)
    assert steps_in(folder) == sorted([*others, *names(4, 10, 11, 123456789)])
    assert checkpoints.complete(elsewhere) == [4] and checkpoints.complete(folder) == [123456789, 10, 4]
    checkpoints.remove_old(folder, 0)
    assert len(steps_in(folder)) == 9


def test_what_can_not_be_removed_is_one_line_and_no_error(tmp_path, monkeypatch, capsys):
    make(tmp_path, 1, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    checkpoints.remove_old(tmp_path, 1)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{tmp_path}/step-00000001 can't be removed: Permission denied")
    assert checkpoints.complete(tmp_path) == [2]  # and the rest goes at the next save


# -------------------------------------------------------------------------------------------------- which one is taken


def on_two_ranks(folder, *args):
    return run_ranks(2, TRAIN, *OPTIONS, "--steps", "30", "--save-every", "10", "--checkpoint", folder, *args)


def test_a_run_goes_back_to_a_step_and_sets_later_ones_aside(copied, undisturbed, tmp_path):
    ended = on_two_ranks(copied, "--resume-from", "10")
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr
    assert f"resumed from {copied}/step-00000010, and later ones set aside\n" in ended[0].stdout
    aside = ["step-00000020.aside", "step-00000030.aside"]
    assert steps_in(copied) == sorted([*names(10, 20, 30), *aside])
    (copied / aside[1]).rename(tmp_path / "before")
    assert same(copied, undisturbed, tmp_path)


def test_when_torchrun_starts_a_run_anew_it_goes_on_from_the_newest(copied, monkeypatch):
    """And not from where the command goes back to."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr("tests.ranks.OF_TORCHRUN", ())
    ended = on_two_ranks(copied, "--resume-from", "10")
    assert f"resumed from {copied}/step-00000030\n" in ended[0].stdout
    assert steps_in(copied) == names(10, 20, 30)


def damage(path):
    file = max(path.glob("rank-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(copied, undisturbed, tmp_path):
    damage(copied / "step-00000030")
    ended = on_two_ranks(copied)
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr
    (line,) = [line for line in ended[0].stdout.splitlines() if "resumed" in line]
    assert line.startswith(f"resumed from {copied}/step-00000020, and later ones set aside: checkpoint "
                           f"{copied}/step-00000030 can't be loaded: ") and "is damaged" in line
    assert "step-00000030.aside" in steps_in(copied) and "resumed" not in ended[1].stdout
    (copied / "step-00000030.aside").rename(tmp_path / "damaged")
    assert same(copied, undisturbed, tmp_path)


def test_when_all_are_damaged_the_run_does_not_begin_anew(copied):
    for path in copied.glob("step-*"):
        damage(path)
    ended = on_two_ranks(copied)
    assert all(rank.code == 2 and "Traceback" not in rank.stderr for rank in ended)
    assert f"train.py: error: checkpoint {copied}/step-00000030 can't be loaded: " in ended[0].stderr
    assert steps_in(copied) == names(10, 20, 30)


def is_as_it_was(folder):
    pass


def was_renamed(folder):
    """Else the run would train the same steps again, and end with "it exists already"."""
    for step in (20, 30):
        shutil.rmtree(checkpoints.path_of(folder, step))
    checkpoints.path_of(folder, 10).rename(checkpoints.path_of(folder, 20))


def has_one_of_another_model(folder):
    model = torch.nn.Linear(2, 2)
    save(checkpoints.path_of(folder, 40), model, torch.optim.AdamW(model.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("prepare, args, says", [
    (is_as_it_was, ["--resume-from", "15"],
     "argument --resume-from: {0} has no complete checkpoint of step 15, but of 30, 20, 10"),
    (is_as_it_was, ["--model", "tiny"], "step-00000030 can't be loaded: it is of another model"),
    (has_one_of_another_model, [], "step-00000040 can't be loaded: it is of another model"),
    (was_renamed, [], "step-00000020 can't be loaded: its name says step 20, its extra 10: was it renamed?")])
def test_what_a_run_cannot_go_on_from_is_one_line_and_is_not_taken_for_damage(prepare, args, says, copied):
    prepare(copied)
    before = steps_in(copied)
    assert says.format(copied) in error_of(run_alone(ROOT / TRAIN, *OPTIONS, "--checkpoint", copied, *args))
    assert steps_in(copied) == before


def test_a_checkpoint_of_another_program_is_refused():
    for extra in (None, [3], {"step": 3}, {"epoch": 1, "loss": 2.0}):
        with pytest.raises(ForeignCheckpoint, match="it is none of train.py: its extra is "):
            checkpoints.check(extra, 3)


@pytest.mark.parametrize("args", [["--resume-from", "10"], []], ids=str)
def test_a_run_that_goes_back_sets_nothing_aside_while_another_saves_there(args, copied):
    """Going back to a step, or because the newest is damaged."""
    if not args:
        damage(copied / "step-00000030")
    before = steps_in(copied)
    script = (f"import pathlib, sys, checkpoint.folder\n"
              f"print(checkpoint.folder.hold(pathlib.Path({str(copied / 'step-00000001')!r})), flush=True)\n"
              f"sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, text=True, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == "True\n"
            error = error_of(run_alone(ROOT / TRAIN, *OPTIONS, "--batch-size", "8", "--checkpoint", copied, *args))
        finally:
            other.kill()
    assert "another run saves in" in error and steps_in(copied) == before


def random_states(rank, folder):
    command = "--checkpoint", str(folder), "--save-every", "1", "--steps", "3"

    def start(*more):
        args = options.parse_args(__doc__, [*command, *more])
        args.text = None
        model = torch.nn.Linear(3, 3).to(rank.device)
        optimizer = DistributedOptimizer(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer, scheduler, checkpoints.Checkpoints(args, rank, model, optimizer, scheduler)

    _, scheduler, saved = start()
    assert saved.first_step == 0
    scheduler.step()
    torch.manual_seed(rank.rank)
    saved.step_done()
    expected = torch.rand(3)
    for more, lr in (((), 1.0), (("--lr", "0.5"), 0.5)):  # the run's own, or what the command says now
        optimizer, scheduler, saved = start(*more)
        assert saved.first_step == 1 and scheduler.last_epoch == 1 and torch.equal(torch.rand(3), expected)
        assert optimizer.param_groups[0]["lr"] == lr / 2
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == lr / 3
    for number in checkpoints.SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # of the process that runs other tests too
    return expected


@pytest.mark.parametrize("world_size", [2])
def test_random_numbers_and_schedulers_go_on_where_they_were(run, tmp_path):
    one, other = run(random_states, tmp_path)
    assert not torch.equal(one, other)  # each rank has its own


# -------------------------------------------------------------------------------------------------------- what changed


def test_learning_rate_and_weight_decay_are_those_of_the_command_or_else_of_the_run(tmp_path):
    def stepped():
        """-> highest learning rate and weight decay with which the last step was done."""
        (group,) = converted(latest(tmp_path), tmp_path / "one.pt")["optimizer"]["param_groups"]
        return group["initial_lr"], group["weight_decay"]
    ended = alone(tmp_path, "--lr", "0.002", "--weight-decay", "0.3")
    assert ended.code == 0 and "lr 0.002, weight decay 0.3" in ended.stdout
    ended = alone(tmp_path, "--clip", "0", steps=2)
    assert "lr 0.002, weight decay 0.3" in ended.stdout and "changed since then: --steps 1 -> 2\n" in ended.stdout
    assert stepped() == (0.002, 0.3)
    ended = alone(tmp_path, "--lr", "0.5", "--weight-decay", "0", steps=3)
    assert "changed since then: --steps 2 -> 3, --lr 0.002 -> 0.5, --weight-decay 0.3 -> 0.0\n" in ended.stdout
    assert "lr 0.5, weight decay 0," in ended.stdout and stepped() == (0.5, 0)
    ended = alone(tmp_path, "--lr", "0.5", "--weight-decay", "0", steps=3)
    assert "changed" not in ended.stdout and "nothing is left to do: --steps 3\n" in ended.stdout


def test_what_decides_on_the_data_must_not_change_but_by_force(tmp_path):
    """All of it, and a text of the same length. The same text elsewhere is the same."""
    for name, text in (("text", "text"), ("same", "text"), ("other", "other"), ("alike", "tent")):
        (tmp_path / f"{name}.txt").write_text(text * 300)

    def one_step_more(text, *args):
        folder = tmp_path / "again"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "run", folder)
        return alone(folder, "--sequence-length", "32", "--seed", "7", "--data", tmp_path / text, *args, steps=2)
    assert alone(tmp_path / "run", "--sequence-length", "32", "--seed", "7", "--data", tmp_path / "text.txt").code == 0
    of_text = f"the run's is {tmp_path}/text.txt (1200 bytes, checksum )"
    everything = "--seed", "8", "--batch-size", "3", "--accumulate", "2", "--sequence-length", "16"
    for text, args, message in (
            ("alike.txt", [], f"--data is {tmp_path}/alike.txt (1200 bytes, checksum ), {of_text}"),
            ("other.txt", everything, f"--seed is 8, the run's is 7; --data is {tmp_path}/other.txt (1500 bytes, "
             f"checksum ), {of_text}; ranks x --batch-size is 3, the run's is 2; --accumulate is 2, the run's is 1; "
             "--sequence-length is 16, the run's is 32")):
        error = re.sub(r"checksum \w{8}", "checksum ", error_of(one_step_more(text, *args)))
        assert error.endswith(f"--checkpoint {tmp_path}/again is of a run with other data: {message}: "
                              "--force goes on nevertheless")
        assert steps_in(tmp_path / "again") == names(1)
    forced = one_step_more("other.txt", *everything, "--force")
    assert forced.code == 0 and steps_in(tmp_path / "again") == names(1, 2)
    assert re.search("changed since then: --seed 7 -> 8, --data .*, --steps 1 -> 2\n", forced.stdout)
    ended = one_step_more("same.txt")
    assert ended.code == 0 and "changed since then: --steps 1 -> 2\n" in ended.stdout


# ------------------------------------------------------------------------------------------------------------ time-outs


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/reference.md"])
def test_a_page_says_how_long_a_rank_waits(page):
    text = " ".join((ROOT / page).read_text().split())
    assert re.search(rf"--timeout.{{0,40}}\b{options.TIMEOUT_S}\b|\b{options.TIMEOUT_S} s \(`--timeout`", text)
