"""How the tests of checkpoints compare models, states, and what ranks say."""

import contextlib
import copy

import torch

from checkpoint import full_state_dict
from checkpoint.ranks import all_gather


def alike(one, other, same):
    """Whether two values have the same keys, lengths and classes, and `same` tensors; on whichever device."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key], same) for key in one)
    if isinstance(one, (list, tuple)):
        have_one_form = type(one) is type(other) and len(one) == len(other)
        return have_one_form and all(alike(a, b, same) for a, b in zip(one, other))
    if isinstance(one, torch.Tensor):
        one, other = (getattr(value, "_local_tensor", value).detach().cpu() for value in (one, other))
        return one.dtype == other.dtype and one.shape == other.shape and same(one, other)
    return type(one) is type(other) and one == other


def equal(one, other):
    """To the bit."""
    return alike(one, other, torch.equal)


def close(one, other):
    """Up to the order of a sum."""
    return alike(one, other, lambda a, b: torch.allclose(a, b, rtol=1e-4, atol=1e-6))


def full(optimizer):
    """Return the whole state on all ranks; of plain torch too."""
    is_plain = isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, "pieces")
    return copy.deepcopy(optimizer.state_dict()) if is_plain else full_state_dict(optimizer, to_all=True)


def weights(model):
    return {name: value.detach() for name, value in model.state_dict().items()}


@contextlib.contextmanager
def nothing_changes(model, optimizer):
    """In model, state and groups, on any rank."""
    before = copy.deepcopy((weights(model), full(optimizer)))
    yield
    assert equal((weights(model), full(optimizer)), before)


def said_by_all(line):
    """-> `line`, which every rank must have."""
    everyone = all_gather(line, None)
    assert set(everyone) == {line}, everyone
    return line
