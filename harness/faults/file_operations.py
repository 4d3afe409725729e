"""A rank ends by SIGKILL before each file operation of a save, in turn: which checkpoint is complete, and does it load?

The save is the third of a run that keeps two: the files of a new checkpoint are written, an old one is removed. What
opens a file to write, makes, renames, syncs or removes one counts. Ranks are forked, not started by torchrun: a kill
takes about a second.
"""

import contextlib
import hashlib
import importlib
import itertools
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

import checkpoint
from harness.run.workers import WorkerError, Workers
from harness.train import corpus, options, run_folder
from harness.train.checkpoints import Checkpoints
from harness.train.gpt import build_model
from harness.train.schedule import warmup_then_cosine

CHANGING = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
STEPS, SAVED = 4, 3  # of a whole run; that of the save in which a rank ends


def trained(rank, stage, folder, steps, is_killed=False, at=0):
    """Trains until `steps` are done, from the newest checkpoint on, and saves each step; keeps two.

    `is_killed`: in the save of step SAVED this rank ends before operation number `at`.
    -> (the step that it went on from, a digest of parameters and optimizer state: "" but on rank 0).
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
        model(*batches.batch(step)).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if is_killed and step + 1 == SAVED:
            die_at(at)
        checkpoints.step_done()
    state = checkpoint.full_state_dict(optimizer)
    return checkpoints.first_step, digest(model, state) if state else ""


def die_at(number):
    """End this process before its file operation of that number, from 0 on."""
    operations = itertools.count()

    def operation():
        if next(operations) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def heard(event, arguments):
        if event in CHANGING or event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            operation()

    fsync = os.fsync  # the one operation that Python tells no audit hook of
    os.fsync = lambda descriptor: (operation(), fsync(descriptor))[1]
    sys.addaudithook(heard)


def digest(model, state):
    """Of parameters and optimizer state, to the bit."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode() + tensor.cpu().numpy().tobytes())
    for index, values in sorted(state["state"].items()):
        for key, value in sorted(values.items()):
            found.update(f"{index} {key}".encode() + torch.as_tensor(value).cpu().numpy().tobytes())
    return found.hexdigest()


def kills_at_operations(stage, ranks, folder, say=print, every=1):
    """-> how often a rank was killed: of each rank at each operation, or at its first and then at `every`-th one.

    Raises AssertionError if the checkpoint before was lost, or what went on from there ended otherwise.
    """
    folder, n_kills = Path(folder), 0
    with Workers(ranks) as workers:
        (_, expected), *_ = workers.run(trained, stage, folder / "undisturbed", STEPS)
        for killed in range(ranks):
            for at in itertools.count(step=every):
                run = folder / f"{killed}.{at}"
                try:
                    workers.run(ended_at, stage, run, killed, at)
                    workers.close()  # they count on
                    break
                except WorkerError as end:
                    if str(end) != f"rank {killed} was killed by signal {signal.SIGKILL.value}":
                        raise AssertionError(f"rank {killed} at operation {at}: {end}") from None
                newest = [*run_folder.complete(run), None][0]
                (begin, found), *_ = workers.run(trained, stage, run, STEPS)
                end, kept = "right" if found == expected else "otherwise", run_folder.complete(run)
                if (begin, end, kept) != (newest, "right", [STEPS, STEPS - 1]) or begin not in (SAVED - 1, SAVED):
                    raise AssertionError(f"rank {killed} killed at operation {at}, with a complete checkpoint of step "
                                         f"{newest}: it went on from step {begin}, ended {end}, and kept {kept}")
                shutil.rmtree(run)
                n_kills += 1
            say(f"rank {killed} killed before {len(range(0, at, every))} file operations of a save: nothing lost")
    return n_kills


def ended_at(rank, stage, folder, killed, at):
    trained(rank, stage, folder, SAVED, rank.rank == killed, at)
