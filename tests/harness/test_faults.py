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
from harness import STAGE_2, STAGE_3, STAGE_4
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
    """Kill one rank after a random time, again and again. torchrun starts all ranks anew each time."""
    n_kills = n_kills or 1
    n_steps = max(400, n_kills * 120)  # more than attempts do on average
    folder = tmp_path / "killed"
    chance = random.Random(0)
    n_killed = 0
    n_in_save = 0
    newest = ""
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


def disturbed(folder, stage, moment, signal_name, *args):
    """Train on three ranks, of which rank 1 sends itself a signal. Returns the Ended of each rank.

    No torchrun runs, because torchrun would end the other ranks itself.
    """
    return run_ranks(3, KILLED, 1, moment, signal_name, f"{stage}/train.py", *OPTIONS, folder, *args)


def assert_goes_on(folder, stage, step, undisturbed):
    """Train again: the run must go on from the checkpoint of `step`, and end like an undisturbed run."""
    assert latest(folder).name == f"step-{step:08}"
    assert f"resumed from {folder}/step-{step:08}\n" in train(stage, folder)
    assert end_equally(folder, undisturbed(stage)) and not list(folder.glob("*.partial"))


@pytest.mark.parametrize("moment, signal_name", [
    ("backward", "SIGKILL"), ("prefetch", "SIGKILL"), ("backward", "SIGSTOP")])
def test_ranks_that_lose_a_rank_name_it_in_one_line_and_nothing_is_lost(moment, signal_name, undisturbed, tmp_path):
    """Kill rank 1 in step 15, or stop it, which ends the run by its time-out. Both other ranks must name rank 1."""
    args = ["--timeout", "10"] if signal_name == "SIGSTOP" else []
    ended = disturbed(tmp_path, STAGE_4, moment, signal_name, *args)
    assert [rank.code for rank in ended] == [1, -9, 1], ended[0].stderr + ended[1].stderr
    for rank in (0, 2):
        (line,) = [line for line in ended[rank].stderr.splitlines() if "error" in line]
        # The other rank may be slow to say that it is there, and is named too then.
        assert re.match(rf"train\.py: error: rank {rank} lost rank ([02], )?1(, [02])?: ", line), line
        assert "Traceback" not in ended[rank].stderr
    assert_goes_on(tmp_path, STAGE_4, 10, undisturbed)
    if signal_name == "SIGSTOP":
        assert any("imed out" in ended[rank].stderr for rank in (0, 2))
        note("SIGSTOP to one rank", 1, "named by the others")


@pytest.mark.parametrize("stage, moment, signal_name, step", [
    (STAGE_2, "backward", "SIGTERM", 15), (STAGE_3, "save 1", "SIGHUP", 21)])
def test_after_a_signal_to_a_rank_all_save_the_step_under_way(stage, moment, signal_name, step, undisturbed, tmp_path):
    """Send the signal in step 15, or in the save after step 20."""
    ended = disturbed(tmp_path, stage, moment, signal_name)
    assert [rank.code for rank in ended] == [75] * 3, ended[0].stderr + ended[1].stderr
    saved = f"saved in {tmp_path}/step-{step:08}: the same command goes on"
    assert f"stopped by {signal_name} after step {step}, {saved}\n" in ended[0].stdout
    assert "stopped" not in ended[1].stdout
    assert_goes_on(tmp_path, stage, step, undisturbed)


def test_a_rank_killed_at_file_operations_of_a_save_loses_nothing(n_kills, undisturbed, tmp_path):
    """Kill rank 0 or 2 where a file is written, renamed or removed: at each operation, or at a few of them.

    The save of step 20 is the fourth, and so it removes the first.
    """
    n_killed = 0
    for killed in (0, 2):
        for operation in itertools.count(1, 1 if n_kills else 3):
            folder = tmp_path / f"{killed}.{operation}"
            command = f"save {operation}", "SIGKILL", TRAIN_4, *OPTIONS, folder, "--save-every=5"
            codes = [ended.code for ended in run_ranks(3, KILLED, killed, *command)]
            if codes == [0] * 3:  # there are no more operations
                break
            assert codes[killed] == -9 and 0 not in codes
            assert latest(folder).name in ("step-00000015", "step-00000020")
            assert f"resumed from {latest(folder)}\n" in train(STAGE_4, folder)
            assert end_equally(folder, undisturbed(STAGE_4))
            n_killed += 1
    assert n_killed >= 3
    note("SIGKILL to a rank, at each operation of a save", n_killed, "that save or the one before")


def test_signals_under_torchrun(tmp_path):
    """Send SIGUSR1 to one rank: torchrun starts all anew. Send SIGTERM to torchrun, and run the same command again."""
    steps = 500
    folder = tmp_path / "signalled"
    of_signals_only = f"--save-every={steps}"
    with Run(TRAIN_4, 2, steps, folder, of_signals_only, max_restarts=1) as run:
        starts = run.starts()
        assert next(starts) == "", run.lines
        assert run.read_until("^step +20/")
        os.kill(run.rank_processes()[-1], signal.SIGUSR1)
        first = run.read_until(r"stopped by SIGUSR1 after step (\d+)")[1]
        begin = next(starts)
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
