"""train.py stops and goes on: signals, how many checkpoints stay, which one is taken, and what must not change."""

import contextlib
import re
import shutil
import signal

import pytest
import torch

from checkpoint import ForeignCheckpoint, latest, save
from checkpoint.folder import hold
from harness import checkpoints, options
from harness.checkpoints import path_of
from stage4_overlap import DistributedOptimizer
from tests.checkpoint import flip_a_bit
from tests.common import STAGES, on_ranks
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
    ended = on_two_ranks(folder, "--keep", "0")
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr
    return folder


@pytest.fixture
def copied(undisturbed, tmp_path):
    return shutil.copytree(undisturbed, tmp_path / "run")


def on_two_ranks(folder, *args):
    """-> Ended of each."""
    return run_ranks(2, TRAIN, *OPTIONS, "--steps", "30", "--save-every", "10", "--checkpoint", folder, *args)


def alone(folder, *args, steps=1):
    """One rank, started as `python train.py` -> Ended."""
    command = "--model", "nano", "--batch-size", "2", "--steps", steps, "--checkpoint", folder
    return run_alone(ROOT / STAGES[0] / "train.py", *command, *args)


def error_of(ended):
    """-> its one line."""
    assert ended.code == 2 and "Traceback" not in ended.stderr, ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if "error" in line]
    return line


def test_a_signal_in_the_last_step_lets_the_run_end(tmp_path):
    command = [TRAIN, *OPTIONS, "--steps", "15", "--checkpoint", tmp_path]
    ended = run_ranks(2, "tests/checkpoint/killed.py", "backward:SIGTERM", *command)
    assert [rank.code for rank in ended] == [0, 0] and "validation loss after" in ended[0].stdout
    assert steps_in(tmp_path) == names(15)


@contextlib.contextmanager
def handlers_put_back():
    """Of signals, in a process that runs other tests too."""
    before = {number: signal.getsignal(number) for number in checkpoints.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@on_ranks(1)
def test_under_nohup_a_run_goes_on_when_the_terminal_goes(rank):
    """nohup has SIGHUP ignored, and so it stays."""
    with handlers_put_back():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        told = checkpoints.StopSignal(30)
        signal.raise_signal(signal.SIGHUP)
        assert told.agreed() is None


def test_without_a_folder_sigterm_ends_a_rank_as_ever():
    ended = run_ranks(2, "tests/checkpoint/killed.py", "backward:SIGTERM", TRAIN, *OPTIONS, "--steps", "30")
    assert [rank.code for rank in ended] == [1, -15]


def test_as_many_checkpoints_stay_as_asked(tmp_path):
    for number, (args, steps) in enumerate((([], (3, 4, 5)), (["--keep", "1"], (5,)), (["--keep", "0"], range(1, 6)))):
        assert alone(tmp_path / str(number), "--save-every", "1", *args, steps=5).code == 0
        assert steps_in(tmp_path / str(number)) == names(*steps)


def make(folder, *steps, is_complete=True):
    for step in steps:
        path_of(folder, step).mkdir()
        (path_of(folder, step) / "data").touch()
        if is_complete:
            (path_of(folder, step) / checkpoints.MANIFEST).touch()


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
    path_of(folder, 4).symlink_to(path_of(elsewhere, 4))
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


def damage(folder, *steps):
    for step in steps:
        flip_a_bit(max(path_of(folder, step).glob("rank-*.safetensors")))


@pytest.mark.parametrize("damaged, args, restarts, says, aside", [
    ([], ["--resume-from", "10"], 0, "{0}/step-00000010, and later ones set aside", (20, 30)),
    ([], ["--resume-from", "10"], 1, "{0}/step-00000030", ()),
    ([30], [], 0, "{0}/step-00000020, and later ones set aside: checkpoint {0}/step-00000030 can't be loaded: .* is "
     "damaged.*", (30,))])
def test_a_run_goes_back_to_a_step_or_to_the_newest_that_is_not_damaged_and_sets_later_ones_aside(
        damaged, args, restarts, says, aside, copied, undisturbed, tmp_path, monkeypatch):
    """When torchrun starts a run anew, it goes on from the newest, and not from where the command goes back to."""
    damage(copied, *damaged)
    monkeypatch.setattr("tests.ranks.OF_TORCHRUN", ())
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
    ended = on_two_ranks(copied, *args)
    assert [rank.code for rank in ended] == [0, 0], ended[0].stderr
    (line,) = [line for rank in ended for line in rank.stdout.splitlines() if "resumed" in line]
    assert re.fullmatch(f"resumed from {says.format(copied)}", line)
    assert steps_in(copied) == sorted([*names(10, 20, 30), *(f"{name}.aside" for name in names(*aside))])
    for name in names(*aside):
        (copied / f"{name}.aside").rename(tmp_path / name)
    assert same(copied, undisturbed, tmp_path)


def was_renamed(folder):
    """Else the run would train the same steps again, and end with "it exists already"."""
    for step in (20, 30):
        shutil.rmtree(path_of(folder, step))
    path_of(folder, 10).rename(path_of(folder, 20))


def has_one_of_another_model(folder):
    model = torch.nn.Linear(2, 2)
    save(path_of(folder, 40), model, torch.optim.AdamW(model.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("prepare, args, says", [
    (lambda folder: None, ["--resume-from", "15"],
     "argument --resume-from: {0} has no complete checkpoint of step 15, but of 30, 20, 10"),
    (lambda folder: None, ["--model", "tiny"], "step-00000030 can't be loaded: it is of another model"),
    (lambda folder: damage(folder, 10, 20, 30), [], "train.py: error: checkpoint {0}/step-00000030 can't be loaded: "),
    (has_one_of_another_model, [], "step-00000040 can't be loaded: it is of another model"),
    (was_renamed, [], "step-00000020 can't be loaded: its name says step 20, its extra 10: was it renamed?"),
    # This process saves there, until it ends; and so nothing may be set aside.
    (lambda folder: hold(path_of(folder, 1)), ["--resume-from", "10"], "another run saves in {0}"),
    (lambda folder: hold(path_of(folder, 1)) and damage(folder, 30), [], "another run saves in {0}")])
def test_what_a_run_cannot_go_on_from_is_one_line_and_nothing_is_set_aside(prepare, args, says, copied):
    prepare(copied)
    before = steps_in(copied)
    ended = on_two_ranks(copied, *args)
    assert says.format(copied) in error_of(ended[0])
    assert (ended[1].code, "Traceback" in ended[1].stderr) == (2, False)
    assert steps_in(copied) == before


def test_a_checkpoint_of_another_program_is_refused():
    for extra in (None, [3], {"step": 3}, {"epoch": 1, "loss": 2.0}):
        with pytest.raises(ForeignCheckpoint, match="it is none of train.py: its extra is "):
            checkpoints.check(extra, 3)


@on_ranks(2)
def test_random_numbers_and_schedulers_go_on_where_they_were(rank, tmp_path):
    """The learning rate is the run's own, or what the command says now."""
    def start(*more):
        args = options.parse_args(__doc__, ["--checkpoint", str(tmp_path), "--save-every=1", "--steps=3", *more])
        args.text = None
        model = torch.nn.Linear(3, 3).to(rank.device)
        optimizer = DistributedOptimizer(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer, scheduler, checkpoints.Checkpoints(args, rank, model, optimizer, scheduler)

    with handlers_put_back():
        _, scheduler, saved = start()
        assert saved.first_step == 0
        scheduler.step()
        torch.manual_seed(rank.rank)
        saved.step_done()
        expected = torch.rand(3)
        for more, lr in (([], 1.0), (["--lr", "0.5"], 0.5)):
            optimizer, scheduler, saved = start(*more)
            assert saved.first_step == 1 and scheduler.last_epoch == 1 and torch.equal(torch.rand(3), expected)
            assert optimizer.param_groups[0]["lr"] == lr / 2
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == lr / 3


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

    def run(steps, text, *args):
        data = tmp_path / f"{text}.txt"
        return alone(tmp_path / "run", "--sequence-length", "32", "--seed", "7", "--data", data, *args, steps=steps)
    assert run(1, "text").code == 0
    of_text = f"the run's is {tmp_path}/text.txt (1200 bytes, checksum )"
    everything = "--seed", "8", "--batch-size", "3", "--accumulate", "2", "--sequence-length", "16"
    for text, args, message in (
            ("alike", [], f"--data is {tmp_path}/alike.txt (1200 bytes, checksum ), {of_text}"),
            ("other", everything, f"--seed is 8, the run's is 7; --data is {tmp_path}/other.txt (1500 bytes, "
             f"checksum ), {of_text}; ranks x --batch-size is 3, the run's is 2; --accumulate is 2, the run's is 1; "
             "--sequence-length is 16, the run's is 32")):
        error = re.sub(r"checksum \w{8}", "checksum ", error_of(run(2, text, *args)))
        assert error.endswith(f"--checkpoint {tmp_path}/run is of a run with other data: {message}: "
                              "--force goes on nevertheless")
    assert "changed since then: --steps 1 -> 2\n" in run(2, "same").stdout
    assert re.search("changed since then: --seed 7 -> 8, --data .*, --steps 2 -> 3\n",
                     run(3, "other", *everything, "--force").stdout)
    assert steps_in(tmp_path / "run") == names(1, 2, 3)


def test_pages_say_how_long_a_rank_waits():
    for page in ("README.md", "docs/guide.md", "docs/reference.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert re.search(rf"--timeout.{{0,40}}\b{options.TIMEOUT_S}\b|\b{options.TIMEOUT_S} s \(`--timeout`", text)
