"""A run moves: stage 3 on 3 ranks, stage 4 on 2, plain torch in one process, killed in between.

Its losses stand beside those of DDP, undisturbed.
"""

import random
import threading
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from checkpoint import latest
from harness.faults.final_state import check, check_undisturbed, converted
from harness.faults.training_run import Run, train_script
from harness.rows.fault_results import Stop
from harness.train import corpus
from harness.train.gpt import GPT, MODELS
from harness.train.schedule import warmup_then_cosine


def journey(folder, say=print, steps=1500, save_every=100):
    """-> list of Stops."""
    stops = []
    for script, ranks, until in ((train_script(3), 3, steps // 3), (train_script(4), 2, steps * 2 // 3)):
        options = {"batch_size": 12 // ranks, "save_every": save_every}
        with Run(script, ranks, steps, folder / "run", "--keep=0", **options) as run:
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
    arguments = "harness/train/train_ddp.py", 1, steps, folder / "ddp", "--keep=0"
    with Run(*arguments, batch_size=12, save_every=save_every) as undisturbed:
        say(f"$ {undisturbed.command}")
        check_undisturbed(undisturbed)
    rows = []
    for where, checkpoint in [*stops, ("plain torch, 1 process", folder / "run" / f"step-{steps:08}")]:
        ours = converted(checkpoint, folder / "one.pt")["model"] if checkpoint.exists() else model.state_dict()
        losses = [validation_loss(weights) for weights in (
            ours, converted(folder / "ddp" / checkpoint.name, folder / "other.pt")["model"])]
        stop = Stop(int(checkpoint.name.removeprefix("step-")), where, *losses)
        rows.append(stop)
        say(f"after step {stop.step}: validation loss {stop.loss:.6f}, undisturbed {stop.undisturbed:.6f} ({where})")
    check(all(abs(stop.loss - stop.undisturbed) < 1e-3 for stop in rows), str(rows))
    return rows


def nano():
    return GPT(MODELS["nano"])


def in_plain_torch(found, begin, steps):
    """Steps `begin` to `steps` of the same run, without anything of this project but model and data -> the model."""
    model, lr = nano(), MODELS["nano"].lr
    model.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_then_cosine(steps))
    set_optimizer_state_dict(model, optimizer, found["optimizer"])
    scheduler.last_epoch = begin
    train, _ = corpus.split(corpus.load_bytes())
    batches = corpus.Batches(train, batch_size=12, sequence_length=32, rank=0, world_size=1)
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
    _, validation = corpus.split(corpus.load_bytes())
    batches = corpus.validation_batches(validation, 16, 32, rank=0, world_size=1)
    with torch.no_grad():
        return sum(model(*batch).item() * len(batch[0]) for batch in batches) / corpus.VALIDATION_SEQUENCES
