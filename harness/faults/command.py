"""Does to training runs what a cluster does: kills, signals, a stopped rank, a second run in the same folder; then
moves a run through stages, numbers of ranks, and plain torch.

    python -m harness.faults [--kills 10] [--stage 4] [--ranks 2]        # or: make faults

`operations`: a rank is ended before each file operation of a save, in turn.

`signals`, `stopped`, `two_runs`: a run gets SIGUSR1 or SIGTERM, has a rank that is stopped, or meets another run in its
folder. All are compared, to the bit, with a run that nobody disturbed.

`faults`: torchrun starts train.py, which saves a checkpoint every few steps and goes on from the newest complete one.
Again and again one rank is ended by SIGKILL, after a random time; torchrun starts all of them anew. Two things are
checked: every start goes on from a checkpoint that is no older than the newest complete one was at the kill; and at the
end parameters and optimizer state are, to the bit, those of a run that nobody disturbed.

`journey`: a run begins in stage 3 on 3 ranks and is killed, goes on in stage 4 on 2 ranks and is killed, is converted
by `python -m checkpoint convert`, and ends in plain torch in one process. Its losses stand beside those of DDP,
undisturbed.
"""

import argparse
import dataclasses
import functools
import tempfile
from pathlib import Path

from harness.faults.journey import journey
from harness.faults.random_kills import random_kills
from harness.faults.scenarios import scenarios
from harness.rows import saved
from harness.rows.fault_results import FaultResult
from harness.run import command_line, signals
from harness.run.files import write

fail = functools.partial(command_line.fail, "faults")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("--kills", type=int, default=10, help="random ones (default 10)")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3, 4), default=4, help="whose train.py (default 4)")
    parser.add_argument("--ranks", type=int, default=2, help="(default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of the training (default 0)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    command_line.check_at_least_1(args, ("kills", "ranks"), fail)
    if args.json:
        command_line.check_writable("--json", args.json, fail)
    signals.exit_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        result = random_kills(args.stage, args.ranks, args.kills, args.seed, Path(folder))
        result.scenarios = scenarios(args.stage, args.ranks, Path(folder))
        result.journey = journey(Path(folder))
    print(f"{result.kills} kills in {result.steps} steps, {result.while_saving} of them while a checkpoint was "
          f"written: nothing lost, {result.tensors} tensors equal to the bit to those of an undisturbed run")
    for done in result.scenarios.rows:
        print(f"{done.fault}, {done.times} x: {done.seen}, {done.end} at the end")
    if args.json:
        write("--json", args.json, saved.to_json(with_the_longest_loop(result, args.json)), fail)


def with_the_longest_loop(result, path):
    """The result with the loop of random kills that `path` holds, if that had more of them: it takes long."""
    try:
        before = saved.from_json(FaultResult, path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return result
    if before.kills <= result.kills:
        return result
    return dataclasses.replace(before, scenarios=result.scenarios, journey=result.journey)
