"""What a cluster does to training runs: kills, signals, a stopped rank, a second run in the folder. Nothing is lost.

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
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from checkpoint import latest
from harness import corpus, options
from harness.checkpoints import Checkpoints, complete, path_of
from harness.gpt import GPT, MODELS, build_model
from harness.options import warmup_then_cosine
from harness.workers import WorkerError, Workers
from tests.checkpoint.compare import equal
from tests.common import STAGES
from tests.harness.faults import STOPS, Run, Stop, converted, die_at, run_undisturbed, same, seen
from tests.ranks import run_ranks

pytestmark = [pytest.mark.waits, pytest.mark.faults]

OPTIONS = ["--model=nano", "--sequence-length=32", "--batch-size=4", "--steps=30", "--save-every=10", "--checkpoint"]
TRAIN_4 = f"{STAGES[3]}/train.py"


@pytest.fixture
def in_full(request):
    """Whether `make faults` asks, -> the number of random kills; else 0, for the short version."""
    return request.config.getoption("--kills", 0)


def train(stage, folder):
    """-> what rank 0 prints."""
    ended = run_ranks(3, f"{stage}/train.py", *OPTIONS, folder)
    assert [rank.code for rank in ended] == [0] * 3, "\n".join(rank.stderr for rank in ended)
    return ended[0].stdout


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """-> function(stage): the folder of a run that nobody disturbs."""
    @functools.cache
    def undisturbed(stage):
        folder = tmp_path_factory.mktemp(stage)
        train(stage, folder)
        return folder
    return undisturbed


def test_random_kills_lose_nothing(in_full, tmp_path):
    """Again and again one rank is ended, after a random time; torchrun starts all of them anew."""
    kills, chance = in_full or 1, random.Random(0)
    steps, killed, while_saving, newest = max(400, kills * 200), 0, 0, ""  # more than attempts get done on average
    with Run(TRAIN_4, 2, steps, tmp_path / "killed", max_restarts=kills) as run:
        for start in run.starts():
            assert start >= newest, f"it went on from {start or 'the beginning'}, but {newest} was complete"
            if killed == kills:
                continue
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.process.wait(chance.uniform(0, 1.0))
            newest = getattr(latest(tmp_path / "killed"), "name", "")
            while_saving += any((tmp_path / "killed").glob("*.partial"))
            if children := run.rank_processes():
                os.kill(chance.choice(children), signal.SIGKILL)
                killed += 1
        assert run.end() == 0 and killed == kills, "\n".join(run.lines[-20:])
    run_undisturbed(TRAIN_4, 2, steps, tmp_path / "undisturbed")
    assert same(tmp_path / "killed", tmp_path / "undisturbed", tmp_path)
    seen(f"SIGKILL at a random moment, {while_saving} in a save", kills, "the newest complete checkpoint")


LOST, SAVED_BY_ALL = [1, -9, 1], [75] * 3  # exit codes of the three ranks
SCENARIOS = [  # a stage; when rank 1 sends itself which signal; the exit codes, and the step that all go on from
    (4, "backward", LOST, 10), (3, "step", LOST, 10), (4, "prefetch", LOST, 10), (4, "save", LOST, 10),
    (4, "backward:SIGSTOP", LOST, 10), (4, "backward:SIGTERM", SAVED_BY_ALL, 15), (2, "step:SIGUSR1", SAVED_BY_ALL, 15),
    (4, "after step:SIGHUP", SAVED_BY_ALL, 15), (3, "save:SIGTERM", SAVED_BY_ALL, 21),
]


@pytest.mark.parametrize("number, moment, codes, step", SCENARIOS)
def test_whatever_happens_to_one_rank_the_others_say_so_in_one_line_and_nothing_is_lost(
        number, moment, codes, step, undisturbed, tmp_path):
    """Without torchrun, which would end them itself; in step 15, or in the save after step 20. Then the same again.

    SIGKILL, and SIGSTOP, which ends a run by its time-out: the others name rank 1. A signal that asks to stop is heard
    after the step under way: all save it.
    """
    folder, stage, signalled = tmp_path / "run", STAGES[number - 1], moment.partition(":")[2]
    more = ["--timeout", "10"] if signalled == "SIGSTOP" else []
    ended = run_ranks(3, "tests/checkpoint/killed.py", moment, f"{stage}/train.py", *OPTIONS, folder, *more)
    assert [rank.code for rank in ended] == codes, ended[0].stderr + ended[1].stderr
    if codes == SAVED_BY_ALL:
        assert f"stopped by {signalled} after step {step}, which is saved: the same command goes on " in ended[0].stdout
        assert "stopped" not in ended[1].stdout
    for rank in (0, 2) if codes == LOST else ():
        (line,) = [line for line in ended[rank].stderr.splitlines() if "error" in line]
        # The other may be slow to say that it is there, and is named too then.
        assert re.match(rf"train\.py: error: rank {rank} lost rank ([02], )?1(, [02])?: ", line), line
        assert "Traceback" not in ended[rank].stderr
    if moment == "save":
        assert any(folder.glob("step-00000020.*.partial"))
    assert latest(folder).name == f"step-{step:08}"
    assert f"resumed from {folder}/step-{step:08}\n" in train(stage, folder)
    assert same(folder, undisturbed(stage), tmp_path) and not list(folder.glob("*.partial"))
    if signalled == "SIGSTOP":
        assert any("imed out" in ended[rank].stderr for rank in (0, 2))
        seen("SIGSTOP to one rank, --timeout 3", 1, "named by the others after that")


def one_step(model, optimizer, scheduler, batch):
    model(*batch).backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


STEPS, SAVED = 4, 3  # of a whole run; that of the save in which a rank ends


def trained(rank, stage, folder, steps, killed=None, at=0):
    """Trains until `steps` are done, from the newest checkpoint on, and saves each step; keeps two.

    In the save of step SAVED rank `killed` ends before operation number `at`.
    -> the step that it went on from.
    """
    args = options.parse_args(__doc__, ["--model", "nano", "--sequence-length", "16", "--batch-size", "1", "--steps",
                                        str(STEPS), "--save-every", "1", "--keep", "2", "--checkpoint", str(folder)])
    batches, _ = corpus.load_data(args, rank)
    model = build_model(args, rank)
    optimizer = importlib.import_module(stage).DistributedOptimizer(model.parameters(), torch.optim.AdamW, lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(args.steps))
    with contextlib.redirect_stdout(None):  # where it goes on from
        checkpoints = Checkpoints(args, rank, model, optimizer, scheduler)
    for step in range(checkpoints.first_step, steps):
        one_step(model, optimizer, scheduler, batches.batch(step))
        if rank.rank == killed and step + 1 == SAVED:
            die_at(at)
        checkpoints.step_done()
    return checkpoints.first_step


def test_a_rank_killed_at_file_operations_of_a_save_loses_nothing(in_full, tmp_path):
    """Files are written, synced and renamed, an old checkpoint is removed. Each rank at each, or every fifth."""
    n_kills, stage = 0, STAGES[3]
    with Workers(2) as workers:
        workers.run(trained, stage, tmp_path / "undisturbed", STEPS)
        for killed in range(2):
            for at in itertools.count(step=1 if in_full else 5):
                run = tmp_path / f"{killed}.{at}"
                try:
                    workers.run(trained, stage, run, SAVED, killed, at)
                    workers.close()  # they count on
                    break
                except WorkerError as end:
                    assert str(end) == f"rank {killed} was killed by signal 9"
                newest = [*complete(run), None][0]
                assert newest in (SAVED - 1, SAVED) and workers.run(trained, stage, run, STEPS) == [newest] * 2
                assert complete(run) == [STEPS, STEPS - 1] and same(run, tmp_path / "undisturbed", tmp_path)
                shutil.rmtree(run)
                n_kills += 1
    assert n_kills >= 4
    seen("SIGKILL to a rank, at each operation of a save", n_kills, "that checkpoint or the one before")


def test_signals_under_torchrun(tmp_path):
    """SIGUSR1 for one rank: torchrun starts all anew. SIGTERM for torchrun; then the same command again."""
    steps, folder = 500, tmp_path / "signalled"
    of_signals_only = f"--save-every={steps}"
    with Run(TRAIN_4, 2, steps, folder, of_signals_only, max_restarts=1) as run:
        starts = run.starts()
        assert next(starts) == "", run.lines
        assert run.said("^step +20/")
        os.kill(run.rank_processes()[-1], signal.SIGUSR1)
        first, begin = run.said(r"stopped by SIGUSR1 after step (\d+)")[1], next(starts)
        assert begin == f"step-{int(first):08}", run.lines[-20:]
        assert run.said("^step ")
        run.process.terminate()
        second = run.said(r"stopped by SIGTERM after step (\d+)")[1]
        run.end()
    run_undisturbed(TRAIN_4, 2, steps, folder, of_signals_only, begin=f"step-{int(second):08}")
    run_undisturbed(TRAIN_4, 2, steps, tmp_path / "undisturbed", of_signals_only)
    assert same(folder, tmp_path / "undisturbed", tmp_path)
    seen("SIGUSR1 to one rank", 1, f"saved by all after step {first}")
    seen("SIGTERM to torchrun", 1, f"saved by all after step {second}")


def at_once(*runs):
    """Stops each run when it is about to train, until all of them are; one that ends before is left alone."""
    def hold(run):
        held = run.rank_processes() if run.said("^validation loss before") else []
        for process in held:
            os.kill(process, signal.SIGSTOP)
        return held

    with ThreadPoolExecutor() as threads:
        for process in sum(threads.map(hold, runs), []):
            os.kill(process, signal.SIGCONT)


def test_two_runs_that_begin_at_once_in_one_folder_mix_nothing(tmp_path, steps=100):
    """They differ in their seed, and save the same steps. Each may finish or be refused in one line; not both are
    refused, and no checkpoint has parts of both."""
    for seed in (0, 1):
        run_undisturbed(TRAIN_4, 2, steps, tmp_path / f"seed {seed}", "--keep=0", f"--seed={seed}")
    with (Run(TRAIN_4, 2, steps, tmp_path / "both", "--keep=0", "--seed=0") as one,
          Run(TRAIN_4, 2, steps, tmp_path / "both", "--keep=0", "--seed=1") as other):
        at_once(one, other)
        codes = [run.end() for run in (one, other)]
        errors = [[line for line in run.lines if line.startswith("train.py: error: ")] for run in (one, other)]
    assert 0 in codes and [len(lines) for lines in errors] == [int(code != 0) for code in codes], errors
    whole = [path_of("", step).name for step in complete(tmp_path / "both")]
    for name in whole:
        found, *expected = (converted(tmp_path / folder / name, tmp_path / "one.pt")
                            for folder in ("both", "seed 0", "seed 1"))
        assert any(equal(found, one) for one in expected), f"{name} is of both runs"
    assert whole
    seen("two runs begin at once in one folder", 1, "both finished" if codes == [0, 0] else "one refused",
         f"{len(whole)} whole")


def test_a_run_moves_through_stages_ranks_and_plain_torch(in_full, tmp_path):
    """Stage 3 on 3 ranks, killed; stage 4 on 2, killed; plain torch in one process. Beside DDP, undisturbed."""
    steps, every = (1500, 100) if in_full else (150, 25)
    folder, stops, saves = tmp_path / "run", [], ("--keep=0", f"--save-every={every}")
    for stage, ranks, until in ((STAGES[2], 3, steps // 3), (STAGES[3], 2, steps * 2 // 3)):
        with Run(f"{stage}/train.py", ranks, steps, folder, *saves, f"--batch-size={12 // ranks}") as run:
            next(run.starts())
            while int(run.said(r"^step +(\d+)/")[1]) <= until:  # the one of `until` comes before it is saved
                pass
            os.kill(run.rank_processes()[0], signal.SIGKILL)
            assert run.end() != 0, "torchrun has not noticed that a rank was killed"
        stops.append((f"{stage}, {ranks} ranks, killed", latest(folder).name,
                      converted(latest(folder), tmp_path / "one.pt")))
    begin = int(stops[-1][1].removeprefix("step-"))
    stops.append(("plain torch, 1 process", f"step-{steps:08}", {"model": in_plain_torch(stops[-1][2], begin, steps)}))
    run_undisturbed("harness/train_ddp.py", 1, steps, tmp_path / "ddp", *saves, "--batch-size=12")
    for where, name, found in stops:
        ddp = converted(tmp_path / "ddp" / name, tmp_path / "one.pt")
        STOPS.append(Stop(int(name.removeprefix("step-")), where, *(validation_loss(one["model"])
                                                                     for one in (found, ddp))))
        assert abs(STOPS[-1].loss - STOPS[-1].undisturbed) < 1e-3, STOPS


def in_plain_torch(found, begin, steps):
    """Steps `begin` to `steps` of the same run, without anything of this project but model and data -> weights."""
    model = GPT(MODELS["nano"])
    model.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=MODELS["nano"].lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(steps))
    set_optimizer_state_dict(model, optimizer, found["optimizer"])
    scheduler.last_epoch = begin
    train, _ = corpus.split(corpus.load_bytes())
    batches = corpus.Batches(train, batch_size=12, sequence_length=32, rank=0, world_size=1)
    for step in range(begin, steps):
        one_step(model, optimizer, scheduler, batches.batch(step))
    return model.state_dict()


def validation_loss(weights):
    """Of a nano model with these weights, in nats a byte."""
    model = GPT(MODELS["nano"])
    model.load_state_dict(weights)
    _, validation = corpus.split(corpus.load_bytes())
    batches = corpus.validation_batches(validation, 16, 32, rank=0, world_size=1)
    with torch.no_grad():
        return sum(model(*batch).item() * len(batch[0]) for batch in batches) / corpus.VALIDATION_SEQUENCES
