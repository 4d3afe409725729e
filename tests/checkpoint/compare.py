"""How the tests of checkpoints compare models, states, and the errors of all ranks."""

import contextlib
import copy

import torch

from checkpoint import full_state_dict
from checkpoint.ranks import all_gather


def equal(first, second):
    """Return whether two values have the same keys, lengths, classes and numbers, and tensors of the same bits."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(equal, first, second))
    return first == second


def full_state(optimizer):
    """Return a copy of the whole state, on every rank. The optimizer may be a plain torch optimizer."""
    if hasattr(optimizer, "pieces"):
        return full_state_dict(optimizer, to_all=True)
    return copy.deepcopy(optimizer.state_dict())


@contextlib.contextmanager
def nothing_changes(model, optimizer):
    """Compare the model, the state and the parameter groups before and after the block, on each rank."""
    before = copy.deepcopy((model.state_dict(), full_state(optimizer)))
    yield
    assert equal((model.state_dict(), full_state(optimizer)), before)


def said_by_all(line):
    """Return `line`, which every rank must have."""
    lines = all_gather(line, None)
    assert set(lines) == {line}, lines
    return line
