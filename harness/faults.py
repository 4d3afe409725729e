"""Does to training runs what a cluster does (kills, signals, a stopped rank), and looks whether anything is lost."""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

import checkpoint
from checkpoint import CheckpointError, latest
from checkpoint.convert import convert
from harness import command_line, corpus, options, results
from harness import options as run_folder
from harness import processes as signals
from harness.checkpoints import Checkpoints
from harness.command_line import write
from harness.gpt import GPT, MODELS, build_model
from harness.options import warmup_then_cosine
from harness.results import FaultResult, FaultRow, Scenarios, Stop
from harness.workers import WorkerError, Workers

# --------------------------------------------------------------------------------------------------------- training_run
# torchrun with a train.py, watched, and its ranks reached.


ROOT = Path(__file__).resolve().parents[1]
SAVE_EVERY = 20
START_LIMIT_S = 120  # an attempt that says nothing for so long hangs


class Run:
    """torchrun with a train.py; it ends with the `with` that it stands in. `lines`: what it has printed so far."""

    def __init__(self, script, ranks, steps, folder, *more, seed=0, batch_size=4, save_every=SAVE_EVERY,
                 max_restarts=0):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   f"--max-restarts={max_restarts}", script, "--model=nano", "--sequence-length=32",
                   f"--batch-size={batch_size}", f"--steps={steps}", f"--seed={seed}", f"--checkpoint={folder}",
                   f"--save-every={save_every}", *more]
        self.command = " ".join(["torchrun", *command[3:]])
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                        preexec_fn=signals.end_with_parent)
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
            if match := re.match(r"resumed from ([^,]+)", line):
                resumed = Path(match[1]).name
            elif line.startswith("validation loss before"):
                yield resumed
                resumed = ""

    def rank_processes(self):
        """-> the ids of torchrun's children."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(child) for child in children]

    def kill_a_rank(self, chance):
        """SIGKILL for one of torchrun's children -> whether there was one."""
        children = self.rank_processes()
        if children:
            os.kill(chance.choice(children), signal.SIGKILL)
        return bool(children)

    def said(self, pattern):
        """Waits until a line matches -> the match."""
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match
            threading.Event().wait(0.05)
        raise AssertionError("\n".join([f"no line has {pattern!r}", *self.lines[-20:]]))

    def end(self):
        """-> the exit code, which torchrun is given a moment for."""
        return self.process.wait(30)


def train_script(stage):
    return str(next(ROOT.glob(f"stage{stage}_*")).relative_to(ROOT) / "train.py")


# ---------------------------------------------------------------------------------------------------------- final_state
# What a run has become: parameters and optimizer state of its last checkpoint, compared to the bit.


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


def differing(folder, other, scratch):
    """-> names of what isn't equal to the bit in the last checkpoints of two runs."""
    one, other = final_state(folder, scratch), final_state(other, scratch)
    equal = {key for key in one.keys() & other.keys() if torch.equal(one[key], other[key])}
    return sorted((one.keys() | other.keys()) - equal)


def check_same(folder, other, scratch):
    differ = differing(folder, other, scratch)
    check(not differ, f"different at the end: {', '.join(differ)}")


# -------------------------------------------------------------------------------------------------------------- journey
# A run moves: stage 3 on 3 ranks, stage 4 on 2, plain torch in one process, killed in between.


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
    arguments = "harness/train_ddp.py", 1, steps, folder / "ddp", "--keep=0"
    with Run(*arguments, batch_size=12, save_every=save_every) as undisturbed:
        say(f"$ {undisturbed.command}")
        check_undisturbed(undisturbed)
    rows = []
    for where, saved_in in [*stops, ("plain torch, 1 process", folder / "run" / f"step-{steps:08}")]:
        ours = converted(saved_in, folder / "one.pt")["model"] if saved_in.exists() else model.state_dict()
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


# --------------------------------------------------------------------------------------------------------- random_kills
# Again and again one rank is ended by SIGKILL, after a random time; torchrun starts all of them anew.


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


# ------------------------------------------------------------------------------------------------------------ scenarios
# A run gets SIGUSR1 or SIGTERM, has a rank that is stopped, or meets another run in its folder.


TIMEOUT_S = 5  # where a rank is stopped
SIGNALLED_STEPS = 500  # of a run that is signalled: more than it gets done before


def undisturbed_run(stage, ranks, folder, **options):
    with Run(train_script(stage), ranks, SIGNALLED_STEPS, folder, **options) as run:
        check_undisturbed(run)


def signalled(stage, ranks, folder, undisturbed, say=print):
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
    n_kills = kills_at_operations(package, ranks, folder / "operations", say)
    rows = [FaultRow("SIGKILL to a rank, at each operation of a save", n_kills, "that checkpoint or the one before")]
    undisturbed_run(stage, ranks, folder / "straight")
    rows += signalled(stage, ranks, folder, folder / "straight", say)
    rows += stopped(stage, ranks, folder, folder / "straight", say)
    rows += two_runs(stage, ranks, folder, say)
    return Scenarios(rows, stage, ranks, torch.__version__, date.today().isoformat())


# ------------------------------------------------------------------------------------------------------ file_operations
# A rank ends by SIGKILL before each file operation of a save, in turn: which checkpoint is complete, and does it
# load?


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


# -------------------------------------------------------------------------------------------------------------- command
# Does to training runs what a cluster does: kills, signals, a stopped rank, a second run in the same folder; then
# moves a run through stages, numbers of ranks, and plain torch.


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
        write("--json", args.json, results.to_json(with_the_longest_loop(result, args.json)), fail)


def with_the_longest_loop(result, path):
    """The result with the loop of random kills that `path` holds, if that had more of them: it takes long."""
    try:
        before = results.from_json(FaultResult, path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return result
    if before.kills <= result.kills:
        return result
    return dataclasses.replace(before, scenarios=result.scenarios, journey=result.journey)


if __name__ == "__main__":
    from harness.faults import main  # ranks are handed functions of that name

    try:
        main()
    except (AssertionError, queue.Empty) as failure:
        sys.exit(f"faults: error: {failure or f'an attempt said nothing for {START_LIMIT_S} seconds'}")
