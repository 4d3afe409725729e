"""What a checkpoint says of the run beside model and optimizer: none of it is believed before it has been looked at."""

import math
import numbers

import torch

import checkpoint


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
        return next(filter(None, (difference(value, found[key], f"{name}[{key!r}]") for key, value in wanted.items())),
                    None)
    if isinstance(wanted, (list, tuple)):
        if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
            return f"{name} has not {len(wanted)} values"
        pairs = enumerate(zip(wanted, found))
        return next(filter(None, (difference(*both, f"{name}[{i}]") for i, both in pairs)), None)
    if isinstance(wanted, torch.Tensor):
        is_same = isinstance(found, torch.Tensor) and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    elif isinstance(wanted, numbers.Real) and not isinstance(wanted, bool):
        is_same = is_finite(found) and (isinstance(found, int) or not isinstance(wanted, int))
    else:
        is_same = wanted is None or isinstance(found, type(wanted))
    return None if is_same else f"{name} is {found!r:.60}"


def is_finite(value):
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and abs(value) < 2**63 and math.isfinite(value)


def set_random_state(extra, rank):
    """Raises ForeignCheckpoint where torch refuses it."""
    try:
        torch.set_rng_state(extra["random"]["cpu"])
        if "cuda" in extra["random"] and rank.device.type == "cuda":
            torch.cuda.set_rng_state(extra["random"]["cuda"], rank.device)
    except (RuntimeError, TypeError) as error:
        line = str(error).splitlines()[0]
        raise checkpoint.ForeignCheckpoint(f"its random state is none: {line}") from None
