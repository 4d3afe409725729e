"""Kills ranks of a training run at random moments, until it has lost nothing often enough.

    python -m harness.faults [--kills 50] [--stage 4] [--ranks 2]        # or: make faults

torchrun starts train.py, which saves a checkpoint every few steps and goes on from the newest complete one. Again and
again one rank is ended by SIGKILL, after a random time; torchrun starts all of them anew. Two things are checked: every
start goes on from a checkpoint that is no older than the newest complete one was at the kill; and at the end parameters
and optimizer state are, to the bit, those of a run that nobody disturbed.
"""

import argparse
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
from datetime import date
from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from stage4_overlap.checkpoint import latest

ROOT = Path(__file__).resolve().parents[1]
SAVE_EVERY = 20
STEPS_A_KILL = 80  # more than an attempt gets done on average, so that there is something left to kill
LONGEST_S = 1.5  # that an attempt is left alone, after it has said where it goes on
START_LIMIT_S = 120  # an attempt that says nothing for so long hangs


class Run:
    """torchrun with a train.py. `lines`: what it has printed so far."""

    def __init__(self, stage, ranks, steps, folder, seed, max_restarts=0):
        script = next(ROOT.glob(f"stage{stage}_*")) / "train.py"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   f"--max-restarts={max_restarts}", str(script), "--model=nano", "--sequence-length=32",
                   "--batch-size=4", f"--steps={steps}", f"--seed={seed}", f"--checkpoint={folder}",
                   f"--save-every={SAVE_EVERY}"]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines, self.unread = [], queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self.unread.put(line.rstrip())
        self.unread.put(None)

    def starts(self):
        """Yield, for each attempt to train, the name of the checkpoint it goes on from; "" for none."""
        resumed = ""
        while (line := self.unread.get(timeout=START_LIMIT_S)) is not None:
            if line.startswith("resumed from "):
                resumed = Path(line.removeprefix("resumed from ")).name
            elif line.startswith("validation loss before"):
                yield resumed
                resumed = ""

    def kill_a_rank(self, chance):
        """SIGKILL for one of torchrun's children -> whether there was one."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        if children:
            os.kill(int(chance.choice(children)), signal.SIGKILL)
        return bool(children)

    def end(self):
        """-> the exit code, which torchrun is given a moment for."""
        try:
            return self.process.wait(30)
        finally:
            self.process.terminate()


def final_state(folder, scratch):
    """The last checkpoint of a run as torch's own tool reads it: parameters and state by name."""
    dcp_to_torch_save(latest(folder), scratch)
    found = torch.load(scratch, weights_only=True)
    return {**found["model"], **{f"{name} {key}": value for name, state in found["optimizer"]["state"].items()
                                 for key, value in state.items()}}


def faults(stage, ranks, kills, seed, folder, say=print):
    """-> dict: what was killed, and when. Raises AssertionError if anything was lost, queue.Empty if a run hangs."""
    chance, steps = random.Random(seed), kills * STEPS_A_KILL
    run, killed, while_saving, newest = Run(stage, ranks, steps, folder / "killed", seed, kills), 0, 0, ""
    for start in run.starts():
        assert start >= newest, f"it went on from {start or 'the beginning'}, but {newest} was complete"
        if killed == kills:
            continue
        threading.Event().wait(chance.uniform(0, LONGEST_S))
        newest = getattr(latest(folder / "killed"), "name", "")
        while_saving += any((folder / "killed").glob("*.partial"))
        killed += run.kill_a_rank(chance)
        say(f"kill {killed}: the newest complete checkpoint is {newest or 'none'}")
    assert run.end() == 0 and killed == kills, "\n".join([f"ended after {killed} kills", *run.lines[-20:]])
    undisturbed = Run(stage, ranks, steps, folder / "undisturbed", seed)
    assert list(undisturbed.starts()) == [""] and undisturbed.end() == 0, "\n".join(undisturbed.lines[-20:])
    one, other = (final_state(folder / name, folder / "state.pt") for name in ("killed", "undisturbed"))
    differ = [key for key in other if not torch.equal(one[key], other[key])]
    assert one.keys() == other.keys() and not differ, f"different at the end: {', '.join(differ)}"
    return {"kills": killed, "while_saving": while_saving, "steps": steps, "tensors": len(other), "stage": stage,
            "ranks": ranks, "save_every": SAVE_EVERY, "seed": seed, "torch": torch.__version__,
            "date": date.today().isoformat()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how often (default 50)")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3, 4), default=4, help="whose train.py (default 4)")
    parser.add_argument("--ranks", type=int, default=2, help="(default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of the training (default 0)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = faults(args.stage, args.ranks, args.kills, args.seed, Path(folder))
    print(f"{result['kills']} kills in {result['steps']} steps, {result['while_saving']} of them while a checkpoint was "
          f"being written: nothing lost, {result['tensors']} tensors equal to the bit to those of an undisturbed run")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, queue.Empty) as failure:
        sys.exit(f"faults: error: {failure or f'an attempt said nothing for {START_LIMIT_S} seconds'}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
