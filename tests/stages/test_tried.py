"""A torch that is newer than any that was tried is said to be so, once."""

import functools
import re
import warnings

import pytest
import torch

from guard import guarded
from guard.refuse import NEWEST, warn_of_an_untried_torch
from tests.common import one_rank_of, optimizer_of
from tests.ranks import ROOT


@pytest.mark.parametrize("version", [NEWEST, "2.11.0", "2.13.0+cpu", "2.14.9"])
def test_a_torch_that_was_tried_is_no_warning(version):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_an_untried_torch(version)


@pytest.mark.parametrize("version", ["2.15.0", "2.15.0a0+git1234", "2.100.1", "3.0.0.dev20270101"])
def test_a_newer_torch_is_warned_of_once(version, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    warn_of_an_untried_torch.cache_clear()
    with pytest.warns(UserWarning, match=re.escape(f"torch {version} is newer than {NEWEST}")) as told:
        for _ in range(2):
            warn_of_an_untried_torch(version)
    assert len(told) == 1


def test_the_other_ranks_are_silent(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    warn_of_an_untried_torch.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_an_untried_torch("2.15.0")


def test_the_newest_that_was_tried_is_the_one_of_ci_and_of_pyproject():
    assert f'"{NEWEST}"]' in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f"on {NEWEST}, the newest" in (ROOT / "pyproject.toml").read_text()


def test_whoever_builds_an_optimizer_is_warned(stage, monkeypatch):
    monkeypatch.setattr(guarded, "warn_of_an_untried_torch", functools.partial(warn_of_an_untried_torch, "2.15.0"))
    monkeypatch.delenv("RANK", raising=False)
    warn_of_an_untried_torch.cache_clear()
    with one_rank_of(2), pytest.warns(UserWarning, match="2.15.0 is newer") as told:
        for _ in range(2):
            optimizer_of(stage)([torch.nn.Parameter(torch.ones(3))])
    assert len(told) == 1
