"""What a run has become: parameters and optimizer state of its last checkpoint, compared to the bit."""

from pathlib import Path

import torch

from checkpoint import latest
from checkpoint.convert import convert


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
