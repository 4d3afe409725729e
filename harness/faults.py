"""Kills ranks of a training run at random moments; then moves a run through stages, numbers of ranks, and plain torch.

    python -m harness.faults [--kills 50] [--stage 4] [--ranks 2]        # or: make faults

`faults`: torchrun starts train.py, which saves a checkpoint every few steps and goes on from the newest complete one.
Again and again one rank is ended by SIGKILL, after a random time; torchrun starts all of them anew. Two things are
checked: every start goes on from a checkpoint that is no older than the newest complete one was at the kill; and at the
end parameters and optimizer state are, to the bit, those of a run that nobody disturbed.

`journey`: a run begins in stage 3 on 3 ranks and is killed, goes on in stage 4 on 2 ranks and is killed, is converted
by `python -m checkpoint convert`, and ends in plain torch in one process. Its losses stand beside those of DDP,
undisturbed.
"""

import argparse
import functools
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
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from checkpoint import latest
from checkpoint.convert import convert
from harness import cli, workload

fail = functools.partial(cli.fail, "faults")

ROOT = Path(__file__).resolve().parents[1]
SAVE_EVERY = 20
STEPS_A_KILL = 80  # more than an attempt gets done on average, so that there is something left to kill
LONGEST_S = 1.5  # that an attempt is left alone, after it has said where it goes on
START_LIMIT_S = 120  # an attempt that says nothing for so long hangs


class Run:
    """torchrun with a train.py; it ends with the `with` that it stands in. `lines`: what it has printed so far."""

    def __init__(self, script, ranks, steps, folder, *, seed=0, batch_size=4, save_every=SAVE_EVERY, max_restarts=0):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   f"--max-restarts={max_restarts}", script, "--model=nano", "--sequence-length=32",
                   f"--batch-size={batch_size}", f"--steps={steps}", f"--seed={seed}", f"--checkpoint={folder}",
                   f"--save-every={save_every}"]
        self.command = " ".join(["torchrun", *command[3:]])
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        preexec_fn=cli.end_with_parent)
        self.lines, self.unread = [], queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.terminate()
        self.process.wait(60)  # torchrun gives its ranks 30

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
        return self.process.wait(30)


def train_script(stage):
    return str(next(ROOT.glob(f"stage{stage}_*")).relative_to(ROOT) / "train.py")


def converted(checkpoint, scratch):
    """A checkpoint, as `python -m checkpoint convert` makes it -> {"model": …, "optimizer": …}, both by name."""
    Path(scratch).unlink(missing_ok=True)
    convert(checkpoint, scratch)
    return torch.load(scratch, weights_only=True)


def final_state(folder, scratch):
    """Parameters and optimizer state of the last checkpoint of a run, by name."""
    found = converted(latest(folder), scratch)
    return {**found["model"], **{f"{name} {key}": value for name, state in found["optimizer"]["state"].items()
                                 for key, value in state.items()}}


def check(is_so, *lines):
    """As assert, which `python -O` leaves out."""
    if not is_so:
        raise AssertionError("\n".join(lines))


def check_undisturbed(run):
    check(list(run.starts()) == [""] and run.end() == 0, *run.lines[-20:])


def faults(stage, ranks, kills, seed, folder, say=print):
    """-> dict: what was killed, and when. Raises AssertionError if anything was lost, queue.Empty if a run hangs."""
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
    one, other = (final_state(folder / name, folder / "state.pt") for name in ("killed", "undisturbed"))
    equal = {key for key in one.keys() & other.keys() if torch.equal(one[key], other[key])}
    differ = sorted((one.keys() | other.keys()) - equal)
    check(not differ, f"different at the end: {', '.join(differ)}")
    return {"kills": killed, "while_saving": while_saving, "steps": steps, "tensors": len(other), "stage": stage,
            "ranks": ranks, "save_every": SAVE_EVERY, "seed": seed, "torch": torch.__version__,
            "date": date.today().isoformat()}


def journey(folder, say=print, steps=1500, save_every=100):
    """-> list of dicts, one for each stop: after which step, where it was trained until there, its loss, and DDP's."""
    stops = []
    for script, ranks, until in ((train_script(3), 3, steps // 3), (train_script(4), 2, steps * 2 // 3)):
        with Run(script, ranks, steps, folder / "run", batch_size=12 // ranks, save_every=save_every) as run:
            say(f"$ {run.command}")
            say(f"goes on from {next(run.starts()) or 'the beginning'}")
            while getattr(latest(folder / "run"), "name", "") < f"step-{until:08}":
                threading.Event().wait(0.01)
            run.kill_a_rank(random.Random(0))
            check(run.end() != 0, "torchrun has not noticed that a rank was killed")
        stops.append((f"{Path(script).parent.name}, {ranks} ranks, killed", latest(folder / "run")))
        say(f"killed; the newest complete checkpoint is {stops[-1][1].name}")
    say(f"$ python -m checkpoint convert {stops[-1][1]} {folder / 'run.pt'}")
    begin = int(stops[-1][1].name.removeprefix("step-"))
    model = in_plain_torch(converted(stops[-1][1], folder / "run.pt"), begin, steps)
    say(f"plain torch, in one process: steps {begin + 1} to {steps}")
    with Run("harness/train_ddp.py", 1, steps, folder / "ddp", batch_size=12, save_every=save_every) as undisturbed:
        say(f"$ {undisturbed.command}")
        check_undisturbed(undisturbed)
    rows = []
    for where, checkpoint in [*stops, ("plain torch, 1 process", folder / "run" / f"step-{steps:08}")]:
        ours = converted(checkpoint, folder / "one.pt")["model"] if checkpoint.exists() else model.state_dict()
        losses = [validation_loss(weights) for weights in (
            ours, converted(folder / "ddp" / checkpoint.name, folder / "other.pt")["model"])]
        rows.append({"step": int(checkpoint.name.removeprefix("step-")), "where": where, "loss": losses[0],
                     "undisturbed": losses[1]})
        say(f"after step {rows[-1]['step']}: validation loss {losses[0]:.6f}, undisturbed {losses[1]:.6f} ({where})")
    check(all(abs(row["loss"] - row["undisturbed"]) < 1e-3 for row in rows), str(rows))
    return rows


def nano():
    return workload.GPT(workload.MODELS["nano"])


def in_plain_torch(found, begin, steps):
    """Steps `begin` to `steps` of the same run, without anything of this project but model and data -> the model."""
    model, lr = nano(), workload.MODELS["nano"].lr
    model.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, workload.warmup_then_cosine(steps))
    set_optimizer_state_dict(model, optimizer, found["optimizer"])
    scheduler.last_epoch = begin
    train, _ = workload.split(workload.load_bytes())
    batches = workload.Batches(train, batch_size=12, sequence_length=32, rank=0, world_size=1)
    for step in range(begin, steps):
        model(*batches.batch(step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def validation_loss(weights):
    """Of a nano model with these weights, in nats a byte."""
    model = nano()
    model.load_state_dict(weights)
    _, validation = workload.split(workload.load_bytes())
    batches = workload.validation_batches(validation, 16, 32, rank=0, world_size=1)
    with torch.no_grad():
        return sum(model(*batch).item() * len(batch[0]) for batch in batches) / workload.VALIDATION_SEQUENCES


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    parser.add_argument("--kills", type=int, default=50, help="how often (default 50)")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3, 4), default=4, help="whose train.py (default 4)")
    parser.add_argument("--ranks", type=int, default=2, help="(default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and of the training (default 0)")
    parser.add_argument("--json", type=Path, help="where to write the result")
    args = parser.parse_args()
    cli.check_at_least_1(args, ("kills", "ranks"), fail)
    if args.json:
        cli.check_writable("--json", args.json, fail)
    cli.exit_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        result = faults(args.stage, args.ranks, args.kills, args.seed, Path(folder))
        result["journey"] = journey(Path(folder))
    print(f"{result['kills']} kills in {result['steps']} steps, {result['while_saving']} of them while a checkpoint "
          f"was written: nothing lost, {result['tensors']} tensors equal to the bit to those of an undisturbed run")
    if args.json:
        cli.write("--json", args.json, json.dumps(result, indent=1) + "\n", fail)


if __name__ == "__main__":
    try:
        main()
    except (AssertionError, queue.Empty) as failure:
        sys.exit(f"faults: error: {failure or f'an attempt said nothing for {START_LIMIT_S} seconds'}")
