"""What a cluster does to training runs: kills, signals, a stopped rank, damaged files. Nothing is lost.

`make faults` runs these in full, and writes the table of results/README.md.
"""

import contextlib
import functools
import importlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess

import pytest
import torch

from checkpoint import latest
from harness import corpus, options
from harness.checkpoints import Checkpoints, checkpoints_in
from harness.gpt import build_model
from harness.options import warmup_then_cosine
from harness.workers import WorkerError, Workers
from tests.common import STAGES
from tests.harness.faults import Run, end_equally, note, run_undisturbed
from tests.harness.killed import at_file_operation
from tests.ranks import run_ranks

pytestmark = [pytest.mark.waits, pytest.mark.faults]

OPTIONS = ["--model=nano", "--sequence-length=32", "--batch-size=4", "--steps=30", "--save-every=10", "--checkpoint"]
TRAIN_4 = f"{STAGES[3]}/train.py"


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
    def undisturbed(stage):
        folder = tmp_path_factory.mktemp(stage)
        train(stage, folder)
        return folder
    return undisturbed


def test_random_kills_lose_nothing(n_kills, tmp_path):
    """Again and again one rank is killed, after a random time; torchrun starts all of them anew."""
    n_kills, chance, folder = n_kills or 1, random.Random(0), tmp_path / "killed"
    n_steps, n_killed, n_in_save, newest = max(400, n_kills * 200), 0, 0, ""  # more than attempts do on average
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
    (4, "backward", LOST, 10), (3, "step", LOST, 10), (4, "prefetch", LOST, 10), (4, "save", LOST, 10),
    (4, "backward:SIGSTOP", LOST, 10), (4, "backward:SIGTERM", SAVED_BY_ALL, 15), (2, "step:SIGUSR1", SAVED_BY_ALL, 15),
    (3, "save:SIGHUP", SAVED_BY_ALL, 21),
]


@pytest.mark.parametrize("number, moment, codes, step", SCENARIOS)
def test_whatever_happens_to_one_rank_the_others_say_so_in_one_line_and_nothing_is_lost(
        number, moment, codes, step, undisturbed, tmp_path):
    """Without torchrun, which would end them itself; in step 15, or in the save after step 20. Then the same again.

    SIGKILL, and SIGSTOP, which ends a run by its time-out: the others name rank 1. A signal that asks to stop is heard
    after the step under way: all save it.
    """
    folder, stage, signal_name = tmp_path / "run", STAGES[number - 1], moment.partition(":")[2]
    more = ["--timeout", "10"] if signal_name == "SIGSTOP" else []
    ended = run_ranks(3, "tests/harness/killed.py", moment, f"{stage}/train.py", *OPTIONS, folder, *more)
    assert [rank.code for rank in ended] == codes, ended[0].stderr + ended[1].stderr
    if codes == SAVED_BY_ALL:
        assert f"stopped by {signal_name} after step {step}, saved: the same command goes on\n" in ended[0].stdout
        assert "stopped" not in ended[1].stdout
    for rank in (0, 2) if codes == LOST else ():
        (line,) = [line for line in ended[rank].stderr.splitlines() if "error" in line]
        # The other may be slow to say that it is there, and is named too then.
        assert re.match(rf"train\.py: error: rank {rank} lost rank ([02], )?1(, [02])?: ", line), line
        assert "Traceback" not in ended[rank].stderr
    if moment == "save":
        assert any(folder.glob("*.partial"))
    assert latest(folder).name == f"step-{step:08}"
    assert f"resumed from {folder}/step-{step:08}\n" in train(stage, folder)
    assert end_equally(folder, undisturbed(stage)) and not list(folder.glob("*.partial"))
    if signal_name == "SIGSTOP":
        assert any("imed out" in ended[rank].stderr for rank in (0, 2))
        note("SIGSTOP to one rank", 1, "named by the others after --timeout")


STEPS, SAVED = 4, 3  # of a whole run; that of the save in which a rank ends


def train_from_newest(rank, folder, steps, killed=None, operation=0):
    """Train until `steps` are done, save each, keep two; return the step that the run went on from.

    In the save of step SAVED the rank `killed` ends before its file operation of that number.
    """
    args = options.parse_args(__doc__, ["--model=nano", "--sequence-length=16", "--batch-size=1", f"--steps={STEPS}",
                                        "--save-every=1", "--keep=2", f"--checkpoint={folder}"])
    batches, _ = corpus.load_data(args, rank)
    model = build_model(args, rank)
    stage = importlib.import_module(STAGES[3])
    optimizer = stage.DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=args.lr,
                                           weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(args.steps))
    with contextlib.redirect_stdout(None):  # where it goes on from
        checkpoints = Checkpoints(args, rank, model, optimizer, scheduler)
    for step in range(checkpoints.first_step, steps):
        model(*batches.batch(step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank.rank == killed and step + 1 == SAVED:
            at_file_operation(operation)
        checkpoints.step_done(step + 1)
    return checkpoints.first_step


def test_a_rank_killed_at_file_operations_of_a_save_loses_nothing(n_kills, tmp_path):
    """Files are written, synced and renamed, an old checkpoint is removed. Each rank at each, or every fifth."""
    n_killed = 0
    with Workers(2) as workers:
        workers.run(train_from_newest, tmp_path / "undisturbed", STEPS)
        for killed in range(2):
            for operation in itertools.count(1, 1 if n_kills else 5):
                folder = tmp_path / f"{killed}.{operation}"
                try:
                    workers.run(train_from_newest, folder, SAVED, killed, operation)
                    workers.close()  # they count on
                    break
                except WorkerError as end:
                    assert str(end) == f"rank {killed} was killed by signal 9"
                newest = int(latest(folder).name.removeprefix("step-"))
                assert newest in (SAVED - 1, SAVED)
                assert workers.run(train_from_newest, folder, STEPS) == [newest] * 2
                assert len(checkpoints_in(folder)) == 2 and end_equally(folder, tmp_path / "undisturbed")
                shutil.rmtree(folder)
                n_killed += 1
    assert n_killed >= 4
    note("SIGKILL to a rank, at each operation of a save", n_killed, "that checkpoint or the one before")


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
    note("SIGUSR1 to one rank: exit 75, torchrun starts all anew", 1, f"saved by all after step {first}")
    note("SIGTERM to torchrun: exit 1, the same command again", 1, f"saved by all after step {second}")
