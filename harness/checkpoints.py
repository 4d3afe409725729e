"""A run saves itself every few steps, and goes on from the newest complete checkpoint."""

import os
from pathlib import Path

import torch
import torch.distributed as dist

import checkpoint
from checkpoint.folder import hold
from checkpoint.ranks import at_own_pace, errors_on_all
from harness import command_line, options
from harness.meeting import is_rank_0, leave, on_all_ranks


def extra_of(step, scheduler, rank, settings):
    random = {"cpu": torch.get_rng_state()}
    if rank.device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(rank.device)
    return {"step": step, "scheduler": scheduler.state_dict(), "random": random, "rank": rank.rank,
            "world_size": rank.world_size, "settings": settings}


def checked(extra, step, scheduler, rank, settings):
    """`extra`, of the checkpoint of this step. Raises ForeignCheckpoint: it is none that `extra_of` makes."""
    wanted = extra_of(step, scheduler, rank, settings)
    wanted["random"].pop("cuda", None)  # where it was saved there may have been none
    for part, needed in (("scheduler", {"base_lrs", "last_epoch"}), ("settings", set())):  # others are of some versions
        there = extra[part] if isinstance(extra, dict) and isinstance(extra.get(part), dict) else {}
        wanted[part] = {key: value for key, value in wanted[part].items() if key in needed or key in there}
    if found := difference(wanted, extra, "extra"):
        raise checkpoint.ForeignCheckpoint(f"it is none of train.py: {found}")
    scheduler = {key: extra["scheduler"][key] for key in wanted["scheduler"]}  # it would take any attribute
    if not extra["step"] == scheduler["last_epoch"] == step:
        steps = f"{extra['step']} and {scheduler['last_epoch']}"
        raise checkpoint.ForeignCheckpoint(f"its name says step {step}, its extra {steps}: was it renamed?")
    if min(scheduler["base_lrs"], default=0) < 0:
        raise checkpoint.ForeignCheckpoint(f"it is none of train.py: its learning rates are {scheduler['base_lrs']}")
    return {**extra, "scheduler": scheduler}


def difference(wanted, found, name):
    """-> in words where `found` is of another kind than `wanted`, or None. None stands for any setting."""
    if isinstance(wanted, dict):
        if not isinstance(found, dict) or not wanted.keys() <= found.keys():
            return f"{name} has not {', '.join(map(str, wanted))}"
        parts = [(key, value, found[key]) for key, value in wanted.items()]
        return next(filter(None, (difference(*both, f"{name}[{key!r}]") for key, *both in parts)), None)
    if isinstance(wanted, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
            return f"{name} has not {len(wanted)} values"
        return difference(dict(enumerate(wanted)), dict(enumerate(found)), name)
    if isinstance(wanted, torch.Tensor):
        is_same = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    elif isinstance(wanted, (int, float)) and not isinstance(wanted, bool):
        is_number = isinstance(found, int if isinstance(wanted, int) else (int, float)) and not isinstance(found, bool)
        is_same = is_number and abs(found) < 2**63
    else:
        is_same = wanted is None or isinstance(found, type(wanted))
    return None if is_same else f"{name} is {found!r:.60}"


def set_random_state(extra, rank):
    """Raises ForeignCheckpoint where torch refuses it."""
    try:
        torch.set_rng_state(extra["random"]["cpu"])
        if "cuda" in extra["random"] and rank.device.type == "cuda":
            torch.cuda.set_rng_state(extra["random"]["cuda"], rank.device)
    except (RuntimeError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise checkpoint.ForeignCheckpoint(f"its random state is none: {line}") from None


MISTAKES = ValueError, checkpoint.CheckpointError


class Checkpoints:
    """Saves a checkpoint every args.save_every steps and after the last, if args.checkpoint names a folder for them.

    And when a rank is told to stop, by SIGTERM, SIGHUP or SIGUSR1: all save after that step, and exit with PREEMPTED.

    `first_step`: how many steps were done when the newest complete one was saved, which is loaded; 0 if there is none.
    The position in the data is the number of the step. Random states go on where they were on the same number of ranks.
    """

    def __init__(self, args, rank, model, optimizer, scheduler):
        self.args, self.rank, self.model, self.optimizer, self.scheduler = args, rank, model, optimizer, scheduler
        self.first_step = self.steps_done = 0
        if args.checkpoint:
            on_all_ranks(self._check_folder)
            on_all_ranks(self._resume, MISTAKES)
            self.stop_signal = options.StopSignal(optimizer, args.timeout)

    def step_done(self):
        """Counts a step, and saves if it is time to; after a signal it doesn't return. Collective."""
        self.steps_done += 1
        if not self.args.checkpoint:
            return
        is_last = self.steps_done == self.args.steps
        signal_name = self.stop_signal.agreed()
        if signal_name or is_last or self.steps_done % self.args.save_every == 0:
            on_all_ranks(self._save, MISTAKES)
        if signal_name and not is_last:
            if is_rank_0():
                print(f"stopped by {signal_name} after step {self.steps_done}, which is saved: the same command goes "
                      f"on (exit code {options.PREEMPTED})", flush=True)
            leave(options.PREEMPTED)

    def _save(self):
        extra = extra_of(self.steps_done, self.scheduler, self.rank, self._settings())
        checkpoint.save(options.path_of(self.args.checkpoint, self.steps_done), self.model, self.optimizer, extra)
        with at_own_pace(f"old checkpoints in {self.args.checkpoint}", None):  # the others wait for their removal
            if is_rank_0():
                options.remove_old(self.args.checkpoint, self.args.keep)

    def _settings(self):
        return options.settings_of(self.args, self.rank.world_size // self.args.tp)

    def _check_folder(self):
        """Now, and not at the first save."""
        def fail(message):
            raise ValueError(message)
        command_line.check_writable("--checkpoint", Path(self.args.checkpoint) / "step", fail)

    def _resume(self):
        step, extra, damage = self._load()
        if step is None:
            return
        self.first_step = self.steps_done = extra["step"]
        self.scheduler.load_state_dict(extra["scheduler"])
        changed = self._changes(extra["settings"])
        options.take_hyperparameters(self.args, self.optimizer, self.scheduler)
        if (extra["rank"], extra["world_size"]) == self.rank[:2]:
            set_random_state(extra, self.rank)
        if is_rank_0():
            later = [other for other in self.steps_found if other > step]
            if later:
                hold(options.path_of(self.args.checkpoint, step))  # no other run saves here from now on
            aside = ", and later ones set aside" if later else ""
            print(f"resumed from {options.path_of(self.args.checkpoint, step)}{aside}{damage}", flush=True)
            if changed:
                print("changed since then: " + ", ".join(f"{option} {before} -> {now}" for option, (before, now)
                                                         in changed.items()), flush=True)
            if self.first_step >= self.args.steps:
                print(f"nothing is left to do: --steps {self.args.steps}", flush=True)
            try:
                options.set_aside(self.args.checkpoint, later)
            except OSError as error:
                raise ValueError(f"--checkpoint {self.args.checkpoint}: {error.strerror}: {error.filename}") from None

    def _steps_to_try(self):
        """-> steps of the checkpoints that this run may go on from, the first choice first; the same on every rank."""
        folder, wanted = self.args.checkpoint, self.args.resume_from
        self.steps_found = options.steps_in(folder)  # what another run may save from here on is none of these
        everything = [options.complete(folder)]
        dist.broadcast_object_list(everything, src=0)
        steps = everything[0]
        if wanted is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":  # torchrun's restart goes on
            return steps
        if wanted not in steps:
            there_are = ", ".join(map(str, steps)) or "none"
            raise ValueError(f"argument --resume-from: {folder} has no complete checkpoint of step {wanted}, but of "
                             f"{there_are}")
        return [wanted]

    def _load(self):
        """The newest complete checkpoint, or, where that is damaged, the one before -> its step or None, its `extra`,
        and what to say of damage."""
        first_error = None
        for step in self._steps_to_try():
            try:
                path = options.path_of(self.args.checkpoint, step)
                extra = checkpoint.load(path, self.model, self.optimizer)
                with errors_on_all(f"checkpoint {path} can't be loaded", None):
                    extra = checked(extra, step, self.scheduler, self.rank, self._settings())
                return step, extra, f": {first_error}" if first_error else ""
            except checkpoint.CheckpointError as error:
                first_error = first_error or error
                if not isinstance(error, checkpoint.DamagedCheckpoint):
                    break
        if first_error:
            raise first_error
        return None, None, ""

    def _changes(self, before):
        """-> {option: (before, now)}. Raises ValueError where a step would see other data, unless --force is given."""
        args, group = self.args, self.optimizer.param_groups[0]
        before = {**before, "--lr": self.scheduler.base_lrs[0], "--weight-decay": group["weight_decay"]}
        args.lr = args.lr if "lr" in args.given else before["--lr"]
        args.weight_decay = args.weight_decay if "weight_decay" in args.given else before["--weight-decay"]
        changed = options.changes(before, self._settings())
        refused = [f"{option} is {changed[option][1]}, the run's is {changed[option][0]}"
                   for option in options.DATA_ORDER if option in changed]
        if refused and not args.force:
            raise ValueError(f"--checkpoint {args.checkpoint} is of a run with other data: {'; '.join(refused)}: "
                             "--force goes on nevertheless")
        return changed
