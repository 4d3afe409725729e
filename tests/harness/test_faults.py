"""What a cluster does to training runs: kills, signals, a stopped rank. Nothing is lost.

`make faults` runs these in full, and writes the table of results/README.md.
"""

import contextlib
import functools
import itertools
import os
import random
import re
import signal
import subprocess

import pytest

from checkpoint import latest
from harness import STAGE_4
from tests.common import STAGES
from tests.harness.faults import Run, end_equally, note, run_undisturbed
from tests.ranks import run_ranks

pytestmark = [pytest.mark.waits, pytest.mark.faults]

OPTIONS = ["--model=nano", "--sequence-length=32", "--batch-size=4", "--steps=30", "--save-every=10", "--checkpoint"]
TRAIN_4, KILLED = f"{STAGE_4}/train.py", "tests/harness/killed.py"


@pytest.fixture
def n_kills(request):
    """How many random kills `make faults` asks for; 0 asks for the short version."""
    return request.config.getoption("--kills", 0)


def train(stage, folder):
    """Return what rank 0 prints."""
    ended = run_ranks(3, f"{stage}/train.py", *OPTIONS, folder)
    assert [rank.code for rank in ended] == [0] * 3, "\n".join(rank.stderr for rank in ended)
    return ended[0].stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function(stage) that returns the folder of a run that nobody disturbs."""
    @functools.cache
    def folder_of(stage):
        folder = tmp_path_factory.mktemp(stage)
        train(stage, folder)
        return folder
    return folder_of


def test_random_kills_lose_nothing(n_kills, tmp_path):
    """Again and again one rank is killed, after a random time; torchrun starts all of them anew."""
    n_kills, chance, folder = n_kills or 1, random.Random(0), tmp_path / "killed"
    n_steps, n_killed, n_in_save, newest = max(400, n_kills * 120), 0, 0, ""  # more than attempts do on average
    with Run(TRAIN_4, 2, n_steps, folder, max_restarts=n_kills) as run:
        for start in run.starts():
            assert start >= newest, f"it went on from {start or 'the beginning'}, but {newest} was complete"
            if n_killed < n_kills:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    run.process.wait(chance.uniform(0, 1.0))
                newest = getattr(latest(folder), "name", "")
                n_in_save += any(folder.glob("*.partial"))
                os.kill(chance.choice(run.rank_processes()), signal.SIGKILL)
                n_killed += 1
        assert run.end() == 0 and n_killed == n_kills, "\n".join(run.lines[-20:])
    run_undisturbed(TRAIN_4, 2, n_steps, tmp_path / "undisturbed")
    assert end_equally(folder, tmp_path / "undisturbed")
    note(f"SIGKILL at a random moment, {n_in_save} in a save", n_kills, "the newest complete checkpoint")


LOST, SAVED_BY_ALL = [1, -9, 1], [75] * 3  # exit codes of the three ranks
SCENARIOS = [  # a stage; when rank 1 sends itself which signal; the exit codes, and the step that all go on from
    (4, "backward", "SIGKILL", LOST, 10), (4, "prefetch", "SIGKILL", LOST, 10), (4, "save 1", "SIGKILL", LOST, 10),
    (4, "backward", "SIGSTOP", LOST, 10), (2, "backward", "SIGTERM", SAVED_BY_ALL, 15),
    (3, "save 1", "SIGHUP", SAVED_BY_ALL, 21),
]


@pytest.mark.parametrize("number, moment, signal_name, codes, step", SCENARIOS)
def test_whatever_happens_to_one_rank_the_others_say_so_in_one_line_and_nothing_is_lost(
        number, moment, signal_name, codes, step, undisturbed, tmp_path):
    """Without torchrun, which would end them itself; in step 15, or in the save after step 20. Then the same again.

    SIGKILL, and SIGSTOP, which ends a run by its time-out: the others name rank 1. A signal that asks to stop is heard
    after the step under way: all save it.
    """
    folder, stage = tmp_path / "run", STAGES[number - 1]
    more = ["--timeout", "10"] if signal_name == "SIGSTOP" else []
    ended = run_ranks(3, KILLED, 1, moment, signal_name, f"{stage}/train.py", *OPTIONS, folder, *more)
    assert [rank.code for rank in ended] == codes, ended[0].stderr + ended[1].stderr
    if codes == SAVED_BY_ALL:
        saved = f"saved in {folder}/step-{step:08}: the same command goes on"
        assert f"stopped by {signal_name} after step {step}, {saved}\n" in ended[0].stdout
        assert "stopped" not in ended[1].stdout
    for rank in (0, 2) if codes == LOST else ():
        (line,) = [line for line in ended[rank].stderr.splitlines() if "error" in line]
        # The other may be slow to say that it is there, and is named too then.
        assert re.match(rf"train\.py: error: rank {rank} lost rank ([02], )?1(, [02])?: ", line), line
        assert "Traceback" not in ended[rank].stderr
    assert latest(folder).name == f"step-{step:08}"
    assert f"resumed from {folder}/step-{step:08}\n" in train(stage, folder)
    assert end_equally(folder, undisturbed(stage)) and not list(folder.glob("*.partial"))
    if signal_name == "SIGSTOP":
        assert any("imed out" in ended[rank].stderr for rank in (0, 2))
        note("SIGSTOP to one rank", 1, "named by the others")


def test_a_rank_killed_at_file_operations_of_a_save_loses_nothing(n_kills, undisturbed, tmp_path):
    """Files are written and renamed, an old checkpoint is removed. Two of three ranks at each operation, or a few."""
    n_killed = 0
    for killed in (0, 2):
        for operation in itertools.count(1, 1 if n_kills else 3):
            folder = tmp_path / f"{killed}.{operation}"
            command = f"save {operation}", "SIGKILL", TRAIN_4, *OPTIONS, folder, "--keep=1"
            codes = [ended.code for ended in run_ranks(3, KILLED, killed, *command)]
            if codes == [0] * 3:  # there are no more operations
                break
            assert codes[killed] == -9 and 0 not in codes and latest(folder).name in ("step-00000010", "step-00000020")
            assert f"resumed from {latest(folder)}\n" in train(STAGE_4, folder)
            assert end_equally(folder, undisturbed(STAGE_4))
            n_killed += 1
    assert n_killed >= 3
    note("SIGKILL to a rank, at each operation of a save", n_killed, "that save or the one before")


def test_signals_under_torchrun(tmp_path):
    """SIGUSR1 for one rank: torchrun starts all anew. SIGTERM for torchrun; then the same command again."""
    steps, folder = 500, tmp_path / "signalled"
    of_signals_only = f"--save-every={steps}"
    with Run(TRAIN_4, 2, steps, folder, of_signals_only, max_restarts=1) as run:
        starts = run.starts()
        assert next(starts) == "", run.lines
        assert run.read_until("^step +20/")
        os.kill(run.rank_processes()[-1], signal.SIGUSR1)
        first, begin = run.read_until(r"stopped by SIGUSR1 after step (\d+)")[1], next(starts)
        assert begin == f"step-{int(first):08}", run.lines[-20:]
        assert run.read_until("^step ")
        run.process.terminate()
        second = run.read_until(r"stopped by SIGTERM after step (\d+)")[1]
        assert run.end() == 1
    run_undisturbed(TRAIN_4, 2, steps, folder, of_signals_only, begin=f"step-{int(second):08}")
    run_undisturbed(TRAIN_4, 2, steps, tmp_path / "undisturbed", of_signals_only)
    assert end_equally(folder, tmp_path / "undisturbed")
    note("SIGUSR1 to a rank: torchrun starts all anew", 1, f"saved by all after step {first}")
    note("SIGTERM to torchrun, the same command again", 1, f"saved by all after step {second}")
