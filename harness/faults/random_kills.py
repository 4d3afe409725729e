"""Again and again one rank is ended by SIGKILL, after a random time; torchrun starts all of them anew.

Two things are checked: every start goes on from a checkpoint that is no older than the newest complete one was at the
kill; and at the end all is, to the bit, that of a run that nobody disturbed.
"""

import random
import threading
from datetime import date

import torch

from checkpoint import latest
from harness.faults.final_state import check, check_same, check_undisturbed, final_state
from harness.faults.training_run import SAVE_EVERY, Run, train_script
from harness.rows.fault_results import FaultResult

STEPS_A_KILL = 200  # more than an attempt gets done on average, so that there is something left to kill
LONGEST_S = 1.0  # that an attempt is left alone, after it has said where it goes on


def random_kills(stage, ranks, kills, seed, folder, say=print):
    """-> FaultResult of the loop alone. Raises AssertionError if anything was lost, queue.Empty if a run hangs."""
    chance, steps = random.Random(seed), kills * STEPS_A_KILL
    killed, while_saving, newest = 0, 0, ""
    with Run(train_script(stage), ranks, steps, folder / "killed", seed=seed, max_restarts=kills) as run:
        for start in run.starts():
            check(start >= newest, f"it went on from {start or 'the beginning'}, but {newest} was complete")
            if killed == kills:
                continue
            threading.Event().wait(chance.uniform(0, LONGEST_S))
            newest = getattr(latest(folder / "killed"), "name", "")
            while_saving += any((folder / "killed").glob("*.partial"))
            killed += run.kill_a_rank(chance)
            say(f"kill {killed}: the newest complete checkpoint is {newest or 'none'}")
        check(run.end() == 0 and killed == kills, f"ended after {killed} kills", *run.lines[-20:])
    with Run(train_script(stage), ranks, steps, folder / "undisturbed", seed=seed) as undisturbed:
        check_undisturbed(undisturbed)
    check_same(folder / "killed", folder / "undisturbed", folder / "state.pt")
    n_tensors = len(final_state(folder / "killed", folder / "state.pt"))
    return FaultResult(kills=killed, while_saving=while_saving, steps=steps, tensors=n_tensors, stage=stage,
                       ranks=ranks, save_every=SAVE_EVERY, seed=seed, torch=torch.__version__,
                       date=date.today().isoformat())
