"""A torch that is newer than any that was tried is said to be so, once."""

import functools
import warnings

import pytest
import torch

from guard import guarded
from guard.refuse import NEWEST, warn_of_an_untried_torch
from tests.common import one_rank_of, optimizer_of
from tests.ranks import ROOT


@pytest.mark.parametrize("version, rank, n_warnings", [
    *((version, "0", 0) for version in (NEWEST, "2.11.0", "2.13.0+cpu", "2.14.9")), ("2.15.0", "1", 0),
    *((version, "0", 1) for version in ("2.15.0", "2.15.0a0+git1234", "2.100.1", "3.0.0.dev20270101"))])
def test_whoever_builds_optimizers_is_warned_once_of_a_newer_torch(stage, monkeypatch, version, rank, n_warnings):
    monkeypatch.setattr(guarded, "warn_of_an_untried_torch", functools.partial(warn_of_an_untried_torch, version))
    monkeypatch.setenv("RANK", rank)
    warn_of_an_untried_torch.cache_clear()
    with one_rank_of(2), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer_of(stage)([torch.nn.Parameter(torch.ones(3))])
    told = [str(warning.message) for warning in told if warning.category is UserWarning]
    assert len(told) == n_warnings and all(f"torch {version} is newer than {NEWEST}" in one for one in told)


def test_the_newest_that_was_tried_is_the_one_of_ci_and_of_pyproject():
    assert f'"{NEWEST}"]' in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f"on {NEWEST}, the newest" in (ROOT / "pyproject.toml").read_text()
