"""Runs that are killed: the other ranks end with one line, and what goes on from a checkpoint ends as it should."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from checkpoint import DamagedCheckpoint, latest
from harness import faults, results
from harness import faults as command
from harness import faults as final_states
from harness import faults as kills
from harness import options as run_folder
from harness import options as stop_signal
from harness.checkpoints import Checkpoints
from harness.faults import Run, final_state, kills_at_operations, random_kills
from harness.results import FaultResult, Stop
from harness.workers import WorkerError
from stage4_overlap import DistributedOptimizer
from tests.common import STAGES
from tests.ranks import LIMIT_S, ROOT, run_alone, run_ranks

pytestmark = pytest.mark.waits

NANO = ["--model", "nano", "--sequence-length", "32", "--steps", "30", "--save-every", "10"]
SEQUENCES = 12  # a step, whatever the number of ranks


def options(folder, ranks):
    return [*NANO, "--batch-size", str(SEQUENCES // ranks), "--checkpoint", str(folder)]


def train(script, folder, ranks=3):
    """-> what rank 0 prints."""
    ended = run_ranks(ranks, script, *options(folder, ranks))
    assert [rank.code for rank in ended] == [0] * ranks, "\n".join(rank.stderr for rank in ended)
    return ended[0].stdout


def last_loss(printed):
    return float(re.findall(r"validation loss after: (\d+\.\d+)", printed)[-1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """-> function(stage, ranks): the folder of a run that nobody disturbs, and its last loss."""
    found = {}

    def undisturbed(stage, ranks=3):
        if (stage, ranks) not in found:
            folder = tmp_path_factory.mktemp(stage)
            found[stage, ranks] = folder, last_loss(train(f"{stage}/train.py", folder, ranks))
        return found[stage, ranks]

    return undisturbed


def equal_to_the_bit(folder, other, scratch):
    one, other = final_state(folder, scratch / "one.pt"), final_state(other, scratch / "other.pt")
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("stage", STAGES[2:])
def test_a_run_that_was_interrupted_ends_as_if_it_had_not_been(stage, undisturbed, tmp_path):
    """What an interruption after step 20 leaves: the checkpoints until then, and the beginning of one."""
    folder, _ = undisturbed(stage)
    for step in (10, 20):
        (tmp_path / f"step-{step:08}").symlink_to(folder / f"step-{step:08}")
    (tmp_path / "step-00000030.0-0123456789ab-0.partial").mkdir()
    printed = train(f"{stage}/train.py", tmp_path)
    assert f"resumed from {tmp_path}/step-00000020" in printed and "step 21/30" in printed
    assert not list(tmp_path.glob("*.partial"))
    assert equal_to_the_bit(tmp_path, folder, tmp_path)


def test_on_another_number_of_ranks_a_run_ends_the_same_up_to_rounding(undisturbed, tmp_path):
    """From 2 ranks with 6 sequences each to 3 with 4, in another stage; then to 1 with 12, in plain torch."""
    folder, loss = undisturbed(STAGES[3], ranks=2)
    (tmp_path / "step-00000010").symlink_to(folder / "step-00000010")
    printed = train(f"{STAGES[2]}/train.py", tmp_path, ranks=3)
    assert "step 11/30" in printed and last_loss(printed) == pytest.approx(loss, abs=2e-4)
    (tmp_path / "step-00000030").rename(tmp_path / "one.partial")
    printed = train("harness/train_ddp.py", tmp_path, ranks=1)
    assert "step 21/30" in printed and last_loss(printed) == pytest.approx(loss, abs=2e-4)


MOMENTS = [(STAGES[3], "backward"), (STAGES[2], "step"), (STAGES[3], "prefetch"), (STAGES[3], "save")]


def test_torchrun_goes_on_by_itself_after_a_kill(undisturbed, tmp_path):
    """In the middle of a save, where random kills hardly come."""
    stage, moment = MOMENTS[3]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
               "tests/checkpoint/killed.py", moment, f"{stage}/train.py", *options(tmp_path / "run", ranks=2)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * LIMIT_S)  # torchrun, twice
    assert run.returncode == 0, run.stderr
    assert len(re.findall("validation loss before", run.stdout)) == 2  # two attempts
    assert f"resumed from {tmp_path}/run/step-00000010" in run.stdout
    assert equal_to_the_bit(tmp_path / "run", undisturbed(stage, ranks=2)[0], tmp_path)


@pytest.mark.parametrize("stage, moment", MOMENTS)
def test_when_a_rank_is_killed_the_others_end_with_one_line_and_nothing_is_lost(stage, moment, undisturbed, tmp_path):
    """Without torchrun, which would end them itself. Then all are started again, with the same folder."""
    folder = tmp_path / "run"
    ended = run_ranks(3, "tests/checkpoint/killed.py", moment, f"{stage}/train.py", *options(folder, ranks=3))
    assert [rank.code for rank in ended] == [1, -9, 1]
    for rank in (0, 2):
        (line,) = [line for line in ended[rank].stderr.splitlines() if "error" in line]
        # The other may be slow to say that it is there, and is named too then.
        assert re.match(rf"train\.py: error: rank {rank} lost rank ([02], )?1(, [02])?: ", line), line
        assert "Traceback" not in ended[rank].stderr
    if moment == "save":
        assert latest(folder).name == "step-00000010" and any(folder.glob("step-00000020.*.partial"))
    assert f"resumed from {folder}/step-00000010" in train(f"{stage}/train.py", folder)
    assert equal_to_the_bit(folder, undisturbed(stage)[0], tmp_path)


def random_states(rank, folder):
    args = SimpleNamespace(checkpoint=folder, save_every=1, steps=3, keep=3, resume_from=None, force=False, timeout=30,
                           given=set(), lr=None, weight_decay=None, seed=0, text=None, batch_size=1, accumulate=1,
                           sequence_length=1, clip=0, tp=1, dtype="float32")

    def start():
        model = torch.nn.Linear(3, 3).to(rank.device)
        optimizer = DistributedOptimizer(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return optimizer, scheduler, Checkpoints(args, rank, model, optimizer, scheduler)

    optimizer, scheduler, checkpoints = start()
    assert checkpoints.first_step == 0
    scheduler.step()
    torch.manual_seed(rank.rank)
    checkpoints.step_done()
    expected = torch.rand(3)
    again, other_scheduler, checkpoints = start()
    for number in stop_signal.SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # of the process that runs other tests too
    assert checkpoints.first_step == 1 and other_scheduler.last_epoch == 1 and again.param_groups[0]["lr"] == 0.5
    assert torch.equal(torch.rand(3), expected)
    return expected


@pytest.mark.parametrize("world_size", [2])
def test_random_numbers_and_schedulers_go_on_where_they_were(run, tmp_path):
    one, other = run(random_states, tmp_path)
    assert not torch.equal(one, other)  # each rank has its own


def test_random_kills_lose_nothing(tmp_path):
    """The short version of make faults, which kills ten times."""
    assert random_kills(stage=4, ranks=2, kills=1, seed=1, folder=tmp_path).kills == 1


STATE = {"weight": torch.zeros(2), "weight exp_avg": torch.ones(2)}


@pytest.mark.parametrize(
    "resumed, killed, message",
    [
        ("step-00000020", STATE, None),
        ("step-00000010", STATE, "went on from step-00000010, but step-00000020 was complete"),
        ("", STATE, "went on from the beginning, but step-00000020 was complete"),
        ("step-00000020", {**STATE, "weight": torch.tensor([0, 1e-9])}, "different at the end: weight"),
        ("step-00000020", {"weight": STATE["weight"]}, "different at the end: weight exp_avg"),
    ],
    ids=["nothing", "a step", "everything", "a bit", "a state"],
)
def test_what_is_lost_is_found(resumed, killed, message, tmp_path, monkeypatch):
    """One kill, of a run that goes on from `resumed`, and ends with the state `killed`."""
    class Recorded:
        lines = []

        def __init__(self, script, ranks, steps, folder, **options):
            self.attempts = ["", resumed] if folder.name == "killed" else [""]
            self.starts, self.kill_a_rank, self.end = lambda: iter(self.attempts), lambda chance: True, lambda: 0

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

    monkeypatch.setattr(kills, "Run", Recorded)
    monkeypatch.setattr(kills, "latest", lambda folder: tmp_path / "step-00000020")
    for module in (final_states, kills):
        monkeypatch.setattr(module, "final_state", lambda folder, _: killed if folder.name == "killed" else STATE)
    monkeypatch.setattr(kills, "LONGEST_S", 0)
    with pytest.raises(AssertionError, match=f"{message}$") if message else nullcontext():
        assert random_kills(stage=4, ranks=2, kills=1, seed=0, folder=tmp_path).tensors == 2


def test_a_damaged_checkpoint_stops_a_run_with_one_line(undisturbed, tmp_path):
    folder = tmp_path / "step-00000030"
    folder.mkdir()
    for file in (undisturbed(STAGES[3])[0] / folder.name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[:-1])
    run = run_alone(f"{STAGES[2]}/train.py", *NANO, "--checkpoint", tmp_path)
    assert run.code == 2 and "Traceback" not in run.stderr
    assert f"train.py: error: checkpoint {folder} can't be loaded: manifest.json is damaged" in run.stderr


def test_a_rank_killed_at_some_file_operations_of_a_save_loses_nothing(tmp_path):
    """Files are written, synced and renamed, and an old checkpoint is removed. At all of them: make faults."""
    assert kills_at_operations(STAGES[2], 2, tmp_path, every=5) >= 4


@pytest.mark.parametrize("newest, begin, found, kept, message", [
    (2, 2, "right", [4, 3], None), (3, 3, "right", [4, 3], None), (1, 1, "right", [4, 3], "from step 1, ended right"),
    (3, 2, "right", [4, 3], "of step 3: it went on from step 2"), (2, 2, "wrong", [4, 3], "ended otherwise"),
    (3, 3, "right", [4], r"kept \[4\]"), (None, 0, "right", [4, 3], "of step None: it went on from step 0"),
])
def test_what_is_lost_at_a_file_operation_is_found(newest, begin, found, kept, message, tmp_path, monkeypatch):
    """One rank, with one operation, and a run that goes on from step `begin`."""
    class Recorded(nullcontext):
        def close(self):
            pass

        def __init__(self, ranks):
            self.answers = iter([[(0, "right")], WorkerError("rank 0 was killed by signal 9"), [(begin, found)], None])
            super().__init__(self)

        def run(self, *_):
            answer = next(self.answers)
            if isinstance(answer, WorkerError):
                (tmp_path / "0.0").mkdir()
                raise answer
            return answer

    monkeypatch.setattr(faults, "Workers", Recorded)
    there_are = iter([[newest] if newest else [], kept])
    monkeypatch.setattr(run_folder, "complete", lambda folder: next(there_are))
    with pytest.raises(AssertionError, match=message) if message else nullcontext():
        assert kills_at_operations(STAGES[3], 1, tmp_path) == 1


REFUSED = "train.py: error: another run writes here"


@pytest.mark.parametrize("codes, lines, weights, message", [
    ((0, 0), ([], []), (1, 2), None),
    ((0, 1), ([], [REFUSED]), (1, 1), None),
    ((1, 1), ([REFUSED], [REFUSED]), (1, 1), "both were refused"),
    ((0, 1), ([], ["Traceback"]), (1, 1), "ended with 1"),
    ((0, 0), ([], []), (1, 3), "step-00000040 is of both runs"),
    ((0, 1), ([], [REFUSED]), (1, DamagedCheckpoint("damaged")), "40 of two runs is complete, and can't be read"),
], ids=["both finish", "one refused", "both refused", "no line", "a mixture", "a damaged one"])
def test_a_mixture_of_two_runs_is_found(codes, lines, weights, message, tmp_path, monkeypatch):
    """The runs have weights 1 and 2."""
    runs = iter([(0, []), (0, []), *zip(codes, lines)])

    class Recorded(nullcontext):
        def __init__(self, *_, **options):
            code, self.lines = next(runs)
            self.process = SimpleNamespace(wait=lambda limit: code)
            super().__init__(self)

    def converted(path, scratch):
        found = {"seed 0": 1, "seed 1": 2, "both": weights[path.name == "step-00000040"]}[path.parent.name]
        if isinstance(found, Exception):
            raise found
        return {"model": {"weight": torch.tensor(found)}}

    for name, fake in (("Run", Recorded), ("at_once", lambda *_: None), ("check_undisturbed", lambda run: None),
                       ("converted", converted)):
        monkeypatch.setattr(faults, name, fake)
    monkeypatch.setattr(run_folder, "complete", lambda folder: [40, 20])
    with pytest.raises(AssertionError, match=message) if message else nullcontext():
        (row,) = faults.two_runs(4, 2, tmp_path)
        assert row.end == "2 whole" and row.seen == ("one refused" if any(codes) else "both finished")


def test_a_shorter_loop_of_kills_does_not_replace_a_longer_one(tmp_path):
    path = tmp_path / "faults.json"

    def loop(kills, **more):
        return FaultResult(kills=kills, while_saving=0, steps=1, tensors=1, stage=4, ranks=2, save_every=20, torch="",
                           date="", seed=kills, **more)
    new = loop(2, journey=[Stop(1, "new", 1.0, 1.0)])
    assert command.with_the_longest_loop(new, path) == new
    for text in ("", "[]", '{"kills": 2}', '{"schema": 1, "kills": null}', results.to_json(loop(2))):
        path.write_text(text)
        assert command.with_the_longest_loop(new, path) == new
    path.write_text(results.to_json(loop(3, journey=[Stop(1, "old", 1.0, 1.0)])))
    assert command.with_the_longest_loop(new, path) == loop(3, journey=new.journey)


@pytest.mark.parametrize("args", [["--kills", "0"], ["--stage", "5"]], ids=str)
def test_bad_input_is_one_line(args, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["faults", *args])
    with pytest.raises(SystemExit) as end:
        command.main()
    stderr = capsys.readouterr().err
    assert end.value.code == 2
    assert stderr.startswith("faults: error: ") and args[0] in stderr and stderr.count("\n") == 1


def test_what_was_started_ends_when_something_goes_wrong(tmp_path):
    with pytest.raises(AssertionError), Run(f"{STAGES[3]}/train.py", 2, 10**6, tmp_path) as run:
        next(run.starts())
        children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
        raise AssertionError
    assert run.process.poll() is not None and len(children) == 2
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_sigterm_ends_it_as_an_error_does(tmp_path, monkeypatch):
    """What it has started and made is put away then: see above."""
    def interrupted(*args):
        (folder,) = tmp_path.iterdir()
        assert folder == args[-1]
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(5)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(command, "random_kills", interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["faults"])
    try:
        with pytest.raises(SystemExit):
            command.main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not list(tmp_path.iterdir())
