"""A run gets SIGUSR1 or SIGTERM, has a rank that is stopped, or meets another run in its folder.

All are compared, to the bit, with a run that nobody disturbed.
"""

import functools
import os
import signal
import threading
import time
from datetime import date
from pathlib import Path

import torch

from checkpoint import CheckpointError
from harness.faults import file_operations
from harness.faults.final_state import check, check_same, check_undisturbed, converted
from harness.faults.random_kills import LONGEST_S
from harness.faults.training_run import START_LIMIT_S, Run, train_script
from harness.rows.fault_results import FaultRow, Scenarios
from harness.train import run_folder

TIMEOUT_S = 5  # where a rank is stopped
SIGNALLED_STEPS = 500  # of a run that is signalled: more than it gets done before


def undisturbed_run(stage, ranks, folder, **options):
    with Run(train_script(stage), ranks, SIGNALLED_STEPS, folder, **options) as run:
        check_undisturbed(run)


def signals(stage, ranks, folder, undisturbed, say=print):
    """SIGUSR1 for one rank: torchrun starts all anew. SIGTERM for torchrun; then the same command again -> rows."""
    arguments = train_script(stage), ranks, SIGNALLED_STEPS, folder / "signalled"
    options = {"save_every": SIGNALLED_STEPS}  # no other checkpoint but of a signal
    with Run(*arguments, **options, max_restarts=1) as run:
        starts = run.starts()
        check(next(starts) == "", *run.lines)
        threading.Event().wait(LONGEST_S / 3)
        os.kill(run.rank_processes()[-1], signal.SIGUSR1)
        begin = next(starts)
        first = run.said(r"stopped by SIGUSR1 after step (\d+)")[1]
        check(begin == f"step-{int(first):08}", f"it went on from {begin}", *run.lines[-20:])
        say(f"SIGUSR1 for one rank: all saved after step {first}, and torchrun started them anew")
        threading.Event().wait(LONGEST_S / 3)
        run.process.terminate()
        second, code = run.said(r"stopped by SIGTERM after step (\d+)")[1], run.end()
    say(f"SIGTERM for torchrun: its ranks saved after step {second}; it ended with {code}")
    with Run(*arguments, **options) as run:
        begin = list(run.starts())
        check(begin == [f"step-{int(second):08}"] and run.end() == 0, f"it went on from {begin}", *run.lines[-20:])
    check_same(folder / "signalled", undisturbed, folder / "state.pt")
    return [FaultRow("SIGUSR1 to one rank", 1, f"saved by all after step {first}"),
            FaultRow("SIGTERM to torchrun", 1, f"saved by all after step {second}")]


def stopped(stage, ranks, folder, undisturbed, say=print):
    """One rank gets SIGSTOP, and SIGKILL as soon as the others have named it -> rows."""
    more = f"--timeout={TIMEOUT_S}",
    with Run(train_script(stage), ranks, SIGNALLED_STEPS, folder / "stopped", *more, max_restarts=1) as run:
        starts = run.starts()
        check(next(starts) == "", *run.lines)
        processes = run.rank_processes()  # in the order of ranks
        threading.Event().wait(LONGEST_S / 3)
        os.kill(processes[-1], signal.SIGSTOP)
        since = time.monotonic()
        try:
            run.said(f"error: rank 0 lost rank {ranks - 1}: ")
            waited = time.monotonic() - since
        finally:
            os.kill(processes[-1], signal.SIGKILL)
        begin = next(starts)
        check(not list(starts) and run.end() == 0, *run.lines[-20:])
    say(f"a rank was stopped: named by the others after {waited:.0f} s, and all went on from {begin or 'step 0'}")
    check_same(folder / "stopped", undisturbed, folder / "state.pt")
    return [FaultRow(f"SIGSTOP to one rank, --timeout {TIMEOUT_S}", 1, f"named by the others after {waited:.0f} s")]


def at_once(*runs):
    """Stops each run when it is about to train, until all of them are; one that ends before is left alone."""
    held, waiting, deadline = [], list(runs), time.monotonic() + START_LIMIT_S
    try:
        while waiting and time.monotonic() < deadline:
            for run in list(waiting):
                is_ready = any(line.startswith("validation loss before") for line in list(run.lines))
                if is_ready:
                    held += run.rank_processes()
                    for process in run.rank_processes():
                        os.kill(process, signal.SIGSTOP)
                if is_ready or run.process.poll() is not None:
                    waiting.remove(run)
            threading.Event().wait(0.002)
    finally:
        for process in held:
            os.kill(process, signal.SIGCONT)


def two_runs(stage, ranks, folder, say=print, steps=200):
    """Two runs that differ in their seed begin at once in one folder, and save the same steps -> rows.

    Each may finish or be refused in one line; not both are refused, and no checkpoint has parts of both.
    """
    def checkpoints_of(which):
        return {path.name: path for path in map(functools.partial(run_folder.path_of, folder / which),
                                                run_folder.complete(folder / which))}

    script, more = train_script(stage), ("--keep=0",)
    with (Run(script, ranks, steps, folder / "seed 0", *more, seed=0) as one,
          Run(script, ranks, steps, folder / "seed 1", *more, seed=1) as other):
        check_undisturbed(one)
        check_undisturbed(other)
    with (Run(script, ranks, steps, folder / "both", *more, seed=0) as one,
          Run(script, ranks, steps, folder / "both", *more, seed=1) as other):
        at_once(one, other)
        codes, refusals = [run.process.wait(START_LIMIT_S) for run in (one, other)], []
        for run, code in zip((one, other), codes):
            errors = [line for line in run.lines if line.startswith("train.py: error: ")]
            check(len(errors) == (code != 0), f"ended with {code}", *run.lines[-20:])
            refusals += errors
    check(0 in codes, "both were refused:", *refusals)
    n_checkpoints = 0
    for name, path in checkpoints_of("both").items():
        try:
            found = converted(path, folder / "one.pt")["model"]
        except CheckpointError as error:
            raise AssertionError(f"{name} of two runs is complete, and can't be read: {error}") from None
        wanted = [converted(folder / f"seed {seed}" / name, folder / "other.pt")["model"] for seed in (0, 1)]
        check(any(all(torch.equal(found[key], one[key]) for key in one) for one in wanted), f"{name} is of both runs")
        n_checkpoints += 1
    end = f"one was refused: {refusals[0].removeprefix('train.py: error: ')}" if refusals else "both finished"
    say(f"two runs in one folder: {end}")
    return [FaultRow("two runs begin at once in one folder", 1, "one refused" if refusals else "both finished",
                f"{n_checkpoints} whole")]


def scenarios(stage, ranks, folder, say=print):
    """-> Scenarios. AssertionError if anything was lost."""
    (folder / "operations").mkdir()
    package = Path(train_script(stage)).parent.name
    n_kills = file_operations.kills_at_operations(package, ranks, folder / "operations", say)
    rows = [FaultRow("SIGKILL to a rank, at each operation of a save", n_kills, "that checkpoint or the one before")]
    undisturbed_run(stage, ranks, folder / "straight")
    rows += signals(stage, ranks, folder, folder / "straight", say)
    rows += stopped(stage, ranks, folder, folder / "straight", say)
    rows += two_runs(stage, ranks, folder, say)
    return Scenarios(rows, stage, ranks, torch.__version__, date.today().isoformat())
